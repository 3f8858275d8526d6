//! By what a host gets the template: over RDMA if a page can be read that way, and its memory may be pinned.

use vmove_fabric::FabricKind;
use vmove_node::peer::negotiate;
use vmove_node::peer::{Hello, LinkError, LinkKind, SessionId, Token};
use vmove_node::reservations::Reservation;
use vmove_types::Backing;
use vmove_types::problem::chain;

use super::HostPart;
use crate::CloneError;
use crate::engine::error::{ForkError, VerbsError};
use crate::engine::message::Taken;
use crate::room::Demand;

impl HostPart {
    /// Takes the best fabric that this node and the parent's have.
    pub(super) async fn choose(
        &self,
        demand: Demand,
        backing: Backing,
        room: &Reservation,
    ) -> Result<Taken, ForkError> {
        let peers = &self.engine.peers;
        let agreed = negotiate(&self.order.offers, &peers.offers())?;
        let mut taken =
            Taken { verbs: agreed.kind == FabricKind::Verbs, why: agreed.why, hears: false, disks: None };
        if taken.verbs
            && let Err(error) = self.try_verbs(demand, backing, room).await
        {
            if !agreed.may_fall_back {
                return Err(ForkError::NoVerbs(error));
            }
            (taken.verbs, taken.why) = (false, chain(&error));
            // It was there before, and more than that may be reserved now.
            let unpinned = demand.with_template(self.order.live_bytes).wanted(backing);
            let again = room.replace(unpinned, |_| Ok::<(), CloneError>(()));
            again.map_err(CloneError::from)??;
        }
        let kind = if taken.verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        let same_group = self.order.group.is_some() && self.order.group == peers.group().ok();
        taken.hears = same_group && peers.multicast(kind, self.hello.token).is_ok();
        Ok(taken)
    }

    /// Whether there is memory for all that RDMA would pin, and a page can be read each way.
    async fn try_verbs(
        &self,
        demand: Demand,
        backing: Backing,
        room: &Reservation,
    ) -> Result<(), VerbsError> {
        let (peers, order) = (&self.engine.peers, &self.order);
        let pinned = demand.with_template(order.registered_bytes);
        let fits = room.replace(pinned.wanted(backing), |rooms| pinned.fits(rooms));
        let fits = fits.map_err(CloneError::from).and_then(|fits| fits);
        fits.map_err(|error| VerbsError::NoRoom(chain(&error)))?;
        let parent = peers.parent_of(&order.node, self.from, order.port);
        let greeting = peers.hello(LinkKind::Trial, SessionId::random(), Token::random());
        let tried =
            peers.dialer.endpoint(&parent, FabricKind::Verbs, &Hello { rdma: true, ..greeting }).await;
        match tried {
            Ok(_) => Ok(()),
            Err(LinkError::Fabric { why, .. }) => Err(VerbsError::NotReached(why)),
            Err(other) => Err(VerbsError::NotReached(chain(&other))),
        }
    }
}
