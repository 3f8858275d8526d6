//! `vmove libvirt hook`: what libvirt calls, and waits for. It never calls libvirt, which waits for it.

use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use vmove_client::{Client, Error};
use vmove_libvirt::{Domain, SOCKETS};
use vmove_types::libvirt::{DomainHook, DomainOperation};
use vmove_types::problem::{Code, Exit};

use super::host;
use crate::args::libvirt::HookArgs;
use crate::failure::Failure;
use crate::output::End;

/// A `vmoved` that is silent for so long does not live. libvirt itself would wait for ever.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is asked while libvirt waits for guest memory.
const ALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// For a QEMU that is asked in the place of a `vmoved` that does not answer.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest XML of a domain, in bytes.
const LONGEST: u64 = 16 << 20;

pub async fn hook(client: &Client, args: HookArgs) -> Result<Exit, End> {
    let operation = match (args.operation.as_str(), args.part.as_str()) {
        ("prepare", "begin") => None,
        ("migrate", "begin") => Some(DomainOperation::Migrate),
        ("started", "begin") => Some(DomainOperation::Started),
        _ => return Ok(Exit::Done),
    };
    let failed = |why: String| Failure::new(Code::DomainRefused, format!("{}: {why}", args.domain));
    let mut xml = String::new();
    let read = std::io::stdin().lock().take(LONGEST).read_to_string(&mut xml);
    read.map_err(|error| failed(format!("the domain's XML could not be read: {error}")))?;
    let domain = Domain::read(&xml).map_err(|error| failed(vmove_types::problem::chain(&error)))?;
    // Before QEMU takes the socket of another one, which that needs.
    let own = domain.own_monitor().map_err(|error| failed(vmove_types::problem::chain(&error)))?;
    let Some(monitor) = own else { return Ok(Exit::Done) };
    let Some(operation) = operation else {
        host::make_socket_folder()
            .map_err(|error| failed(format!("{SOCKETS} could not be made: {error}")))?;
        return Ok(Exit::Done);
    };
    let request = DomainHook { operation, xml: xml.clone() };
    let why = tokio::select! {
        biased;
        answered = client.answer_libvirt(&request) => match answered {
            Ok(_) => return Ok(Exit::Done),
            Err(Error::Refused(problem)) => return Err(failed(problem.message).into()),
            Err(error) => Failure::from(error).message,
        },
        why = silent(client) => why,
    };
    // A guest that begins here, or is restored, needs no vmoved.
    if operation == DomainOperation::Started && !waits_for_guest(monitor).await {
        return Ok(Exit::Done);
    }
    Err(failed(format!(
        "it is enabled for vmove, and vmoved does not answer here ({why}): start it, or `vmove libvirt disable {}` and restart the domain",
        args.domain
    ))
    .into())
}

/// Ends when vmoved does not answer, with the reason.
async fn silent(client: &Client) -> String {
    loop {
        tokio::time::sleep(ALIVE_INTERVAL).await;
        match tokio::time::timeout(ALIVE_TIMEOUT, client.node()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Failure::from(error).message,
            Err(_) => return format!("silent for {} s", ALIVE_TIMEOUT.as_secs()),
        }
    }
}

/// Whether the QEMU at this monitor waits for a guest of another host. If it does not answer, perhaps.
async fn waits_for_guest(monitor: &Path) -> bool {
    let status = tokio::time::timeout(MONITOR_TIMEOUT, run_state(monitor)).await;
    !matches!(status, Ok(Ok(status)) if status != "inmigrate")
}

/// Two commands of QMP, and what the second answers.
async fn run_state(monitor: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(monitor).await?;
    let asked = b"{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"query-status\"}\n";
    stream.write_all(asked).await?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next_line().await? {
        let answer: Value = serde_json::from_str(&line)?;
        if let Some(status) = answer.pointer("/return/status").and_then(Value::as_str) {
            return Ok(status.to_owned());
        }
    }
    Err(std::io::ErrorKind::UnexpectedEof.into())
}
