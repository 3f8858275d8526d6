//! The description of the interface.

use axum::response::Response;
use utoipa::Modify;
use utoipa::openapi::{Content, OpenApi, Ref, ResponseBuilder};

use crate::server::access::OPERATIONS;
use vmove_types::problem::{Code, Problem};
use vmove_types::{check, fork_report, group, migration, progress, report, spec, vm};

/// Gathers what the handlers say of themselves.
#[derive(Debug, utoipa::OpenApi)]
#[openapi(
    info(
        title = "vmoved",
        description = "Interface of vmoved, on its Unix socket, and over TLS on its peer port. There a client shows a certificate, and \
                       the configuration of the node says which role it has; `x-vmove-role` of an operation is the role that it needs \
                       (viewer, operator, admin; each may do what those before it may; `stopVm` with `force` needs admin). What is `public` needs viewer, \
                       and may be asked by nodes, and without TLS by everybody who reaches the port. \
                       Refusals are `application/problem+json` with a `Problem`: any request may be refused with 403 (`forbidden`, `read-only`) \
                       and 429 (`rate-limited`, with `Retry-After`), one with a body with 413 (`too-large`).",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        super::node::health,
        super::node::metrics,
        super::node::node,
        super::devices::list,
        super::tuning::show,
        super::tuning::apply,
        super::vms::list,
        super::vms::run,
        super::vms::adopt,
        super::vms::show,
        super::vms::stop,
        super::vms::forget,
        super::vms::set_state,
        super::vms::check,
        super::vms::attach_device,
        super::disks::list,
        super::disks::begin,
        super::disks::cancel,
        super::forks::tree,
        super::forks::kill,
        super::forks::promote,
        super::forks::warm,
        super::forks::create,
        super::forks::list,
        super::forks::recover,
        super::forks::show,
        super::forks::templates,
        super::forks::save,
        super::forks::load,
        super::forks::restore,
        super::forks::remove,
        super::hooks::list,
        super::hooks::test,
        super::libvirt::hook,
        super::proxmox::arrival,
        super::fabric::check,
        super::groups::list,
        super::groups::start,
        super::groups::show,
        super::groups::cancel,
        super::groups::events,
        super::migrations::list,
        super::migrations::start,
        super::migrations::show,
        super::migrations::cancel,
        super::migrations::recover,
        super::migrations::stay,
        super::migrations::turn_into_visit,
        super::migrations::reclaim,
        super::migrations::events,
    ),
    components(schemas(
        Problem, Code, migration::Taken, vm::Stopped,
        fork_report::ForkReport, fork_report::ForkProgress,
        group::GroupProgress, group::GroupReport, progress::Progress, progress::Outcome, report::Report, check::Blocker, check::CheckReport, spec::MigrationSpec,
    )),
    modifiers(&Access),
    tags((name = "node"), (name = "vms"), (name = "forks"), (name = "hooks"), (name = "libvirt"), (name = "proxmox"), (name = "migrations"), (name = "groups"))
)]
struct Api;

/// Says of each operation who may ask it, and that it may be refused.
#[derive(Debug)]
struct Access;

impl Modify for Access {
    fn modify(&self, api: &mut OpenApi) {
        let refused = ResponseBuilder::new()
            .description("Refused, or failed")
            .content("application/json", Content::new(Some(Ref::from_schema_name("Problem"))))
            .build();
        for operation in OPERATIONS {
            let Some(item) = api.paths.paths.get_mut(operation.path) else { continue };
            let described = match operation.method {
                "GET" => item.get.as_mut(),
                "POST" => item.post.as_mut(),
                "PUT" => item.put.as_mut(),
                "DELETE" => item.delete.as_mut(),
                _ => None,
            };
            let Some(described) = described else { continue };
            let extensions = described.extensions.get_or_insert_default();
            // One key: a second one would come before or after it by chance.
            let role = if operation.public { "public".to_owned() } else { operation.needs.to_string() };
            extensions.insert("x-vmove-role".to_owned(), role.into());
            for status in ["4XX", "5XX"] {
                let responses = &mut described.responses.responses;
                responses.entry(status.to_owned()).or_insert_with(|| refused.clone().into());
            }
        }
    }
}

/// The description, with a line end.
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
    use std::collections::BTreeSet;

    use vmove_skip::installed::is_current;
    use vmove_skip::reference::rest_page;

    use super::{OPERATIONS, document};

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-daemon --lib the_checked_in` writes it, and the page of the reference.
    #[test]
    fn the_checked_in_description_is_current() {
        let document = document();
        is_current("docs/openapi.json", document.as_bytes(), "vmove-daemon");
        let page = rest_page("vmoved", "openapi.json", &document);
        is_current("docs/reference/vmoved-rest.md", page.as_bytes(), "vmove-daemon");
    }

    /// What is in the description and not in the table would be refused to every client, and nobody would know its role.
    #[test]
    fn every_operation_has_a_role_and_every_role_an_operation() {
        let api: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let mut described = BTreeSet::new();
        for (path, methods) in api["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let id = operation["operationId"].as_str().unwrap();
                assert!(operation["x-vmove-role"].is_string(), "{id}");
                assert!(operation["responses"]["4XX"].is_object(), "{id}");
                described.insert((id.to_owned(), method.to_uppercase(), path.clone()));
            }
        }
        let text = str::to_owned;
        let known = OPERATIONS.iter().filter(|operation| operation.path != "/openapi.json");
        let known: BTreeSet<_> = known.map(|o| (text(o.id), text(o.method), text(o.path))).collect();
        assert_eq!(known, described);
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own() {
        vmove_http::openapi::check(&document()).unwrap();
    }
}
