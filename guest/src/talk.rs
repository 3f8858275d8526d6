//! Requests and their answers.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Port, Problem};

/// After the answer `busy`. The host counts lines, and takes eight in a second.
const BUSY: Duration = Duration::from_millis(500);
/// So long a host may be busy, times the port's patience.
const BUSY_FOR: u32 = 3;

/// What a machine is after a fork.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct Role {
    /// 0 in the parent; in children from 1 to `size`.
    pub index: u32,
    /// Children of this fork.
    pub size: u32,
    /// By which the parent joins or kills them, and a child ends.
    pub ticket: String,
}

/// How a child has ended.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct End {
    /// From 1.
    pub index: u32,
    /// What it left.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub result: Value,
    /// Why it left nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

impl Port {
    /// Forks this machine. Returns in the parent, and in each of `count` children.
    ///
    /// # Errors
    /// The host refuses or does not answer.
    pub fn fork(&mut self, count: u32) -> Result<Role, Problem> {
        let answer = self.ask(&json!({ "fork": count }), |answer| answer["role"].is_string())?;
        read(answer)
    }

    /// Waits until all children of a ticket have ended, and tells how, in the order of their indexes. The ticket is used up then.
    ///
    /// # Errors
    /// The host refuses.
    pub fn join(&mut self, ticket: &str) -> Result<Vec<End>, Problem> {
        let mut answer = self.ask_again(&json!({ "join": ticket }), |answer| answer["joined"] == ticket)?;
        read(answer["children"].take())
    }

    /// Ends all children of a ticket. Gives how many lived.
    ///
    /// # Errors
    /// The host refuses.
    pub fn kill(&mut self, ticket: &str) -> Result<u32, Problem> {
        let mut answer = self.ask_again(&json!({ "kill": ticket }), |answer| answer["killed"] == ticket)?;
        read(answer["children"].take())
    }

    /// Ends this machine, which is a child of the ticket. The parent's [join](Port::join) gives it the result. Returns only if it does not end: why.
    pub fn exit(&mut self, ticket: &str, result: &Value) -> Problem {
        // No answer is awaited but a refusal. The host may be without its daemon for a while; it counts once, however often it is said.
        loop {
            match self.ask(&json!({ "exit": ticket, "result": result }), |_| false) {
                Ok(answer) => return Problem::Answer(answer.to_string()),
                Err(Problem::Lost | Problem::NobodyListens { .. }) => {}
                Err(problem) => return problem,
            }
        }
    }

    /// What may be asked twice.
    fn ask_again(&mut self, request: &Value, is_answer: impl Fn(&Value) -> bool) -> Result<Value, Problem> {
        loop {
            match self.ask(request, &is_answer) {
                Err(Problem::Lost) => {}
                other => return other,
            }
        }
    }

    /// Asks until the host is not busy. Passes over answers to what others have asked before.
    fn ask(&mut self, request: &Value, is_answer: impl Fn(&Value) -> bool) -> Result<Value, Problem> {
        let deadline = Instant::now() + self.patience * BUSY_FOR;
        self.say(&request.to_string())?;
        loop {
            let line = self.hear()?;
            let Ok(answer) = serde_json::from_str::<Value>(&line) else { return Err(Problem::Answer(line)) };
            if let Some(code) = answer["error"].as_str() {
                if code == "busy" && Instant::now() < deadline {
                    std::thread::sleep(BUSY);
                    self.say(&request.to_string())?;
                    continue;
                }
                let message = answer["message"].as_str().unwrap_or_default().to_owned();
                return Err(Problem::Refused { code: code.to_owned(), message });
            }
            if is_answer(&answer) {
                return Ok(answer);
            }
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(answer: Value) -> Result<T, Problem> {
    let shown = answer.to_string();
    serde_json::from_value(answer).map_err(|_| Problem::Answer(shown))
}

#[cfg(test)]
mod tests;
