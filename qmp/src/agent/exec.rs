//! Programs that the agent runs.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Agent, AgentError, nonsense};

/// First and longest pause between two looks at a program that runs.
const LOOK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// One answer may take so long; the program itself has its own limit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of an answer with a program's output: the agent keeps 16 MiB of each of the two, which is 43 MiB in base64.
const MAX_STATUS: usize = 48 << 20;

/// A program to run in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecRequest {
    /// Its path in the guest.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// `NAME=VALUE` each.
    pub environment: Vec<String>,
    /// Longest time from the start to the end.
    pub time: Duration,
    /// Bytes of standard output, and of standard error, that are kept.
    pub output: usize,
}

impl ExecRequest {
    /// Runs `program` without arguments for up to 30 s, and keeps 64 KiB of each output.
    #[must_use]
    pub fn new(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            time: Duration::from_secs(30),
            output: 64 << 10,
        }
    }

    /// `sh -c SCRIPT` with the same limits.
    #[must_use]
    pub fn shell(script: &str) -> Self {
        Self { arguments: vec!["-c".to_owned(), script.to_owned()], ..Self::new("/bin/sh") }
    }
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By itself, with this exit status.
    Exit(i64),
    /// By this signal, or on Windows by this exception.
    Signal(i64),
}

/// A program that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Executed {
    /// How.
    pub finish: Finish,
    /// Its standard output, up to the bound.
    pub out: Vec<u8>,
    /// Its standard error, up to the bound.
    pub err: Vec<u8>,
    /// Whether there was more than is kept here.
    pub truncated: bool,
    /// From the request until it was seen to have ended.
    pub took: Duration,
}

impl Executed {
    /// Whether it ended by itself with status 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.finish == Finish::Exit(0)
    }
}

impl Agent {
    /// Runs a program in the guest and waits for its end. One that takes too long goes on: the agent cannot end it.
    ///
    /// # Errors
    /// [`AgentError::StillRuns`], and what [`Agent::ask`] gives.
    pub async fn execute(&mut self, request: &ExecRequest) -> Result<Executed, AgentError> {
        const START: &str = "guest-exec";
        let begun = Instant::now();
        let until = begun + request.time;
        let arguments = json!({
            "path": request.program,
            "arg": request.arguments,
            "env": request.environment,
            "capture-output": true,
        });
        let reply = self.ask(START, &arguments, ANSWER_TIMEOUT.min(request.time)).await?;
        let pid = reply.get("pid").and_then(Value::as_i64);
        let pid = pid.ok_or_else(|| nonsense(START, "expected a process id", &reply))?;
        let late = || AgentError::StillRuns { program: request.program.clone(), pid, waited: request.time };
        let mut pause = LOOK.0;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            let status = match self.status(pid, request, ANSWER_TIMEOUT.min(left)).await {
                // Ours was the shorter limit, not the agent's fault.
                Err(AgentError::Silent { .. }) if left < ANSWER_TIMEOUT => return Err(late()),
                other => other?,
            };
            if let Some(mut done) = status {
                done.took = begun.elapsed();
                return Ok(done);
            }
            tokio::time::sleep(pause.min(until.saturating_duration_since(Instant::now()))).await;
            pause = (pause * 2).min(LOOK.1);
        }
    }

    /// `None` while it runs.
    async fn status(
        &mut self,
        pid: i64,
        request: &ExecRequest,
        deadline: Duration,
    ) -> Result<Option<Executed>, AgentError> {
        const STATUS: &str = "guest-exec-status";
        let reply = self.ask_bounded(STATUS, &json!({ "pid": pid }), MAX_STATUS, deadline).await?;
        match reply.get("exited").and_then(Value::as_bool) {
            Some(false) => return Ok(None),
            Some(true) => {}
            None => return Err(nonsense(STATUS, "expected exited", &reply)),
        }
        let number = |key: &str| reply.get(key).and_then(Value::as_i64);
        let finish = match (number("signal"), number("exitcode")) {
            (Some(signal), _) => Finish::Signal(signal),
            (None, Some(status)) => Finish::Exit(status),
            (None, None) => return Err(nonsense(STATUS, "expected exitcode or signal", &reply)),
        };
        let output = |key: &str| -> Result<(Vec<u8>, bool), AgentError> {
            let Some(text) = reply.get(key) else { return Ok((Vec::new(), false)) };
            let bytes = text.as_str().and_then(|text| STANDARD.decode(text).ok());
            let mut bytes =
                bytes.ok_or_else(|| nonsense(STATUS, &format!("expected base64 in {key}"), &reply))?;
            let more = bytes.len() > request.output;
            bytes.truncate(request.output);
            Ok((bytes, more))
        };
        let ((out, more_out), (err, more_err)) = (output("out-data")?, output("err-data")?);
        let flag = |key: &str| reply.get(key).and_then(Value::as_bool).unwrap_or(false);
        let truncated = more_out || more_err || flag("out-truncated") || flag("err-truncated");
        Ok(Some(Executed { finish, out, err, truncated, took: Duration::ZERO }))
    }
}
