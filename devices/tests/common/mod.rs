//! Trees of `/sys` in a folder, and a kernel that acts on what is written there.
#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use vmove_devices::vf::{Functions, Setting};
use vmove_devices::{Identity, Mac, PciAddress, Sys};

pub const IGB: &str = include_str!("../trees/igb.tree");
pub const MADE_UP: &str = include_str!("../trees/made-up.tree");

pub fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Which driver a device gets when no other is named: the one that it had in the tree.
fn own_drivers(root: &Path) -> BTreeMap<String, String> {
    let devices = root.join("sys/bus/pci/devices");
    let names =
        std::fs::read_dir(&devices).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    names.filter_map(|name| Some((name.clone(), driver(root, &name)?))).collect()
}

pub fn driver(root: &Path, device: &str) -> Option<String> {
    let link = std::fs::read_link(root.join("sys/bus/pci/devices").join(device).join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// A panic in place of a kill: nothing of the program runs any more.
#[derive(Debug)]
pub struct Killed;

/// A kernel that does what is written to `driver_override`, `unbind` and `drivers_probe`.
#[derive(Clone)]
pub struct Kernel {
    root: PathBuf,
    own: Arc<BTreeMap<String, String>>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Writes and settings so far.
    acts: usize,
    /// The program is killed before this one.
    kill_at: Option<usize>,
    /// `vfio-pci` takes nothing.
    no_vfio: bool,
    functions: BTreeMap<(String, u32), Identity>,
    refuse: Option<Setting>,
    deaf: bool,
}

impl Kernel {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), own: Arc::new(own_drivers(root)), state: Arc::default() }
    }

    pub fn sys(&self) -> Sys {
        let kernel = self.clone();
        Sys::with_writer(&self.root, Arc::new(move |path: &Path, text: &str| kernel.write(path, text)))
    }

    pub fn kill_at(&self, act: Option<usize>) {
        let mut state = self.state.lock().unwrap();
        state.kill_at = act;
        state.acts = 0;
    }

    pub fn without_vfio(&self) {
        self.state.lock().unwrap().no_vfio = true;
    }

    /// From now on this is refused.
    pub fn refuse(&self, setting: Setting) {
        self.state.lock().unwrap().refuse = Some(setting);
    }

    /// From now on settings are taken, and nothing happens.
    pub fn deaf(&self) {
        self.state.lock().unwrap().deaf = true;
    }

    pub fn function(&self, netdev: &str, index: u32) -> Identity {
        self.state.lock().unwrap().functions.get(&(netdev.to_owned(), index)).copied().unwrap_or_default()
    }

    /// Counts an act of the program, or kills it before.
    fn act(&self) {
        let mut state = self.state.lock().unwrap();
        if state.kill_at == Some(state.acts) {
            drop(state);
            std::panic::panic_any(Killed);
        }
        state.acts += 1;
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.act();
        let name = path.file_name().unwrap().to_str().unwrap();
        let devices = self.root.join("sys/bus/pci/devices");
        match name {
            "driver_override" => {
                let named = if text.trim().is_empty() { "(null)" } else { text.trim() };
                std::fs::write(path, named)
            }
            "unbind" => std::fs::remove_file(devices.join(text).join("driver")),
            "drivers_probe" => {
                let dir = devices.join(text);
                let named = std::fs::read_to_string(dir.join("driver_override"))?;
                let driver = if named == "(null)" { self.own.get(text).cloned() } else { Some(named) };
                let refused = self.state.lock().unwrap().no_vfio && driver.as_deref() == Some("vfio-pci");
                match driver.filter(|_| !refused && !dir.join("driver").exists()) {
                    Some(driver) => {
                        std::fs::create_dir_all(self.root.join("sys/bus/pci/drivers").join(&driver))?;
                        symlink(self.root.join("sys/bus/pci/drivers").join(driver), dir.join("driver"))
                    }
                    None => Ok(()),
                }
            }
            _ => std::fs::write(path, text),
        }
    }
}

impl Functions for Kernel {
    fn read(&self, netdev: &str, index: u32) -> io::Result<Identity> {
        Ok(self.function(netdev, index))
    }

    fn set(&self, netdev: &str, index: u32, setting: Setting) -> io::Result<()> {
        self.act();
        let mut state = self.state.lock().unwrap();
        if state.refuse == Some(setting) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if state.deaf {
            return Ok(());
        }
        let function = state.functions.entry((netdev.to_owned(), index)).or_default();
        match setting {
            Setting::Mac(mac) => function.mac = Some(mac).filter(|mac| *mac != Mac([0; 6])),
            Setting::Vlan(vlan) => function.vlan = Some(vlan).filter(|vlan| *vlan != 0),
            Setting::Trust(trust) => function.trust = Some(trust).filter(|trust| *trust),
            Setting::NodeGuid(guid) => function.node_guid = Some(guid).filter(|guid| guid.0 != 0),
            Setting::PortGuid(guid) => function.port_guid = Some(guid).filter(|guid| guid.0 != 0),
            _ => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(())
    }
}
