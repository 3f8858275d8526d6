//! Devices of the host on a command line (`-device vfio-pci`), and the ports from which they can be unplugged.
//!
//! The command line that is kept of a guest has the ports, but none of these devices: so it serves at every node, where the device is another
//! one, and wherever the guest comes to it starts without. Where the guest starts, [`CommandLine::plug`] adds them, after all else: what has no
//! place of its own on the command line gets the same one with and without them.

use std::collections::BTreeMap;

use vmove_types::device::{DeviceRequest, Identity, PciAddress, VmDevice, is_role};

use super::{CommandLine, CommandLineError, Item, Obstacle, options};

/// QEMU's device that is one of the host.
const DRIVER: &str = "vfio-pci";
/// Ports that take one device, and bridges that take several, from which devices can be unplugged.
const PORTS: &[&str] = &["pcie-root-port", "ioh3420", "xio3130-downstream", "pci-bridge"];
/// Of ports that vmove adds. Chassis and slot of a port must be its own; these leave the small numbers to the operator.
const FIRST_CHASSIS: usize = 200;
/// Bus of a `pc` machine, on which every slot can be unplugged.
const PC_BUS: &str = "pci.0";

const ON_ROOT: &str = "a device there cannot be unplugged, and so this guest could never be moved";
const PORT: &str = "name no bus (vmove gives it a port), or give -device pcie-root-port,id=ID,chassis=N and bus=ID, or use --device";

/// A device of the host, as a command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    address: PciAddress,
    id: Option<String>,
    bus: Option<String>,
    properties: BTreeMap<String, String>,
    /// As written, for messages.
    written: Item,
}

/// How the machine of a command line takes devices while it runs.
enum Slots {
    /// By ports of their own.
    Ports,
    /// Any slot of its one bus.
    Bus,
    /// Not at all.
    None,
}

impl CommandLine {
    /// Whether devices of the host are named.
    #[must_use]
    pub fn has_host_devices(&self) -> bool {
        self.items.iter().any(is_host_device)
    }

    /// Takes the devices of the host out of the command line.
    ///
    /// # Errors
    /// [`CommandLineError::NotMovable`] with those that could never be unplugged, [`CommandLineError::Unreadable`].
    pub fn take_host_devices(&mut self) -> Result<Vec<HostDevice>, CommandLineError> {
        let (found, kept) =
            std::mem::take(&mut self.items).into_iter().partition::<Vec<_>, _>(is_host_device);
        self.items = kept;
        read_all(found)
    }

    /// Gives each device its role, QEMU's id and a port, and adds the ports that are lacking. `own` are those that the command line named,
    /// as [`CommandLine::take_host_devices`] found them; `asked` those that were asked for beside it.
    ///
    /// # Errors
    /// [`CommandLineError::NotMovable`] with all that cannot be unplugged where they are, [`CommandLineError::Unreadable`] if a role or a
    /// device is there twice.
    pub fn seat(
        &mut self,
        own: Vec<HostDevice>,
        asked: &[DeviceRequest],
    ) -> Result<Vec<VmDevice>, CommandLineError> {
        self.check_places(&own)?;
        let mut roles: Vec<String> = asked.iter().map(|request| request.role.clone()).collect();
        let mut devices: Vec<VmDevice> = asked.iter().map(|request| seated(request.clone())).collect();
        for device in own {
            let role = role_of(device.id.as_deref(), &roles);
            roles.push(role.clone());
            devices.push(VmDevice {
                id: device.id.unwrap_or_else(|| VmDevice::id_of(&role)),
                bus: device.bus.unwrap_or_default(),
                properties: device.properties,
                request: DeviceRequest { role, address: device.address, identity: Identity::default() },
            });
        }
        all_different(&devices)?;
        self.add_ports(&mut devices)?;
        Ok(devices)
    }

    /// What a QEMU that runs already has: all of them must have an id and a place that does not depend on each other.
    ///
    /// # Errors
    /// As [`CommandLine::seat`].
    pub fn seated(&self, own: Vec<HostDevice>) -> Result<Vec<VmDevice>, CommandLineError> {
        let lacking = |device: &HostDevice| {
            let fixed = device.properties.contains_key("addr");
            let reason = match (&device.id, self.slots(), &device.bus) {
                (None, ..) => "it has no id, by which it could be unplugged",
                (_, Slots::Bus, _) if !fixed => {
                    "without addr= other devices would move to its place at the destination"
                }
                (_, Slots::Bus, _) | (_, _, Some(_)) => return None,
                _ => ON_ROOT,
            };
            Some(Obstacle::of(&device.written, reason, "start the guest by `vmove run --device`"))
        };
        let obstacles: Vec<Obstacle> = own.iter().filter_map(lacking).collect();
        if !obstacles.is_empty() {
            return Err(CommandLineError::NotMovable(obstacles));
        }
        // Nothing is added to a QEMU that runs.
        self.clone().seat(own, &[])
    }

    /// Adds the devices to the command line of a QEMU that is to be started with them.
    pub fn plug(&mut self, devices: &[VmDevice]) {
        for device in devices {
            let mut words = vec![
                DRIVER.to_owned(),
                format!("host={}", device.request.address),
                format!("id={}", options::escape(&device.id)),
                format!("bus={}", options::escape(&device.bus)),
            ];
            let further = device.properties.iter();
            words.extend(further.map(|(key, value)| format!("{key}={}", options::escape(value))));
            self.items.push(Item::new("-device", words.join(",")));
        }
    }

    fn slots(&self) -> Slots {
        let program = std::path::Path::new(&self.program).file_name().unwrap_or_default().to_string_lossy();
        let arm = program.contains("aarch64") || program.contains("riscv64");
        match self.machine_option("type") {
            Some(kind) if kind.contains("q35") || kind == "virt" || kind.starts_with("virt-") => Slots::Ports,
            Some(kind) if kind.starts_with("pc") => Slots::Bus,
            // QEMU's own choice for PCs.
            None if !arm => Slots::Bus,
            _ => Slots::None,
        }
    }

    /// Refuses devices that sit where they cannot be unplugged.
    fn check_places(&self, devices: &[HostDevice]) -> Result<(), CommandLineError> {
        let ports = self.ports()?;
        let mut taken: Vec<&str> = Vec::new();
        let mut obstacles = Vec::new();
        for device in devices {
            let reason = match (device.bus.as_deref(), self.slots()) {
                (None, Slots::Ports) if device.properties.contains_key("addr") => Some(ON_ROOT),
                (None, Slots::Ports | Slots::Bus) | (Some(PC_BUS), Slots::Bus) => None,
                (Some(bus), _) => match ports.get(bus) {
                    Some(_) if taken.contains(&bus) => {
                        Some("another device is on that port: QEMU can unplug only both together")
                    }
                    Some(true) => None,
                    Some(false) => Some("hot plug is switched off for that port"),
                    None => Some(ON_ROOT),
                },
                (None, Slots::None) => Some("its machine type has no port from which it can be unplugged"),
            };
            taken.extend(device.bus.as_deref().filter(|bus| ports.contains_key(*bus)));
            obstacles.extend(reason.map(|reason| Obstacle::of(&device.written, reason, PORT)));
        }
        if obstacles.is_empty() { Ok(()) } else { Err(CommandLineError::NotMovable(obstacles)) }
    }

    /// The ports of the command line, and whether devices can be unplugged from each.
    fn ports(&self) -> Result<BTreeMap<String, bool>, CommandLineError> {
        let mut found = BTreeMap::new();
        for item in self.named("device") {
            let options = item.options()?;
            let is_port = options.get("driver", true).is_some_and(|driver| PORTS.contains(&driver.as_str()));
            if let Some(id) = options.get("id", false).filter(|_| is_port) {
                found.insert(id, options.flag("hotplug") != Some(false));
            }
        }
        Ok(found)
    }

    fn add_ports(&mut self, devices: &mut [VmDevice]) -> Result<(), CommandLineError> {
        let known = self.ports()?;
        let mut number = 0;
        for device in devices.iter_mut().filter(|device| device.bus.is_empty()) {
            match self.slots() {
                Slots::Bus => PC_BUS.clone_into(&mut device.bus),
                Slots::Ports => {
                    let id = |number| format!("vmove-port{number}");
                    while known.contains_key(&id(number)) {
                        number += 1;
                    }
                    device.bus = id(number);
                    let chassis = FIRST_CHASSIS + number;
                    let port = format!("pcie-root-port,id={},bus=pcie.0,chassis={chassis}", device.bus);
                    self.items.push(Item::new("-device", port));
                    number += 1;
                }
                Slots::None => {
                    return Err(CommandLineError::NotMovable(vec![Obstacle {
                        option: format!("--device {}", device.request),
                        reason: "its machine type has no port from which a device can be unplugged",
                        remedy: "use -machine q35, pc or virt",
                    }]));
                }
            }
        }
        Ok(())
    }
}

fn seated(request: DeviceRequest) -> VmDevice {
    VmDevice { id: VmDevice::id_of(&request.role), bus: String::new(), properties: BTreeMap::new(), request }
}

fn driver(item: &Item) -> Option<String> {
    (item.name() == "device").then(|| item.options().ok()?.get("driver", true)).flatten()
}

fn is_host_device(item: &Item) -> bool {
    driver(item).as_deref() == Some(DRIVER)
}

/// Whether it gives the guest a device of the host, also by a variant of the driver from which it could not be unplugged.
pub(super) fn passes_through(item: &Item) -> bool {
    driver(item).is_some_and(|driver| driver.starts_with(DRIVER))
}

/// Where these devices of the host are.
pub(super) fn addresses(items: Vec<Item>) -> Result<Vec<PciAddress>, CommandLineError> {
    Ok(read_all(items)?.into_iter().map(|device| device.address).collect())
}

fn read_all(items: Vec<Item>) -> Result<Vec<HostDevice>, CommandLineError> {
    let mediated: Vec<Obstacle> = items.iter().filter_map(mediated).collect();
    if !mediated.is_empty() {
        return Err(CommandLineError::NotMovable(mediated));
    }
    items.into_iter().map(read).collect()
}

/// A part of a device that a vendor's driver makes: QEMU names it by a path.
fn mediated(item: &Item) -> Option<Obstacle> {
    let path = item.options().ok()?.get("sysfsdev", false)?;
    let reason = "mediated devices and vendors' vGPUs cannot be unplugged from a running guest, and so it could never be moved";
    let is_pci = path.contains("/pci/") && path.rsplit('/').next()?.parse::<PciAddress>().is_ok();
    (!is_pci)
        .then(|| Obstacle::of(item, reason, "give the guest a virtual function or a whole device (--device)"))
}

fn read(item: Item) -> Result<HostDevice, CommandLineError> {
    let options = item.options()?;
    let named = options.get("host", false);
    let path = options.get("sysfsdev", false);
    let name = named.or_else(|| path?.rsplit('/').next().map(str::to_owned)).unwrap_or_default();
    let address =
        name.parse().map_err(|_| item.unreadable("expected host= with a PCI address like 0000:17:00.2"))?;
    const OWN: [&str; 6] = ["", "driver", "host", "sysfsdev", "id", "bus"];
    let further = options.all().into_iter().filter(|(key, _)| !OWN.contains(&key.as_str()));
    Ok(HostDevice {
        address,
        id: options.get("id", false),
        bus: options.get("bus", false),
        properties: further.collect(),
        written: item,
    })
}

/// The role of a device that the command line names: its id, if that can be one, else a new name.
fn role_of(id: Option<&str>, taken: &[String]) -> String {
    let free = |role: &String| !taken.contains(role);
    let own =
        id.map(|id| id.strip_prefix("vmove-").unwrap_or(id)).filter(|id| is_role(id)).map(str::to_owned);
    own.filter(free).unwrap_or_else(|| {
        let mut names = (0..).map(|number: usize| format!("dev{number}"));
        names.find(free).unwrap_or_default()
    })
}

fn all_different(devices: &[VmDevice]) -> Result<(), CommandLineError> {
    for (at, device) in devices.iter().enumerate() {
        let expected = devices[..at].iter().find_map(|other| {
            if other.request.role == device.request.role {
                Some("each role may be there once")
            } else if other.request.address == device.request.address {
                Some("each device may be there once")
            } else if other.id == device.id {
                Some("each id may be there once")
            } else {
                None
            }
        });
        if let Some(expected) = expected {
            let (option, value) = ("--device".to_owned(), device.request.to_string());
            return Err(CommandLineError::Unreadable { option, value, expected });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        CommandLine::parse(text.split_whitespace().map(Into::into).collect()).unwrap()
    }

    fn words(line: &CommandLine) -> String {
        line.to_argv().iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    fn seat(line: &mut CommandLine, asked: &[&str]) -> Result<Vec<VmDevice>, CommandLineError> {
        let own = line.take_host_devices()?;
        let asked: Vec<DeviceRequest> = asked.iter().map(|text| text.parse().unwrap()).collect();
        line.seat(own, &asked)
    }

    #[test]
    fn each_device_gets_a_port_and_the_kept_line_has_only_the_ports() {
        let mut kept = line("qemu -M q35 -device vfio-pci,host=17:00.2,rombar=0 -device e1000e");
        let devices = seat(&mut kept, &["net=0000:3b:02.1,mac=52:54:00:12:34:56"]).unwrap();
        assert_eq!(
            words(&kept),
            "qemu -M q35 -device e1000e -device pcie-root-port,id=vmove-port0,bus=pcie.0,chassis=200 \
             -device pcie-root-port,id=vmove-port1,bus=pcie.0,chassis=201"
        );
        let mut started = kept.clone();
        started.plug(&devices);
        let added = words(&started).strip_prefix(&words(&kept)).unwrap().to_owned();
        assert_eq!(
            added,
            " -device vfio-pci,host=0000:3b:02.1,id=vmove-net,bus=vmove-port0 \
             -device vfio-pci,host=0000:17:00.2,id=vmove-dev0,bus=vmove-port1,rombar=0"
        );
        assert_eq!(devices[1].request.role, "dev0");
        // What was started is read into the same again, as if it ran already.
        let mut foreign = started;
        let own = foreign.take_host_devices().unwrap();
        let read = foreign.seated(own).unwrap();
        let known = |devices: &[VmDevice]| -> Vec<(String, String)> {
            devices.iter().map(|device| (device.request.role.clone(), device.bus.clone())).collect()
        };
        assert_eq!((words(&foreign), known(&read)), (words(&kept), known(&devices)));
    }

    #[test]
    fn a_port_of_the_operators_and_a_pc_need_none() {
        let mut q35 = line(
            "qemu -machine type=q35 -device pcie-root-port,id=rp1,chassis=1 \
             -device {\"driver\":\"vfio-pci\",\"host\":\"0000:17:00.2\",\"id\":\"hostdev0\",\"bus\":\"rp1\"}",
        );
        let devices = seat(&mut q35, &[]).unwrap();
        assert_eq!(words(&q35), "qemu -machine type=q35 -device pcie-root-port,id=rp1,chassis=1");
        let [VmDevice { request, id, bus, .. }] = &devices[..] else { panic!("{devices:?}") };
        assert_eq!((request.role.as_str(), id.as_str(), bus.as_str()), ("hostdev0", "hostdev0", "rp1"));
        let mut pc = line("qemu -device vfio-pci,host=17:00.2,id=9-odd");
        let devices = seat(&mut pc, &[]).unwrap();
        assert_eq!((words(&pc).as_str(), devices[0].bus.as_str()), ("qemu", "pci.0"));
        assert_eq!((devices[0].request.role.as_str(), devices[0].id.as_str()), ("dev0", "9-odd"));
    }

    #[test]
    fn what_could_never_be_unplugged_is_refused_with_the_way_out() {
        let port = "qemu -M q35 -device pcie-root-port,id=rp,chassis=1";
        for (text, asked, reason) in [
            ("qemu -M q35 -device vfio-pci,host=17:00.2,bus=pcie.0", None, "cannot be unplugged"),
            ("qemu -M q35 -device vfio-pci,host=17:00.2,addr=5", None, "cannot be unplugged"),
            (&format!("{port},hotplug=off -device vfio-pci,host=17:00.2,bus=rp"), None, "switched off"),
            (
                &format!(
                    "{port} -device vfio-pci,host=17:00.2,bus=rp -device vfio-pci,host=17:00.3,bus=rp,addr=0.1"
                ),
                None,
                "both together",
            ),
            ("qemu -M microvm", Some("a=17:00.2"), "no port"),
            ("qemu -device vfio-pci,sysfsdev=/sys/bus/mdev/devices/c8b3", None, "vGPU"),
            ("qemu -device vfio-pci,host=nowhere", None, "PCI address"),
            ("qemu -device vfio-pci,host=17:00.2,id=a", Some("a=17:00.2"), "each device"),
        ] {
            let asked: Vec<&str> = asked.into_iter().collect();
            let error = seat(&mut line(text), &asked).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_running_guest_keeps_only_devices_that_can_leave() {
        for (text, reason) in [
            ("qemu -M q35 -device vfio-pci,host=17:00.2,id=a", "cannot be unplugged"),
            ("qemu -M pc -device vfio-pci,host=17:00.2,id=a", "addr="),
            ("qemu -M pc -device vfio-pci,host=17:00.2,addr=5", "no id"),
        ] {
            let mut line = line(text);
            let own = line.take_host_devices().unwrap();
            let error = line.seated(own).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
        let mut line = line("qemu -M pc -device vfio-pci,host=17:00.2,id=a,addr=5");
        let own = line.take_host_devices().unwrap();
        assert_eq!(line.seated(own).unwrap()[0].properties["addr"], "5");
    }
}
