//! One host: how its QEMU is started.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Name of the virtio serial port between supervisor and agent.
pub const PORT_NAME: &str = "vmove.lab";

/// Where the parts of a lab are.
#[derive(Debug, Clone)]
pub struct Places {
    /// What setup made: kernel, initramfs, tools.
    pub files: PathBuf,
    /// The source tree: the hosts' start script is in it.
    pub source: PathBuf,
    /// QEMU.
    pub qemu: PathBuf,
    /// Sockets and logs of this lab, and a folder for each host to write to.
    pub state: PathBuf,
}

/// What the hosts are like.
#[derive(Debug, Clone)]
pub struct Shape {
    /// How many, 1 to 9.
    pub hosts: usize,
    /// Memory of each in MiB.
    pub memory_mib: u32,
    /// Processors of each.
    pub processors: u32,
    /// Whether to make a soft RoCE device.
    pub rdma: bool,
    /// Kernel of the hosts.
    pub kernel: Kernel,
    /// Whether each has an IOMMU and a network card with virtual functions, on a network of their own.
    pub devices: bool,
    /// NUMA nodes of each, which share its processors and its memory equally. 1: none are made.
    pub numa_nodes: u32,
}

/// A kernel that setup has unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kernel {
    /// That of the backports of Debian 12
    Stable,
    /// A newer one, whose soft RoCE has on-demand paging
    Next,
}

impl Kernel {
    const fn files(self) -> (&'static str, &'static str) {
        match self {
            Self::Stable => ("vmlinuz", "initrd.img"),
            Self::Next => ("vmlinuz-next", "initrd-next.img"),
        }
    }
}

impl Places {
    /// Socket on which QEMU connects host `number` to the switch.
    #[must_use]
    pub fn wire(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.net"))
    }

    /// Socket on which QEMU connects the card with virtual functions of host `number` to the cards' switch.
    #[must_use]
    pub fn card(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.card"))
    }

    /// Socket on which QEMU connects host `number` itself to the cards' switch, beside its card.
    #[must_use]
    pub fn beside_card(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.beside"))
    }

    /// Socket of the agent's port.
    #[must_use]
    pub fn port(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.port"))
    }

    /// Socket of the terminal on which the host runs a shell.
    #[must_use]
    pub fn terminal(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.terminal"))
    }

    /// Folder that host `number` sees as `/run/lab` and may write to.
    #[must_use]
    pub fn folder(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}"))
    }

    /// Kernel messages of a host.
    #[must_use]
    pub fn console(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.console"))
    }

    /// What QEMU itself had to say.
    #[must_use]
    pub fn qemu_log(&self, number: usize) -> PathBuf {
        self.state.join(format!("h{number}.qemu.log"))
    }

    /// Where a supervisor takes requests.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.state.join("control")
    }
}

/// IPv4 address of a host.
#[must_use]
pub fn address(number: usize) -> String {
    format!("10.77.0.{number}")
}

/// Starts the QEMU of host `number`. It dies with the calling thread's process, even if that is killed.
///
/// # Errors
/// QEMU could not be started.
pub fn start(places: &Places, shape: &Shape, number: usize, program: &Path) -> Result<Child> {
    std::fs::create_dir_all(places.folder(number))?;
    let log = File::create(places.qemu_log(number))?;
    // There is no option by which QEMU dies with its parent before 10.2; setpriv asks the kernel for that.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(&places.qemu)
        .args(arguments(places, shape, number, program)?)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("could not start {}", places.qemu.display()))
}

/// Tells the host's kernel how fast its clock ticks, which is as this machine's does. On a busy machine it would measure wrongly, and then live
/// several times too fast.
fn ticks() -> String {
    let machine = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = machine.lines().find(|line| line.starts_with("bogomips"));
    // Two of them are one tick.
    let rate = line.and_then(|line| line.split(':').nth(1)?.trim().parse::<f64>().ok());
    rate.map_or_else(String::new, |rate| format!("tsc_early_khz={:.0} ", rate * 500.0))
}

fn arguments(places: &Places, shape: &Shape, number: usize, program: &Path) -> Result<Vec<String>> {
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let share = |tag: &str, path: &str, more: &str| {
        vec![
            "-fsdev".to_owned(),
            format!("local,id={tag},path={path},security_model=none,multidevs=remap{more}"),
            "-device".to_owned(),
            format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
        ]
    };
    let append = format!(
        // The clock options spare seconds of calibration; the rest makes an emulated processor faster.
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable random.trust_cpu=on \
         cryptomgr.notests {}{}lab.number={number} lab.rdma={} lab.program={} lab.start={}",
        ticks(),
        // Without 'nopt' the kernel could let devices pass its IOMMU by.
        if shape.devices { "intel_iommu=on iommu=nopt " } else { "" },
        u8::from(shape.rdma),
        text(program)?,
        text(&places.source.join("tests/lab/host/start"))?,
    );
    let mut all: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-machine",
        "q35",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max,la57=off",
    ]
    .map(str::to_owned)
    .to_vec();
    let mut add = |name: &str, value: String| all.extend([name.to_owned(), value]);
    add("-name", format!("lab-h{number}"));
    add("-m", shape.memory_mib.to_string());
    add("-smp", shape.processors.to_string());
    for node in (0..shape.numa_nodes).filter(|_| shape.numa_nodes > 1) {
        let (memory, cpus) = (shape.memory_mib / shape.numa_nodes, shape.processors / shape.numa_nodes);
        let (first, last) = (node * cpus, (node + 1) * cpus - 1);
        add("-object", format!("memory-backend-ram,id=numa{node},size={memory}M"));
        add("-numa", format!("node,nodeid={node},cpus={first}-{last},memdev=numa{node}"));
    }
    let (kernel, initrd) = shape.kernel.files();
    add("-kernel", text(&places.files.join(kernel))?);
    add("-initrd", text(&places.files.join(initrd))?);
    add("-append", append);
    add("-serial", format!("file:{}", text(&places.console(number))?));
    if shape.devices {
        // Before all devices that it translates for.
        add("-device", "intel-iommu,intremap=on,caching-mode=on".into());
    }
    add("-device", "virtio-serial-pci".into());
    add("-chardev", format!("socket,id=port,path={},server=on,wait=off", text(&places.port(number))?));
    add("-device", format!("virtserialport,chardev=port,name={PORT_NAME}"));
    add(
        "-chardev",
        format!("socket,id=terminal,path={},server=on,wait=off", text(&places.terminal(number))?),
    );
    add("-device", "virtconsole,chardev=terminal".into());
    add("-device", "virtio-rng-pci".into());
    add(
        "-netdev",
        format!("stream,id=net,server=off,addr.type=unix,addr.path={}", text(&places.wire(number))?),
    );
    // RoCE's largest packet of 4096 bytes needs more than Ethernet's usual 1500.
    add("-device", format!("virtio-net-pci,netdev=net,mac=52:54:00:77:00:0{number},host_mtu=9000,romfile="));
    if shape.devices {
        add("-device", "pcie-root-port,id=card-port,chassis=1,slot=1".into());
        add(
            "-netdev",
            format!("stream,id=card,server=off,addr.type=unix,addr.path={}", text(&places.card(number))?),
        );
        add("-device", format!("igb,bus=card-port,netdev=card,mac=52:54:00:78:00:{number:02x},romfile="));
        add(
            "-netdev",
            format!(
                "stream,id=beside,server=off,addr.type=unix,addr.path={}",
                text(&places.beside_card(number))?
            ),
        );
        add("-device", format!("virtio-net-pci,netdev=beside,mac=52:54:00:76:00:{number:02x},romfile="));
    }
    all.extend(share("root", "/", ",readonly=on"));
    all.extend(share("tools", &text(&places.files.join("root"))?, ",readonly=on"));
    all.extend(share("out", &text(&places.folder(number))?, ""));
    Ok(all)
}
