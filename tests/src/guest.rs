//! Guests under test: their QEMU command lines, and stock QEMU processes that run them without vmove.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vmove_guest::beacon::Phase;
use vmove_guest::config::Config;

use crate::beacon::{self, BeaconPage};
use crate::kvm_device;
use crate::places;
use crate::process::Guarded;
use crate::tsc;

/// Kernel parameters of every guest: a quiet and fast start under emulation. Huge pages only where the program asks, so
/// that the kernel has no reason to move pages about; nor does it move them between NUMA nodes, at which a guest of two nodes stands still for
/// good, emulated by a stock QEMU 7.2 on a busy machine.
const KERNEL: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable random.trust_cpu=on \
                      cryptomgr.notests init_on_alloc=0 numa_balancing=disable transparent_hugepage=madvise";

/// How long a guest may take to boot and fill its memory: some 4 s alone, several times that on a busy machine.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(180);

/// How the guest's processor runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// By the processor, through `/dev/kvm`.
    Kvm,
    /// Emulated.
    Tcg,
}

impl Accel {
    /// The argument of QEMU's `-accel`.
    #[must_use]
    pub const fn argument(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// KVM where there is one, unless the guest is to be emulated all the same.
    #[must_use]
    pub fn best(emulated: bool) -> Self {
        if emulated || Self::Kvm.usable().is_err() { Self::Tcg } else { Self::Kvm }
    }

    /// Whether it can be used here.
    ///
    /// # Errors
    /// Why not.
    pub fn usable(self) -> Result<()> {
        if self == Self::Kvm {
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(KVM)
                .context("no KVM here: /dev/kvm cannot be opened")?;
            kvm_device::open_to_qemu()?;
        }
        Ok(())
    }
}

const KVM: &str = "/dev/kvm";

/// What runs in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum System {
    /// Linux with the guest's program, emulated.
    Linux,
    /// The [payload](crate::payload).
    Payload {
        /// Its image, a firmware.
        image: PathBuf,
        /// How its processor runs.
        accel: Accel,
    },
}

/// A guest to be started.
#[derive(Debug, Clone)]
pub struct Guest {
    /// QEMU program.
    pub qemu: PathBuf,
    /// Size of its memory in MiB. It needs some 150 MiB beside its working set and cold pages.
    pub memory_mib: u32,
    /// What it is to do; it gets as many virtual CPUs as it has threads.
    pub config: Config,
    /// Whether a stock QEMU maps its memory on a boundary of 2 MiB. Unless it is told to, QEMU maps a file on tmpfs
    /// anywhere, and the kernel maps no huge page there. vmove sees to its own guests.
    pub aligned: bool,
    /// Kernel modules that it loads, in this order.
    pub modules: Vec<&'static str>,
    /// Memory in MiB that it fills and gives up again before it begins: free, and not zero.
    pub used_mib: u32,
    /// MiB of its first disk that it reads again and again, in parts of 8 MiB. It says `VMOVE-GUEST SCANNED` after each.
    pub scan_mib: u32,
    /// The name of another guest on its network, which it calls until that answers. It needs an address.
    pub neighbour: Option<String>,
    /// More QEMU arguments.
    pub extra: Vec<String>,
    /// The image that `extra` names, if it is new and the guest's only device: where the guest has booted before, it is replaced by what
    /// the guest had written by then.
    pub disk: Option<PathBuf>,
    /// What follows the accelerator's name in `-accel`, with its comma.
    pub accel_options: &'static str,
    /// Its initramfs, unless it is the usual one.
    pub initrd: Option<PathBuf>,
    /// What follows on the kernel's command line.
    pub kernel_options: &'static str,
    /// What runs in it.
    pub system: System,
}

/// Modules for virtio devices on PCI; those of the devices follow.
pub const VIRTIO: [&str; 5] =
    ["virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci"];

impl Guest {
    /// A guest of `memory_mib` on the QEMU under test.
    ///
    /// # Errors
    /// When that is not there.
    pub fn new(memory_mib: u32, config: Config) -> Result<Self> {
        let qemu = places::Qemu::under_test()?;
        Ok(Self {
            qemu,
            memory_mib,
            config,
            aligned: true,
            modules: Vec::new(),
            used_mib: 0,
            scan_mib: 0,
            neighbour: None,
            extra: Vec::new(),
            disk: None,
            accel_options: "",
            initrd: None,
            kernel_options: "",
            system: System::Linux,
        })
    }

    /// Size of its memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }

    /// Program and arguments, without a memory backend and a monitor: those are the starter's business. `serial` is
    /// where the console goes, as a file name QEMU understands.
    ///
    /// # Errors
    /// When kernel or initramfs are not there.
    pub fn command_line(&self, serial: &str) -> Result<Vec<String>> {
        let text = |path: PathBuf| {
            path.into_os_string().into_string().map_err(|p| anyhow::anyhow!("{p:?} is not UTF-8"))
        };
        let mut line = vec![text(self.qemu.clone())?];
        let mut add = |words: &[&str]| line.extend(words.iter().map(|w| (*w).to_owned()));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        let accel = if let System::Payload { accel, .. } = &self.system { *accel } else { Accel::Tcg };
        // All that KVM may write to a guest's memory: QEMU's default has every feature for that but this.
        let cpu = if accel == Accel::Kvm { "qemu64,kvm-asyncpf-int=on" } else { "qemu64" };
        let accelerator = format!("{}{}", accel.argument(), self.accel_options);
        add(&["-machine", "pc", "-accel", &accelerator, "-cpu", cpu]);
        add(&["-m", &self.memory_mib.to_string(), "-smp", &self.config.threads.to_string()]);
        add(&["-serial", &format!("file:{serial}")]);
        if let System::Payload { image, .. } = &self.system {
            add(&["-bios", &text(image.clone())?]);
            line.extend(self.extra.iter().cloned());
            return Ok(line);
        }
        let initrd = self.initrd.clone().map_or_else(places::guest_initrd, Ok)?;
        add(&["-kernel", &text(places::guest_kernel()?)?, "-initrd", &text(initrd)?]);
        let mut task = self.config.to_string();
        if !self.modules.is_empty() {
            task = format!("{task} vmove.modules={}", self.modules.join(","));
        }
        if self.used_mib > 0 {
            task = format!("{task} vmove.used_mib={}", self.used_mib);
        }
        if self.scan_mib > 0 {
            task = format!("{task} vmove.scan_mib={}", self.scan_mib);
        }
        if let Some(neighbour) = &self.neighbour {
            task = format!("{task} vmove.neighbour={neighbour}");
        }
        add(&["-append", &format!("{KERNEL} tsc_early_khz={} {} {task}", tsc::khz(), self.kernel_options)]);
        line.extend(self.extra.iter().cloned());
        Ok(line)
    }
}

/// A QEMU that runs a guest with its RAM in a named shared file, started by us and not by vmove.
#[derive(Debug)]
pub struct StockQemu {
    process: Guarded,
    ram: PathBuf,
    qmp: PathBuf,
    serial: PathBuf,
    log: PathBuf,
}

impl StockQemu {
    /// Starts `guest` in `folder` with its RAM in the file `ram`, which QEMU makes. `more` is appended, such as
    /// `-incoming`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(guest: &Guest, folder: &Path, ram: &Path, more: &[&str]) -> Result<Self> {
        Self::start_with_ram_id(guest, folder, ram, "vmram", more)
    }

    /// As [`StockQemu::start`], with this name for the RAM, by which QEMU knows it in a migration.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_with_ram_id(
        guest: &Guest,
        folder: &Path,
        ram: &Path,
        id: &str,
        more: &[&str],
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let (qmp, serial) = (folder.join("qmp.sock"), folder.join("serial.log"));
        let log = folder.join("qemu.log");
        let line = guest.command_line(&serial.to_string_lossy())?;
        let mut command = Command::new(&line[0]);
        let align = if guest.aligned { ",align=2M" } else { "" };
        command.args(&line[1..]).args([
            "-object",
            &format!(
                "memory-backend-file,id={id},share=on{align},size={}M,mem-path={}",
                guest.memory_mib,
                ram.display()
            ),
            "-machine",
            &format!("memory-backend={id}"),
            "-qmp",
            &format!("unix:{},server=on,wait=off", qmp.display()),
            "-name",
            "guest,debug-threads=on",
        ]);
        let out = File::create(&log)?;
        command.args(more).current_dir(folder).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn().with_context(|| format!("could not start {}", line[0]))?;
        Ok(Self { process: child.into(), ram: ram.to_owned(), qmp, serial, log })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its monitor socket; there some milliseconds after the start.
    #[must_use]
    pub fn qmp(&self) -> &Path {
        &self.qmp
    }

    /// The file with its RAM.
    #[must_use]
    pub fn ram(&self) -> &Path {
        &self.ram
    }

    /// What the guest printed.
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read(&self.serial)
            .map_or_else(|_| String::new(), |text| String::from_utf8_lossy(&text).into_owned())
    }

    /// Waits until the monitor socket is there.
    ///
    /// # Errors
    /// When QEMU ends instead (with what it said), or takes more than 30 s.
    pub fn wait_monitor(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            // It listens on the socket before it sets up the rest; connecting waits for the greeting.
            if self.qmp.exists() {
                return Ok(());
            }
            if let Some(status) = self.process.ended()? {
                bail!("QEMU ended ({status}): {}", self.log());
            }
            if Instant::now() > deadline {
                bail!("QEMU has opened no monitor in 30 s: {}", self.log());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Waits until the guest's program runs.
    ///
    /// # Errors
    /// When QEMU ends, or the guest takes too long; with what they said.
    pub fn wait_running(&mut self) -> Result<BeaconPage> {
        let running = beacon::wait_running(|| vec![self.ram.clone()], BOOT_TIMEOUT);
        match running {
            Ok((_, page)) => {
                debug_assert!(page.read().is_some_and(|b| b.phase == Phase::Running));
                Ok(page)
            }
            Err(e) => Err(e.context(format!("console: {}; QEMU: {}", self.console(), self.log()))),
        }
    }

    /// What QEMU itself printed.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Lines with which the guest's program told of an error.
#[must_use]
pub fn failures(console: &str) -> Vec<String> {
    let told = ["VMOVE-GUEST FAIL", "VMOVE-GUEST ERROR", "Kernel panic", "BUG:", "Oops:", "rcu: INFO: rcu_"];
    console.lines().filter(|line| told.iter().any(|t| line.contains(t))).map(str::to_owned).collect()
}
