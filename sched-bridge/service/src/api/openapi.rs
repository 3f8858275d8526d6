//! The description of the interface.

use axum::response::Response;
use sched_bridge::model::Assignment;
use sched_bridge::place::Placement;
use utoipa::OpenApi;

use super::problem::{Code, Problem};
use crate::lease::Held;

/// Collects the descriptions of the handlers.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "vbridged",
        description = "Placement, leases, move plans and accounts of virtual clusters. Refusals are `application/problem+json` with a `Problem`.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        super::nodes::health, super::nodes::bridge,
        super::nodes::list, super::nodes::show, super::nodes::publish, super::nodes::remove, super::nodes::set_state, super::nodes::look, super::glue2::show,
        super::nodes::topology, super::nodes::put_topology,
        super::leases::list, super::leases::grant, super::leases::show, super::leases::renew, super::leases::release, super::leases::account,
        super::vms::start, super::vms::stop, super::types::list,
        super::clusters::list, super::clusters::show, super::clusters::resize, super::clusters::fork, super::clusters::checkpoint,
        super::clusters::checkpoints, super::clusters::restore, super::clusters::remove,
        super::plans::list, super::plans::make, super::plans::show, super::plans::remove, super::plans::run,
    ),
    components(schemas(Problem, Code, Assignment, Held, Placement)),
    tags((name = "bridge"), (name = "nodes"), (name = "topology"), (name = "leases"), (name = "clusters"), (name = "account"), (name = "plans"))
)]
struct Api;

/// The description as text that ends with a newline.
#[must_use]
pub fn document() -> String {
    vmove_http::openapi::document::<Api>()
}

/// Answers with the description.
pub async fn serve() -> Response {
    vmove_http::openapi::answer(document())
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::is_current;
    use vmove_skip::reference::rest_page;

    use super::document;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-bridge --lib the_checked_in` writes it, and the page of the reference.
    #[test]
    fn the_checked_in_description_is_current() {
        let document = document();
        is_current("docs/vbridged-openapi.json", document.as_bytes(), "vmove-bridge");
        let page = rest_page("vbridged", "vbridged-openapi.json", &document);
        is_current("docs/reference/vbridged-rest.md", page.as_bytes(), "vmove-bridge");
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own() {
        vmove_http::openapi::check(&document()).unwrap();
    }
}
