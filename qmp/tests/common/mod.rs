//! Real QEMUs for tests: finding them, a guest that counts, cleaning up whatever happens.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::{
    ffi::OsString,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use vmove_types::Backing;

use vmove_qmp::confine::Confinement;
use vmove_qmp::{Client, CommandLine, QemuProcess, RamFileSpec, RunLayout};

pub const TIMEOUT: Duration = Duration::from_secs(20);

/// The QEMUs to test with: those that the environment names, else the one in `PATH`. What is lacking is skipped.
pub fn qemus() -> Vec<PathBuf> {
    let named = vmove_skip::QEMUS_OF_SETUP.map(|name| (name, std::env::var_os(name)));
    let mut found: Vec<PathBuf> = Vec::new();
    for (name, value) in named {
        match value.map(PathBuf::from) {
            Some(path) if path.is_file() => found.push(path),
            Some(path) => vmove_skip::skip!(part = name, "{} is no file", path.display()),
            None => vmove_skip::skip!(part = name, "it is not set"),
        }
    }
    if found.is_empty() {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found_one = std::env::split_paths(&folders).map(|folder| folder.join("qemu-system-x86_64"));
        found.extend(found_one.filter(|path| path.is_file()).take(1));
    }
    if found.is_empty() {
        vmove_skip::skip!(
            "no qemu-system-x86_64 in PATH, and none of VMOVE_QEMU_7_2, VMOVE_QEMU_10_0 and VMOVE_QEMU_TESTING is set"
        );
    }
    found
}

/// A directory on tmpfs, and all QEMUs started in it. Both are gone when it is dropped.
pub struct Bench {
    pub base: PathBuf,
    pub qemu: PathBuf,
    processes: Vec<QemuProcess>,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Bench {
    pub fn new(qemu: &Path) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = PathBuf::from(format!("/dev/shm/vmove-qmp-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&base).unwrap();
        std::fs::write(base.join("counter.rom"), counting_firmware()).unwrap();
        Self { base, qemu: qemu.to_owned(), processes: Vec::new() }
    }

    /// A guest of 64 MiB that counts, with these options added.
    pub fn guest(&self, options: &[&str]) -> CommandLine {
        let rom = self.base.join("counter.rom");
        let mut argv: Vec<OsString> = vec![self.qemu.clone().into()];
        for word in ["-machine", "q35", "-accel", "tcg", "-m", "64M", "-display", "none", "-nodefaults"] {
            argv.push(word.into());
        }
        argv.extend(["-bios".into(), rom.into()]);
        argv.extend(options.iter().map(OsString::from));
        CommandLine::parse(argv).unwrap()
    }

    /// Node `node`. All nodes share one memory directory, so that both QEMUs of a move map the same RAM.
    pub fn layout(&self, node: &str) -> RunLayout {
        let vm_dir = self.base.join(node);
        std::fs::create_dir_all(&vm_dir).unwrap();
        RunLayout {
            qmp_socket: vm_dir.join("qmp.sock"),
            vm_dir,
            memory_dir: self.base.clone(),
            backing: Backing::Thp,
            name: "test".to_owned(),
            confinement: Confinement::default(),
        }
    }

    pub async fn spawn(&mut self, argv: &[OsString], layout: &RunLayout) -> (QemuProcess, Client) {
        let log = layout.vm_dir.join("qemu.log");
        let process = QemuProcess::spawn(argv, &layout.vm_dir, &log, &layout.confinement).unwrap();
        self.processes.push(process.clone());
        let client = process.wait_qmp(&layout.qmp_socket, TIMEOUT).await.unwrap();
        (process, client)
    }

    /// Starts `line` on node "source" and a QEMU that waits for it on node "destination".
    pub async fn couple(&mut self, line: &CommandLine) -> Couple {
        let here = self.layout("source");
        let mut movable = line.clone();
        let ram = movable.rewrite_movable(&here).unwrap();
        let (source_process, source) = self.spawn(&movable.to_argv(), &here).await;
        let (destination_process, destination) = self.waiting(line).await;
        Couple { source_process, source, destination_process, destination, ram }
    }

    /// A QEMU that waits for the guest of `line`.
    pub async fn waiting(&mut self, line: &CommandLine) -> (QemuProcess, Client) {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let there = self.layout(&format!("destination-{number}"));
        let derived = line.derive_destination(&there).unwrap();
        self.spawn(&derived.argv, &there).await
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for process in &self.processes {
            process.kill_now();
        }
        if std::thread::panicking() {
            for process in &self.processes {
                eprintln!("--- {}\n{}", process.log().display(), process.log_tail());
            }
        }
        // A QEMU that is about to die may still hold files in it open, which does no harm.
        let _ = std::fs::remove_dir_all(&self.base);
    }
}

pub struct Couple {
    pub source_process: QemuProcess,
    pub source: Client,
    pub destination_process: QemuProcess,
    pub destination: Client,
    pub ram: Vec<RamFileSpec>,
}

/// What the counting guest has written into its RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub count: u32,
    /// Times that the guest has started from its first instruction.
    pub starts: u32,
}

impl Couple {
    pub fn count(&self) -> Count {
        count(&self.ram[0].path)
    }

    /// Asserts that the guest runs, and has not been restarted.
    pub async fn assert_running(&self) {
        let before = self.count();
        for _ in 0..500 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let now = self.count();
            assert_eq!(now.starts, 1, "the guest was reset");
            if now.count > before.count {
                return;
            }
        }
        panic!("the guest does not count: {before:?}");
    }

    /// Asserts that the guest stands still.
    pub async fn assert_stopped(&self) {
        let before = self.count();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(self.count(), before, "the guest runs");
    }
}

pub fn count(ram: &Path) -> Count {
    let mut bytes = [0; 16];
    std::fs::File::open(ram).unwrap().read_exact_at(&mut bytes, 0x8000).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    Count { count: word(0), starts: word(8) }
}

/// 64 KiB of firmware that counts at 0x8000 for ever, and its own starts at 0x8008.
fn counting_firmware() -> Vec<u8> {
    let mut rom = vec![0xf4; 64 << 10];
    let code: &[u8] = &[
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0x66, 0xff, 0x06, 0x08, 0x80, // inc dword [0x8008]
        0x66, 0xff, 0x06, 0x00, 0x80, // again: inc dword [0x8000]
        0xf3, 0x90, // pause
        0xeb, 0xf7, // jmp again
    ];
    rom[..code.len()].copy_from_slice(code);
    // Reset vector: jmp far 0xf000:0x0000
    rom[0xfff0..0xfff5].copy_from_slice(&[0xea, 0x00, 0x00, 0x00, 0xf0]);
    rom
}

/// The run state, such as `running`.
pub async fn run_state(client: &Client) -> String {
    let reply = client.execute_raw("query-status", serde_json::Value::Null, TIMEOUT).await.unwrap();
    reply["status"].as_str().unwrap().to_owned()
}
