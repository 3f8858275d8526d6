//! Addresses of a virtual function, set through its physical one.

use std::io;

use serde::{Deserialize, Serialize};

use crate::device::{Device, Sriov};
use crate::error::{Act, Cause, DeviceError};
use crate::list::DEVICES;
use crate::{Guid, Identity, Mac, PciAddress, Sys, infiniband};

/// One setting of a virtual function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// MAC address; all zeros: none, the guest's driver chooses one.
    Mac(Mac),
    /// VLAN; 0: none.
    Vlan(u16),
    /// Whether it may change its address and receive all traffic.
    Trust(bool),
    /// GUID of the InfiniBand node; 0: none.
    NodeGuid(Guid),
    /// GUID of the InfiniBand port; 0: none.
    PortGuid(Guid),
}

/// By what virtual functions are set. [`crate::rtnetlink::Rtnetlink`] asks the kernel.
pub trait Functions: Send {
    /// What function `index` of a network device has; what is not set is `None`.
    ///
    /// # Errors
    /// The kernel's answer; `NotFound` if there is no such function.
    fn read(&self, netdev: &str, index: u32) -> io::Result<Identity>;

    /// Sets one thing of function `index` of a network device.
    ///
    /// # Errors
    /// The kernel's answer, which is that of the physical function's driver.
    fn set(&self, netdev: &str, index: u32, setting: Setting) -> io::Result<()>;
}

/// What a function had before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerIdentity {
    /// What was set.
    pub identity: Identity,
    /// Which entry of the physical port's table of P_Keys it saw, as the kernel wrote it.
    pub pkey_index: Option<String>,
}

/// What a function has of all that is going to be set. Nothing is changed.
///
/// # Errors
/// [`Cause::NotVirtual`], [`Cause::NoNetdev`], [`Cause::PfDown`], [`Cause::NoPkey`], [`Cause::Refused`].
pub fn current(
    sys: &Sys,
    functions: &dyn Functions,
    device: &Device,
    wanted: &Identity,
) -> Result<FormerIdentity, DeviceError> {
    look(sys, functions, device, wanted).map_err(|cause| cause.of(device.address, Act::Identify))
}

fn look(
    sys: &Sys,
    functions: &dyn Functions,
    device: &Device,
    wanted: &Identity,
) -> Result<FormerIdentity, Cause> {
    if wanted.is_empty() {
        return Ok(FormerIdentity::default());
    }
    let (pf, index) = place(device)?;
    let mut former = FormerIdentity::default();
    if (Identity { pkey: None, ..*wanted }) != Identity::default() {
        let netdev = netdev(sys, pf)?;
        let of_ethernet = wanted.mac.is_some() || wanted.vlan.is_some() || wanted.trust.is_some();
        if of_ethernet && !is_up(sys, &netdev) {
            return Err(Cause::PfDown { netdev });
        }
        let what = "number among its functions".to_owned();
        former.identity =
            functions.read(&netdev, index).map_err(|source| Cause::Refused { netdev, what, source })?;
    }
    if wanted.pkey.is_some() {
        former.pkey_index = Some(infiniband::pkey_index(sys, pf, device.address)?);
    }
    Ok(former)
}

/// Gives a function its addresses, and looks whether it has them.
///
/// # Errors
/// As [`current`], and [`Cause::Refused`], [`Cause::NotKept`], [`Cause::NotInPartition`]. What was set before stays: [`restore`] takes it
/// back.
pub fn apply(
    sys: &Sys,
    functions: &dyn Functions,
    device: &Device,
    wanted: &Identity,
) -> Result<(), DeviceError> {
    let act = || -> Result<(), Cause> {
        look(sys, functions, device, wanted)?;
        let Ok((pf, index)) = place(device) else { return Ok(()) };
        let settings = settings(wanted);
        if !settings.is_empty() {
            let netdev = netdev(sys, pf)?;
            set_all(functions, &netdev, index, &settings)?;
            check(functions, &netdev, index, wanted)?;
        }
        wanted.pkey.map_or(Ok(()), |pkey| infiniband::set_pkey(sys, pf, device.address, pkey))
    };
    act().map_err(|cause| cause.of(device.address, Act::Identify))
}

/// Gives a function back what it had of all that was set.
///
/// # Errors
/// [`Cause::NoNetdev`], [`Cause::Refused`], [`Cause::File`].
pub fn restore(
    sys: &Sys,
    functions: &dyn Functions,
    device: &Device,
    given: &Identity,
    former: &FormerIdentity,
) -> Result<(), DeviceError> {
    let Ok((pf, index)) = place(device) else { return Ok(()) };
    let had = &former.identity;
    let before = Identity {
        mac: given.mac.map(|_| had.mac.unwrap_or(Mac([0; 6]))),
        vlan: given.vlan.map(|_| had.vlan.unwrap_or(0)),
        trust: given.trust.map(|_| had.trust.unwrap_or(false)),
        node_guid: given.node_guid.map(|_| had.node_guid.unwrap_or(Guid(0))),
        port_guid: given.port_guid.map(|_| had.port_guid.unwrap_or(Guid(0))),
        pkey: None,
    };
    let act = || -> Result<(), Cause> {
        let settings = settings(&before);
        if !settings.is_empty() {
            set_all(functions, &netdev(sys, pf)?, index, &settings)?;
        }
        former
            .pkey_index
            .as_ref()
            .map_or(Ok(()), |entry| infiniband::set_index(sys, pf, device.address, entry))
    };
    act().map_err(|cause| cause.of(device.address, Act::Return))
}

fn place(device: &Device) -> Result<(PciAddress, u32), Cause> {
    match device.sriov {
        Sriov::Virtual { pf, index } => Ok((pf, index)),
        _ => Err(Cause::NotVirtual),
    }
}

/// The network device by which a physical function is asked.
fn netdev(sys: &Sys, pf: PciAddress) -> Result<String, Cause> {
    sys.names(&format!("{DEVICES}/{pf}/net")).into_iter().next().ok_or(Cause::NoNetdev { pf })
}

/// `IFF_UP`.
pub(crate) fn is_up(sys: &Sys, netdev: &str) -> bool {
    sys.hex(&format!("sys/class/net/{netdev}/flags")).is_ok_and(|flags| flags & 1 == 1)
}

fn settings(of: &Identity) -> Vec<Setting> {
    let all = [
        // Trust first: without it some drivers refuse an address that the guest is to change.
        of.trust.map(Setting::Trust),
        of.mac.map(Setting::Mac),
        of.vlan.map(Setting::Vlan),
        of.node_guid.map(Setting::NodeGuid),
        of.port_guid.map(Setting::PortGuid),
    ];
    all.into_iter().flatten().collect()
}

fn set_all(functions: &dyn Functions, netdev: &str, index: u32, settings: &[Setting]) -> Result<(), Cause> {
    for setting in settings {
        functions.set(netdev, index, *setting).map_err(|source| Cause::Refused {
            netdev: netdev.to_owned(),
            what: setting.to_string(),
            source,
        })?;
    }
    Ok(())
}

/// Reads the settings back, because some drivers report success and change nothing. Some drivers accept GUIDs but do not report them.
fn check(functions: &dyn Functions, netdev: &str, index: u32, wanted: &Identity) -> Result<(), Cause> {
    let refused =
        |source| Cause::Refused { netdev: netdev.to_owned(), what: "settings read back".to_owned(), source };
    let found = functions.read(netdev, index).map_err(refused)?;
    let kept = |setting: Setting, found: String| {
        Err(Cause::NotKept { netdev: netdev.to_owned(), what: setting.to_string(), found })
    };
    match (wanted.mac, found.mac) {
        (Some(mac), other) if other != Some(mac) => {
            return kept(Setting::Mac(mac), other.map_or("none".to_owned(), |mac| mac.to_string()));
        }
        _ => {}
    }
    match (wanted.vlan, found.vlan.unwrap_or(0)) {
        (Some(vlan), other) if other != vlan => kept(Setting::Vlan(vlan), other.to_string()),
        _ => Ok(()),
    }
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mac(mac) => write!(f, "MAC address {mac}"),
            Self::Vlan(vlan) => write!(f, "VLAN {vlan}"),
            Self::Trust(trust) => write!(f, "trust {}", if *trust { "on" } else { "off" }),
            Self::NodeGuid(guid) => write!(f, "node GUID {guid}"),
            Self::PortGuid(guid) => write!(f, "port GUID {guid}"),
        }
    }
}
