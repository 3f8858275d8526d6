//! What a command line has QEMU open by its path, and what else needs rights.

use std::path::PathBuf;

use super::image::is_path;
use super::{CommandLine, Item};
use crate::confine::KVM;

/// A file, folder, device or socket that QEMU opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// The option that names it, as written.
    pub option: String,
    /// Its path.
    pub path: PathBuf,
    /// It is written, too.
    pub writes: bool,
    /// QEMU makes it if it is not there.
    pub makes: bool,
    /// It is QEMU itself.
    pub runs: bool,
    /// What QEMU does without a word where it may not open it, and how to ask for that.
    pub instead: Option<&'static str>,
}

/// A network by a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The option, as written.
    pub option: String,
    /// The tap that it names.
    pub name: Option<String>,
    /// A script or a helper makes it or sets it up.
    pub runs_programs: bool,
}

/// Options whose argument is a path of a file that is read.
const READ: &[&str] = &["L", "bios", "cdrom", "dtb", "initrd", "kernel", "shim"];
/// Of an image that is written.
const IMAGES: &[&str] = &["", "fda", "fdb", "hda", "hdb", "hdc", "hdd", "mtdblock", "pflash", "sd"];
/// Keys of options with a file that is read.
const KEYS_READ: &[(&str, &[&str])] = &[
    ("acpitable", &["data", "file"]),
    ("device", &["file", "romfile"]),
    ("fw_cfg", &["file"]),
    ("fsdev", &["path"]),
    ("object", &["dir", "file", "filename"]),
    ("option-rom", &["file"]),
    ("smbios", &["file"]),
    ("spice", &["x509-dir"]),
    ("virtfs", &["path"]),
];
/// Devices of the host behind devices of the guest, by how their names begin.
const DEVICES: &[(&str, &str)] = &[("vhost-vsock", "/dev/vhost-vsock"), ("vhost-scsi", "/dev/vhost-scsi")];

/// Of a guest that is to have KVM where it can, and is emulated where it cannot.
const EMULATED: &str =
    "QEMU would emulate the guest without a word, many times slower; if that is meant, say accel=tcg";

impl CommandLine {
    /// Networks by a tap that QEMU opens itself.
    #[must_use]
    pub fn taps(&self) -> Vec<Tap> {
        let networks = ["netdev", "nic", "net"].iter().flat_map(|name| self.named(name));
        networks.filter_map(tap).collect()
    }

    /// Everything that QEMU opens by its path, as far as vmove knows the option. What it names with the placeholders is left out unless they
    /// have been replaced.
    #[must_use]
    pub fn opened(&self) -> Vec<Opened> {
        let snapshot = self.named("snapshot").next().is_some();
        let mut found: Vec<Opened> = self.items.iter().flat_map(|item| opened(item, snapshot)).collect();
        found.extend(self.kvm());
        found.retain(|opened| !opened.path.as_os_str().is_empty());
        found
    }

    /// Where KVM is what is tried first. What comes after it is for hosts without KVM.
    fn kvm(&self) -> Option<Opened> {
        let of = |item: &Item| Some((written(item), item.options().ok()?.get("accel", true)?));
        let machine = self.machine_option("accel").map(|accel| (format!("-machine accel={accel}"), accel));
        let enabled = self.named("enable-kvm").map(|item| (written(item), "kvm".to_owned()));
        let all: Vec<(String, String)> =
            enabled.chain(self.named("accel").filter_map(of)).chain(machine).collect();
        let mut names = all.iter().flat_map(|(_, accel)| accel.split(':'));
        if names.next() != Some("kvm") {
            return None;
        }
        let instead = names.any(|name| name == "tcg").then_some(EMULATED);
        Some(Opened { writes: true, instead, ..read(&all[0].0, KVM) })
    }
}

fn tap(item: &Item) -> Option<Tap> {
    let options = item.options().ok()?;
    let kind = options.get("type", true)?;
    if !matches!(kind.as_str(), "tap" | "bridge")
        || ["fd", "fds"].iter().any(|key| options.get(key, false).is_some())
    {
        return None;
    }
    let script =
        |key: &str| options.get(key, false).is_none_or(|script| !matches!(script.as_str(), "" | "no"));
    let runs_programs = kind == "bridge"
        || options.get("helper", false).is_some()
        || script("script")
        || script("downscript");
    Some(Tap { option: written(item), name: options.get("ifname", false), runs_programs })
}

fn written(item: &Item) -> String {
    format!("{} {}", item.flag.to_string_lossy(), item.value().to_string_lossy()).trim().to_owned()
}

fn read(option: &str, path: &str) -> Opened {
    Opened { option: option.to_owned(), path: path.into(), ..Opened::default() }
}

fn opened(item: &Item, snapshot: bool) -> Vec<Opened> {
    let (name, option) = (item.name(), written(item));
    let Ok(text) = item.text() else { return Vec::new() };
    let reads = |path: &str| read(&option, path);
    if READ.contains(&name) {
        return vec![reads(text)];
    }
    if IMAGES.contains(&name) {
        return is_path(text).then(|| Opened { writes: !snapshot, ..reads(text) }).into_iter().collect();
    }
    let Ok(options) = item.options() else { return Vec::new() };
    let on = |key: &str| options.flag(key) == Some(true);
    match name {
        "drive" => {
            let file = options.get("file", false).filter(|file| is_path(file));
            let cdrom = options.get("media", false).as_deref() == Some("cdrom");
            let read_only = snapshot || cdrom || ["readonly", "read-only", "snapshot"].into_iter().any(on);
            file.map(|file| Opened { writes: !read_only, ..reads(&file) }).into_iter().collect()
        }
        "blockdev" => {
            // Also that of a node inside the node.
            let is_file = |key: &str| key == "filename" || key.ends_with(".filename");
            let files = options.all().into_iter().filter(|(key, file)| is_file(key) && is_path(file));
            let read_only = ["read-only", "auto-read-only"].into_iter().any(on);
            files.map(|(_, file)| Opened { writes: !read_only, ..reads(&file) }).collect()
        }
        "chardev" => {
            let own = on("server") || options.get("backend", true).as_deref() == Some("file");
            let paths = [("path", own), ("logfile", true)];
            let of = |(key, makes): (&str, bool)| Some(made(&option, &options.get(key, false)?, makes));
            paths.into_iter().filter_map(of).collect()
        }
        "qmp" | "qmp-pretty" | "monitor" | "serial" | "parallel" | "debugcon" => {
            let path = ["file:", "pipe:", "unix:"].into_iter().find_map(|kind| text.strip_prefix(kind));
            path.map(|path| made(&option, path.split(',').next().unwrap_or_default(), true))
                .into_iter()
                .collect()
        }
        "D" | "pidfile" => vec![made(&option, text, true)],
        // A file of RAM that the operator has chosen.
        "object" if options.get("qom-type", true).as_deref() == Some("memory-backend-file") => {
            options.get("mem-path", false).map(|path| made(&option, &path, true)).into_iter().collect()
        }
        "netdev" if on("vhost") => vec![Opened { writes: true, ..reads("/dev/vhost-net") }],
        "device" => {
            let driver = options.get("driver", true).unwrap_or_default();
            let device = DEVICES.iter().find(|(start, _)| driver.starts_with(start));
            let device = device.map(|(_, path)| Opened { writes: true, ..reads(path) });
            let vfio = (driver == "vfio-pci").then(|| vfio_group(&options)).flatten();
            let vfio = vfio.map(|path| Opened { writes: true, ..reads(&path) });
            device.into_iter().chain(vfio).chain(by_keys(item, &option)).collect()
        }
        _ => by_keys(item, &option),
    }
}

/// A socket or a file that QEMU makes, or that must be there and is written.
fn made(option: &str, path: &str, makes: bool) -> Opened {
    Opened { writes: true, makes, ..read(option, path) }
}

fn by_keys(item: &Item, option: &str) -> Vec<Opened> {
    let keys = KEYS_READ.iter().find(|(name, _)| *name == item.name()).map_or(&[][..], |(_, keys)| keys);
    let Ok(options) = item.options() else { return Vec::new() };
    keys.iter().filter_map(|key| options.get(key, false)).map(|path| read(option, &path)).collect()
}

/// The device by which QEMU has a PCI device of the host.
fn vfio_group(options: &super::options::Options) -> Option<String> {
    let device = match options.get("sysfsdev", false) {
        Some(path) => path,
        None => {
            let address = options.get("host", false)?;
            let domain = if address.matches(':').count() == 1 { "0000:" } else { "" };
            format!("/sys/bus/pci/devices/{domain}{address}")
        }
    };
    let group = std::fs::read_link(PathBuf::from(device).join("iommu_group")).ok()?;
    Some(format!("/dev/vfio/{}", group.file_name()?.to_str()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(std::iter::once(&"qemu").chain(words).map(Into::into).collect()).unwrap()
    }

    #[test]
    fn files_are_found_wherever_they_are_said() {
        let found = |words: &[&str]| -> Vec<(String, bool, bool)> {
            let opened = line(words).opened();
            opened.into_iter().map(|o| (o.path.display().to_string(), o.writes, o.makes)).collect()
        };
        for (words, path, writes, makes) in [
            (&["-kernel", "/k"][..], "/k", false, false),
            (&["-hda", "/d"], "/d", true, false),
            (&["-hda", "/d", "-snapshot"], "/d", false, false),
            (&["/d"], "/d", true, false),
            (&["-drive", "if=virtio,file=/a,,b"], "/a,b", true, false),
            (&["-drive", "file=/c.iso,media=cdrom"], "/c.iso", false, false),
            (&["-blockdev", "driver=file,node-name=n,filename=/b"], "/b", true, false),
            (
                &[
                    "-blockdev",
                    r#"{"driver":"raw","file":{"driver":"file","filename":"/j"},"read-only":true}"#,
                ],
                "/j",
                false,
                false,
            ),
            (&["-blockdev", "raw,file.driver=file,file.filename=/b,read-only=on"], "/b", false, false),
            (&["-chardev", "socket,id=c,path=/s,server=on"], "/s", true, true),
            (&["-chardev", "socket,id=c,path=/s"], "/s", true, false),
            (&["-serial", "file:/l"], "/l", true, true),
            (&["-pidfile", "/p"], "/p", true, true),
            (&["-enable-kvm"], "/dev/kvm", true, false),
            (&["-machine", "q35,accel=kvm"], "/dev/kvm", true, false),
            (&["-fw_cfg", "name=x,file=/f"], "/f", false, false),
            (&["-object", "secret,id=s,file=/f"], "/f", false, false),
            (&["-object", "memory-backend-file,id=m,size=1G,mem-path=/m,share=on"], "/m", true, true),
            (&["-netdev", "user,id=n"], "", false, false),
            (&["-machine", "q35,accel=kvm:tcg"], "/dev/kvm", true, false),
            (&["-accel", "kvm", "-accel", "tcg"], "/dev/kvm", true, false),
            (&["-accel", "tcg", "-accel", "kvm"], "", false, false),
            (&["-machine", "q35,accel=tcg:kvm"], "", false, false),
            (&["-drive", "file=nbd://host/x"], "", false, false),
        ] {
            let expected = if path.is_empty() { Vec::new() } else { vec![(path.to_owned(), writes, makes)] };
            assert_eq!(found(words), expected, "{words:?}");
        }
    }

    #[test]
    fn what_would_take_the_place_of_kvm_is_known() {
        for (words, option, falls_back) in [
            (&["-enable-kvm"][..], "-enable-kvm", false),
            (&["-accel", "kvm,kernel-irqchip=on"], "-accel kvm,kernel-irqchip=on", false),
            (&["-machine", "q35,accel=kvm:tcg"], "-machine accel=kvm:tcg", true),
            (&["-accel", "kvm", "-accel", "tcg,thread=multi"], "-accel kvm", true),
        ] {
            let kvm = line(words).opened().pop().unwrap();
            assert_eq!((kvm.option.as_str(), kvm.instead.is_some()), (option, falls_back), "{words:?}");
        }
    }

    #[test]
    fn taps_that_need_root_are_told_from_those_that_exist() {
        let of = |argument: &str| {
            line(&["-netdev", argument]).taps().pop().map(|tap| (tap.name, tap.runs_programs))
        };
        let t = || Some("t0".to_owned());
        assert_eq!(of("tap,id=n,ifname=t0,script=no,downscript=no"), Some((t(), false)));
        assert_eq!(of("tap,id=n,ifname=t0"), Some((t(), true)));
        assert_eq!(of("bridge,id=n,br=br0"), Some((None, true)));
        assert_eq!(of("tap,id=n,fd=3"), None);
        assert_eq!(of("user,id=n"), None);
    }
}
