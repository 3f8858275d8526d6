//! A client of `vbridged`: nodes, topology, leases, plans and accounts of virtual clusters.
//!
//! ```no_run
//! use vmove_client::bridge::{Bridge, Error};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let bridge = Bridge::connect("unix:/run/vbridged/control.sock".parse()?, None);
//! for lease in bridge.leases(Some("alice")).await?.leases {
//!     println!("{}: {} VMs", lease.id, lease.held.len());
//! }
//! match bridge.renew_lease("job-17").await {
//!     Err(Error::Refused(problem)) => println!("the lease has ended: {problem}"),
//!     answer => println!("heartbeat {}", answer?.beats),
//! }
//! # Ok(())
//! # }
//! ```

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use sched_bridge::model::{Node, NodeState};
use sched_bridge::topology::Topology;
use vmove_bridge_types::account::Record;
use vmove_bridge_types::cluster::{
    CheckpointInfo, CheckpointList, CheckpointRequest, ClusterForked, ClusterInfo, ClusterList,
    ClusterRestored, ForkClusterRequest, ResizeRequest, Resized, RestoreClusterRequest,
};
use vmove_bridge_types::plan::{Plan, PlanRequest};
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{
    AccountQuery, BridgeInfo, LeaseAnswer, LeaseInfo, LeaseList, LeaseRequest, LookAnswer, LookRequest,
    NodeDetail, NodeList, NodeStateRequest, PlanList, StartAnswer, StartRequest, StopVms, TopologyText,
};
use vmove_bridge_types::types::TypeList;
use vmove_http::client::encoded;
pub use vmove_http::tls::TlsError;

use crate::Endpoint;
use crate::connection::Connection;

/// Why a request to `vbridged` has no answer.
pub type Error = crate::Error<Code>;

/// Within it a bridge answers: running a plan takes hours.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A client of one `vbridged`. Each request fails if the bridge refuses it or does not answer.
#[derive(Debug, Clone)]
pub struct Bridge(Connection);

#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Bridge {
    /// A client of the bridge at `endpoint`, which needs a bearer token on TCP. A connection is made with the first request.
    #[must_use]
    pub fn connect(endpoint: Endpoint, token: Option<&str>) -> Self {
        Self(Connection::new(endpoint, ANSWER_TIMEOUT, token, "vbridged"))
    }

    /// The same client, which checks an `https` endpoint by the authorities in this file (PEM).
    pub fn with_authority(self, authorities: &Path) -> Result<Self, TlsError> {
        self.0.with_authority(authorities).map(Self)
    }

    /// The answer to `GET path`, such as `/v1/nodes`, as the bridge gave it, for who passes it on. A refusal is an answer, too.
    pub async fn ask(&self, path: &str) -> Result<(StatusCode, Bytes), Error> {
        self.0.whole(Method::GET, path).await
    }

    /// Status of the bridge and its store.
    pub async fn info(&self) -> Result<BridgeInfo, Error> {
        self.0.get("/v1/bridge").await
    }

    /// All nodes with their free resources.
    pub async fn nodes(&self) -> Result<NodeList, Error> {
        self.0.get("/v1/nodes").await
    }

    /// A node: its inventory, its VMs and its held devices.
    pub async fn node(&self, name: &str) -> Result<NodeDetail, Error> {
        self.0.get(&node(name)).await
    }

    /// Publishes a node's inventory.
    pub async fn publish_node(&self, inventory: &Node) -> Result<NodeDetail, Error> {
        self.0.put(&node(inventory.name.as_str()), inventory).await
    }

    /// Removes a node of which nothing is held.
    pub async fn remove_node(&self, name: &str) -> Result<(), Error> {
        self.0.bytes(Method::DELETE, &node(name), Bytes::new()).await.map(drop)
    }

    /// Sets whether a node takes VMs.
    pub async fn set_node_state(&self, name: &str, state: NodeState) -> Result<NodeDetail, Error> {
        self.0.put(&format!("{}/state", node(name)), &NodeStateRequest { state }).await
    }

    /// Has a node looked at now. `ended`: VMs that have ended there, as far as the caller knows.
    pub async fn look_at_node(&self, name: &str, ended: Vec<String>) -> Result<LookAnswer, Error> {
        self.0.post(&format!("{}/look", node(name)), &LookRequest { ended }).await
    }

    /// The topology.
    pub async fn topology(&self) -> Result<Topology, Error> {
        self.0.get("/v1/topology").await
    }

    /// Replaces the topology.
    pub async fn publish_topology(&self, text: &TopologyText) -> Result<Topology, Error> {
        self.0.put("/v1/topology", text).await
    }

    /// All leases, or those of one holder.
    pub async fn leases(&self, holder: Option<&str>) -> Result<LeaseList, Error> {
        let query = holder.map(|holder| format!("?holder={}", encoded(holder))).unwrap_or_default();
        self.0.get(&format!("/v1/leases{query}")).await
    }

    /// The instance types, keys and aliases that requests may name.
    pub async fn types(&self) -> Result<TypeList, Error> {
        self.0.get("/v1/types").await
    }

    /// Places a virtual cluster and leases what it needs, or only tells where it would be placed.
    pub async fn grant_lease(&self, request: &LeaseRequest) -> Result<LeaseAnswer, Error> {
        self.0.post("/v1/leases", request).await
    }

    /// A lease.
    pub async fn lease(&self, id: &str) -> Result<LeaseInfo, Error> {
        self.0.get(&lease(id, "")).await
    }

    /// Records a heartbeat of a lease.
    pub async fn renew_lease(&self, id: &str) -> Result<LeaseInfo, Error> {
        self.0.act(&lease(id, "/renew")).await
    }

    /// Releases a lease.
    pub async fn release_lease(&self, id: &str) -> Result<Record, Error> {
        self.0.delete(&lease(id, "")).await
    }

    /// Starts VMs of a lease on their nodes: all of them or none.
    pub async fn start_vms(&self, id: &str, request: &StartRequest) -> Result<StartAnswer, Error> {
        self.0.post(&lease(id, "/vms"), request).await
    }

    /// Stops VMs of a lease; all, if the request names none. The lease stays.
    pub async fn stop_vms(&self, id: &str, request: &StopVms) -> Result<StopVms, Error> {
        self.0.post(&lease(id, "/vms/stop"), request).await
    }

    /// All clusters, or those of one holder.
    pub async fn clusters(&self, holder: Option<&str>) -> Result<ClusterList, Error> {
        let query = holder.map(|holder| format!("?holder={}", encoded(holder))).unwrap_or_default();
        self.0.get(&format!("/v1/clusters{query}")).await
    }

    /// A cluster and its VMs, as their nodes say now.
    pub async fn cluster(&self, id: &str) -> Result<ClusterInfo, Error> {
        self.0.get(&cluster(id, "")).await
    }

    /// Gives a group of a cluster more VMs, or fewer.
    pub async fn resize_cluster(&self, id: &str, request: &ResizeRequest) -> Result<Resized, Error> {
        self.0.post(&cluster(id, "/resize"), request).await
    }

    /// Forks a running cluster.
    pub async fn fork_cluster(&self, id: &str, request: &ForkClusterRequest) -> Result<ClusterForked, Error> {
        self.0.post(&cluster(id, "/fork"), request).await
    }

    /// Keeps a running cluster as it is now.
    pub async fn make_checkpoint(
        &self,
        id: &str,
        request: &CheckpointRequest,
    ) -> Result<CheckpointInfo, Error> {
        self.0.post(&cluster(id, "/checkpoint"), request).await
    }

    /// All checkpoints.
    pub async fn checkpoints(&self) -> Result<CheckpointList, Error> {
        self.0.get("/v1/checkpoints").await
    }

    /// Lets a cluster run again as it was at its checkpoint.
    pub async fn restore_cluster(
        &self,
        checkpoint: &str,
        request: &RestoreClusterRequest,
    ) -> Result<ClusterRestored, Error> {
        self.0.post(&format!("/v1/checkpoints/{}/restore", encoded(checkpoint)), request).await
    }

    /// Deletes a checkpoint and its templates.
    pub async fn remove_checkpoint(&self, name: &str) -> Result<(), Error> {
        let path = format!("/v1/checkpoints/{}", encoded(name));
        self.0.bytes(Method::DELETE, &path, Bytes::new()).await.map(drop)
    }

    /// Accounting records, as the text that was asked for.
    pub async fn account(&self, query: &AccountQuery) -> Result<String, Error> {
        let format = query.format.as_deref().unwrap_or("jsonl");
        let mut path = format!("/v1/account?format={}", encoded(format));
        if let Some(holder) = &query.holder {
            path.push_str(&format!("&holder={}", encoded(holder)));
        }
        for (name, value) in [("site", &query.site), ("service", &query.service)] {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", encoded(value)));
            }
        }
        if let Some(since) = query.since_ms {
            path.push_str(&format!("&since_ms={since}"));
        }
        let text = self.0.bytes(Method::GET, &path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// All nodes as entities of GLUE 2, in a rendering: `xml`, `json` or `ldif`.
    pub async fn glue2(&self, format: &str, site: &str) -> Result<String, Error> {
        let path = format!("/v1/glue2?format={}&site={}", encoded(format), encoded(site));
        let text = self.0.bytes(Method::GET, &path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// All plans.
    pub async fn plans(&self) -> Result<PlanList, Error> {
        self.0.get("/v1/plans").await
    }

    /// Makes a plan. Running it is another request.
    pub async fn make_plan(&self, request: &PlanRequest) -> Result<Plan, Error> {
        self.0.post("/v1/plans", request).await
    }

    /// A plan, with the state of each step.
    pub async fn plan(&self, id: &str) -> Result<Plan, Error> {
        self.0.get(&plan(id, "")).await
    }

    /// Deletes a plan that is not being run.
    pub async fn remove_plan(&self, id: &str) -> Result<(), Error> {
        self.0.bytes(Method::DELETE, &plan(id, ""), Bytes::new()).await.map(drop)
    }

    /// Runs a plan, or continues it. Answers when it is done or a step has failed.
    pub async fn run_plan(&self, id: &str) -> Result<Plan, Error> {
        self.0.act(&plan(id, "/run")).await
    }
}

fn node(name: &str) -> String {
    format!("/v1/nodes/{}", encoded(name))
}

fn lease(id: &str, rest: &str) -> String {
    format!("/v1/leases/{}{rest}", encoded(id))
}

fn cluster(id: &str, rest: &str) -> String {
    format!("/v1/clusters/{}{rest}", encoded(id))
}

fn plan(id: &str, rest: &str) -> String {
    format!("/v1/plans/{}{rest}", encoded(id))
}
