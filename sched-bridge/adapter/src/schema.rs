//! The JSON schema of the contract, made from its types.

use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use vmove_bridge_types::adapter::{Action, Answer, Request};

/// A schema (JSON Schema 2020-12) of which `$defs` has the request (`AdapterRequest`), the answer (`AdapterAnswer`), and what they
/// consist of. A text is valid if it is a request or an answer.
#[must_use]
pub fn of_contract() -> Value {
    let mut parts: Vec<(String, RefOr<Schema>)> = Vec::new();
    collect::<Request>(&mut parts);
    collect::<Answer>(&mut parts);
    collect::<Action>(&mut parts);
    let mut definitions = Map::new();
    for (name, schema) in parts {
        definitions.insert(name, serde_json::to_value(schema).unwrap_or_default());
    }
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Contract of vmove's adapters, version 1",
        "oneOf": [{ "$ref": "#/$defs/AdapterRequest" }, { "$ref": "#/$defs/AdapterAnswer" }],
        "$defs": definitions,
    });
    point_to_definitions(&mut schema);
    schema
}

fn collect<T: ToSchema + PartialSchema>(parts: &mut Vec<(String, RefOr<Schema>)>) {
    parts.push((T::name().into_owned(), T::schema()));
    T::schemas(parts);
}

/// References of OpenAPI, as those of JSON Schema.
fn point_to_definitions(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if key == "$ref" => {
                        *text = text.replace("#/components/schemas/", "#/$defs/");
                    }
                    other => point_to_definitions(other),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(point_to_definitions),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_has_its_definition() {
        let schema = of_contract();
        let mut found = Vec::new();
        references(&schema, &mut found);
        assert!(found.len() >= 5, "{found:?}");
        for reference in found {
            let path = reference.strip_prefix('#').expect("inside the schema");
            assert!(schema.pointer(path).is_some(), "{reference} in {schema}");
        }
        let states = &schema["$defs"]["AdapterState"];
        assert!(states.to_string().contains("\"waiting\""), "{states}");
        assert_eq!(schema["$defs"]["AdapterStatus"]["required"], json!(["name", "state"]));
    }
}
