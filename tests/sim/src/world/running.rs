//! A daemon that is up.

use std::sync::Arc;

use vmove_migrate::engine::Engine;
use vmove_node::reservations::Reservations;
use vmove_node::store::VmStore;

use crate::life::Life;
use crate::world::cards::SimDevices;

/// A daemon that is reached by others.
#[derive(Debug, Clone)]
pub struct Daemon {
    pub life: Arc<Life>,
    pub engine: Arc<Engine>,
    pub vms: Arc<VmStore>,
    pub reservations: Arc<Reservations>,
    pub devices: SimDevices,
}
