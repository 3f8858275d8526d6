//! A keyboard for guests: tests type lines of shell in them, over a virtio-serial port, and read on the console what that printed.
//!
//! With it come guests that can fork themselves, and the programs and libraries that they do that with.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmove_guest::config::{Config, Rate};

use crate::daemon::{Node, Vm};
use crate::guest::{Guest, VIRTIO, failures};
use crate::initramfs::{self, KEYBOARD};
use crate::places;

/// The root of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Where Debian has its own Python, whatever else is in the path.
const PYTHON: &str = "/usr/bin/python3";
/// The folder of `examples/fork-job` in the guest.
pub const EXAMPLES: &str = "/examples";

/// What a guest has beside the shell program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum With {
    /// Nothing.
    Nothing,
    /// Python and the library for it.
    Python,
}

/// A guest with a keyboard, a port for forks, `vmove-fork`, and the programs of `examples/fork-job`. Its initramfs is made in `folder`. It
/// writes as many pages in a second as it is told.
///
/// # Errors
/// When something that it needs is not there or cannot be compiled.
pub fn guest(folder: &Path, pages_per_second: u32, with: With) -> Result<Guest> {
    let config = Config {
        working_set_mib: 8,
        rate: Rate::PagesPerSecond(pages_per_second),
        verify: pages_per_second,
        ..Config::default()
    };
    let memory_mib = if with == With::Python { 320 } else { 224 };
    let mut guest = Guest::new(memory_mib, config)?;
    guest.modules = VIRTIO.into_iter().chain(["virtio_console"]).collect();
    guest.extra = keyboard();
    guest.extra.extend(port("fork", "org.vmove.fork"));
    let mut files = vec![
        ("bin/vmove-fork".to_owned(), places::fork_program()?),
        ("bin/dna-search".to_owned(), dna_search(folder)?),
        (format!("{}/primes.sh", &EXAMPLES[1..]), Path::new(ROOT).join("examples/fork-job/primes.sh")),
    ];
    if with == With::Python {
        files.extend(python()?);
    }
    let initrd = folder.join("guest-with-programs.img");
    std::fs::write(&initrd, initramfs::with_files(&places::guest_initrd()?, &files)?)?;
    guest.initrd = Some(initrd);
    Ok(guest)
}

/// Gives a guest a keyboard. Its modules must have `virtio_console`.
#[must_use]
pub fn keyboard() -> Vec<String> {
    let mut words = ["-device", "virtio-serial-pci"].map(str::to_owned).to_vec();
    words.extend(port("keyboard", KEYBOARD));
    words
}

fn port(id: &str, name: &str) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id={id},path={{vmdir}}/{id}.sock,server=on,wait=off"),
        "-device".to_owned(),
        format!("virtserialport,chardev={id},name={name}"),
    ]
}

/// The example in C, as its comment says how to build it.
fn dna_search(folder: &Path) -> Result<PathBuf> {
    let program = folder.join("dna-search");
    let library = Path::new(ROOT).join("guest/c");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-O2", "-static", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-I"]);
    compiler.arg(&library).arg(Path::new(ROOT).join("examples/fork-job/dna-search.c"));
    compiler.arg(library.join("vmove_fork.c")).arg("-o").arg(&program);
    let output = compiler.output().context("cc could not be started")?;
    ensure!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

/// Python as this machine has it, with those modules of its library that the library for guests loads, and no others.
fn python() -> Result<Vec<(String, PathBuf)>> {
    let library = Path::new(ROOT).join("guest/python");
    let loaded = "import encodings.ascii, encodings.latin_1, vmove_fork, sys\n\
                  for m in list(sys.modules.values()): print(getattr(m, '__file__', None) or '')";
    let mut ask = Command::new(PYTHON);
    ask.args(["-B", "-S", "-c", loaded]).env("PYTHONPATH", &library).env_remove("PYTHONHOME");
    let said = ask.output().with_context(|| format!("{PYTHON} could not be started"))?;
    ensure!(said.status.success(), "{PYTHON}: {}", String::from_utf8_lossy(&said.stderr));
    let program = Path::new(PYTHON).canonicalize()?;
    let text = String::from_utf8(said.stdout)?;
    let mut parts: Vec<PathBuf> =
        text.lines().filter(|line| line.starts_with("/usr/")).map(Into::into).collect();
    parts.push(program.clone());
    let mut paths = Vec::new();
    for part in parts {
        // Modules in C and the program itself have libraries.
        if part.extension().is_none_or(|extension| extension != "py") {
            paths.extend(libraries(&part)?);
        }
        paths.push(part);
    }
    paths.sort();
    paths.dedup();
    let mut files: Vec<(String, PathBuf)> = paths
        .into_iter()
        .map(|path| (path.to_string_lossy().trim_start_matches('/').to_owned(), path))
        .collect();
    files.push(("bin/python3".to_owned(), program));
    files.push((format!("{}/vmove_fork.py", &EXAMPLES[1..]), library.join("vmove_fork.py")));
    files
        .push((format!("{}/render.py", &EXAMPLES[1..]), Path::new(ROOT).join("examples/fork-job/render.py")));
    Ok(files)
}

/// The shared libraries of a program, by the paths at which the loader finds them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd could not be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let path =
        |line: &str| line.split_ascii_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
}

/// Types in one guest.
#[derive(Debug)]
pub struct Typist {
    keyboard: UnixStream,
    vm: Vm,
    typed: u32,
}

/// What a line did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Its exit code.
    pub code: i32,
    /// What the console showed from when it was typed to its end.
    pub printed: String,
}

fn sit_down(node: &Node, name: &str) -> Result<(UnixStream, Vm)> {
    let vm = node.vm(name)?;
    let path = vm.dir.join("keyboard.sock");
    let keyboard = UnixStream::connect(&path).with_context(|| path.display().to_string())?;
    Ok((keyboard, vm))
}

impl Typist {
    /// Sits down at a VM that runs.
    ///
    /// # Errors
    /// When it has no keyboard.
    pub fn at(node: &Node, name: &str) -> Result<Self> {
        let (keyboard, vm) = sit_down(node, name)?;
        Ok(Self { keyboard, vm, typed: 0 })
    }

    /// Goes on where its guest is now.
    ///
    /// # Errors
    /// As [`Typist::at`].
    pub fn follow(&mut self, node: &Node, name: &str) -> Result<()> {
        (self.keyboard, self.vm) = sit_down(node, name)?;
        Ok(())
    }

    /// Types a line and waits until it has ended, at most `timeout`.
    ///
    /// # Errors
    /// When it has not, or the guest has told of an error.
    pub fn line(&mut self, line: &str, timeout: Duration) -> Result<Done> {
        let before = self.start(line)?;
        self.end(before, timeout)
    }

    /// Types a line. Gives the length of what the console showed before, for [`Typist::end`].
    ///
    /// # Errors
    /// When the keyboard is gone.
    pub fn start(&mut self, line: &str) -> Result<usize> {
        let before = self.vm.console().len();
        self.keyboard.write_all(format!("{line}\n").as_bytes())?;
        self.typed += 1;
        Ok(before)
    }

    /// Waits until the line that was typed last has ended.
    ///
    /// # Errors
    /// As [`Typist::line`].
    pub fn end(&self, before: usize, timeout: Duration) -> Result<Done> {
        let (deadline, mark) = (Instant::now() + timeout, format!("VMOVE-GUEST TYPED {} ", self.typed));
        loop {
            let console = self.vm.console();
            let failed = failures(&console);
            ensure!(failed.is_empty(), "the guest tells of errors: {failed:#?}");
            let shown = console.get(before..).unwrap_or_default();
            if let Some((printed, code)) = shown.split_once(&mark).filter(|(_, code)| code.contains('\n')) {
                let code = code.lines().next().unwrap_or_default().trim().parse()?;
                return Ok(Done { code, printed: printed.replace('\r', "") });
            }
            if Instant::now() > deadline {
                bail!("what was typed has not ended in {timeout:?}: {shown}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
