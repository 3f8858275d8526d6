//! Self-test of a lab: the hosts reach each other, RDMA connections can be made, and RDMA reads work.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::address;
use crate::supervisor::Lab;
use crate::wire::{Command, Event};

/// Longest time for one step.
const COMMAND_TIMEOUT_MS: u64 = 60_000;

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

/// Everything a command says until it ends; `None` when its host goes away.
pub(crate) fn collect(events: &std::sync::mpsc::Receiver<Event>) -> Option<Done> {
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
    both(lab, server, client).map(|(_, client)| client)
}

/// The same; what the server said, and the client.
///
/// # Errors
/// See [`pair`].
pub fn both(lab: &Lab, server: (usize, &str), client: (usize, &str)) -> Result<(String, String)> {
    let serving = lab.exec(server.0, shell(server.1, COMMAND_TIMEOUT_MS))?;
    let mut last = String::new();
    for _ in 0..10 {
        // There is no telling when such a server listens; a client that finds none says so and is tried again.
        std::thread::sleep(Duration::from_millis(700));
        let done = run(lab, client.0, shell(client.1, COMMAND_TIMEOUT_MS))?;
        if done.status == 0 {
            let end = collect(&serving).context("the server's host went away")?;
            if end.status != 0 {
                bail!("'{}' on h{} ended with {}: {}", server.1, server.0, end.status, end.text);
            }
            return Ok((end.text, done.text));
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
        let found = run(lab, host, shell("ibv_devinfo -d rxe0", COMMAND_TIMEOUT_MS))?;
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

/// Latency of READs of 4 KiB from `client` out of `server`.
fn read_latency(lab: &Lab, server: usize, client: usize) -> Result<String> {
    let found = perftest(lab, (server, client), "ib_read_lat", 4096, 1000, "")?;
    Ok(format!(
        "h{client} -> h{server}: ib_read_lat 4 KiB: typical {} us, average {} us, 99 % {} us",
        figure(&found, 4)?,
        figure(&found, 5)?,
        figure(&found, 7)?
    ))
}

/// Bandwidth of READs of 64 KiB from `client` out of `server`.
fn read_bandwidth(lab: &Lab, server: usize, client: usize) -> Result<String> {
    let found = perftest(lab, (server, client), "ib_read_bw", 65536, 500, "")?;
    Ok(format!("h{client} -> h{server}: ib_read_bw 64 KiB: average {} MiB/s", figure(&found, 3)?))
}

/// The figures of one of perftest's programs, run between two hosts (server, client).
///
/// # Errors
/// See [`pair`].
pub fn perftest(
    lab: &Lab,
    hosts: (usize, usize),
    program: &str,
    bytes: usize,
    count: usize,
    more: &str,
) -> Result<Vec<f64>> {
    let common = format!("{program} -d rxe0 -x 1 -s {bytes} -n {count} -F {more}");
    let text = pair(lab, (hosts.0, &common), (hosts.1, &format!("{common} {}", address(hosts.0))))?;
    // The last line that is all numbers.
    text.lines()
        .rev()
        .filter_map(|line| {
            line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>()
        })
        .find(|row| row.len() >= 4)
        .with_context(|| format!("no figures in: {text}"))
}

/// A column of [`perftest`]'s figures.
///
/// # Errors
/// There is none.
pub fn figure(row: &[f64], column: usize) -> Result<f64> {
    row.get(column).copied().with_context(|| format!("no column {column} in {row:?}"))
}
