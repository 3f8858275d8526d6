//! By what a host gets the template: over RDMA if a page can be read that way, and its memory may be pinned.

use vmove_clone::room::Demand;
use vmove_fabric::FabricKind;
use vmove_migrate::check::fabric::negotiate;
use vmove_migrate::link::{Dialer, LinkError};
use vmove_migrate::proto::hello::{Hello, LinkKind, SessionId, Token};
use vmove_qmp::RamBacking;

use super::host::Part;
use super::message::Taken;
use crate::api::problem::{Code, Problem, chain};

impl Part {
    /// Takes the best fabric that this node and the parent's have.
    pub(super) async fn choose(&self, demand: Demand, backing: RamBacking) -> Result<Taken, Problem> {
        let remote = &self.forks.remote;
        let agreed = negotiate(&self.order.offers, &remote.offers());
        let agreed = agreed.map_err(|why| Problem::new(Code::Forbidden, why))?;
        let mut taken =
            Taken { verbs: agreed.kind == FabricKind::Verbs, why: agreed.why, hears: false, disks: None };
        if taken.verbs {
            if let Err(why) = self.try_verbs(demand, backing).await {
                if !agreed.may_fall_back {
                    return Err(Problem::new(Code::ForkFailed, why));
                }
                (taken.verbs, taken.why) = (false, why);
            }
        }
        let kind = if taken.verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        let same_group = self.order.group.is_some() && self.order.group == remote.group().ok();
        taken.hears = same_group && remote.multicast(kind).is_ok();
        Ok(taken)
    }

    /// Whether there is memory for all that RDMA would pin, and a page can be read each way.
    async fn try_verbs(&self, demand: Demand, backing: RamBacking) -> Result<(), String> {
        let (remote, order) = (&self.forks.remote, &self.order);
        let room = self.forks.fits(demand.with_template(order.registered_bytes), backing).await;
        room.map_err(|problem| format!("no verbs, which would pin holes: {}", problem.message))?;
        let parent = remote.root_of(&order.node, self.from, order.port);
        let greeting = remote.hello(LinkKind::Trial, SessionId::random(), Token::default());
        let tried =
            remote.dialer.endpoint(&parent, FabricKind::Verbs, &Hello { rdma: true, ..greeting }).await;
        match tried {
            Ok(_) => Ok(()),
            Err(LinkError::Fabric { why, .. }) => Err(format!("no verbs: {why}")),
            Err(other) => Err(format!("no verbs: {}", chain(&other))),
        }
    }
}
