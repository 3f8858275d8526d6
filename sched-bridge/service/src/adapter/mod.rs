//! Adapters: programs that start what the bridge itself does not, such as the containers and bare-metal environments of a
//! blueprint.
//!
//! The contract: the program is started once for each request; it reads one [`Request`] as JSON from standard input and writes one
//! [`Answer`] to standard output. It ends with 0 if it has answered, even if environments have failed; anything else is a failure of the
//! adapter, and what it wrote to standard error is shown. Requests can be repeated: `start` of something that is there already
//! answers with it. Fields that are not known are to be ignored.

pub mod slurm;

use std::process::Stdio;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Version of the contract.
pub const VERSION: u32 = 1;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Start environments; those that are there already are left as they are.
    Start,
    /// Say how they are.
    Status,
    /// End them; those that are gone already are fine.
    Stop,
}

/// A request to an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Version of the contract: 1.
    pub version: u32,
    /// What to do.
    pub action: Action,
    /// The blueprint or cluster; together with an environment's name it names what runs.
    pub cluster: String,
    /// Environments.
    pub environments: Vec<Environment>,
}

/// One environment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Name, unique in the cluster.
    pub name: String,
    /// `container` or `bare-metal`.
    pub kind: String,
    /// What to run: a command line, or an image and a command line.
    pub artifact: String,
    /// Nodes that it may run on, as placed.
    pub nodes: Vec<String>,
    /// Nodes that it should be near to: those of the VMs that it is connected with.
    pub near: Vec<String>,
    /// Hardware threads.
    pub cores: u32,
    /// Memory. Unit: MiB.
    pub memory_mib: u64,
    /// GPUs.
    pub gpus: u32,
    /// Networks that it is on, by name.
    pub networks: Vec<String>,
}

/// An adapter's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Version of the contract: 1.
    pub version: u32,
    /// One for each environment of the request, in its order.
    pub environments: Vec<Status>,
}

/// How an environment is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// `waiting`, `running`, `ended`, `failed` or `absent`.
    pub state: String,
    /// What the adapter knows it by (`slurm:17`).
    #[serde(default)]
    pub handle: String,
    /// Nodes that it runs on.
    #[serde(default)]
    pub nodes: Vec<String>,
    /// Why, if it has failed.
    #[serde(default)]
    pub message: String,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The program is not there.
    #[error("could not run the adapter {program}: {reason}; see [adapters] in the configuration")]
    Command {
        /// The program.
        program: String,
        /// What the system said.
        reason: std::io::Error,
    },
    /// It failed.
    #[error("the adapter {program} failed: {said}")]
    Failed {
        /// The program.
        program: String,
        /// What it printed.
        said: String,
    },
    /// It answered something else.
    #[error("the adapter {program} answered {found:?}: expected {expected}")]
    Answer {
        /// The program.
        program: String,
        /// The beginning of the answer.
        found: String,
        /// What it should have been.
        expected: String,
    },
}

/// Asks an adapter.
///
/// # Errors
/// It is not there, fails, or answers something that is not of the contract.
pub async fn ask(command: &[String], request: &Request) -> Result<Answer, AdapterError> {
    let (program, arguments) = command.split_first().map_or(("", &[][..]), |(p, a)| (p.as_str(), a));
    let not_run = |reason| AdapterError::Command { program: program.to_owned(), reason };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(not_run)?;
    if let Some(mut input) = child.stdin.take() {
        // One that does not read has its reason; its answer tells.
        let _ = input.write_all(&serde_json::to_vec(request).unwrap_or_default()).await;
    }
    let output = child.wait_with_output().await.map_err(not_run)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(AdapterError::Failed { program: program.to_owned(), said });
    }
    let wrong = |expected: String| AdapterError::Answer {
        program: program.to_owned(),
        found: text.chars().take(80).collect(),
        expected,
    };
    let answer: Answer =
        serde_json::from_str(&text).map_err(|e| wrong(format!("JSON of the contract ({e})")))?;
    let asked: Vec<&str> = request.environments.iter().map(|e| e.name.as_str()).collect();
    let told: Vec<&str> = answer.environments.iter().map(|e| e.name.as_str()).collect();
    if answer.version != VERSION || asked != told {
        return Err(wrong(format!("version {VERSION} and the environments {asked:?}")));
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        let environments = vec![Environment { name: "web".into(), ..Environment::default() }];
        Request { version: VERSION, action: Action::Status, cluster: "c".into(), environments }
    }

    async fn shell(script: &str) -> Result<Answer, AdapterError> {
        ask(&["sh".to_owned(), "-c".to_owned(), script.to_owned()], &request()).await
    }

    #[tokio::test]
    async fn an_adapter_that_breaks_the_contract_is_named() {
        let good =
            r#"cat >/dev/null; echo '{"version":1,"environments":[{"name":"web","state":"running"}]}'"#;
        assert_eq!(shell(good).await.unwrap().environments[0].state, "running");
        for (script, wanted) in [
            ("echo broken >&2; exit 3", "broken"),
            ("echo hello", "JSON of the contract"),
            (r#"echo '{"version":2,"environments":[]}'"#, "version 1"),
            (r#"echo '{"version":1,"environments":[]}'"#, "[\"web\"]"),
        ] {
            let error = shell(script).await.unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        ask(&["/nonexistent".into()], &request()).await.unwrap_err();
    }
}
