//! JSON, as the drafts of OGF's working group have it: an object with an array for each kind of entity.

use serde_json::{Map, Value as Json, json};

use super::entity::{Entity, Others, Value};

pub(super) fn render(entities: &[Entity]) -> String {
    let mut all: Map<String, Json> = Map::new();
    for entity in entities {
        let array = all.entry(entity.kind.name()).or_insert_with(|| json!([]));
        if let Json::Array(array) = array {
            array.push(object(entity));
        }
    }
    format!("{:#}\n", Json::Object(all))
}

fn object(entity: &Entity) -> Json {
    let mut object = Map::new();
    object.insert("ID".to_owned(), json!(entity.id));
    object.insert("Name".to_owned(), json!(entity.name));
    if !entity.other.is_empty() {
        object.insert("OtherInfo".to_owned(), json!(entity.other));
    }
    if !entity.extensions.is_empty() {
        let extensions: Map<String, Json> =
            entity.extensions.iter().map(|(id, value)| (id.clone(), json!(value))).collect();
        object.insert("Extension".to_owned(), Json::Object(extensions));
    }
    for (_, name, value) in &entity.values {
        let value = match value {
            Value::Text(text) => json!(text),
            Value::Number(number) => json!(number),
            Value::Flag(flag) => json!(flag),
            Value::List(words) => json!(words),
        };
        object.insert((*name).to_owned(), value);
    }
    let associations = entity.associations.iter().map(|(name, others)| {
        let others = match others {
            Others::One(id) => json!(id),
            Others::Many(ids) => json!(ids),
            Others::None => Json::Null,
        };
        ((*name).to_owned(), others)
    });
    object.insert("Associations".to_owned(), Json::Object(associations.collect()));
    Json::Object(object)
}
