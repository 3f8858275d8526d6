//! What a fleet is made of: nodes, their devices, memory and cores, and who has taken what.
//!
//! Units: memory is in mebibytes, link rates in gigabits per second, cores are hardware threads as the kernel counts them.

mod address;
mod device;
mod fleet;
mod node;
mod occupancy;

pub use crate::ids::{
    ClusterName, IdError, MemoryMib, NodeName, NumaId, PciAddress, PciId, PciRoot, SocketId, SwitchName,
    VmName,
};
pub use address::DeviceAddress;
pub use device::{Device, DeviceKind, LinkLayer, Port};
pub use fleet::{Fleet, FleetError, NodeIndex};
pub use node::{Cpu, HugePages, Node, NodeState, NumaNode};
pub(crate) use occupancy::overlaps_taken;
pub use occupancy::{Assignment, Granted, NumaShare, Occupancy, OccupancyError};
