//! Pages of the reference, made from what the programs say of themselves.

use std::fmt::Write;
use std::sync::Mutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use serde_json::Value;
use utoipa::ToSchema;

/// What a program says of one of its metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Unit, if it has one.
    pub unit: Option<Unit>,
    /// What it means.
    pub help: String,
}

#[derive(Debug, Default)]
struct Descriptions(Mutex<Vec<Metric>>);

impl Descriptions {
    fn add(&self, kind: &'static str, name: &KeyName, unit: Option<Unit>, help: &SharedString) {
        let (name, help) = (name.as_str().to_owned(), help.to_string());
        self.0.lock().expect("nobody panics with it").push(Metric { name, kind, unit, help });
    }
}

impl Recorder for Descriptions {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.add("counter", &name, unit, &help);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.add("gauge", &name, unit, &help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.add("histogram", &name, unit, &help);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// The metrics that `describe` describes, by name.
///
/// # Panics
/// `describe` does.
#[must_use]
pub fn described(describe: impl FnOnce()) -> Vec<Metric> {
    let said = Descriptions::default();
    metrics::with_local_recorder(&said, describe);
    let mut all = said.0.into_inner().expect("nobody panics with it");
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// What breaks the rules of Prometheus and `OpenMetrics` for names and help texts, one sentence each: the program's own prefix, base units,
/// the unit at the end or right before `_total`, `_total` for counters only, and no endings that series of histograms have.
#[must_use]
pub fn broken_rules(prefix: &str, metrics: &[Metric]) -> Vec<String> {
    const OTHER_UNITS: [&str; 14] = [
        "ms",
        "us",
        "ns",
        "milliseconds",
        "microseconds",
        "minutes",
        "hours",
        "kb",
        "kib",
        "mb",
        "mib",
        "gib",
        "bits",
        "percent",
    ];
    let mut broken = Vec::new();
    for Metric { name, kind, unit, help } in metrics {
        let mut check = |is: bool, rule: &str| {
            if !is {
                broken.push(format!("{name} ({kind}): {rule}"));
            }
        };
        let stem = name.strip_suffix("_total").unwrap_or(name);
        let words: Vec<&str> = stem.split('_').collect();
        check(name.starts_with(prefix), &format!("its name begins with {prefix}"));
        check((stem != name) == (*kind == "counter"), "counters end in _total, and nothing else does");
        check(!words.iter().any(|word| OTHER_UNITS.contains(word)), "its unit is a base unit");
        for base in [Unit::Seconds, Unit::Bytes] {
            let at = words.iter().position(|word| *word == base.as_str());
            check(at.is_none_or(|at| at + 1 == words.len()), "its unit is the last word, but for _total");
            check(at.is_some() == (*unit == Some(base)), "its name has the unit that it has");
        }
        check(*kind != "histogram" || unit.is_some(), "a histogram has a unit");
        let series = ["bucket", "count", "sum", "info", "created"];
        let ends = words.last().is_some_and(|last| series.contains(last));
        check(!ends || (*kind == "gauge" && stem.ends_with("_info")), "it ends as only a series may");
        check(help.ends_with('.') && !help.contains('\n'), "its help is one line and a sentence");
    }
    broken
}

/// The page of a program's metrics.
#[must_use]
pub fn metrics_page(program: &str, metrics: &[Metric]) -> String {
    let rows = metrics.iter().map(|metric| {
        let unit = metric.unit.map_or("", |unit| unit.as_str());
        format!("| `{}` | {} | {unit} | {} |\n", metric.name, metric.kind, cell(&metric.help))
    });
    format!(
        "# Metrics of `{program}`\n\nMade from the descriptions in the program. Names and units follow the rules of Prometheus.\n{}",
        table("| Metric | Kind | Unit | Meaning |\n|---|---|---|---|\n", rows)
    )
}

/// The page of a program's settings: the example that its package installs, which tests hold to have every key.
#[must_use]
pub fn settings_page(program: &str, installed: &str, example: &str) -> String {
    format!(
        "# Settings of `{program}`\n\nThis file is installed as `{installed}`. It shows every key but those of hooks, with the default where \
         there is one; what begins with `# ` is commented out.\n\n```toml\n{example}```\n"
    )
}

/// The page of an interface, made from its `OpenAPI` description.
///
/// # Panics
/// It is none.
#[must_use]
pub fn rest_page(program: &str, file: &str, description: &str) -> String {
    let api: Value = serde_json::from_str(description).expect("JSON");
    let about = api["info"]["description"].as_str().expect("what it is about");
    let mut page = format!(
        "# REST interface of `{program}`\n\nMade from [`{file}`](../{file}).\n\n{about}\n\n## Operations\n"
    );
    for (path, methods) in api["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            page += &operation_text(&method.to_uppercase(), path, operation);
        }
    }
    page += "\n## Types\n";
    for (name, schema) in api["components"]["schemas"].as_object().expect("schemas") {
        write!(page, "\n### {name}\n").expect("a string grows");
        page += &schema_text(schema);
    }
    page
}

/// A type by its name, as it is read from a file.
///
/// # Panics
/// It has no description in JSON.
#[must_use]
pub fn type_named<T: ToSchema>() -> (String, Value) {
    let mut schema = serde_json::to_value(T::schema()).expect("JSON");
    for field in schema["properties"].as_object_mut().into_iter().flatten().map(|(_, field)| field) {
        // Of one that may be missing, the explanation is with what it is otherwise.
        let below =
            field["oneOf"].as_array().and_then(|parts| parts.iter().find_map(|part| part.get("description")));
        if let Some(about) = below.cloned() {
            field["description"] = about;
        }
    }
    (T::name().into_owned(), schema)
}

/// The page of the keys of a file, made from the types that it is read into.
///
/// # Panics
/// A key is not explained.
#[must_use]
pub fn keys_page(title: &str, about: &str, types: &[(String, Value)]) -> String {
    let mut page = format!("# {title}\n\nMade from the types in the program. {about}\n");
    for (name, schema) in types {
        let fields = schema["properties"].as_object().into_iter().flatten();
        for (key, field) in fields {
            assert!(field["description"].is_string(), "{name}: the key {key} is not explained");
        }
        write!(page, "\n## {name}\n").expect("a string grows");
        page += &schema_text(schema);
    }
    page
}

fn operation_text(method: &str, path: &str, operation: &Value) -> String {
    let summary = operation["summary"].as_str().unwrap_or_default();
    let mut text = format!("\n### `{method} {path}`\n\n{summary}");
    if let Some(role) = operation["x-vmove-role"].as_str() {
        write!(text, " Role: {role}.").expect("a string grows");
    }
    text.push('\n');
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let rows = parameters.map(|one| {
        let [name, place] = ["name", "in"].map(|key| one[key].as_str().unwrap_or_default());
        let optional = if one["required"] == true { "" } else { ", optional" };
        let meaning = cell(one["description"].as_str().unwrap_or_default());
        format!("| `{name}` | {place}{optional} | {} | {meaning} |\n", type_of(&one["schema"]))
    });
    text += &table("| Parameter | Where | Type | Meaning |\n|---|---|---|---|\n", rows);
    let content = |part: &Value| {
        let content = part["content"].as_object()?;
        let (media, of) = content.iter().next()?;
        Some(if media == "application/json" { type_of(&of["schema"]) } else { format!("`{media}`") })
    };
    if let Some(body) = content(&operation["requestBody"]) {
        write!(text, "\nBody: {body}.\n").expect("a string grows");
    }
    let answers = operation["responses"].as_object().into_iter().flatten();
    let answers: Vec<String> = answers
        .map(|(code, answer)| {
            let what = content(answer).map(|what| format!(" {what}")).unwrap_or_default();
            format!("{code}{what}")
        })
        .collect();
    write!(text, "\nAnswers: {}.\n", answers.join(", ")).expect("a string grows");
    text
}

fn schema_text(schema: &Value) -> String {
    let about = schema["description"].as_str().map(|about| format!("\n{about}\n")).unwrap_or_default();
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let fields = schema["properties"].as_object().into_iter().flatten();
    let rows = fields.map(|(name, field)| {
        let optional = if required.contains(&name.as_str()) { "" } else { ", optional" };
        let meaning = cell(field["description"].as_str().unwrap_or_default());
        format!("| `{name}` | {}{optional} | {meaning} |\n", type_of(field))
    });
    let fields = table("| Field | Type | Meaning |\n|---|---|---|\n", rows);
    if !fields.is_empty() {
        return about + &fields;
    }
    let parts = ["oneOf", "anyOf", "allOf"].iter().filter_map(|key| schema[*key].as_array()).flatten();
    let parts: Vec<String> = parts.map(part_text).collect();
    let what =
        if parts.is_empty() { format!("\n{}\n", type_of(schema)) } else { format!("\n{}", parts.concat()) };
    about + &what
}

/// One of several that a schema may be, as an item of a list.
fn part_text(part: &Value) -> String {
    let about = part["description"].as_str().map(|about| format!(": {}", cell(about))).unwrap_or_default();
    let fields = part["properties"].as_object().into_iter().flatten();
    let fields: Vec<String> =
        fields.map(|(name, field)| format!("`{name}` ({}{})", type_of(field), keys_of(field))).collect();
    let what = if fields.is_empty() { type_of(part) } else { fields.join(", ") };
    format!("- {what}{about}\n")
}

/// The keys of an object that has no name of its own.
fn keys_of(schema: &Value) -> String {
    let keys = schema["properties"].as_object().into_iter().flatten();
    let told = keys.map(|(key, of)| {
        let about = cell(of["description"].as_str().unwrap_or_default());
        format!(" with `{key}` ({}): {about}", type_of(of))
    });
    told.collect()
}

/// What a value is, in a few words.
fn type_of(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        return values.join(" or ");
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(parts) = schema[key].as_array() {
            let parts: Vec<String> =
                parts.iter().filter(|part| part["type"] != "null").map(type_of).collect();
            return parts.join(" or ");
        }
    }
    let names = match &schema["type"] {
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect()
        }
        Value::String(name) => vec![name.as_str()],
        _ => vec!["any"],
    };
    match names.as_slice() {
        ["array"] => format!("list of {}", type_of(&schema["items"])),
        ["object"] if schema["additionalProperties"].is_object() => {
            format!("object of {}", type_of(&schema["additionalProperties"]))
        }
        names => names.join(" or "),
    }
}

/// Rows below their header; nothing if there is none.
fn table(header: &str, rows: impl Iterator<Item = String>) -> String {
    let rows: String = rows.collect();
    if rows.is_empty() { rows } else { format!("\n{header}{rows}") }
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram};

    use super::{broken_rules, described, metrics_page, rest_page};

    #[test]
    fn each_metric_that_is_described_has_a_row() {
        let metrics = described(|| {
            describe_histogram!("x_b_seconds", Unit::Seconds, "How long.");
            describe_counter!("x_a_total", "How many.");
            counter!("x_c_total").absolute(0);
        });
        let page = metrics_page("x", &metrics);
        let rows =
            "| `x_a_total` | counter |  | How many. |\n| `x_b_seconds` | histogram | seconds | How long. |\n";
        assert!(page.ends_with(rows), "{page}");
    }

    #[test]
    fn names_that_break_a_rule_are_told() {
        let good = described(|| {
            describe_counter!("x_sent_bytes_total", Unit::Bytes, "How much.");
            describe_counter!("x_ends_total", "How many.");
            describe_gauge!("x_build_info", "Always 1.");
            describe_histogram!("x_b_seconds", Unit::Seconds, "How long.");
        });
        assert_eq!(broken_rules("x_", &good), [""; 0]);
        for (describe, rule) in [
            (
                (|| describe_counter!("x_bytes_sent_total", Unit::Bytes, "How much.")) as fn(),
                "x_bytes_sent_total (counter): its unit is the last word, but for _total",
            ),
            (
                || describe_counter!("x_ends", "How many."),
                "x_ends (counter): counters end in _total, and nothing else does",
            ),
            (
                || describe_gauge!("x_now_total", "Now."),
                "x_now_total (gauge): counters end in _total, and nothing else does",
            ),
            (|| describe_gauge!("x_wait_ms", "Now."), "x_wait_ms (gauge): its unit is a base unit"),
            (
                || describe_gauge!("x_wait_seconds", "Now."),
                "x_wait_seconds (gauge): its name has the unit that it has",
            ),
            (|| describe_gauge!("x_vm_count", "Now."), "x_vm_count (gauge): it ends as only a series may"),
            (|| describe_gauge!("y_vms", "Now."), "y_vms (gauge): its name begins with x_"),
            (|| describe_gauge!("x_vms", "Now"), "x_vms (gauge): its help is one line and a sentence"),
        ] {
            assert_eq!(broken_rules("x_", &described(describe)), [rule]);
        }
    }

    #[test]
    fn operations_and_types_are_told_with_what_they_take() {
        let api = r##"{"info": {"description": "All of it."}, "paths": {"/v1/a/{id}": {"post": {
            "summary": "Does it.", "x-vmove-role": "admin",
            "parameters": [{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}, "description": "Which."}],
            "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Ask"}}}},
            "responses": {"200": {"content": {"text/plain": {}}}, "4XX": {}}}}},
            "components": {"schemas": {
                "Ask": {"description": "A request.", "required": ["n"],
                    "properties": {"n": {"type": "integer"}, "of": {"type": ["array", "null"], "items": {"type": "string"}}}},
                "Word": {"enum": ["yes", "no"]},
                "Either": {"oneOf": [{"$ref": "#/components/schemas/Ask"}, {"properties": {"b": {"type": "boolean"}}}]}}}}"##;
        let page = rest_page("x", "x.json", api);
        for line in [
            "### `POST /v1/a/{id}`\n\nDoes it. Role: admin.\n",
            "| `id` | path | string | Which. |\n",
            "Body: [Ask](#ask).\n\nAnswers: 200 `text/plain`, 4XX.\n",
            "### Ask\n\nA request.\n\n| Field | Type | Meaning |\n|---|---|---|\n| `n` | integer |  |\n| `of` | list of string, optional |  |\n",
            "### Word\n\n`\"yes\"` or `\"no\"`\n",
            "### Either\n\n- [Ask](#ask)\n- `b` (boolean)\n",
        ] {
            assert!(page.contains(line), "{line} is not in:\n{page}");
        }
    }
}
