//! Which role each operation of the interface needs.

use axum::extract::Query;
use axum::http::{Method, Uri};
use vmove_types::vm::StopQuery;

use crate::config::Role;

/// An operation of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Its id in the description.
    pub id: &'static str,
    /// `GET` and so on.
    pub method: &'static str,
    /// As the router has it.
    pub path: &'static str,
    /// The role that a client needs.
    pub needs: Role,
    /// Nodes may ask it, and without TLS everybody who reaches the port.
    pub public: bool,
}

impl Operation {
    const fn new(id: &'static str, method: &'static str, path: &'static str, needs: Role) -> Self {
        Self { id, method, path, needs, public: false }
    }

    const fn public(id: &'static str, path: &'static str) -> Self {
        Self { id, method: "GET", path, needs: Role::Viewer, public: true }
    }

    /// Whether it changes nothing.
    pub fn is_question(&self) -> bool {
        self.method == "GET"
    }

    /// The role that this request for it needs.
    pub fn needs(&self, uri: &Uri) -> Role {
        // The handler reads the query in the same way, and refuses one that cannot be read.
        let forced = || Query::<StopQuery>::try_from_uri(uri).is_ok_and(|query| query.force);
        if self.id == "stopVm" && forced() { Role::Admin } else { self.needs }
    }

    /// The operation of a request whose path the router has found as this template.
    pub fn find(method: &Method, template: &str) -> Option<&'static Self> {
        // The router answers HEAD as GET.
        let method = if *method == Method::HEAD { "GET" } else { method.as_str() };
        OPERATIONS.iter().find(|operation| operation.method == method && operation.path == template)
    }
}

/// All of them. A request that is for none of them is refused to clients, so nothing is open by mistake.
pub const OPERATIONS: &[Operation] = &[
    Operation::public("health", "/healthz"),
    Operation::public("showNode", "/v1/node"),
    Operation::public("listVms", "/v1/vms"),
    Operation::public("listMigrations", "/v1/migrations"),
    Operation::public("showMigration", "/v1/migrations/{id}"),
    Operation::public("followMigration", "/v1/migrations/{id}/events"),
    Operation::public("listGroups", "/v1/groups"),
    Operation::public("showGroup", "/v1/groups/{id}"),
    Operation::public("followGroup", "/v1/groups/{id}/events"),
    // The description itself, which describes no such operation.
    Operation::public("", "/openapi.json"),
    Operation::new("metrics", "GET", "/metrics", Role::Viewer),
    Operation::new("listDevices", "GET", "/v1/devices", Role::Viewer),
    Operation::new("showTuning", "GET", "/v1/tuning", Role::Viewer),
    Operation::new("showVm", "GET", "/v1/vms/{name}", Role::Viewer),
    Operation::new("checkVm", "GET", "/v1/vms/{name}/check", Role::Viewer),
    Operation::new("listDisks", "GET", "/v1/vms/{name}/disks", Role::Viewer),
    Operation::new("showForkTree", "GET", "/v1/vms/{name}/tree", Role::Viewer),
    Operation::new("listForks", "GET", "/v1/forks", Role::Viewer),
    Operation::new("showFork", "GET", "/v1/forks/{id}", Role::Viewer),
    Operation::new("listTemplates", "GET", "/v1/templates", Role::Viewer),
    Operation::new("listHooks", "GET", "/v1/hooks", Role::Viewer),
    // It writes settings of the host.
    Operation::new("applyTuning", "POST", "/v1/tuning", Role::Admin),
    // It loads the network between two nodes.
    Operation::new("checkFabric", "GET", "/v1/fabric/check", Role::Operator),
    Operation::new("startMigration", "POST", "/v1/migrations", Role::Operator),
    Operation::new("cancelMigration", "DELETE", "/v1/migrations/{id}", Role::Operator),
    Operation::new("stayVisitor", "POST", "/v1/migrations/{id}/stay", Role::Operator),
    Operation::new("turnIntoVisit", "POST", "/v1/migrations/{id}/visit", Role::Operator),
    Operation::new("recoverMigration", "POST", "/v1/migrations/{id}/recover", Role::Operator),
    Operation::new("startGroup", "POST", "/v1/groups", Role::Operator),
    Operation::new("cancelGroup", "DELETE", "/v1/groups/{id}", Role::Operator),
    Operation::new("createFork", "POST", "/v1/forks", Role::Operator),
    Operation::new("recoverFork", "POST", "/v1/forks/{id}/recover", Role::Operator),
    Operation::new("killChild", "DELETE", "/v1/children/{name}", Role::Operator),
    Operation::new("promoteVm", "POST", "/v1/vms/{name}/promote", Role::Operator),
    Operation::new("prepareChildren", "PUT", "/v1/vms/{name}/warm", Role::Operator),
    Operation::new("saveTemplate", "POST", "/v1/templates", Role::Operator),
    Operation::new("loadTemplate", "POST", "/v1/templates/{name}/load", Role::Operator),
    Operation::new("removeTemplate", "DELETE", "/v1/templates/{name}", Role::Operator),
    Operation::new("setVmState", "PUT", "/v1/vms/{name}/state", Role::Operator),
    Operation::new("attachDevice", "POST", "/v1/vms/{name}/devices/{role}/attach", Role::Operator),
    Operation::new("cancelDiskMove", "DELETE", "/v1/vms/{name}/disks/{disk}/move", Role::Operator),
    // With `force`: admin.
    Operation::new("stopVm", "DELETE", "/v1/vms/{name}", Role::Operator),
    Operation::new("runVm", "POST", "/v1/vms", Role::Admin),
    Operation::new("adoptVm", "POST", "/v1/vms:adopt", Role::Admin),
    Operation::new("forgetVm", "POST", "/v1/vms/{name}/forget", Role::Admin),
    // The caller's word alone keeps the guest from running twice.
    Operation::new("reclaimMigration", "POST", "/v1/migrations/{id}/reclaim", Role::Admin),
    // The caller's word alone keeps the guest from running twice.
    Operation::new("restoreTemplate", "POST", "/v1/templates/{name}/restore", Role::Admin),
    // It makes a file wherever it is told.
    Operation::new("moveDisk", "POST", "/v1/vms/{name}/disks/{disk}/move", Role::Admin),
    // It has memory of guests of other nodes come.
    Operation::new("answerLibvirt", "POST", "/v1/libvirt/hook", Role::Admin),
    Operation::new("expectProxmoxGuest", "POST", "/v1/proxmox/arrival", Role::Admin),
    // It may run programs of the configuration.
    Operation::new("testHook", "POST", "/v1/hooks/{name}/test", Role::Admin),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_by_force_needs_more() {
        let stop = Operation::find(&Method::DELETE, "/v1/vms/{name}").unwrap();
        for (uri, needs) in [
            ("/v1/vms/a", Role::Operator),
            ("/v1/vms/a?force=false", Role::Operator),
            ("/v1/vms/a?force=true", Role::Admin),
            ("/v1/vms/a?%66orce=%74rue", Role::Admin),
        ] {
            assert_eq!(stop.needs(&uri.parse().unwrap()), needs, "{uri}");
        }
        assert_eq!(Operation::find(&Method::HEAD, "/metrics").unwrap().id, "metrics");
        assert_eq!(Operation::find(&Method::PATCH, "/v1/vms/{name}"), None);
    }
}
