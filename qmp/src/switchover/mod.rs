//! Moving the device state between two QEMUs whose guest RAM travels by other means.
//!
//! Both sides get the capability `x-ignore-shared`: RAM blocks that are shared named files do not enter the stream, which
//! leaves firmware, video memory and devices (0.3 to 0.8 MiB for a small guest).
//!
//! ```text
//! source                                            destination (started with -incoming defer -S)
//! prepare   capabilities, bandwidth                 prepare   capabilities
//! start     migrate            ---- stream ---->    listen    migrate-incoming
//!  STOP     vCPUs halted  (block I/O may still land in guest RAM)
//!  held     pre-switchover (drained: guest RAM is final)
//! continue_ migrate-continue   ---- devices --->    loaded    everything read, guest still stopped
//!  completed                                        resume    cont -> RESUME
//! ```
//!
//! The guest may be brought back on the source at every point before `resume` on the destination, by [`Source::cancel`];
//! whoever calls that after [`Source::completed`] must know that the destination has never resumed, and has ended.

mod destination;
mod error;
mod query;
mod relay;
mod settings;
mod source;
mod status;
mod track;
mod watched;

pub use destination::{Announce, Destination, DestinationOptions, Inbound, LoadedAt, ResumedAt};
pub use error::SwitchoverError;
pub use query::query_migration;
pub use relay::{RelayStats, StateReceiver, StateSender, relay};
pub use source::{
    CompletedAt, GUEST_PANICKED, GuestState, HeldAt, Hold, Outbound, Source, SourceOptions, StoppedAt,
};
pub use status::{MigrationInfo, MigrationStatus};
pub use watched::{SkipsShared, Verdict, Watched, clear_skip_shared};
