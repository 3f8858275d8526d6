//! Files to which a process cannot write, for another reason than a full disk: `strace` answers its writes in the kernel's place.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Each write of a process to a file fails with `EIO`, until this is dropped. Neither can the file be cut.
#[derive(Debug)]
pub struct FailingWrites(Child);

impl FailingWrites {
    /// Begins with it: `file` must be there. Whatever the process `pid` starts meanwhile is traced, so that nobody else can attach to it.
    ///
    /// # Errors
    /// When `strace` cannot attach.
    pub fn of(pid: i32, file: &Path) -> Result<Self> {
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-o", "/dev/null", "-e", "trace=write,ftruncate"]);
        command.args(["-e", "inject=write,ftruncate:error=EIO", "-P"]).arg(file);
        command.args(["-p", &pid.to_string()]).stdin(Stdio::null());
        let this = Self(command.spawn().context("strace")?);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_traced(pid, this.0.id())? {
            ensure!(Instant::now() < deadline, "strace does not attach to {pid}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(this)
    }
}

/// Whether all threads of `pid` are traced by `tracer`.
fn is_traced(pid: i32, tracer: u32) -> Result<bool> {
    let line = format!("\nTracerPid:\t{tracer}\n");
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))?;
    // One that has just ended needs no tracer.
    let status =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok());
    let traced: Vec<bool> = status.map(|text| text.contains(&line)).collect();
    Ok(!traced.is_empty() && traced.iter().all(|one| *one))
}

/// Checks that this is possible here.
///
/// # Errors
/// Why it is not.
pub fn possible() -> Result<()> {
    let status =
        Command::new("strace").args(["-q", "-o", "/dev/null", "true"]).status().context("no strace")?;
    ensure!(status.success(), "strace cannot attach to processes here");
    Ok(())
}

impl Drop for FailingWrites {
    fn drop(&mut self) {
        // Not SIGKILL: it lets go of the process, and of a call that it holds.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}
