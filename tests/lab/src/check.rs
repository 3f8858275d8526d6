//! Self-test of a lab: the hosts reach each other, RDMA connections can be made, and RDMA reads work.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::address;
use crate::supervisor::Lab;
use crate::wire::{Command, Event};

/// Longest time for one step.
const STEP_MS: u64 = 60_000;

/// What a command said and how it ended.
#[derive(Debug)]
pub struct Done {
    /// Standard output and error.
    pub text: String,
    /// As [`Event::Exit`].
    pub status: i32,
}

/// A shell command.
#[must_use]
pub fn shell(text: &str, timeout_ms: u64) -> Command {
    let argv = ["sh", "-c", text].map(str::to_owned).to_vec();
    Command { argv, env: Vec::new(), folder: None, timeout_ms }
}

/// Runs a command in a host to its end.
///
/// # Errors
/// The host went away.
pub fn run(lab: &Lab, host: usize, command: Command) -> Result<Done> {
    collect(&lab.exec(host, command)?).with_context(|| format!("host h{host} went away"))
}

fn collect(events: &std::sync::mpsc::Receiver<Event>) -> Option<Done> {
    let mut text = String::new();
    for event in events {
        match event {
            Event::Out(more) | Event::Err(more) => text.push_str(&more),
            Event::Exit { status } => return Some(Done { text, status }),
            _ => {}
        }
    }
    None
}

/// Runs a server in `server` and, once it listens, a client in `client`. What the client said.
///
/// # Errors
/// One of them failed; the message has its words.
pub fn pair(lab: &Lab, server: (usize, &str), client: (usize, &str)) -> Result<String> {
    let serving = lab.exec(server.0, shell(server.1, STEP_MS))?;
    let mut last = String::new();
    for _ in 0..10 {
        // There is no telling when such a server listens; a client that finds none says so and is tried again.
        std::thread::sleep(Duration::from_millis(700));
        let done = run(lab, client.0, shell(client.1, STEP_MS))?;
        if done.status == 0 {
            let end = collect(&serving).context("the server's host went away")?;
            if end.status != 0 {
                bail!("'{}' on h{} ended with {}: {}", server.1, server.0, end.status, end.text);
            }
            return Ok(done.text);
        }
        last = done.text;
        if done.status == 124 {
            break;
        }
    }
    bail!("'{}' on h{} failed: {}", client.1, client.0, last.trim())
}

/// Checks every pair of neighbouring hosts, and prints what it finds.
///
/// # Errors
/// The first thing that does not work.
pub fn all(lab: &Lab, hosts: usize) -> Result<()> {
    for host in 1..=hosts {
        let found = run(lab, host, shell("ibv_devinfo -d rxe0", STEP_MS))?;
        if !found.text.contains("PORT_ACTIVE") {
            bail!("h{host} has no active RDMA port: {}", found.text);
        }
        let mtu = found.text.lines().find(|line| line.contains("active_mtu")).unwrap_or_default().trim();
        println!("h{host}: rxe0 is active, {mtu}");
    }
    for (server, client) in (1..hosts).map(|host| (host, host + 1)) {
        let to = address(server);
        pair(
            lab,
            (server, &format!("rping -s -a {to} -C 10")),
            (client, &format!("rping -c -a {to} -C 10")),
        )?;
        println!("h{client} -> h{server}: rping, 10 of 10");
    }
    if hosts > 1 {
        println!("{}", read_latency(lab, 1, 2)?);
        println!("{}", read_bandwidth(lab, 1, 2)?);
    }
    Ok(())
}

/// `ib_read_lat` of 4 KiB from `client` out of `server`.
///
/// # Errors
/// See [`pair`].
pub fn read_latency(lab: &Lab, server: usize, client: usize) -> Result<String> {
    let common = "ib_read_lat -d rxe0 -x 1 -s 4096 -n 1000 -F";
    let text = pair(lab, (server, common), (client, &format!("{common} {}", address(server))))?;
    let row = last_row(&text)?;
    Ok(format!(
        "h{client} -> h{server}: ib_read_lat 4 KiB: typical {} us, average {} us, 99 % {} us",
        field(&row, 4)?,
        field(&row, 5)?,
        field(&row, 7)?
    ))
}

/// `ib_read_bw` of 64 KiB from `client` out of `server`.
///
/// # Errors
/// See [`pair`].
pub fn read_bandwidth(lab: &Lab, server: usize, client: usize) -> Result<String> {
    let common = "ib_read_bw -d rxe0 -x 1 -s 65536 -n 500 -F";
    let text = pair(lab, (server, common), (client, &format!("{common} {}", address(server))))?;
    Ok(format!("h{client} -> h{server}: ib_read_bw 64 KiB: average {} MiB/s", field(&last_row(&text)?, 3)?))
}

/// The figures of perftest's table.
fn last_row(text: &str) -> Result<Vec<String>> {
    text.lines()
        .rev()
        .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .find(|row| row.len() >= 4 && row.iter().all(|word| word.parse::<f64>().is_ok()))
        .with_context(|| format!("no figures in: {text}"))
}

fn field(row: &[String], index: usize) -> Result<&str> {
    row.get(index).map(String::as_str).with_context(|| format!("no column {index} in {row:?}"))
}
