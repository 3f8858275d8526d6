//! The description of the interface.

use utoipa::OpenApi;

use super::problem::{Code, Problem};
use super::schema;

/// Gathers what the handlers say of themselves.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "vbridged",
        description = "Placement, leases, move plans and accounts of virtual clusters. Refusals are `application/problem+json` with a `Problem`.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        super::nodes::health, super::nodes::bridge,
        super::nodes::list, super::nodes::show, super::nodes::publish, super::nodes::remove, super::nodes::set_state,
        super::nodes::topology, super::nodes::put_topology,
        super::leases::list, super::leases::grant, super::leases::show, super::leases::renew, super::leases::release, super::leases::account,
        super::vms::start, super::vms::stop,
        super::plans::list, super::plans::make, super::plans::show, super::plans::remove, super::plans::run,
    ),
    components(schemas(Problem, Code, schema::Assignment, schema::Held, schema::Placement)),
    tags((name = "bridge"), (name = "nodes"), (name = "topology"), (name = "leases"), (name = "account"), (name = "plans"))
)]
struct Api;

/// The description, with a line end.
#[must_use]
pub fn document() -> String {
    let mut text = Api::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Answers with the description.
pub async fn serve() -> impl axum::response::IntoResponse {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], document())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `VMOVE_WRITE_OPENAPI=1 cargo test -p vmove-bridge openapi` writes it.
    #[test]
    fn the_checked_in_description_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vbridged-openapi.json");
        if std::env::var_os("VMOVE_WRITE_OPENAPI").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            found == document(),
            "docs/vbridged-openapi.json is out of date: run VMOVE_WRITE_OPENAPI=1 cargo test -p vmove-bridge openapi"
        );
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own() {
        let text = document();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for part in text.split("\"$ref\": \"#").skip(1) {
            let pointer = part.split('"').next().unwrap();
            assert!(json.pointer(pointer).is_some(), "{pointer}");
        }
        let mut names = std::collections::BTreeSet::new();
        for methods in json["paths"].as_object().unwrap().values() {
            for operation in methods.as_object().unwrap().values() {
                assert!(names.insert(operation["operationId"].as_str().unwrap().to_owned()));
            }
        }
    }
}
