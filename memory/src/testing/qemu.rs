//! A real QEMU with a tiny guest that writes to the pages given by the test.

use std::arch::global_asm;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ram::{peek, poke};
use crate::{FileOffset, Mapping, Process, QemuMapping, RamFile, find_mappings};

// A firmware image of 64 KiB. From the reset vector into flat 32-bit mode, then: wait until the word at 0x8000 changes,
// write it to [0x8008] addresses beginning at [0x8004], [0x800c] apart, and answer with the same word at 0x8010.
global_asm!(
    ".pushsection .rodata.vmove_test_firmware, \"a\"",
    ".balign 16",
    "vmove_test_firmware:",
    ".code16",
    "cli",
    // mov bx, offset of the descriptor; lgdt cs:[bx]
    ".byte 0xbb",
    ".word 7f - vmove_test_firmware",
    ".byte 0x2e, 0x66, 0x0f, 0x01, 0x17",
    "mov eax, cr0",
    "or al, 1",
    "mov cr0, eax",
    // A far jump to 8:0xffff0000 + offset of the code below.
    ".byte 0x66, 0xea",
    ".long 0xffff0000 + (6f - vmove_test_firmware)",
    ".word 8",
    ".code32",
    "6:",
    "mov eax, 0x10",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "xor ebp, ebp",
    "2:",
    "pause",
    "mov eax, dword ptr ds:[0x8000]",
    "cmp eax, ebp",
    "je 2b",
    "mov ebp, eax",
    "mov edi, dword ptr ds:[0x8004]",
    "mov ecx, dword ptr ds:[0x8008]",
    "mov edx, dword ptr ds:[0x800c]",
    "3:",
    "test ecx, ecx",
    "jz 4f",
    "mov dword ptr [edi], eax",
    "add edi, edx",
    "dec ecx",
    "jmp 3b",
    "4:",
    "mov dword ptr ds:[0x8010], ebp",
    "jmp 2b",
    ".balign 8",
    "5:",
    ".quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff",
    "7:",
    ".word 23",
    ".long 0xffff0000 + (5b - vmove_test_firmware)",
    ".org vmove_test_firmware + 0xfff0",
    ".code16",
    ".byte 0xe9",
    ".word 0x10000 - 0xfff3",
    ".org vmove_test_firmware + 0x10000",
    ".code64",
    ".popsection",
    ".globl vmove_test_firmware",
);

unsafe extern "C" {
    static vmove_test_firmware: [u8; 0x10000];
}

const MAILBOX: u64 = 0x8000;

/// How the guest's processor runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    Tcg,
    Kvm,
}

/// Whether to let the guest run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Running,
    Paused,
}

/// A running QEMU. Killed on drop.
pub struct Qemu {
    pub child: Child,
    pub process: Process,
    pub files: Vec<RamFile>,
    pub mappings: Vec<QemuMapping>,
    pub map: Arc<Mapping>,
    qmp: BufReader<UnixStream>,
    pass: u32,
    _dir: tempfile::TempDir,
}

/// The QEMUs to test: those named in `VMOVE_TEST_QEMU`, separated by colons, or those that `./run` has fetched, or the one in
/// `PATH`.
pub fn binaries() -> Vec<PathBuf> {
    let fetched = || {
        let each = vmove_skip::QEMUS_OF_SETUP.into_iter().filter_map(std::env::var_os);
        each.reduce(|mut all, next| {
            all.push(":");
            all.push(next);
            all
        })
    };
    let named = std::env::var_os("VMOVE_TEST_QEMU").or_else(fetched);
    let named = named.unwrap_or_else(|| "qemu-system-x86_64".into());
    let runs = |path: &PathBuf| {
        Command::new(path)
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    std::env::split_paths(&named).filter(runs).collect()
}

/// Runs a test with each QEMU, if there is any.
pub fn with_each(accel: Accel, test: impl Fn(&PathBuf)) {
    if accel == Accel::Kvm && std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return vmove_skip::skip!(part = "under KVM", "no access to /dev/kvm");
    }
    let binaries = binaries();
    if binaries.is_empty() {
        vmove_skip::skip!("no QEMU: './run setup' fetches two, VMOVE_TEST_QEMU names others");
    }
    binaries.iter().for_each(test);
}

impl Qemu {
    /// Starts a QEMU whose memory is these files, one NUMA node each.
    pub fn start(
        binary: &PathBuf,
        accel: Accel,
        start: Start,
        backend_options: &str,
        files: Vec<RamFile>,
    ) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (firmware, socket) = (dir.path().join("firmware"), dir.path().join("qmp"));
        // SAFETY: the assembler put 64 KiB there, and nobody writes to it.
        let image: &[u8] = unsafe { &vmove_test_firmware };
        std::fs::write(&firmware, image).map_err(|error| error.to_string())?;
        let mut command = Command::new(binary);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc"]);
        command.args([
            "-cpu",
            "qemu64",
            "-smp",
            "1",
            "-accel",
            if accel == Accel::Kvm { "kvm" } else { "tcg" },
        ]);
        let total: u64 = files.iter().map(|file| file.len().0 >> 20).sum();
        command.arg("-m").arg(format!("{total}M"));
        for (i, file) in files.iter().enumerate() {
            let (path, size) = (file.path().display(), file.len().0);
            command.arg("-object").arg(format!(
                "memory-backend-file,id=ram{i},share=on,mem-path={path},size={size}{backend_options}"
            ));
            command.arg("-numa").arg(format!("node,memdev=ram{i}"));
        }
        command.arg("-bios").arg(&firmware);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        if start == Start::Paused {
            command.arg("-S");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: the function makes one async-signal-safe call.
        unsafe { command.pre_exec(die_with_parent) };
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let qmp = match connect(&socket, &mut child) {
            Ok(qmp) => qmp,
            Err(why) => {
                let _ = child.kill();
                let output = child.wait_with_output().map_err(|error| error.to_string())?;
                return Err(format!("{why}: {}", String::from_utf8_lossy(&output.stderr).trim()));
            }
        };
        let process = Process::open(child.id()).map_err(|error| error.to_string())?;
        let mappings = find_mappings(&process, &files.iter().collect::<Vec<_>>()).expect("RAM is mapped");
        let map = files[0].map().expect("map");
        Ok(Self { child, process, files, mappings, map, qmp, pass: 0, _dir: dir })
    }

    /// Executes a QMP command without arguments and returns its answer.
    pub fn qmp(&mut self, command: &str) -> String {
        let stream = self.qmp.get_mut();
        writeln!(stream, "{{\"execute\":\"{command}\"}}").expect("QMP");
        loop {
            let mut line = String::new();
            assert_ne!(self.qmp.read_line(&mut line).expect("QMP answers"), 0, "QEMU ended");
            if line.contains("\"return\"") || line.contains("\"error\"") {
                return line;
            }
        }
    }

    /// Tells the guest to write to `count` addresses, and waits until it has. Returns what it wrote.
    pub fn guest_writes(&mut self, base: u64, count: u64, stride: u64) -> u32 {
        self.order(base, count, stride);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.order_is_done() {
            assert!(Instant::now() < deadline, "the guest does not answer");
            std::thread::sleep(Duration::from_micros(200));
        }
        self.pass
    }

    /// Tells the guest to write, without waiting.
    pub fn order(&mut self, base: u64, count: u64, stride: u64) {
        let word = |value: u64| u32::try_from(value).expect("below 4 GiB");
        self.pass += 1;
        let low = |a: u32, b: u32| u64::from(a) | u64::from(b) << 32;
        poke(&self.map, MAILBOX + 8, low(word(count), word(stride)));
        let base = word(base).to_le_bytes();
        self.map.copy_in(FileOffset(MAILBOX + 4), &base).expect("in range");
        self.map.copy_in(FileOffset(MAILBOX), &self.pass.to_le_bytes()).expect("in range");
    }

    pub fn order_is_done(&self) -> bool {
        peek(&self.map, MAILBOX + 16) & 0xffff_ffff == u64::from(self.pass)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest must not survive a test that is killed.
fn die_with_parent() -> std::io::Result<()> {
    // SAFETY: no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    Ok(())
}

fn connect(socket: &PathBuf, child: &mut Child) -> Result<BufReader<UnixStream>, String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => return Err(error.to_string()),
            Err(_) => {}
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("QEMU ended with {status}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(|error| error.to_string())?;
    let mut qmp = BufReader::new(stream);
    let mut greeting = String::new();
    qmp.read_line(&mut greeting).map_err(|error| error.to_string())?;
    writeln!(qmp.get_mut(), "{{\"execute\":\"qmp_capabilities\"}}").map_err(|error| error.to_string())?;
    qmp.read_line(&mut greeting).map_err(|error| error.to_string())?;
    Ok(qmp)
}
