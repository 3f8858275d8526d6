//! Which options are taken, and what of their arguments is not.

use crate::cmdline::options::{Options, Pairs};
use crate::cmdline::{CommandLineError, Item};

use super::Broken;
use super::places::{
    are_credentials, in_vm_dir, is_image, is_of_ceph, is_script_of_node, may_listen, may_log,
};

const RUNS: &str = "it runs a program on this node";
const FILE: &str = "it uses a file or folder of this node that is not in the VM's own folder ({vmdir})";
const SOCKET: &str = "it connects to a socket of this node, or listens where this node has something else";
const DEVICE: &str = "it takes a device of this node";
const MONITOR: &str = "it lets others on the network control QEMU";
const SHARES: &str = "it gives the guest files of this node";
const CHANGES: &str = "it changes other options after they were checked";
const UNKNOWN: &str = "it is not among the options that are known to be harmless";
const AS_ROOT: &str =
    "it has QEMU start as root, which opens all its files before it changes to another user";
const UNFILTERED: &str = "it takes away QEMU's filter of system calls";
const REMOTE: &str = "it reaches its image in a way that is not known to be harmless";

/// Options that reach nothing of the host, whatever their argument is; or that are dropped, replaced or refused elsewhere.
const HARMLESS: &[&str] = &[
    "S",
    "accel",
    "action",
    "add-fd",
    "alt-grab",
    "append",
    "async-teardown",
    "chroot",
    "compat",
    "cpu",
    "ctrl-grab",
    "curses",
    "d",
    "daemonize",
    "dfilter",
    "echr",
    "enable-sync-profile",
    "enable-kvm",
    "full-screen",
    "g",
    "icount",
    "iscsi",
    "k",
    "loadvm",
    "m",
    "mem-path",
    "mem-prealloc",
    "mon",
    "msg",
    "name",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "numa",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "overcommit",
    "portrait",
    "preconfig",
    "prom-env",
    "rotate",
    "rtc",
    "sdl",
    "seed",
    "singlestep",
    "smp",
    "snapshot",
    "tb-size",
    "usb",
    "uuid",
    "vga",
    "watchdog",
    "watchdog-action",
    "win2k-hack",
];

/// Files that make up the guest: firmware and kernel. Read only, as are those of `fw_cfg`, `secret` and the like; whoever may name any file
/// as a disk gains nothing by them.
const GUEST_FILES: &[&str] = &["L", "bios", "dtb", "initrd", "kernel", "option-rom", "shim"];

/// Images by their path alone; the empty name is a bare operand.
const IMAGES: &[&str] = &["", "cdrom", "fda", "fdb", "hda", "hdb", "hdc", "hdd", "mtdblock", "pflash", "sd"];

/// Formats and drivers of images: files and block devices of this node, and servers.
const IMAGE_DRIVERS: &[&str] = &[
    "bochs",
    "cloop",
    "copy-on-read",
    "dmg",
    "file",
    "ftp",
    "ftps",
    "gluster",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "iscsi",
    "luks",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "parallels",
    "preallocate",
    "qcow",
    "qcow2",
    "qed",
    "raw",
    "rbd",
    "throttle",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
];

const NETDEVS: &[&str] =
    &["bridge", "dgram", "hubport", "l2tpv3", "nic", "none", "socket", "stream", "tap", "user", "vde"];

const CHARDEVS: &[&str] = &[
    "braille",
    "dbus",
    "file",
    "hub",
    "memory",
    "msmouse",
    "mux",
    "null",
    "parallel",
    "parport",
    "pipe",
    "pty",
    "qemu-vdagent",
    "ringbuf",
    "serial",
    "socket",
    "spiceport",
    "spicevmc",
    "stdio",
    "testdev",
    "tty",
    "udp",
    "vc",
    "wctablet",
];

/// Objects whose type begins so.
const OBJECTS: &[&str] = &[
    "acpi-generic-",
    "authz-",
    "can-bus",
    "colo-compare",
    "cryptodev-backend-builtin",
    "filter-buffer",
    "filter-mirror",
    "filter-redirector",
    "filter-replay",
    "filter-rewriter",
    "iothread",
    "main-loop",
    "memory-backend-",
    "rng-",
    "secret",
    "sev-",
    "tdx-",
    "thread-context",
    "throttle-group",
    "tls-cipher-suites",
    "tls-creds-",
];

/// Devices that are a piece of this node.
const DEVICES: &[(&str, &str)] = &[
    ("usb-host", DEVICE),
    ("u2f-", DEVICE),
    ("virtio-input-host", DEVICE),
    ("scsi-generic", DEVICE),
    ("vhost-scsi", DEVICE),
    ("ccid-card-emulated", FILE),
    ("usb-mtp", SHARES),
    ("virtio-9p", SHARES),
];

/// What a value may be.
#[derive(Clone, Copy)]
enum May {
    /// Nothing: the key is refused.
    NotBe,
    /// A switch that is off.
    BeOff,
    /// `no`, or a script of this node.
    BeScript,
    /// A path in the VM's folder.
    BeInVmDir,
    /// The same, or a log of this node.
    BeLog,
    /// A path in the VM's folder, or of credentials for QEMU.
    BeCredentials,
    /// A file of Ceph.
    BeOfCeph,
    /// A path in the VM's folder, or a device of random numbers.
    BeRandom,
}

use May::{BeCredentials, BeInVmDir, BeLog, BeOfCeph, BeOff, BeRandom, BeScript, NotBe};

/// Keys of options that are looked at, with what they may be.
const KEYS: &[(&str, &str, May, &str)] = &[
    ("netdev", "script", BeScript, RUNS),
    ("netdev", "downscript", BeScript, RUNS),
    ("netdev", "helper", BeScript, RUNS),
    ("netdev", "guestfwd", NotBe, RUNS),
    ("netdev", "smb", NotBe, SHARES),
    ("netdev", "sock", NotBe, SOCKET),
    ("netdev", "abstract", BeOff, SOCKET),
    ("chardev", "abstract", BeOff, SOCKET),
    ("chardev", "input-path", BeInVmDir, FILE),
    ("chardev", "logfile", BeLog, FILE),
    ("drive", "logfile", BeLog, FILE),
    ("drive", "conf", BeOfCeph, FILE),
    ("drive", "keyvalue-pairs", NotBe, FILE),
    ("object", "filename", BeRandom, FILE),
    ("object", "dir", BeCredentials, FILE),
    ("object", "path", NotBe, SOCKET),
    ("machine", "dumpdtb", BeInVmDir, FILE),
    ("trace", "file", BeLog, FILE),
    ("audiodev", "path", BeLog, FILE),
    ("tpmdev", "path", NotBe, DEVICE),
    ("tpmdev", "cancel-path", NotBe, DEVICE),
    ("spice", "x509-dir", BeCredentials, FILE),
    ("spice", "x509-key-file", BeCredentials, FILE),
    ("spice", "x509-cert-file", BeCredentials, FILE),
    ("spice", "x509-cacert-file", BeCredentials, FILE),
    ("spice", "x509-dh-key-file", BeCredentials, FILE),
    ("device", "rootdir", NotBe, SHARES),
    ("device", "hidraw", NotBe, DEVICE),
    ("device", "evdev", NotBe, DEVICE),
    ("device", "hostbus", NotBe, DEVICE),
    ("device", "hostaddr", NotBe, DEVICE),
    ("device", "hostdevice", NotBe, DEVICE),
    ("device", "db", NotBe, FILE),
];

/// The rules that an option breaks. `monitors`: character devices that are monitors.
pub(super) fn broken(item: &Item, monitors: &[String]) -> Result<Vec<Broken>, CommandLineError> {
    let name = item.name();
    let whole = |why| Ok(vec![(name.to_owned(), why)]);
    match name {
        name if HARMLESS.contains(&name) || GUEST_FILES.contains(&name) => Ok(Vec::new()),
        name if IMAGES.contains(&name) => {
            let remote = !item.value().is_empty() && !is_image(item.text()?);
            Ok(rule_if(remote, "drive.remote", REMOTE))
        }
        "drive" | "blockdev" => image_rules(item),
        "serial" | "parallel" | "debugcon" | "monitor" | "qmp" | "qmp-pretty" => short_chardev(item),
        "netdev" | "nic" | "net" => netdev(item),
        "chardev" => chardev(item, monitors),
        "object" => {
            let kind = kind_of(item, "qom-type")?.unwrap_or_default();
            let known = OBJECTS.iter().any(|start| kind.starts_with(start));
            let rule = format!("object.{kind}");
            Ok([rule_if(!known, &rule, UNKNOWN), keys(item, "object")?].concat())
        }
        "device" => {
            let kind = kind_of(item, "driver")?.unwrap_or_default();
            let found = DEVICES.iter().find(|(start, _)| kind.starts_with(start));
            let rule = format!("device.{kind}");
            Ok([found.map(|(_, why)| (rule, *why)).into_iter().collect(), keys(item, "device")?].concat())
        }
        "vnc" | "spice" | "display" => display(item, name),
        "audio" => keys(item, "audiodev"),
        "acpitable" | "boot" | "fw_cfg" | "smbios" => Ok(Vec::new()),
        "audiodev" | "machine" | "tpmdev" | "trace" => keys(item, name),
        "global" => global(item),
        "usbdevice" => Ok(rule_if(item.text()?.contains(':'), "usbdevice", DEVICE)),
        // An absolute one is left out at the destination, as is a source of the guest's state.
        "pidfile" => Ok(rule_if(!item.text()?.starts_with('/') && !in_vm_dir(item.text()?), name, FILE)),
        "D" => Ok(rule_if(!may_log(item.text()?), name, FILE)),
        "incoming" => Ok(rule_if(item.text()?.contains("exec"), name, RUNS)),
        "runas" => Ok(rule_if(true, "user", AS_ROOT)),
        "run-with" => Ok(rule_if(item.options()?.get("user", false).is_some(), "user", AS_ROOT)),
        "sandbox" => {
            let on = item
                .options()?
                .get("enable", true)
                .is_some_and(|on| matches!(on.as_str(), "on" | "yes" | "true" | "y"));
            Ok(rule_if(!on, name, UNFILTERED))
        }
        "set" | "readconfig" => whole(CHANGES),
        "plugin" => whole(RUNS),
        "virtfs" | "virtfs_synth" | "fsdev" | "semihosting" | "semihosting-config" => whole(SHARES),
        "writeconfig" | "dump-vmstate" | "jitdump" | "perfmap" => whole(FILE),
        "gdb" | "s" => whole(MONITOR),
        _ => whole(UNKNOWN),
    }
}

fn rule_if(broken: bool, rule: &str, why: &'static str) -> Vec<Broken> {
    broken.then(|| (rule.to_owned(), why)).into_iter().collect()
}

/// The type that an option says first, or by its key; the last word counts.
fn kind_of(item: &Item, key: &str) -> Result<Option<String>, CommandLineError> {
    Ok(item.options()?.get(key, true))
}

/// Looks at every key that is given, also those that a later one overrides.
fn keys(item: &Item, group: &str) -> Result<Vec<Broken>, CommandLineError> {
    let mut found = Vec::new();
    for (key, value) in item.options()?.all() {
        let rules = KEYS.iter().filter(|(of, name, ..)| *of == group && is_key(&key, name));
        let broken = rules.filter(|(_, _, may, _)| !may.be(&value));
        found.extend(broken.map(|(_, name, _, why)| (format!("{group}.{name}"), *why)));
    }
    Ok(found)
}

/// `driver.property=value`, or the three by their names.
fn global(item: &Item) -> Result<Vec<Broken>, CommandLineError> {
    let options = item.options()?;
    let get = |key| options.get(key, false).unwrap_or_default();
    let named = May::of_device(&get("property"), &get("value"));
    Ok([named.into_iter().collect(), keys(item, "device")?].concat())
}

/// Whether a key is this one, also inside others (`addr.path`), or something inside it (`guestfwd.0`).
fn is_key(key: &str, name: &str) -> bool {
    let inside = |rest: Option<&str>, dot: fn(&str) -> bool| rest.is_some_and(dot);
    key == name
        || inside(key.strip_suffix(name), |before| before.ends_with('.'))
        || inside(key.strip_prefix(name), |after| after.starts_with('.'))
}

impl May {
    /// The rule that a property of a device breaks.
    fn of_device(property: &str, value: &str) -> Option<Broken> {
        let rules = KEYS.iter().filter(|(of, name, ..)| *of == "device" && *name == property);
        let mut broken = rules.filter(|(_, _, may, _)| !may.be(value));
        broken.next().map(|(_, name, _, why)| (format!("device.{name}"), *why))
    }

    fn be(self, value: &str) -> bool {
        match self {
            Self::NotBe => false,
            Self::BeOff => matches!(value, "off" | "no" | "false" | "n"),
            Self::BeScript => is_script_of_node(value),
            Self::BeInVmDir => in_vm_dir(value),
            Self::BeLog => may_log(value),
            Self::BeCredentials => are_credentials(value),
            Self::BeOfCeph => is_of_ceph(value),
            Self::BeRandom => {
                matches!(value, "/dev/urandom" | "/dev/random" | "/dev/hwrng") || in_vm_dir(value)
            }
        }
    }
}

fn image_rules(item: &Item) -> Result<Vec<Broken>, CommandLineError> {
    let mut found = Vec::new();
    let name = item.name();
    for (key, value) in item.options()?.all() {
        let last = key.rsplit('.').next().unwrap_or_default();
        let is_driver = matches!(last, "driver" | "format") || (key.is_empty() && name == "blockdev");
        let is_file = matches!(last, "file" | "filename" | "backing") || (key.is_empty() && name == "drive");
        let unknown = is_driver && !IMAGE_DRIVERS.contains(&value.as_str());
        let remote = is_file && !value.is_empty() && !is_image(&value);
        found.extend(rule_if(unknown, "drive.driver", REMOTE));
        found.extend(rule_if(remote, "drive.remote", REMOTE));
    }
    found.extend(keys(item, "drive")?);
    Ok(found)
}

/// A socket in the VM's folder is one of QEMU's own, and may be a monitor: a guest must not be connected to it.
fn netdev(item: &Item) -> Result<Vec<Broken>, CommandLineError> {
    let (kind, options) = (kind_of(item, "type")?.unwrap_or_default(), item.options()?);
    let unknown = !kind.is_empty() && !NETDEVS.contains(&kind.as_str());
    let own = kind == "dgram" || options.flag("server") == Some(true);
    let outside = options.all().iter().any(|(key, value)| is_key(key, "path") && !(own && in_vm_dir(value)));
    let found = [rule_if(unknown, "netdev.type", UNKNOWN), rule_if(outside, "netdev.path", SOCKET)];
    Ok([found.concat(), keys(item, "netdev")?].concat())
}

fn chardev(item: &Item, monitors: &[String]) -> Result<Vec<Broken>, CommandLineError> {
    let options = item.options()?;
    let backend = options.get("backend", true).unwrap_or_default();
    let is_monitor = options.get("id", false).is_some_and(|id| monitors.contains(&id));
    let all = options.all();
    let network = matches!(backend.as_str(), "udp" | "vc" | "spiceport" | "dbus")
        || all.iter().any(|(key, _)| matches!(key.as_str(), "host" | "port"));
    let listens = options.flag("server") == Some(true);
    let (harmless, why): (fn(&str) -> bool, _) = match backend.as_str() {
        "socket" if listens => (may_listen, SOCKET),
        // Nobody listens in the VM's folder but QEMU itself, perhaps with a monitor.
        "socket" => (|_| false, SOCKET),
        "file" => (may_log, FILE),
        _ => (in_vm_dir, FILE),
    };
    let outside = all.iter().any(|(key, value)| is_key(key, "path") && !harmless(value));
    let mut found = rule_if(!CHARDEVS.contains(&backend.as_str()), "chardev.backend", UNKNOWN);
    found.extend(rule_if(is_monitor && network, "monitor.network", MONITOR));
    found.extend(rule_if(outside, "chardev.path", why));
    found.extend(keys(item, "chardev")?);
    Ok(found)
}

/// `unix:…`, `file:…`, `tcp:…` and the like.
fn short_chardev(item: &Item) -> Result<Vec<Broken>, CommandLineError> {
    const NETWORK: [&str; 5] = ["tcp:", "telnet:", "tn3270:", "udp:", "websocket:"];
    let name = item.name();
    let text = item.text()?;
    let (is_monitor, text) = match text.strip_prefix("mon:") {
        Some(rest) => (true, rest),
        None => (matches!(name, "monitor" | "qmp" | "qmp-pretty"), text),
    };
    if let Some(rest) = text.strip_prefix("unix:") {
        // Never JSON: the path comes first.
        let options = Options::Pairs(Pairs::parse(rest));
        let all = options.all();
        let path = all.first().filter(|(key, _)| key.is_empty()).map(|(_, path)| path.as_str());
        let abstracts = all.iter().any(|(key, value)| key == "abstract" && !BeOff.be(value));
        let harmless = options.flag("server") == Some(true) && path.is_some_and(may_listen) && !abstracts;
        return Ok(rule_if(!harmless, "chardev.path", SOCKET));
    }
    if let Some(path) = text.strip_prefix("file:") {
        return Ok(rule_if(!may_log(path), "chardev.path", FILE));
    }
    if let Some(path) = text.strip_prefix("pipe:") {
        return Ok(rule_if(!in_vm_dir(path), "chardev.path", FILE));
    }
    if NETWORK.iter().any(|kind| text.starts_with(kind)) {
        return Ok(rule_if(is_monitor, "monitor.network", MONITOR));
    }
    if text.starts_with('/') {
        return Ok(rule_if(true, "chardev.path", DEVICE));
    }
    let kind = text.split([':', ',']).next().unwrap_or_default();
    if is_monitor && kind == "vc" {
        // Which is on the screen that is shown to the network.
        return Ok(rule_if(true, "monitor.network", MONITOR));
    }
    let known = matches!(kind, "none" | "null" | "stdio" | "pty" | "vc" | "chardev" | "braille" | "msmouse");
    Ok(rule_if(!known, "chardev.backend", UNKNOWN))
}

fn display(item: &Item, name: &str) -> Result<Vec<Broken>, CommandLineError> {
    let options = item.options()?;
    let unix = options.flag("unix") == Some(true);
    let listens = options.flag("reverse") != Some(true);
    let outside = options.all().iter().any(|(key, value)| {
        let socket = match key.as_str() {
            "" | "vnc" => value.strip_prefix("unix:"),
            "addr" if unix => Some(value.as_str()),
            _ => None,
        };
        socket.is_some_and(|path| !listens || !may_listen(path))
    });
    Ok([rule_if(outside, "chardev.path", SOCKET), keys(item, name)?].concat())
}
