//! Why there is no placement.

/// Why a cluster was not placed. Nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// No fleet can fulfil the request.
    #[error("the request contradicts itself: {reason}")]
    Contradiction {
        /// Which parts contradict each other.
        reason: String,
    },
    /// The request names something that the fleet does not have.
    #[error("{what} {name} is not in the fleet; publish its inventory and the topology first")]
    Unknown {
        /// `node` or `switch`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// It does not fit now.
    #[error("no room: {fit} of {vms} VMs would fit; {reason}")]
    NoRoom {
        /// VMs of the request.
        vms: u32,
        /// Most VMs, of any group, that have room within the limits of distance.
        fit: u32,
        /// The constraint that rules out most nodes, or what to relax.
        reason: String,
    },
}
