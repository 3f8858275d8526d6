//! What can be chosen.

use std::time::Duration;

use crate::tcp::TcpOptions;

/// When memory is registered for on-demand paging: nothing is pinned, and the device asks the kernel for pages that it does not know
/// yet, which takes its time. Only of a device that does so for READs of reliable connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDemand {
    /// Memory that cannot be pinned is not registered.
    Never,
    /// When memory cannot be pinned: a limit of the kernel, or [`max_registered`](VerbsOptions::max_registered).
    #[default]
    IfNeeded,
    /// Nothing is pinned.
    Always,
}

/// Options of a [`VerbsFabric`](super::VerbsFabric).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsOptions {
    /// Name of the device (`mlx5_0`, `rxe0`); `None`: the first with a usable port, RoCE before InfiniBand.
    pub device: Option<String>,
    /// Port of the device, from 1; `None`: its first that is active.
    pub port: Option<u8>,
    /// Index of the address in the port's table; `None`: on Ethernet the first RoCE v2 address with an IPv4 number,
    /// else the first RoCE v2 address; on InfiniBand 0.
    pub gid_index: Option<u8>,
    /// Index of the partition key in the port's table, 0..=65534. Default 0: on InfiniBand the first that the subnet manager has
    /// given; RoCE has no partitions.
    pub pkey_index: u16,
    /// READs under way per connection, 1..=255; what both devices can is less. Default 16.
    pub read_depth: u8,
    /// Time until an unanswered packet is sent again: 4.096 us times two to the power of this, 1..=31. Default 15
    /// (134 ms).
    pub ack_timeout: u8,
    /// How often, before the connection counts as lost, 0..=7. Default 6. Soft RoCE takes 7 for "for ever".
    pub retries: u8,
    /// The path counts as lost when requests are under way and none has ended for this long, whatever the device says; large
    /// ones get a second more for each 8 MiB. Default 3 s.
    pub silence: Duration,
    /// Traffic class of urgent connections (on RoCE the DSCP is in its upper six bits). Default 0.
    pub urgent_traffic_class: u8,
    /// Traffic class of all others. Default 0.
    pub bulk_traffic_class: u8,
    /// Service level of urgent connections, 0..=15. Default 0.
    pub urgent_service_level: u8,
    /// Service level of all others, 0..=15. Default 0.
    pub bulk_service_level: u8,
    /// How long [`Endpoint::wait`](crate::Endpoint::wait) on an urgent connection looks for the completion of
    /// outstanding work before it sleeps. Default 50 us; 0: sleep at once.
    pub urgent_spin: Duration,
    /// Bytes that may be registered at once, over all regions; `None`: as many as the kernel allows.
    pub max_registered: Option<u64>,
    /// Whether memory is registered without pinning it. Default: where it cannot be pinned.
    pub on_demand: OnDemand,
    /// The connection that two queue pairs are introduced over, and that messages take.
    pub stream: TcpOptions,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            device: None,
            port: None,
            gid_index: None,
            pkey_index: 0,
            read_depth: 16,
            ack_timeout: 15,
            retries: 6,
            silence: Duration::from_secs(3),
            urgent_traffic_class: 0,
            bulk_traffic_class: 0,
            urgent_service_level: 0,
            bulk_service_level: 0,
            urgent_spin: Duration::from_micros(50),
            max_registered: None,
            on_demand: OnDemand::default(),
            stream: TcpOptions::default(),
        }
    }
}
