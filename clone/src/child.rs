//! One copy of a guest: a QEMU that is prepared, gets the template's memory and device state, and runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use vmove_types::Backing;

use tokio::io::AsyncWriteExt;
use vmove_memory::{
    ByteLen, MappingHints, MemoryDir, Process, QemuMapping, RamFile, Replacement, Sharing, find_mappings,
    replace_in_qemu, touched_in_qemu,
};
use vmove_node::guest_devices::fit::Owned;
use vmove_node::layout;
use vmove_node::record::{RamFileRecord, VmRecord};
use vmove_node::starter::Starter;
use vmove_qmp::access::{self, Denied};
use vmove_qmp::client::FdSetEntry;
use vmove_qmp::cmdline::{ChildIdentity, Nic};
use vmove_qmp::confine::Confinement;
use vmove_qmp::switchover::{Destination, DestinationOptions, Inbound, StateSender};
use vmove_qmp::{Client, CommandLine, QemuProcess, RamFileSpec, RunLayout};
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::fork_report::{ChildNic, LoadWrite};
use vmove_types::time::Mono;

use crate::disk::{self, Disk, Images, Overlay};
use crate::error::blocking;
use crate::service::PageService;
use crate::template::Source;
use crate::verify::Comparison;
use crate::{CloneError, identity, network, room};

/// A hundred QEMUs started at once take their time.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// For what takes milliseconds alone, and more beside a hundred others.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// What all children of a guest have in common.
#[derive(Debug, Clone)]
pub struct Base {
    /// Command line as the operator gave it.
    pub command_line: Vec<String>,
    /// Environment variables of QEMU.
    pub environment: Vec<(String, String)>,
    /// Machine type with its version.
    pub machine: String,
    /// Backing of guest memory.
    pub backing: Backing,
    /// The daemon's folder for VMs.
    pub run_dir: PathBuf,
    /// The daemon's folder for guest memory.
    pub memory_dir: PathBuf,
    /// Disks that are written: each child gets an overlay.
    pub disks: Vec<Disk>,
    /// Where the images of these are.
    pub images: Images,
    /// Folder for overlays; `None` for that of each image, or of the sockets that lead to it.
    pub overlay_dir: Option<PathBuf>,
    /// How children are started.
    pub starter: Starter,
    /// With which rights their QEMUs run: those of the parent's on its node.
    pub confinement: Confinement,
    /// Devices of its node that the guest owns.
    pub devices: Vec<Owned>,
    /// The child is the guest itself, which runs nowhere else: it keeps its UUID and MAC addresses.
    pub as_it_was: bool,
}

impl Base {
    /// Whether the guest locks its memory. Its children do not.
    #[must_use]
    pub fn locks_memory(&self) -> bool {
        let line = CommandLine::parse(self.command_line.iter().map(OsString::from).collect());
        line.and_then(|mut line| line.lock_nothing()).unwrap_or(false)
    }
}

/// A child that could be started.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its number among the children of its parent.
    pub index: u32,
    /// Who it is.
    pub identity: ChildIdentity,
    /// Where its files are.
    pub layout: RunLayout,
    /// Its own RAM files: empty until it is given memory of its own.
    pub ram: Vec<RamFileSpec>,
    /// Its disks.
    pub overlays: Vec<Overlay>,
    /// The template of its command line, for its record.
    command_line: Vec<String>,
    environment: Vec<(String, String)>,
    argv: Vec<OsString>,
    /// The same without its environment.
    bare_argv: Vec<OsString>,
    nics: Vec<Nic>,
    /// MAC addresses of these NICs of its parent, as far as its command line has them.
    parents_macs: Vec<Option<String>>,
    /// Its MAC addresses are those of the device state.
    as_it_was: bool,
    starter: Starter,
}

impl Plan {
    /// Derives a child from its parent.
    ///
    /// # Errors
    /// [`CloneError::CommandLine`]; [`CloneError::Refused`] for files and sockets that parent and child would take from each
    /// other.
    pub fn new(base: &Base, index: u32, name: &str) -> Result<Self, CloneError> {
        let mut line = CommandLine::parse(base.command_line.iter().map(OsString::from).collect())?;
        line.pin_machine(&base.machine)?;
        // All of the template would be copied for it.
        line.lock_nothing()?;
        let parents: Vec<Option<String>> =
            line.nics()?.iter().map(|nic| mac_in(nic).map(str::to_owned)).collect();
        let identity = match base.as_it_was {
            true => identity::kept(name),
            false => identity::fresh(name, line.nics()?.len()),
        };
        line.give_identity(&identity)?;
        let layout = layout::of_vm(&base.run_dir, &base.memory_dir, name, base.backing, &base.confinement);
        let folder = base.overlay_dir.as_deref();
        let overlay = |(number, disk): (usize, &Disk)| match &base.images {
            Images::Here => Overlay::new(disk, number, name, folder),
            Images::Exported(at) => at.overlay(disk, number, name, folder.unwrap_or(&at.folder)),
        };
        let overlays: Vec<Overlay> = base.disks.iter().enumerate().map(overlay).collect();
        let alone = base.images != Images::Here;
        disk::rewrite(&mut line, &base.disks.iter().zip(&overlays).collect::<Vec<_>>(), alone)?;
        let command = line.derive_destination(&layout)?;
        let same: Vec<Blocker> = command.same_paths.iter().map(|path| same_path(path)).collect();
        if !same.is_empty() {
            return Err(CloneError::Refused(same));
        }
        let mut argv = command.argv;
        if base.backing != Backing::Thp {
            let mut started = CommandLine::parse(argv)?;
            started.reserve_nothing()?;
            argv = started.to_argv();
        }
        let words = line.to_argv().into_iter().map(|word| word.to_string_lossy().into_owned());
        Ok(Self {
            index,
            identity,
            layout,
            ram: command.ram,
            overlays,
            command_line: words.collect(),
            environment: base.environment.clone(),
            argv: layout::with_environment(argv.clone(), &base.environment),
            bare_argv: argv,
            nics: line.nics()?,
            parents_macs: parents,
            as_it_was: base.as_it_was,
            starter: base.starter.clone(),
        })
    }

    /// Environment variables of its QEMU.
    #[must_use]
    pub fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// The template of its command line.
    #[must_use]
    pub fn command_line(&self) -> &[String] {
        &self.command_line
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// The MAC address of its NIC of this id.
    #[must_use]
    pub fn mac_of(&self, id: &str) -> Option<&str> {
        let nic = self.nics.iter().find(|nic| nic.id.as_deref() == Some(id))?;
        mac_in(nic)
    }

    /// Its NICs that are given by `-device`, for its report.
    #[must_use]
    pub fn nic_report(&self) -> Vec<ChildNic> {
        let both = self.nics.iter().zip(&self.parents_macs);
        let one = |(nic, parents): (&Nic, &Option<String>)| {
            let mac = mac_in(nic)?.to_owned();
            Some(ChildNic { netdev: nic.netdev.clone(), mac, parents: parents.clone() })
        };
        both.filter_map(one).collect()
    }

    /// Refuses what its QEMU could not open: files of its command line, and the images of `disks` below its overlays. Takes milliseconds.
    ///
    /// # Errors
    /// [`CloneError::Refused`]; [`CloneError::Io`].
    pub fn may_open(&self, images: &[PathBuf]) -> Result<(), CloneError> {
        let denied = access::denied(
            &self.bare_argv,
            &self.layout,
            &access::More { read: images.to_vec(), made: Vec::new() },
        );
        let denied =
            denied.map_err(CloneError::io("ask for QEMU what it may open of", &self.layout.vm_dir))?;
        let blocker =
            |denied: Denied| Blocker::new(BlockerCode::QemuUser, denied.message).about(denied.subject);
        if denied.is_empty() {
            Ok(())
        } else {
            Err(CloneError::Refused(denied.into_iter().map(blocker).collect()))
        }
    }

    /// Gives its QEMU a file.
    fn give(&self, file: &Path) -> Result<(), CloneError> {
        self.layout.confinement.give(file).map_err(CloneError::io("give QEMU", file))
    }

    /// Whether its overlays lie over the images that these disks are now. A fork of the parent in between puts the parent on
    /// another image.
    #[must_use]
    pub fn is_over(&self, disks: &[Disk]) -> bool {
        let wanted = disks.iter().map(|disk| (&disk.file, disk.size));
        self.overlays.iter().map(|overlay| (&overlay.base, overlay.size)).eq(wanted)
    }
}

fn mac_in(nic: &Nic) -> Option<&str> {
    nic.options.split(',').find_map(|option| option.strip_prefix("mac="))
}

fn same_path(path: &Path) -> Blocker {
    let message = format!(
        "{} is named by the command line, and all children would use it: write {{vmdir}} in its place, which is another folder \
         for each VM",
        path.display()
    );
    Blocker::new(BlockerCode::SamePath, message).about(path.to_string_lossy())
}

/// A QEMU that waits for memory and device state. Dropping it ends nothing: see [`Child::kill`].
#[derive(Debug)]
pub struct Child {
    /// What it is.
    pub plan: Plan,
    /// Its QEMU.
    pub qemu: QemuProcess,
    /// Its monitor.
    pub client: Client,
    /// Where its RAM is mapped.
    pub mappings: Vec<QemuMapping>,
    process: Arc<Process>,
    hints: Vec<MappingHints>,
    destination: Destination,
    stream: Option<StateSender>,
    netdevs: Vec<String>,
    /// The template's files that its RAM maps, as device and inode.
    mapped: Vec<(u64, u64)>,
    /// The template's files, as descriptors that QEMU got by `add-fd`.
    descriptors: Vec<FdSetEntry>,
    /// Its faults are answered by a page service.
    served: bool,
}

impl Child {
    /// Starts a QEMU and does everything that needs neither memory nor state. The folder `plan.layout.vm_dir` must be there.
    ///
    /// `started` is told of the process as soon as there is one, to be ended if this fails or is dropped.
    ///
    /// # Errors
    /// [`CloneError`].
    pub async fn prepare(plan: Plan, started: impl FnOnce(QemuProcess)) -> Result<Self, CloneError> {
        let order = plan.clone();
        let qemu = blocking(move || {
            let dir = MemoryDir::prepare(&order.layout.memory_dir, order.layout.backing)?;
            for spec in &order.ram {
                crate::files::remove_file(&spec.path)?;
                let name = spec.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                dir.create_ram_file(name, ByteLen(spec.size))?;
                order.give(&spec.path)?;
            }
            for overlay in &order.overlays {
                overlay.create()?;
                order.give(&overlay.path)?;
            }
            let (folder, rights) = (&order.layout.vm_dir, &order.layout.confinement);
            Ok(order.starter.start(order.name(), &order.argv, folder, rights)?)
        })
        .await?;
        started(qemu.clone());
        let client = qemu.wait_qmp(&plan.layout.qmp_socket, START_TIMEOUT).await?;
        let destination = Destination::prepare(&client, &DestinationOptions::default()).await?;
        let netdevs = network::isolate(&client, &plan.nics).await?;
        let (stream, theirs) = StateSender::pair()?;
        destination.listen(Inbound::Fd(theirs)).await?;
        let (pid, ram) = (qemu.pid(), plan.ram.clone());
        let (process, mappings, hints) = blocking(move || {
            let process = Process::open(pid)?;
            let files: Vec<RamFile> = ram.iter().map(|r| RamFile::open(&r.path)).collect::<Result<_, _>>()?;
            let mappings = find_mappings(&process, &files.iter().collect::<Vec<_>>())?;
            let hints = crate::check::hints_of(&process, &mappings)?;
            Ok((process, mappings, hints))
        })
        .await?;
        let process = Arc::new(process);
        Ok(Self {
            plan,
            qemu,
            client,
            mappings,
            process,
            hints,
            destination,
            stream: Some(stream),
            netdevs,
            mapped: Vec::new(),
            descriptors: Vec::new(),
            served: false,
        })
    }

    /// Replaces QEMU's mapping of its RAM by a private mapping of the template's files. Returns at once if that was done and QEMU has
    /// touched nothing since.
    ///
    /// # Errors
    /// [`CloneError`], in particular for lack of huge pages.
    pub async fn map_template(&mut self, sources: &[Source]) -> Result<(), CloneError> {
        let wanted: Vec<(u64, u64)> = sources.iter().map(|source| source.identity).collect();
        if self.mapped == wanted && !self.touched()? {
            return Ok(());
        }
        for entry in self.descriptors.drain(..) {
            self.client.remove_fd(entry).await?;
        }
        for source in sources {
            use std::os::fd::AsFd;
            self.descriptors.push(self.client.add_fd(None, source.file.as_fd(), DESCRIPTOR_TIMEOUT).await?);
        }
        let replace = |(at, hints): (&QemuMapping, &MappingHints)| Replacement {
            at: *at,
            fd_in_qemu: self.descriptors[at.file_index].fd,
            sharing: Sharing::Private,
            hints: hints.clone(),
        };
        let replacements: Vec<_> = self.mappings.iter().zip(&self.hints).map(replace).collect();
        let process = Arc::clone(&self.process);
        let (dir, backing) = (self.plan.layout.memory_dir.clone(), self.plan.layout.backing);
        let replaced = move || {
            let done = replace_in_qemu(&process, &replacements, &[]);
            done.map_err(|error| {
                room::huge_pages(error, replacements.iter().map(|one| one.at.len.0).sum(), &dir, backing)
            })
        };
        blocking(replaced).await?;
        self.mapped = wanted;
        Ok(())
    }

    /// Has its faults answered by `service`, since its template is still on its way. After [`Self::map_template`], before
    /// [`Self::load`], which touches guest memory.
    ///
    /// # Errors
    /// [`CloneError::Memory`].
    pub async fn be_served(&mut self, service: &Arc<PageService>) -> Result<(), CloneError> {
        self.served = true;
        let (service, process) = (Arc::clone(service), Arc::clone(&self.process));
        let mappings = self.mappings.clone();
        blocking(move || service.take(&process, &mappings)).await
    }

    /// Whether QEMU has read or written guest memory since the template was mapped. What it has written would hide the
    /// template's bytes.
    fn touched(&self) -> Result<bool, CloneError> {
        let mut any = false;
        touched_in_qemu(&self.process, &self.mappings, |_, _| any = true)?;
        Ok(any)
    }

    /// Loads the device state. The guest stands still.
    ///
    /// # Errors
    /// [`CloneError::Switchover`], with QEMU's reason.
    pub async fn load(&mut self, state: &[u8]) -> Result<(), CloneError> {
        let mut stream =
            self.stream.take().ok_or_else(|| CloneError::Task("a child is loaded once".to_owned()))?;
        let write = async {
            // A QEMU that refuses the state closes its end; why is what `loaded` tells.
            let written = stream.write_all(state).await;
            let _ = stream.shutdown().await;
            written
        };
        let (written, loaded) = tokio::join!(write, self.destination.loaded(STEP_TIMEOUT));
        loaded?;
        written.map_err(|e| CloneError::Task(format!("the device state could not be sent to QEMU: {e}")))
    }

    /// Compares its memory with the template, and gives back what was written there while the device state was loaded. It must not have
    /// run.
    ///
    /// # Errors
    /// [`CloneError::Differs`].
    pub async fn verify(&self, template: &[PathBuf]) -> Result<Vec<LoadWrite>, CloneError> {
        let (name, generation) = (self.plan.identity.name.clone(), self.plan.identity.generation.clone());
        let (process, mappings, paths) =
            (Arc::clone(&self.process), self.mappings.clone(), template.to_vec());
        blocking(move || {
            let files: Vec<RamFile> = paths.iter().map(|p| RamFile::open(p)).collect::<Result<_, _>>()?;
            let comparison = Comparison {
                child: &name,
                process: &process,
                mappings: &mappings,
                files: &files,
                generation: &generation,
            };
            comparison.run()
        })
        .await
    }

    /// Lets it run. Its network stays off. Returns when it did.
    ///
    /// # Errors
    /// [`CloneError::Switchover`].
    pub async fn run(&self) -> Result<Mono, CloneError> {
        Ok(Mono(self.destination.resume(STEP_TIMEOUT).await?.at.0))
    }

    /// Gives it NICs of its own and switches them on: see [`network`]. Returns what to say of it.
    pub async fn bring_up_network(&mut self) -> String {
        for entry in self.descriptors.drain(..) {
            // The mapping holds the memory by itself.
            if let Err(error) = self.client.remove_fd(entry).await {
                tracing::debug!(%error, "a descriptor stays open in QEMU");
            }
        }
        // A guest whose memory is on its way is slow.
        let patience = if self.served { 2 * network::UNPLUG_TIMEOUT } else { network::UNPLUG_TIMEOUT };
        if self.plan.as_it_was {
            return network::switch_on(&self.client, &self.destination, &self.netdevs).await;
        }
        network::bring_up(&self.client, &self.netdevs, &self.plan.nics, patience).await
    }

    /// Whether it has a network.
    #[must_use]
    pub fn has_network(&self) -> bool {
        !self.netdevs.is_empty()
    }

    /// Ends it.
    pub async fn kill(&self) {
        if let Err(error) = self.qemu.kill().await {
            tracing::error!(vm = %self.plan.name(), %error, "could not end a child");
        }
    }

    /// Its record, without devices of the node.
    #[must_use]
    pub fn record(&self) -> VmRecord {
        let ram = |spec: &RamFileSpec| RamFileRecord {
            id: spec.id.clone(),
            path: spec.path.clone(),
            size: spec.size,
        };
        VmRecord {
            name: self.plan.name().to_owned(),
            pid: i32::try_from(self.qemu.pid()).unwrap_or_default(),
            pid_start: self.process.start_time(),
            qmp_socket: self.plan.layout.qmp_socket.clone(),
            vm_dir: self.plan.layout.vm_dir.clone(),
            backing: self.plan.layout.backing,
            command_line: self.plan.command_line.clone(),
            environment: self.plan.environment.clone(),
            ram: self.plan.ram.iter().map(ram).collect(),
            overlays: self.plan.overlays.iter().map(|overlay| overlay.path.clone()).collect(),
            devices: Vec::new(),
            adopted: false,
            libvirt: None,
            session: None,
        }
    }
}
