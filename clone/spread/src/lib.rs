//! Memory of one host, to many.
//!
//! A [`Template`] is memory that does not change; a [`Root`] spreads it to every [`Host`] that joins. Only what is not zero travels, in
//! the order in which hosts need it, and each chunk of 4 KiB is verified by a checksum before it counts as there. The ways:
//!
//! | way | how |
//! |---|---|
//! | multicast | the root sends each piece once; what a host misses it reads, or it is sent again if several miss it |
//! | unicast | each host reads everything from the root |
//! | pipeline | hosts read from each other what they have already ([`route`]) |
//! | two stages | one host of each leaf switch first, the others of the leaf from that one |
//!
//! A host that needs a chunk at once ([`Wants::ask`]) reads it before everything else.
//!
//! What decides ([`HostId`]'s part, the root's part, the pacer) does no input or output, so it runs in tests and models as it does on
//! a network. The crate knows nothing of what the memory is used for.

mod error;
mod host;
mod layout;
mod marks;
mod memory;
mod message;
mod pace;
pub mod plan;
mod root;
pub mod route;
mod run;
pub mod simulate;
mod span;
mod template;

pub use error::SpreadError;
pub use host::HostTotals;
pub use layout::{CHUNK, Extent, Layout, LayoutError};
pub use message::HostId;
pub use pace::{Pacer, Time};
pub use root::RootTotals;
pub use route::{Route, Scheme};
pub use run::{Host, HostOptions, HostState, HostStatus, Root, RootOptions, RootStatus, Target, Wants};
pub use span::Span;
pub use template::{Template, non_zero};
