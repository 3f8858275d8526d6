//! Cleans up when a program is interrupted or killed, because a signal does not drop guards.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};

use crate::{networks, sandbox};

/// From now on, Ctrl-C, SIGTERM and SIGHUP remove this process's sandboxes and networks before the process ends. Call it before
/// threads are started, because they inherit the blocked signals, as do started programs; our daemons unblock them.
///
/// # Errors
/// When the signals cannot be blocked.
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

/// Variable for the process that waits for the end of another process: the id of that other process.
const WATCHED: &str = "VMOVE_CLEAN_UP_AFTER";

/// As [`clean_up_when_interrupted`], but also cleans up after SIGKILL: the program is started a second time, and this second process
/// waits until the first has ended for any reason. Call it before everything else: in the second process it does not return.
///
/// # Errors
/// When the second process cannot be started, or the signals cannot be blocked.
pub fn clean_up_when_killed() -> Result<()> {
    if let Some(pid) = std::env::var(WATCHED).ok().and_then(|pid| pid.parse().ok()) {
        // Nobody writes. The read ends when the watched process ends, because only that process has the other end of the pipe.
        std::io::stdin().read_to_end(&mut Vec::new())?;
        sandbox::clean_up_of(pid);
        networks::clean_up_of(pid);
        std::process::exit(0);
    }
    let program = std::env::current_exe().context("the path of this program")?;
    let mut watcher = Command::new(program);
    watcher.env(WATCHED, std::process::id().to_string()).stdin(Stdio::piped()).stdout(Stdio::null());
    // A process group of its own: killing the group of the first process must not kill both.
    let watcher = watcher.process_group(0).spawn().context("a second process to clean up after this one")?;
    // This process keeps the pipe open as long as it lives.
    std::mem::forget(watcher);
    clean_up_when_interrupted()
}
