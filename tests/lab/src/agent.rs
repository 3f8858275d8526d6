//! Runs in a host: executes commands that arrive on the virtio serial port.
//!
//! The port can be open only once at a time, so it is opened close-on-exec: a command that stays behind in the
//! background does not keep it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::host::PORT_NAME;
use crate::wire::{Command, Event, Numbered, line};

/// Where answers go; a line at a time.
type Answers = Arc<Mutex<File>>;

/// Serves until the port is closed.
///
/// # Errors
/// There is no such port, or it cannot be read.
pub fn run() -> Result<()> {
    let port =
        File::options().read(true).write(true).open(find_port()?).context("could not open the port")?;
    let answers = Arc::new(Mutex::new(port.try_clone()?));
    let mut lines = BufReader::new(port);
    loop {
        let mut text = String::new();
        if lines.read_line(&mut text)? == 0 {
            // Nobody has the other end open (yet, or any more).
            std::thread::sleep(Duration::from_millis(100));
            continue;
        }
        match serde_json::from_str::<Numbered<Command>>(&text) {
            Ok(Numbered { id, what }) => {
                let answers = Arc::clone(&answers);
                std::thread::spawn(move || {
                    let status = execute(&what, id, &answers);
                    answer(&answers, id, Event::Exit { status });
                });
            }
            Err(error) => eprintln!("agent: not a command: {error}: {text}"),
        }
    }
}

/// The device of the port with our name: there is no udev to make a link.
fn find_port() -> Result<PathBuf> {
    for entry in std::fs::read_dir("/sys/class/virtio-ports").context("no virtio serial ports")? {
        let entry = entry?;
        if std::fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == PORT_NAME) {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    anyhow::bail!("no virtio serial port is called {PORT_NAME}")
}

fn answer(answers: &Answers, id: u64, what: Event) {
    let Ok(line) = line(&Numbered { id, what }) else { return };
    let mut port = answers.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(error) = port.write_all(&line) {
        eprintln!("agent: could not answer: {error}");
    }
}

/// Runs a command to its end. Its exit status as in [`Event::Exit`].
fn execute(command: &Command, id: u64, answers: &Answers) -> i32 {
    let Some((program, arguments)) = command.argv.split_first() else { return 127 };
    let spawned = std::process::Command::new(program)
        .args(arguments)
        .envs(command.env.iter().map(|(name, value)| (name, value)))
        .current_dir(command.folder.as_deref().unwrap_or("/"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            answer(answers, id, Event::Err(format!("{program}: {error}\n")));
            return 127;
        }
    };
    let out = child.stdout.take().map(|pipe| relay(pipe, Event::Out, id, answers));
    let err = child.stderr.take().map(|pipe| relay(pipe, Event::Err, id, answers));
    let status = wait(&mut child, Duration::from_millis(command.timeout_ms));
    // What the command left in the background may hold the pipes for ever; its own words are there by now.
    let begin = Instant::now();
    for relay in [out, err].into_iter().flatten() {
        while !relay.is_finished() && begin.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    status
}

fn relay(
    mut pipe: impl Read + Send + 'static,
    make: fn(String) -> Event,
    id: u64,
    answers: &Answers,
) -> std::thread::JoinHandle<()> {
    let answers = Arc::clone(answers);
    std::thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        while let Ok(len @ 1..) = pipe.read(&mut buffer) {
            answer(&answers, id, make(String::from_utf8_lossy(&buffer[..len]).into_owned()));
        }
    })
}

/// Waits for the end of a command, and kills its process group when its time is over.
fn wait(child: &mut Child, time: Duration) -> i32 {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.code().or(status.signal().map(|s| 128 + s)).unwrap_or(127),
            Ok(None) if begin.elapsed() > time => {
                let _ = i32::try_from(child.id()).map(|id| killpg(Pid::from_raw(id), Signal::SIGKILL));
                let _ = child.wait();
                return 124;
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Err(_) => return 127,
        }
    }
}
