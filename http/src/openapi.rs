//! The description of an interface, and what its tests check.

use std::collections::BTreeSet;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::OpenApi;
use utoipa::openapi::{RefOr, Schema};

/// The description, with a line end.
#[must_use]
pub fn document<T: OpenApi>() -> String {
    let mut description = T::openapi();
    let schemas = description.components.iter_mut().flat_map(|components| components.schemas.values_mut());
    schemas.for_each(drop_object_defaults);
    let mut text = description.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Generators of clients leave out a schema with such a default, and it says no more than those of its fields.
fn drop_object_defaults(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::Object(object)) = schema else { return };
    for property in object.properties.values_mut() {
        if let RefOr::T(Schema::OneOf(one)) = property
            && one.default.as_ref().is_some_and(Value::is_object)
        {
            one.default = None;
        }
    }
}

/// Answers with a description.
#[must_use]
pub fn answer(document: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

/// What is wrong with a description.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenApiError {
    /// It is not JSON.
    #[error("the description is not JSON")]
    Json(#[from] serde_json::Error),
    /// A reference leads nowhere.
    #[error("the reference #{0} leads nowhere")]
    Reference(String),
    /// Two operations have one name, or one has none.
    #[error("{method} {path}: expected a name that no other operation has, found {found:?}")]
    Name {
        /// Method of the operation.
        method: String,
        /// Its path.
        path: String,
        /// Its name, if any.
        found: Option<String>,
    },
}

/// Checks that every reference leads somewhere, and that every operation has a name of its own.
///
/// # Errors
/// What is wrong first.
pub fn check(document: &str) -> Result<(), OpenApiError> {
    let json: Value = serde_json::from_str(document)?;
    for part in document.split("\"$ref\": \"#").skip(1) {
        let pointer = part.split('"').next().unwrap_or_default();
        if json.pointer(pointer).is_none() {
            return Err(OpenApiError::Reference(pointer.to_owned()));
        }
    }
    let mut names = BTreeSet::new();
    for (path, methods) in json["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let found = operation["operationId"].as_str();
            if found.is_none_or(|name| !names.insert(name.to_owned())) {
                let (method, path, found) = (method.clone(), path.clone(), found.map(str::to_owned));
                return Err(OpenApiError::Name { method, path, found });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_description_is_told_from_a_good_one() {
        let operation =
            |path: &str, name: &str| format!(r#""{path}": {{"get": {{"operationId": "{name}"}}}}"#);
        let paths = |list: &[String]| format!(r#"{{"paths": {{{}}}}}"#, list.join(","));
        check(&paths(&[operation("/a", "a"), operation("/b", "b")])).unwrap();
        let twice = check(&paths(&[operation("/a", "a"), operation("/b", "a")])).unwrap_err();
        assert!(twice.to_string().contains("/b") && twice.to_string().contains("\"a\""), "{twice}");
        let nowhere = check(r##"{"x": {"$ref": "#/y"}}"##).unwrap_err();
        assert!(matches!(nowhere, OpenApiError::Reference(pointer) if pointer == "/y"));
        assert!(matches!(check("{").unwrap_err(), OpenApiError::Json(_)));
    }
}
