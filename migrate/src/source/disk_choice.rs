//! Which disks move with a guest, and what stands in the way of each.

use std::ffi::OsString;
use std::path::PathBuf;

use vmove_node::record::VmRecord;
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::confine::Confinement;
use vmove_qmp::disks::DiskFact;
use vmove_qmp::inspect::{BlockFact, VmFacts};
use vmove_qmp::{CommandLine, RunLayout};
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::disk::ALL_DISKS;
use vmove_types::spec::MigrationSpec;

use crate::proto::message::{Disk, MovedDisk};

/// Disks that move.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub moved: Vec<Moving>,
    /// Why some cannot.
    pub blockers: Vec<Blocker>,
    /// All disks: what does not move must be seen by both nodes.
    all: Vec<DiskFact>,
}

/// A disk that moves.
#[derive(Debug, Clone)]
pub(crate) struct Moving {
    pub told: MovedDisk,
    /// Its topmost block node.
    pub node: String,
    /// By which QEMU's commands know its front end.
    pub device: String,
    /// Its image here.
    pub path: PathBuf,
}

/// A disk of a guest, and what stands in the way of a copy.
#[derive(Debug)]
pub(crate) struct Known {
    pub fact: DiskFact,
    /// As the command line has it, and its path here.
    pub image: Option<(String, PathBuf)>,
    pub obstacles: Vec<Blocker>,
}

/// All disks of a guest, by the names that its command line gives them, too.
pub(crate) fn known(vm: &VmRecord, mut all: Vec<DiskFact>) -> Result<Vec<Known>, CommandLineError> {
    let images = Images::of(vm)?;
    images.name(&mut all);
    let known = |fact: DiskFact| {
        let (image, mut obstacles) = (images.find(&fact.file), obstacles(&fact));
        if image.is_none() && obstacles.is_empty() {
            obstacles.push(not_on_the_command_line(&fact));
        }
        Known { fact, image, obstacles }
    };
    Ok(all.into_iter().map(known).collect())
}

/// Looks at the disks that are to move.
pub(crate) fn choose(
    vm: &VmRecord,
    spec: &MigrationSpec,
    all: Vec<DiskFact>,
) -> Result<Choice, CommandLineError> {
    let mut choice = Choice { all, ..Choice::default() };
    if spec.disks.is_empty() {
        return Ok(choice);
    }
    let images = Images::of(vm)?;
    images.name(&mut choice.all);
    let every = spec.disks == [ALL_DISKS];
    let (known, read_only) = (&choice.all, |disk: &DiskFact| disk.read_only);
    let names = |disk: &DiskFact, name: &String| disk.names.contains(name);
    let mut refuse = |message: String, about: &str| {
        choice.blockers.push(Blocker::new(BlockerCode::DiskNotMovable, message).about(about));
    };
    for name in spec.disks.iter().filter(|_| !every) {
        match known.iter().find(|disk| names(disk, name)) {
            None => refuse(format!("{:?} has no disk {name}: it has {}", vm.name, listed(known)), name),
            Some(disk) if read_only(disk) => refuse(
                format!(
                    "Disk {name} ({}) can only be read by the guest: it is not copied, and must be there at the destination; leave it out of --disks",
                    disk.file
                ),
                name,
            ),
            Some(_) => {}
        }
    }
    let wanted =
        |disk: &&DiskFact| !read_only(disk) && (every || spec.disks.iter().any(|name| names(disk, name)));
    let chosen: Vec<&DiskFact> = known.iter().filter(wanted).collect();
    for place in &spec.disk_map {
        if !chosen.iter().any(|disk| names(disk, &place.name)) {
            refuse(
                format!(
                    "No disk {} moves, for which {} was named: those are {}",
                    place.name,
                    place.path,
                    listed(chosen.iter().copied())
                ),
                &place.name,
            );
        }
    }
    for disk in chosen {
        let why = obstacles(disk);
        let image = images.find(&disk.file);
        match image {
            Some((image, path)) if why.is_empty() => {
                let to = spec
                    .disk_map
                    .iter()
                    .find(|place| names(disk, &place.name))
                    .map(|place| place.path.clone());
                choice.moved.push(Moving {
                    told: MovedDisk {
                        name: disk.name.clone(),
                        image,
                        format: if disk.format == "qcow2" { "qcow2" } else { "raw" }.to_owned(),
                        size: disk.size,
                        allocated: disk.allocated,
                        cluster: disk.cluster,
                        to,
                    },
                    node: disk.node.clone(),
                    device: disk.device.clone(),
                    path,
                });
            }
            None if why.is_empty() => choice.blockers.push(not_on_the_command_line(disk)),
            _ => choice.blockers.extend(why),
        }
    }
    Ok(choice)
}

impl Choice {
    /// What the destination is told.
    pub(crate) fn told(&self) -> Vec<MovedDisk> {
        self.moved.iter().map(|disk| disk.told.clone()).collect()
    }

    /// Whether nothing but disks that move lies over this file: what it holds comes along in their copies.
    fn comes_along(&self, file: &String) -> bool {
        let moves = |disk: &DiskFact| self.moved.iter().any(|moved| moved.node == disk.node);
        let mut over = self.all.iter().filter(|disk| disk.chain.contains(file)).peekable();
        over.peek().is_some() && over.all(moves)
    }

    /// Leaves out blockers for images behind a socket of this host ([`BlockFact::by_socket`]) whose content comes along.
    pub(crate) fn mend(&self, facts: &VmFacts, blockers: &mut Vec<Blocker>) {
        let comes = facts.block.iter().filter(|block| block.by_socket() && self.comes_along(&block.file));
        let comes: Vec<&str> = comes.map(|block| block.node.as_str()).collect();
        let of_socket = |blocker: &Blocker| blocker.code == BlockerCode::DiskNotShared;
        let about = |blocker: &Blocker| blocker.subject.as_deref().is_some_and(|node| comes.contains(&node));
        blockers.retain(|blocker| !(of_socket(blocker) && about(blocker)));
    }

    /// The files of disks that stay where they are: both nodes must see them.
    pub(crate) fn shared(&self, facts: &VmFacts) -> Vec<Disk> {
        let of = |file: &String| self.all.iter().find(|disk| disk.chain.contains(file));
        let told = |block: &BlockFact| Disk {
            node: of(&block.file).map_or_else(|| block.node.clone(), |disk| disk.name.clone()),
            path: block.file.clone(),
            size: std::fs::metadata(&block.file).map_or(0, |meta| meta.len()),
            read_only: block.read_only,
            shared: block.shared,
            fs: block.fs.clone().unwrap_or_default(),
        };
        // Only files have paths that can be looked at; network disks name themselves the same everywhere.
        let mut files: Vec<&BlockFact> =
            facts.block.iter().filter(|block| block.file.starts_with('/')).collect();
        files.retain(|block| !self.comes_along(&block.file));
        files.into_iter().map(told).collect()
    }
}

fn listed<'a>(disks: impl IntoIterator<Item = &'a DiskFact>) -> String {
    let names: Vec<&str> = disks.into_iter().map(|disk| disk.name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn not_on_the_command_line(disk: &DiskFact) -> Blocker {
    let message = format!(
        "Disk {} ({}) is not on the command line, so that the destination would not have it: detach it, or start the guest with it",
        disk.name, disk.file
    );
    Blocker::new(BlockerCode::DiskNotKnown, message).about(&disk.name)
}

/// Why a disk cannot be copied, and the way out.
fn obstacles(disk: &DiskFact) -> Vec<Blocker> {
    let mut found = Vec::new();
    let mut add = |code: BlockerCode, why: String| {
        let message = format!("Disk {} ({}) {why}", disk.name, disk.file);
        found.push(Blocker::new(code, message).about(&disk.name));
    };
    let (format, protocol) = (disk.format.as_str(), disk.protocol.as_deref().unwrap_or("unknown"));
    if let Some((id, kind)) = &disk.job {
        add(
            BlockerCode::DiskBusy,
            format!("is at work in job {id:?} ({kind}) of QEMU: wait for its end, or cancel it"),
        );
    } else if !matches!(format, "raw" | "qcow2" | "file" | "host_device") {
        add(
            BlockerCode::DiskNotMovable,
            format!(
                "has format {format:?}: raw and qcow2 can be copied; put it on storage that both nodes see"
            ),
        );
    } else if !matches!(protocol, "file" | "host_device") {
        add(
            BlockerCode::DiskNotMovable,
            format!(
                "is opened by driver {protocol:?}: files and block devices can be copied; a server is reached from both nodes, so leave it out of --disks"
            ),
        );
    } else if disk.encrypted {
        add(BlockerCode::DiskEncrypted, "is encrypted, and QEMU would write what it holds as plain text: put it on storage that both nodes see".to_owned());
    } else if let Some(special) = disk.special {
        add(
            BlockerCode::DiskNotMovable,
            format!(
                "has {special}, which a copy would not have: remove these (qemu-img), or put it on storage that both nodes see"
            ),
        );
    }
    if disk.shared {
        add(BlockerCode::DiskShared, "may be written by others while the guest has it (share-rw=on), unseen by a copy: start the guest without that".to_owned());
    }
    if disk.size == 0 && found_nothing(&found) {
        found.push(
            Blocker::new(
                BlockerCode::DiskNotMovable,
                format!("Disk {} ({}) holds nothing: leave it out of --disks", disk.name, disk.file),
            )
            .about(&disk.name),
        );
    }
    found
}

fn found_nothing(found: &[Blocker]) -> bool {
    found.is_empty()
}

/// Images of a command line: as written, as QEMU opened them, and their names.
struct Images {
    vm_dir: PathBuf,
    images: Vec<(String, PathBuf, Option<String>)>,
}

impl Images {
    fn of(vm: &VmRecord) -> Result<Self, CommandLineError> {
        let line = CommandLine::parse(vm.command_line.iter().map(OsString::from).collect())?;
        // As it was when QEMU was started here; only the placeholders matter.
        let layout = RunLayout {
            qmp_socket: vm.qmp_socket.clone(),
            vm_dir: vm.vm_dir.clone(),
            memory_dir: PathBuf::new(),
            backing: vm.backing,
            name: vm.name.clone(),
            confinement: Confinement::default(),
        };
        let (written, opened) = (line.movable_images()?, line.opened_images(&layout)?);
        let both = written.into_iter().zip(opened).zip(line.image_names()?);
        let all = both.map(|((written, opened), name)| (written.file, vm.vm_dir.join(opened.file), name));
        Ok(Self { vm_dir: vm.vm_dir.clone(), images: all.collect() })
    }

    /// Gives disks the names that their images have on the command line: the node of one that was moved here has another.
    fn name(&self, disks: &mut [DiskFact]) {
        for disk in disks {
            let named = self.entry(&disk.file).and_then(|(_, _, name)| name.clone());
            let Some(name) = named.filter(|name| !disk.names.contains(name)) else { continue };
            disk.name.clone_from(&name);
            disk.names.insert(0, name);
        }
    }

    /// The image behind a file that QEMU names.
    fn find(&self, file: &str) -> Option<(String, PathBuf)> {
        self.entry(file).map(|(written, path, _)| (written.clone(), path.clone()))
    }

    fn entry(&self, file: &str) -> Option<&(String, PathBuf, Option<String>)> {
        // QEMU's working folder is the VM's.
        let file = self.vm_dir.join(file);
        self.images.iter().find(|(_, path, _)| *path == file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, change: impl FnOnce(&mut DiskFact)) -> DiskFact {
        let mut disk = DiskFact::default();
        (disk.name, disk.names) = (name.to_owned(), vec![name.to_owned(), format!("v{name}")]);
        (disk.node, disk.file) = (format!("#{name}"), format!("/{name}.img"));
        (disk.format, disk.protocol, disk.size) = ("raw".to_owned(), Some("file".to_owned()), 1 << 20);
        disk.chain = vec![disk.file.clone()];
        change(&mut disk);
        disk
    }

    fn vm() -> VmRecord {
        let mut vm = crate::retention::tests::vm();
        let drive = |name: &str| ["-drive".to_owned(), format!("if=none,id={name},file=/{name}.img")];
        vm.command_line =
            std::iter::once("qemu".to_owned()).chain(["a", "b", "c"].into_iter().flat_map(drive)).collect();
        vm
    }

    fn spec(disks: &[&str], map: &[&str]) -> MigrationSpec {
        MigrationSpec {
            disks: disks.iter().map(|&name| name.to_owned()).collect(),
            disk_map: map.iter().map(|text| text.parse().unwrap()).collect(),
            ..MigrationSpec::default()
        }
    }

    #[test]
    fn all_are_those_that_can_be_written() {
        let known = vec![disk("a", |_| {}), disk("b", |disk| disk.read_only = true), disk("c", |_| {})];
        let choice = choose(&vm(), &spec(&["all"], &["vc=/there"]), known.clone()).unwrap();
        let moved: Vec<_> = choice.told().into_iter().map(|disk| (disk.name, disk.to)).collect();
        assert_eq!(moved, [("a".to_owned(), None), ("c".to_owned(), Some("/there".to_owned()))]);
        assert!(choice.blockers.is_empty(), "{:?}", choice.blockers);
        assert!(choose(&vm(), &spec(&[], &[]), known).unwrap().moved.is_empty());
    }

    #[test]
    fn what_cannot_move_is_named_with_the_way_out() {
        let is = |name: &str, words: [&str; 2], change: fn(&mut DiskFact)| {
            let found =
                choose(&vm(), &spec(&[name], &[]), vec![disk("a", change), disk("d", |_| {})]).unwrap();
            let [blocker] = &found.blockers[..] else { panic!("{found:?}") };
            assert!(words.iter().all(|word| blocker.message.contains(word)), "{}", blocker.message);
            assert!(found.moved.is_empty());
        };
        is("x", ["no disk x", "it has a, d"], |_| {});
        is("a", ["can only be read", "must be there"], |disk| disk.read_only = true);
        is("a", ["\"vmdk\"", "both nodes see"], |disk| disk.format = "vmdk".to_owned());
        is("a", ["\"nbd\"", "leave it out"], |disk| disk.protocol = Some("nbd".to_owned()));
        is("a", ["encrypted", "plain text"], |disk| disk.encrypted = true);
        is("a", ["internal snapshots", "remove these"], |disk| disk.special = Some("internal snapshots"));
        is("a", ["\"backup0\"", "wait for its end"], |disk| {
            disk.job = Some(("backup0".to_owned(), "backup".to_owned()));
        });
        is("a", ["share-rw", "without that"], |disk| disk.shared = true);
        is("d", ["not on the command line", "detach it"], |_| {});
        let found =
            choose(&vm(), &spec(&["a"], &["c=/x"]), vec![disk("a", |_| {}), disk("c", |_| {})]).unwrap();
        assert!(found.blockers[0].message.contains("No disk c moves"), "{found:?}");
    }
}
