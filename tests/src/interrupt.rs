//! Cleaning up when a program is interrupted or killed: guards are not dropped by a signal.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};

use crate::{networks, sandbox};

/// From now on, Ctrl-C, SIGTERM and SIGHUP remove this process's sandboxes and networks before the process ends. To be called before
/// threads are started, since they inherit the signals' blocking; programs that are started do not.
///
/// # Errors
/// When the signals cannot be taken over.
pub fn clean_up_when_interrupted() -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGHUP);
    signals.thread_block()?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Ok(signal) = signals.wait() {
            eprintln!("{signal}: cleaning up");
            sandbox::clean_up_mine();
            networks::clean_up_of(std::process::id());
            std::process::exit(128 + signal as i32);
        }
    })?;
    Ok(())
}

/// Set for the process that waits for the end of another one: the id of that one.
const WATCHED: &str = "VMOVE_CLEAN_UP_AFTER";

/// As [`clean_up_when_interrupted`], also after SIGKILL: the program is started a second time, and this second process waits
/// until the first has ended, however it did. To be called first of all: in the second process it does not return.
///
/// # Errors
/// When the second process cannot be started, or the signals not be taken over.
pub fn clean_up_when_killed() -> Result<()> {
    if let Some(pid) = std::env::var(WATCHED).ok().and_then(|pid| pid.parse().ok()) {
        // Nobody writes: the pipe is closed with the last process that holds its other end, and only the watched one does.
        std::io::stdin().read_to_end(&mut Vec::new())?;
        sandbox::clean_up_of(pid);
        networks::clean_up_of(pid);
        std::process::exit(0);
    }
    let program = std::env::current_exe().context("the path of this program")?;
    let mut watcher = Command::new(program);
    watcher.env(WATCHED, std::process::id().to_string()).stdin(Stdio::piped()).stdout(Stdio::null());
    // A group of its own: whoever kills the group of the first must not get both.
    let watcher = watcher.process_group(0).spawn().context("a second process to clean up after this one")?;
    // Its pipe stays open as long as this process lives.
    std::mem::forget(watcher);
    clean_up_when_interrupted()
}
