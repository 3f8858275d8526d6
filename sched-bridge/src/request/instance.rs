//! The extended instance type: `m1.xlarge; xpu_arch=fermi; xpus>=3 OR p7f.grande`.
//!
//! ```text
//! request     = alternative { "OR" alternative }
//! alternative = item { ";" item }
//! item        = "(" request ")" | NAME | KEY op value
//! op          = "=" | "!=" | ">=" | "<=" | ">" | "<"
//! value       = NUMBER | NUMBER ".." NUMBER | WORD { "," WORD }
//! ```
//! All items of an alternative must hold. All words after `=` must hold; `!=` forbids each. A `NAME` alone is an instance type. Numbers
//! may end in K, M or G (2^10, 2^20, 2^30). What an alternative says of a key takes the place of what its instance type says of it; CPU
//! features are added.

use serde::Deserialize;

use super::{Catalog, Clause, Expr, Key, Op, RequestError};

/// Deepest nesting of brackets.
const DEEPEST: usize = 32;

/// Most bytes of a request.
const LONGEST: usize = 16 << 10;

/// Reads an extended instance type.
///
/// # Errors
/// What is wrong, with its column.
pub fn parse(text: &str, catalog: &Catalog) -> Result<Expr, RequestError> {
    if text.len() > LONGEST {
        let found = format!("a request of {} bytes", text.len());
        return Err(RequestError::syntax("column 1", found, format!("at most {LONGEST}")));
    }
    let mut parser = Parser { text, at: 0, depth: 0, catalog };
    let expr = parser.any()?;
    parser.skip_space();
    if parser.at < text.len() {
        return Err(parser.error(
            "a closing bracket without an opening one, or text after the end",
            "\";\", OR or the end",
        ));
    }
    Ok(expr)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    catalog: &'a Catalog,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn place(&self, at: usize) -> String {
        format!("column {}", self.text[..at].chars().count() + 1)
    }

    fn error(&self, reason: impl Into<String>, expected: impl Into<String>) -> RequestError {
        RequestError::syntax(self.place(self.at), reason, expected)
    }

    /// Consumes the word `OR`, if it is next.
    fn take_or(&mut self) -> bool {
        self.skip_space();
        let rest = self.rest();
        let is = rest.get(..2).is_some_and(|word| word.eq_ignore_ascii_case("or"))
            && rest[2..].chars().next().is_none_or(|c| c.is_whitespace() || c == '(');
        if is {
            self.at += 2;
        }
        is
    }

    fn any(&mut self) -> Result<Expr, RequestError> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(self.error("too many brackets within each other", format!("at most {DEEPEST}")));
        }
        let mut alternatives = vec![self.all()?];
        while self.take_or() {
            alternatives.push(self.all()?);
        }
        self.depth -= 1;
        Ok(if alternatives.len() == 1 { alternatives.remove(0) } else { Expr::Any(alternatives) })
    }

    fn all(&mut self) -> Result<Expr, RequestError> {
        let mut items = vec![self.item()?];
        loop {
            self.skip_space();
            if !self.rest().starts_with(';') {
                break;
            }
            self.at += 1;
            self.skip_space();
            // A semicolon at the end is allowed.
            if self.rest().is_empty() || self.rest().starts_with(')') {
                break;
            }
            items.push(self.item()?);
        }
        Ok(if items.len() == 1 { items.remove(0) } else { Expr::All(items) })
    }

    fn item(&mut self) -> Result<Expr, RequestError> {
        self.skip_space();
        if self.rest().starts_with('(') {
            self.at += 1;
            let inner = self.any()?;
            self.skip_space();
            if !self.rest().starts_with(')') {
                return Err(self.error("a bracket is not closed", "\")\""));
            }
            self.at += 1;
            return Ok(inner);
        }
        let start = self.at;
        let key = self.word("=!<>;()");
        if key.is_empty() {
            return Err(self.error("a condition is missing", "an instance type, or KEY=VALUE"));
        }
        self.skip_space();
        let op = ["!=", ">=", "<=", "==", "=", ">", "<"].into_iter().find(|op| self.rest().starts_with(op));
        let Some(op) = op else {
            let clause =
                Clause { key: Key::Flavor, op: Op::OneOf(vec![key.to_owned()]), place: self.place(start) };
            return Ok(Expr::Is(clause));
        };
        self.at += op.len();
        self.skip_space();
        let value = self.word(";()");
        let place = self.place(start);
        if key.eq_ignore_ascii_case("cpu_info") && value.starts_with('{') {
            return cpu_info(op, value, &place);
        }
        self.catalog.condition(key, op, value, place)
    }

    /// Up to a stop character or ` OR `, without white space at its end.
    fn word(&mut self, stops: &str) -> &'a str {
        let rest = self.rest();
        let mut end = rest.find(|c| stops.contains(c)).unwrap_or(rest.len());
        let mut from = 0;
        while let Some(space) = rest[from..end].find(char::is_whitespace).map(|at| at + from) {
            let mut ahead = Parser { at: self.at + space, depth: 0, ..*self };
            if ahead.take_or() {
                end = space;
                break;
            }
            from = space + rest[space..].chars().next().map_or(1, char::len_utf8);
        }
        self.at += end;
        rest[..end].trim_end()
    }
}

/// `cpu_info={"model":"Nehalem", "features":["tdtscp", "xtpr"]}`, as the heterogeneous OpenStack has it in its tables.
fn cpu_info(op: &str, value: &str, place: &str) -> Result<Expr, RequestError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct CpuInfo {
        model: Option<String>,
        #[serde(default)]
        features: Vec<String>,
    }
    if op != "=" && op != "==" {
        return Err(RequestError::syntax(place, format!("operator {op} before an object"), "="));
    }
    let info: CpuInfo = serde_json::from_str(value).map_err(|error| {
        RequestError::syntax(place, format!("cpu_info: {error}"), "an object with model and features")
    })?;
    let model = info.model.map(|model| (Key::CpuModel, Op::Contains(model)));
    let features = (!info.features.is_empty()).then_some((Key::CpuFeatures, Op::AllOf(info.features)));
    let parts = [model, features].into_iter().flatten();
    Ok(Expr::All(parts.map(|(key, op)| Expr::Is(Clause { key, op, place: place.to_owned() })).collect()))
}
