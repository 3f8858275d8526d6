//! `/v1/node`, `/healthz`, `/metrics`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;

use vmove_fabric::FabricKind;
use vmove_http::Answer;
use vmove_node::blocking::run_blocking;
use vmove_node::peer::FabricOffer;

use crate::config::{KnownNode, qemu_user_note};
use crate::server::App;
use crate::server::problem::IntoProblem;
use vmove_types::node::{NodeInfo, NodeMemory};

/// This node: fabrics, memory, known peers.
#[utoipa::path(get, path = "/v1/node", operation_id = "showNode", tag = "node", responses((status = 200, body = NodeInfo)))]
pub async fn node(State(app): State<Arc<App>>) -> Answer<NodeInfo> {
    let memory = run_blocking(memory).await.map_err(IntoProblem::into_problem)?;
    let vms_without_grant = match &app.grants {
        Some(grants) => {
            let vms = app.registry.list().await;
            Some(vms.iter().filter(|vm| vm.status != "ended" && grants.lease_of(&vm.name).is_none()).count())
        }
        None => None,
    };
    let offers = app.fabrics.offers();
    let running = app.sessions.live().iter().filter(|p| !p.outcome.is_end()).count();
    let named = |(name, node): (&String, &KnownNode)| Some((name.clone(), node.server_name.clone()?));
    Ok(Json(NodeInfo {
        node: app.config.node.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: vmove_node::peer::PROTOCOL_VERSION,
        pid: std::process::id(),
        uptime_s: app.started.elapsed().as_secs(),
        listen: app.listen.to_string(),
        security: app.security_word().to_owned(),
        fabrics: offers.iter().filter(|o| o.why_not.is_none()).map(|o| o.kind.to_string()).collect(),
        rdma_network: offers.iter().find(|o| usable_rdma(o)).map(|o| o.reach.clone()),
        no_rdma: offers.iter().find_map(|o| o.why_not.clone()),
        vms_without_grant,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        no_dirty_tracking: app.no_dirty_tracking.clone(),
        shared_disk: app.shared_disk.clone(),
        qemu_user: app.config.qemu.whose(),
        qemu_sandbox: app.config.qemu.sandbox,
        qemu_user_note: qemu_user_note(&app.config.qemu),
        memory,
        nodes: app.config.nodes.iter().map(|(name, node)| (name.clone(), node.address.clone())).collect(),
        server_names: app.config.nodes.iter().filter_map(named).collect(),
        vms: app.registry.count(),
        migrations_running: running,
    }))
}

fn usable_rdma(offer: &FabricOffer) -> bool {
    offer.kind == FabricKind::Verbs && offer.why_not.is_none()
}

/// The daemon answers, and nothing holds what requests need.
#[utoipa::path(get, path = "/healthz", operation_id = "health", tag = "node", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn health(State(app): State<Arc<App>>) -> &'static str {
    // Each takes a lock that most requests take: otherwise the watchdog would not notice one that is never released. None of these is held while
    // somebody waits for a disk, a QEMU or another node, for whose silence this daemon must not be ended: so not that of the VMs' records.
    let vms = (app.registry.why_ended(""), app.registry.vms().is_name_held(""));
    let _ = (vms, app.sessions.live(), app.forks.progress(""));
    "ok\n"
}

/// Prometheus metrics, as on the metrics port.
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "node", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    vmove_http::metrics::answer(app.metrics.render())
}

fn memory() -> NodeMemory {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |key: &str| {
        let line = info.lines().find_map(|l| l.strip_prefix(key));
        let number =
            line.and_then(|l| l.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok());
        number.unwrap_or(0) << 10
    };
    let free_pages = |size: u64| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", size >> 10);
        let count = std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse::<u64>().ok());
        count.unwrap_or(0).saturating_mul(size)
    };
    NodeMemory {
        total_bytes: kib("MemTotal"),
        available_bytes: kib("MemAvailable"),
        free_huge_2m_bytes: free_pages(2 << 20),
        free_huge_1g_bytes: free_pages(1 << 30),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn memory_of_this_machine() {
        let memory = super::memory();
        assert!(memory.total_bytes > 0 && memory.available_bytes <= memory.total_bytes);
    }
}
