//! Cleaning up when a program is interrupted: guards are not dropped by a signal.

use anyhow::Result;
use nix::sys::signal::{SigSet, Signal};

use crate::sandbox;

/// From now on, Ctrl-C, SIGTERM and SIGHUP remove this process's sandboxes before the process ends. To be called before
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
            std::process::exit(128 + signal as i32);
        }
    })?;
    Ok(())
}
