//! What the destination finds when a VM asks for room.

use std::path::PathBuf;

use vmove_qmp::access::{self, Denied};
use vmove_qmp::cmdline::{DestinationCommand, RunLayout};

use super::libvirt;
use super::moved_disks;
use crate::node::Node;
use crate::proto::message::{BlockInfo, Disk, PART_BYTES, Prepare};
use crate::vmm::Vmm;
use vmove_node::blocking::run_blocking;
use vmove_node::peer::{Caller, Objection, SessionId};
use vmove_node::reservations::{Reservation, Room, Rooms, Wanted};
use vmove_types::Backing;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::spec::Visit;
use vmove_types::vm::RunRequest;

/// What a session needs beside guest memory and page maps: QEMU itself, buffers. Bytes.
const OVERHEAD: u64 = 64 << 20;
/// For each page with `--verify`.
const HASH_BYTES: u64 = 8;
/// For each 2 MiB of the guest: how it is read, what is missing of it, and QEMU's three bitmaps of written pages.
const PART_OVERHEAD: u64 = 256;

/// The memory for the guest, reserved for as long as the answer is kept; or everything that stands in the way here. Changes nothing but that
/// empty folders and mounts for guest memory may be made.
pub(crate) async fn room(
    node: &Node,
    id: SessionId,
    prepare: &Prepare,
    caller: &Caller,
) -> Result<Reservation, Vec<Blocker>> {
    if let Err(why) = node.config.peers.accepts(caller) {
        tracing::warn!(vm = prepare.vm, from = prepare.source, %why, "a guest of another node is refused");
        let message = format!("{} does not take it: {why}", node.config.node);
        return Err(vec![Blocker::new(BlockerCode::PeerNotAccepted, message)]);
    }
    let mut found = blockers(node, prepare).await;
    // Last: what is reserved is refused to others, and this guest may not come.
    match memory(node, id, prepare) {
        Ok(reserved) if found.is_empty() => return Ok(reserved),
        Ok(_) => {}
        Err(why) => found.push(why),
    }
    Err(found)
}

/// Everything but memory.
async fn blockers(node: &Node, prepare: &Prepare) -> Vec<Blocker> {
    if let Some(domain) = &prepare.libvirt {
        return libvirt::blockers(node, prepare, domain);
    }
    let mut found = Vec::new();
    if let Err(e) = vmove_node::store::check_name(&prepare.vm) {
        found.push(Blocker::new(BlockerCode::Name, e.to_string()));
    } else if node.vms.has(&prepare.vm) {
        let (vm, here) = (&prepare.vm, &node.config.node);
        let message = if prepare.source == *here {
            format!("{vm:?} is on {here}: choose another node")
        } else {
            format!("A VM named {vm:?} is already on {here}: rename one of them")
        };
        found.push(Blocker::new(BlockerCode::NameTaken, message).about(&prepare.vm));
    }
    if let Err(why) = vmove_node::peer::negotiate(&prepare.fabrics, &node.config.dialer.fabrics()) {
        found.push(Blocker::new(BlockerCode::NoCommonFabric, why.to_string()));
    }
    let objections = node.config.peers.objections(&prepare.command_line, &prepare.vm, &prepare.environment);
    // Asking it what it is would be starting it.
    let may_ask = !objections.iter().any(|o| matches!(o, Objection::Binary { .. }));
    found.extend(objections.iter().map(|why| objection(&node.config.node, why)));
    let one_host = vmove_node::clock::is_of_this_kernel(&prepare.boot_id);
    match crate::command::derive_command(node, prepare) {
        Ok((layout, command)) => {
            found.extend(rights(&layout, &command, prepare).await);
            let program = command.argv.first().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
            if may_ask {
                found.extend(qemu(&*node.config.vmm, &program, prepare).await);
            }
            if one_host {
                found.extend(same_host(&command.same_paths));
            }
            if command.locks_memory && prepare.spec.visit != Visit::No {
                let why = "QEMU locks all of its memory, which a guest on a visit does not have: move it for good, or start it without mem-lock";
                found.push(Blocker::new(BlockerCode::MemoryLocked, why));
            }
            if let (true, Err(why)) = (command.locks_memory, vmove_memory::drops_locked()) {
                found.push(Blocker::new(BlockerCode::MemoryLocked, vmove_types::problem::chain(&why)));
            }
        }
        // What cannot be read was said already.
        Err(_) if found.iter().any(|blocker| blocker.code == BlockerCode::CommandLine) => {}
        Err(why) => found.push(Blocker::new(BlockerCode::CommandLine, why.to_string())),
    }
    found.extend(crate::homes::blocker(node, prepare));
    found.extend(prepare.disks.iter().filter_map(|d| disk(d, one_host)));
    found.extend(moved_disks::blockers(node, prepare));
    found.extend(crate::devices::arrival::blockers(node, prepare).await);
    if let Err(why) = node.config.admission.would_admit(&asked_of(prepare)) {
        found.push(Blocker::new(BlockerCode::Grant, why.to_string()));
    }
    found
}

/// What a guest asks of this node, as if it were to be started here.
pub(crate) fn asked_of(prepare: &Prepare) -> RunRequest {
    RunRequest {
        name: prepare.vm.clone(),
        memory: prepare.backing.to_string(),
        command_line: prepare.command_line.clone(),
        environment: prepare.environment.iter().cloned().collect(),
        devices: crate::devices::arrival::chosen(prepare).into_iter().map(|device| device.request).collect(),
        grant: prepare.spec.grant.clone(),
        pin: None,
    }
}

/// What QEMU's user may not open here. A disk that is not here at all is said elsewhere.
async fn rights(layout: &RunLayout, command: &DestinationCommand, prepare: &Prepare) -> Vec<Blocker> {
    let more = access::More {
        read: prepare.disks.iter().map(|disk| PathBuf::from(&disk.path)).collect(),
        // The daemon may do more: whoever sends a guest must not have it make files where the guest's QEMU could not.
        made: prepare.moved.iter().filter_map(|disk| disk.to.clone().map(PathBuf::from)).collect(),
    };
    let (argv, layout) = (command.argv.clone(), layout.clone());
    let blocker = |denied: Denied| Blocker::new(BlockerCode::QemuUser, denied.message).about(denied.subject);
    match run_blocking(move || access::denied(&argv, &layout, &more)).await {
        Ok(Ok(denied)) => denied.into_iter().map(blocker).collect(),
        Ok(Err(why)) => {
            vec![Blocker::new(
                BlockerCode::QemuUser,
                format!("What QEMU's user may open here is not known: {why}"),
            )]
        }
        Err(why) => vec![Blocker::new(BlockerCode::QemuUser, why.to_string())],
    }
}

/// What a command line would have done here.
fn objection(node: &str, why: &Objection) -> Blocker {
    tracing::warn!(%why, "a guest of another node is refused");
    let (code, subject) = match why {
        Objection::Binary { program, .. } => (BlockerCode::QemuNotAllowed, program),
        Objection::Option(forbidden) => (BlockerCode::OptionNotAllowed, &forbidden.rule),
        Objection::Environment(name) => (BlockerCode::EnvironmentNotAllowed, name),
        // Even if only one option cannot be read: the others were not looked at then.
        _ => return Blocker::new(BlockerCode::CommandLine, why.to_string()),
    };
    Blocker::new(code, format!("{node} does not take it: {why}")).about(subject)
}

/// Who reserves memory for a migration.
pub(crate) fn holder(id: SessionId, prepare: &Prepare) -> String {
    format!("migration {id} of {:?} from {}", prepare.vm, prepare.source)
}

/// What a guest takes here: its memory, the page maps on tmpfs, and [`OVERHEAD`]. Where its memory is locked, it takes all of that at once.
/// `held_only`: of its memory, what holds something at the source; the rest is overcommitted.
pub(crate) fn wanted(prepare: &Prepare, held_only: bool) -> Wanted {
    let beside = |b: &BlockInfo| {
        let pages = b.size.div_ceil(b.page_size.max(1));
        let hashes = if prepare.spec.verify { pages.saturating_mul(HASH_BYTES) } else { 0 };
        let parts = b.size.div_ceil(PART_BYTES).saturating_mul(PART_OVERHEAD);
        pages.saturating_add(hashes).saturating_add(parts)
    };
    let host_bytes = prepare.blocks.iter().fold(OVERHEAD, |sum, b| sum.saturating_add(beside(b)));
    let guest_bytes = if held_only { prepare.held_bytes() } else { prepare.guest_bytes() };
    Wanted { backing: prepare.backing, guest_bytes, host_bytes }
}

fn memory(node: &Node, id: SessionId, prepare: &Prepare) -> Result<Reservation, Blocker> {
    let (mut wanted, backing) = (wanted(prepare, node.config.reservations.overcommits()), prepare.backing);
    // Of a guest that comes home, most is here.
    wanted.guest_bytes = wanted.guest_bytes.saturating_sub(crate::homes::held_bytes(node, prepare));
    if prepare.libvirt.is_some() && backing != Backing::Thp {
        // The kernel has promised them to libvirt's QEMU, which maps its memory and waits.
        wanted.guest_bytes = 0;
    }
    let fits = |rooms: &Rooms| enough(&node.config.node, &prepare.vm, wanted, rooms);
    let reserved = node.config.reservations.reserve(&holder(id, prepare), wanted, fits);
    reserved.unwrap_or_else(|e| {
        Err(Blocker::new(BlockerCode::Memory, vmove_types::problem::chain(&e)).about(backing.name()))
    })
}

fn enough(node: &str, vm: &str, wanted: Wanted, rooms: &Rooms) -> Result<(), Blocker> {
    let mib = |b: u64| b.div_ceil(1 << 20);
    let (guest, host) = (wanted.guest_bytes, wanted.host_bytes);
    let refuse = |code, bytes, what: &str, of_it: &str, room: &Room, remedy: &str| {
        let message = format!("{vm} needs {} MiB of {what}{of_it}, {node} has {room}: {remedy}", mib(bytes));
        Err(Blocker::new(code, message).about(wanted.backing.name()))
    };
    let remedy = "free some there, or choose another node";
    if wanted.backing != Backing::Thp {
        if rooms.guest.left() < guest {
            let remedy = "raise nr_hugepages there";
            return refuse(BlockerCode::HugePages, guest, "free huge pages", "", &rooms.guest, remedy);
        }
        if rooms.host.left() < host {
            let beside = " beside its huge pages";
            return refuse(BlockerCode::Memory, host, "available memory", beside, &rooms.host, remedy);
        }
        return Ok(());
    }
    let all = guest.saturating_add(host);
    if rooms.guest.left() < all {
        let parts = format!(" ({} MiB of guest RAM and {} MiB beside it)", mib(guest), mib(host));
        return refuse(BlockerCode::Memory, all, "available memory", &parts, &rooms.guest, remedy);
    }
    Ok(())
}

async fn qemu(vmm: &dyn Vmm, program: &str, prepare: &Prepare) -> Vec<Blocker> {
    let Some(host) = vmm.binary(program).await else {
        let message =
            format!("QEMU {program} of the source is not on this node: install it there, or put it in PATH");
        return vec![Blocker::new(BlockerCode::QemuMissing, message).about(program)];
    };
    let host = match host {
        Ok(host) => host,
        Err(error) => {
            return vec![
                Blocker::new(BlockerCode::QemuMissing, vmove_types::problem::chain(&error)).about(program),
            ];
        }
    };
    let mut found = Vec::new();
    if release(&host.version) < release(&prepare.qemu_version) {
        let message = format!(
            "QEMU {} runs at the source, {} is {} here: device state of a newer QEMU cannot be loaded by an older one; install {} or newer",
            prepare.qemu_version,
            host.path.display(),
            host.version,
            prepare.qemu_version
        );
        found.push(Blocker::new(BlockerCode::QemuVersion, message).about(program));
    }
    if !host.has_machine(&prepare.machine) {
        let message = format!(
            "Machine type {} of the guest is not known to QEMU {} here",
            prepare.machine, host.version
        );
        found.push(Blocker::new(BlockerCode::MachineType, message).about(&prepare.machine));
    }
    found
}

/// Major and minor; the last number does not change device state.
fn release(version: &str) -> (u32, u32) {
    let mut numbers = version.split(['.', ' ', '(']).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// On one host the two QEMUs would take sockets and files from each other.
fn same_host(paths: &[std::path::PathBuf]) -> Vec<Blocker> {
    let blocker = |path: &std::path::PathBuf| {
        let message = format!(
            "{} is named by the command line, and both QEMUs would be on one host: write {{vmdir}} in its place, which each node replaces by a folder of its own",
            path.display()
        );
        Blocker::new(BlockerCode::SamePath, message).about(path.to_string_lossy())
    };
    paths.iter().map(blocker).collect()
}

fn disk(disk: &Disk, one_host: bool) -> Option<Blocker> {
    let blocker = |message| Some(Blocker::new(BlockerCode::DiskNotShared, message).about(&disk.node));
    if disk.shared == Some(false) && !one_host && !disk.read_only {
        return blocker(format!(
            "Disk {} ({}) is on {}, which only the source sees: put it on shared storage, or move it along (--disks {})",
            disk.node, disk.path, disk.fs, disk.node
        ));
    }
    match std::fs::metadata(&disk.path) {
        Err(error) => blocker(format!(
            "Disk {} ({}) cannot be reached at the destination: {error}",
            disk.node, disk.path
        )),
        Ok(here) if here.is_file() && here.len() != disk.size => blocker(format!(
            "Disk {} ({}) has {} bytes at the source and {} here: these are not the same file",
            disk.node,
            disk.path,
            disk.size,
            here.len()
        )),
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::pending::PageSet;

    #[test]
    fn a_command_line_that_cannot_be_read_is_not_taken() {
        let line = ["/not/there", "-netdev", "tap,script=/tmp/x", "-fw_cfg", "name=x", "-chardev", "{\"x"];
        let line = line.map(str::to_owned);
        let objections = vmove_node::peer::PeerPolicy::default().objections(&line, "web", &[]);
        let codes: Vec<_> = objections.iter().map(|why| objection("b", why).code).collect();
        assert_eq!(codes, [BlockerCode::CommandLine]);
    }

    #[test]
    fn what_vmove_keeps_of_each_page_counts_beside_the_guest() {
        const GIB: u64 = 1 << 30;
        let mut prepare = crate::retention::tests::prepare();
        let mut held = PageSet::empty(1024 * GIB / PART_BYTES);
        held.insert(0..GIB / PART_BYTES);
        let data = held.encode();
        prepare.blocks = vec![BlockInfo { id: "ram".to_owned(), size: 1024 * GIB, page_size: 4096, data }];
        let host_mib = |prepare: &Prepare| wanted(prepare, false).host_bytes >> 20;
        // A byte of each page, 256 of each 2 MiB, and QEMU.
        assert_eq!(host_mib(&prepare), 256 + 128 + 64);
        assert_eq!(wanted(&prepare, false).guest_bytes, 1024 * GIB);
        assert_eq!(wanted(&prepare, true), Wanted { guest_bytes: GIB, ..wanted(&prepare, false) });
        prepare.spec.verify = true;
        assert_eq!(host_mib(&prepare), 256 + 128 + 64 + 2048);
        // Huge pages are fewer.
        prepare.blocks[0].page_size = 2 << 20;
        assert_eq!(host_mib(&prepare), (128 + 64) + 4);
    }

    #[test]
    fn only_the_release_counts() {
        assert_eq!(release("10.0.2"), (10, 0));
        assert_eq!(release("7.2.18 (Debian 1:7.2+dfsg)"), (7, 2));
        assert!(release("7.2.0") < release("10.0.0"));
        assert_eq!(release("nonsense"), (0, 0));
    }

    #[test]
    fn disks_must_be_there_and_be_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, b"12345").unwrap();
        let at = |path: &Path, size, shared, read_only| Disk {
            node: "d".to_owned(),
            path: path.to_string_lossy().into_owned(),
            size,
            read_only,
            shared,
            fs: "ext4".to_owned(),
        };
        assert_eq!(disk(&at(&path, 5, Some(true), false), false), None);
        assert_eq!(disk(&at(&path, 5, Some(false), false), true), None, "one host sees its own disk");
        assert_eq!(disk(&at(&path, 5, Some(false), true), false), None, "read-only media may be on both");
        for (bad, word) in [
            (disk(&at(&path, 5, Some(false), false), false), "shared storage"),
            (disk(&at(&path, 6, Some(true), false), false), "not the same file"),
            (disk(&at(&dir.path().join("none"), 5, Some(true), false), false), "cannot be reached"),
        ] {
            let message = bad.unwrap().message;
            assert!(message.contains(word), "{message}");
        }
    }
}
