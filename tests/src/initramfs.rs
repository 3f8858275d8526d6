//! Builds the guest's initramfs: an archive in the `newc` format of cpio, which the kernel unpacks by itself.
//!
//! The `cpio` program is not used: it needs root for device nodes, and its output is not the same each time for the same input.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The script that the kernel starts. It keeps the guest running after the program has ended, so that its last output can be read.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for word in $(/bin/busybox cat /proc/cmdline); do
    case $word in
    vmove.modules=*)
        for module in $(echo "${word#*=}" | /bin/busybox tr , ' '); do
            /bin/busybox insmod "/modules/$module.ko" || echo "VMOVE-GUEST ERROR no module $module"
        done ;;
    vmove.address=*) address=${word#*=} ;;
    vmove.neighbour=*) neighbour=${word#*=} ;;
    vmove.worker=*) worker=1 ;;
    vmove.scan_mib=*) scan=${word#*=} ;;
    vmove.used_mib=*)
        # Free memory that has been used before, and is not zero.
        left=${word#*=}
        while [ "$left" -gt 0 ]; do
            # 1.9 MiB of it.
            /bin/busybox cat /bin/busybox >>/used || echo "VMOVE-GUEST ERROR no room for $word"
            left=$((left - 2))
        done
        /bin/busybox rm /used ;;
    esac
done
# Until it answers: by name, with packets of the largest size, and over TCP.
call() {
    until /bin/busybox ping -c 1 -W 2 -s $(($(/bin/busybox cat /sys/class/net/eth0/mtu) - 28)) "$1" >/answer &&
        [ "$(printf 12345678 | /bin/busybox nc -w 5 "$1" SERVICE_PORT | /bin/busybox head -c 8)" = 12345678 ]; do
        /bin/busybox sleep 1
    done
    echo "VMOVE-GUEST REACHED $(/bin/busybox head -n 1 /answer)"
}
# Reads the first MiB of the first disk again and again, past the page cache, and says so for each part of 8 MiB.
scan_disk() {
    while :; do
        part=0
        while [ "$part" -lt $(($1 / 8)) ]; do
            /bin/busybox dd if=/dev/vda of=/dev/null bs=1M count=8 skip=$((part * 8)) iflag=direct 2>/dev/null ||
                echo "VMOVE-GUEST ERROR the disk cannot be read"
            echo "VMOVE-GUEST SCANNED"
            part=$((part + 1))
        done
    done
}
# Whoever writes `SHARE OF` to the second serial port is told the sum of that share of the numbers up to 1000.
worker() {
    /bin/busybox stty -F /dev/ttyS1 raw -echo
    while read -r share of; do
        sum=0 number=$share
        while [ "$number" -le 1000 ]; do
            sum=$((sum + number)) number=$((number + of))
        done
        echo "$share $sum"
    done </dev/ttyS1 >/dev/ttyS1
}
[ -z "$worker" ] || worker &
# When all modules are loaded.
[ -z "$scan" ] || scan_disk "$scan" &
if [ "$address" = dhcp ]; then
    /bin/busybox ip link set eth0 up
    # It stays, and asks again before the address ends.
    /bin/busybox udhcpc -i eth0 -n -t 60 -T 1 -O mtu -s /bin/dhcp >/dev/null ||
        echo "VMOVE-GUEST ERROR nobody gave an address"
    [ -z "$neighbour" ] || call "$neighbour" &
elif [ -n "$address" ]; then
    /bin/busybox ip address add "$address" dev eth0 && /bin/busybox ip link set eth0 up ||
        echo "VMOVE-GUEST ERROR no network card for $address"
fi
# Runs what a test types: lines that come over a port of their own, and after each says how it ended.
typed() {
    /bin/busybox --install -s /bin
    number=0
    exec 3<>"$1"
    while :; do
        # Nothing comes while nobody is connected.
        if read -r line <&3; then
            number=$((number + 1))
            /bin/busybox sh -c "$line" 3<&-
            echo "VMOVE-GUEST TYPED $number $?"
        else
            sleep 0.1
        fi
    done
}
for port in /sys/class/virtio-ports/*; do
    [ "$(/bin/busybox cat "$port/name" 2>/dev/null)" != KEYBOARD ] || typed "/dev/${port##*/}" &
done
/bin/vmove-guest
echo "VMOVE-GUEST ERROR the program ended with $?"
while :; do /bin/busybox sleep 1000; done
"#;

/// What the DHCP client runs when it has an address, and when it has none any more.
const DHCP: &str = r#"#!/bin/busybox sh
case $1 in
deconfig) /bin/busybox ip address flush dev eth0 ;;
bound | renew)
    /bin/busybox ip address replace "$ip/$mask" dev eth0
    [ -z "$mtu" ] || /bin/busybox ip link set eth0 mtu "$mtu"
    echo "nameserver $dns" >/etc/resolv.conf
    echo "VMOVE-GUEST ADDRESS $ip/$mask mtu=$mtu dns=$dns router=$router" >/dev/console ;;
esac
"#;

/// The virtio-serial port over which tests type: [`crate::typist`].
pub const KEYBOARD: &str = "org.vmove.test.keyboard";

/// Paths of the parts of the guest.
#[derive(Debug)]
pub struct Parts<'a> {
    /// A statically linked busybox.
    pub busybox: &'a Path,
    /// The statically linked guest program.
    pub program: &'a Path,
    /// Kernel modules that a guest may load by `vmove.modules=`.
    pub modules: Vec<PathBuf>,
}

/// The bytes of the initramfs.
///
/// # Errors
/// When a part cannot be read.
pub fn build(parts: &Parts<'_>) -> Result<Vec<u8>> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("could not read {}", path.display()));
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "etc", "proc", "sys", "modules"] {
        archive.add(folder, Kind::Folder, &[]);
    }
    // The kernel opens it for init's output before anything is mounted.
    archive.add("dev/console", Kind::CharDevice { major: 5, minor: 1 }, &[]);
    let init =
        INIT.replace("SERVICE_PORT", &vmove_guest::SERVICE_PORT.to_string()).replace("KEYBOARD", KEYBOARD);
    archive.add("init", Kind::Program, init.as_bytes());
    archive.add("bin/dhcp", Kind::Program, DHCP.as_bytes());
    archive.add("bin/busybox", Kind::Program, &read(parts.busybox)?);
    archive.add("bin/vmove-guest", Kind::Program, &read(parts.program)?);
    for module in &parts.modules {
        let name = module.file_name().and_then(|n| n.to_str()).context("a module without a name")?;
        archive.add(&format!("modules/{name}"), Kind::File, &read(module)?);
    }
    Ok(archive.finish())
}

/// The bytes of an initramfs with more files, of which each has a path without a leading slash. All of them are programs. The kernel unpacks
/// archives that follow each other.
///
/// # Errors
/// When a file cannot be read.
pub fn with_files(initramfs: &Path, files: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("could not read {}", path.display()));
    let mut archive = Archive::default();
    let mut folders = std::collections::BTreeSet::new();
    for (name, path) in files {
        let above: Vec<&Path> = Path::new(name).ancestors().skip(1).collect();
        for folder in above.into_iter().rev().filter(|folder| !folder.as_os_str().is_empty()) {
            if folders.insert(folder.to_owned()) {
                archive.add(&folder.to_string_lossy(), Kind::Folder, &[]);
            }
        }
        archive.add(name, Kind::Program, &read(path)?);
    }
    Ok([read(initramfs)?, archive.finish()].concat())
}

#[derive(Clone, Copy)]
enum Kind {
    Folder,
    File,
    Program,
    CharDevice { major: u32, minor: u32 },
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, kind: Kind, content: &[u8]) {
        let (mode, major, minor) = match kind {
            Kind::Folder => (0o040_755, 0, 0),
            Kind::File => (0o100_644, 0, 0),
            Kind::Program => (0o100_755, 0, 0),
            Kind::CharDevice { major, minor } => (0o020_600, major, minor),
        };
        self.entries += 1;
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_length = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // Inode, mode, owner, group, links, time, length, device, device node, length of the name, checksum (unused).
        let fields = [self.entries, mode, 0, 0, 1, 0, length, 0, 0, major, minor, name_length, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", Kind::File, &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_parts_and_the_trailer() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let part = |name: &str, content: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).expect("writes");
            path
        };
        let (busybox, program) = (part("busybox", "BUSY"), part("program", "GUEST"));
        let parts =
            Parts { busybox: &busybox, program: &program, modules: vec![part("virtio.ko", "MODULE")] };
        let bytes = build(&parts).expect("an archive");
        assert_eq!(bytes.len() % 512, 0);
        let text = String::from_utf8_lossy(&bytes);
        for wanted in
            ["070701", "dev/console\0", "bin/busybox\0", "BUSY", "GUEST", "modules/virtio.ko\0", "TRAILER!!!"]
        {
            assert!(text.contains(wanted), "{wanted}");
        }
        // Every header begins on a multiple of four.
        for (at, _) in text.match_indices("070701") {
            assert_eq!(at % 4, 0);
        }
    }
}
