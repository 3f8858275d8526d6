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
//!
//! How long 1 GiB takes to 16 hosts on one switch of 25 Gbit/s, by the model:
//!
//! ```
//! use vmove_spread::plan::{Network, Way};
//! use vmove_spread::simulate::{Scenario, simulate};
//!
//! let scenario = Scenario::new(Network::flat(16, 3.1e9), 1 << 30);
//! let one_by_one = simulate(&scenario, Way::Unicast)?;
//! let pipeline = simulate(&scenario, Way::Pipeline)?;
//! assert!(pipeline.complete.1 < one_by_one.complete.1 / 8.0);
//! # Ok::<(), vmove_spread::plan::PlanError>(())
//! ```

mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod host_id;
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
mod words;

pub use error::SpreadError;
pub use host::HostTotals;
pub use host_id::HostId;
pub use layout::{CHUNK, Extent, Layout, LayoutError};
pub use pace::{Pacer, Time};
pub use root::RootTotals;
pub use route::{Route, Scheme};
pub use run::{Host, HostOptions, HostState, HostStatus, Root, RootOptions, RootStatus, Target, Wants};
pub use span::Span;
pub use template::{Template, non_zero};
