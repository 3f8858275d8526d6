//! Asks the supervisor of a running lab.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::wire::{Command, Event, Request, line};

/// Sends a request and gives every answer to `each`, until the supervisor hangs up.
///
/// # Errors
/// No lab is running there, or it refused.
pub fn ask(control: &Path, request: &Request, mut each: impl FnMut(Event)) -> Result<()> {
    let mut stream = UnixStream::connect(control)
        .with_context(|| format!("no lab answers at {}; './run lab up' starts one", control.display()))?;
    stream.write_all(&line(request)?)?;
    for text in BufReader::new(stream).lines() {
        match serde_json::from_str(&text?)? {
            Event::Failed(why) => bail!(why),
            event => each(event),
        }
    }
    Ok(())
}

/// Runs a command in a host and passes its output on. Its exit status.
///
/// # Errors
/// As [`ask`].
pub fn exec(control: &Path, host: usize, command: Command) -> Result<i32> {
    let mut found = None;
    ask(control, &Request::Exec { host, command }, |event| match event {
        Event::Out(text) => {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
        Event::Err(text) => eprint!("{text}"),
        Event::Exit { status } => found = Some(status),
        _ => {}
    })?;
    found.context("the host went away before the command ended")
}
