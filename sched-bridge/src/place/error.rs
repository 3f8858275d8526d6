//! Why there is no placement.

/// Why a cluster was not placed. Nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// No fleet could fulfil it.
    #[error("the request contradicts itself: {reason}")]
    Contradiction {
        /// Which parts contradict each other.
        reason: String,
    },
    /// Names something that the fleet does not have.
    #[error("{what} {name} is not in the fleet; import its inventory and topology first")]
    Unknown {
        /// A node or a switch.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// Does not fit now.
    #[error("no room for {vms} VMs: {fit} would fit; {reason}")]
    NoRoom {
        /// VMs that were asked for.
        vms: u32,
        /// The most that would fit into one place that obeys the limits of distance; counts VMs of any group.
        fit: u32,
        /// The constraint that rules out most nodes, and what to relax.
        reason: String,
    },
}
