//! The description of the interface.

use axum::response::Response;
use utoipa::OpenApi;

use vmove_types::problem::{Code, Problem};
use vmove_types::{check, fork_report, group, migration, progress, report, spec, vm};

/// Gathers what the handlers say of themselves.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "vmoved",
        description = "Control interface of vmoved, on its Unix socket. The questions `/v1/node`, `/v1/vms`, `/v1/migrations`, `/v1/groups` \
                       and what is below the latter are answered on the peer port, too. Refusals are `application/problem+json` \
                       with a `Problem`.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(
        super::node::health,
        super::node::metrics,
        super::node::node,
        super::devices::list,
        super::vms::list,
        super::vms::run,
        super::vms::adopt,
        super::vms::show,
        super::vms::stop,
        super::vms::forget,
        super::vms::set_state,
        super::vms::check,
        super::vms::attach_device,
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
        super::forks::remove,
        super::hooks::list,
        super::hooks::test,
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
        super::migrations::reclaim,
        super::migrations::events,
    ),
    components(schemas(
        Problem, Code, migration::Taken, vm::Stopped,
        fork_report::ForkReport, fork_report::ForkProgress,
        group::GroupProgress, group::GroupReport, progress::Progress, progress::Outcome, report::Report, check::Blocker, check::CheckReport, spec::MigrationSpec,
    )),
    tags((name = "node"), (name = "vms"), (name = "forks"), (name = "hooks"), (name = "migrations"), (name = "groups"))
)]
struct Api;

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
    use std::path::Path;

    use super::document;

    /// `VMOVE_WRITE_OPENAPI=1 cargo test -p vmove-daemon openapi` writes it.
    #[test]
    fn the_checked_in_description_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        vmove_http::openapi::check_file(&document(), Path::new(path)).unwrap();
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own() {
        vmove_http::openapi::check(&document()).unwrap();
    }
}
