//! Partition keys of InfiniBand functions.
//!
//! With `mlx4` the host maps entries of its port's table into that of a virtual function. With `mlx5` the subnet manager decides, by the
//! function's port GUID: there is nothing to set on the host.

use crate::list::{DEVICES, driver};
use crate::{Cause, PciAddress, Sys};

/// Where the map of a function is: the folder of its first port, and the RDMA device.
fn map_of(sys: &Sys, pf: PciAddress, function: PciAddress) -> Result<(String, String, String), Cause> {
    let none = || Cause::NoPkey { driver: driver(sys, pf).unwrap_or_else(|| "(none)".to_owned()) };
    let rdma = sys.names(&format!("{DEVICES}/{pf}/infiniband")).into_iter().next().ok_or_else(none)?;
    let ports = format!("sys/class/infiniband/{rdma}/iov/{function}/ports");
    let port = sys.names(&ports).into_iter().next().ok_or_else(none)?;
    Ok((format!("{ports}/{port}/pkey_idx/0"), rdma, port))
}

/// Which entry of the physical port's table the function sees as its first.
pub(crate) fn pkey_index(sys: &Sys, pf: PciAddress, function: PciAddress) -> Result<String, Cause> {
    let (file, ..) = map_of(sys, pf, function)?;
    let path = sys.path(&file);
    let failed = |source| Cause::File { path: path.clone(), source };
    std::fs::read_to_string(&path).map(|text| text.trim().to_owned()).map_err(failed)
}

/// Shows the function this partition.
pub(crate) fn set_pkey(sys: &Sys, pf: PciAddress, function: PciAddress, pkey: u16) -> Result<(), Cause> {
    let (file, rdma, port) = map_of(sys, pf, function)?;
    let table = format!("sys/class/infiniband/{rdma}/ports/{port}/pkeys");
    let is_it = |entry: &String| {
        let found = sys.hex(&format!("{table}/{entry}")).unwrap_or(0);
        // Full membership of the port serves a function that is to be a limited member.
        found == u32::from(pkey) || found == u32::from(pkey | 0x8000)
    };
    let entry = sys.names(&table).into_iter().find(is_it);
    let entry = entry.ok_or(Cause::NotInPartition { rdma, port, pkey })?;
    sys.write(&file, &entry)
}

/// Shows the function an entry of the table, as [`pkey_index`] told it.
pub(crate) fn set_index(sys: &Sys, pf: PciAddress, function: PciAddress, entry: &str) -> Result<(), Cause> {
    sys.write(&map_of(sys, pf, function)?.0, entry)
}
