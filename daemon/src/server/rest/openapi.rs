//! The description of the interface.

use utoipa::OpenApi;

use crate::api::problem::{Code, Problem};
use crate::api::{schema, types};

/// Gathers what the handlers say of themselves.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "vmoved",
        description = "Control interface of vmoved, on its Unix socket. The questions `/v1/node`, `/v1/vms`, `/v1/migrations` \
                       and what is below the latter are answered on the peer port, too. Refusals are `application/problem+json` \
                       with a `Problem`.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        super::node::health,
        super::node::metrics,
        super::node::node,
        super::vms::list,
        super::vms::run,
        super::vms::adopt,
        super::vms::show,
        super::vms::stop,
        super::vms::forget,
        super::vms::set_state,
        super::vms::check,
        super::forks::tree,
        super::forks::kill,
        super::forks::promote,
        super::forks::warm,
        super::forks::create,
        super::forks::show,
        super::forks::templates,
        super::forks::save,
        super::forks::load,
        super::forks::remove,
        super::fabric::check,
        super::migrations::list,
        super::migrations::start,
        super::migrations::show,
        super::migrations::cancel,
        super::migrations::recover,
        super::migrations::events,
    ),
    components(schemas(
        Problem, Code, types::Taken, types::Stopped,
        schema::ForkReport, schema::ForkProgress,
        schema::Progress, schema::Outcome, schema::Report, schema::Blocker, schema::CheckReport, schema::MigrationSpec,
    )),
    tags((name = "node"), (name = "vms"), (name = "forks"), (name = "migrations"))
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

    /// `VMOVE_WRITE_OPENAPI=1 cargo test -p vmove-daemon openapi` writes it.
    #[test]
    fn the_checked_in_description_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        if std::env::var_os("VMOVE_WRITE_OPENAPI").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            found == document(),
            "docs/openapi.json is out of date: run VMOVE_WRITE_OPENAPI=1 cargo test -p vmove-daemon openapi"
        );
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let json: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let text = document();
        for part in text.split("\"$ref\": \"#").skip(1) {
            let pointer = part.split('"').next().unwrap();
            assert!(json.pointer(pointer).is_some(), "{pointer}");
        }
    }

    #[test]
    fn every_operation_has_a_name_of_its_own() {
        let json: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let mut names = std::collections::BTreeSet::new();
        for (path, methods) in json["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let name = operation["operationId"].as_str().unwrap();
                assert!(names.insert(name.to_owned()), "{method} {path}: {name} is taken");
            }
        }
    }
}
