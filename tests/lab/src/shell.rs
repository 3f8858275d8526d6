//! A terminal of this machine on the console of a host.

use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// Ctrl-], which ends the connection, as in telnet.
const LEAVE: u8 = 0x1d;

/// Restores the terminal when dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Self> {
        let before = tcgetattr(stdin()).context("could not read the terminal's settings")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(stdin(), SetArg::TCSANOW, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, &self.0);
    }
}

/// Connects to the console socket until Ctrl-], or the end of input where that is no terminal.
///
/// # Errors
/// No lab is running there, or the host went away.
pub fn attach(console: &Path) -> Result<()> {
    let mut host = UnixStream::connect(console)
        .with_context(|| format!("no host answers at {}; './run lab up' starts a lab", console.display()))?;
    let terminal = stdin().is_terminal();
    eprintln!("connected; Ctrl-] leaves");
    let _raw = if terminal { Some(Raw::enter()?) } else { None };
    host.write_all(b"\n")?; // the shell prints its prompt
    let mut buffer = [0; 4096];
    let mut open = true;
    loop {
        let input = stdin();
        let mut fds =
            [PollFd::new(host.as_fd(), PollFlags::POLLIN), PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        // After the end of input, which would be told for ever, wait a moment for the last answer.
        let (watched, time) = if open { (2, PollTimeout::NONE) } else { (1, PollTimeout::from(1000_u16)) };
        let ready = poll(&mut fds[..watched], time)?;
        let [from_host, from_keyboard] =
            [0, 1].map(|n: usize| fds[n].revents().is_some_and(|told| !told.is_empty()));
        if ready == 0 {
            return Ok(());
        }
        if from_host {
            let len = host.read(&mut buffer)?;
            anyhow::ensure!(len > 0, "the host went away");
            stdout().write_all(&buffer[..len])?;
            stdout().flush()?;
        }
        if open && from_keyboard {
            let len = nix::unistd::read(stdin(), &mut buffer)?;
            let typed = &buffer[..len];
            if typed.contains(&LEAVE) {
                return Ok(());
            }
            open = len > 0;
            host.write_all(typed)?;
        }
    }
}
