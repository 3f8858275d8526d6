//! Runs adapters, the programs of `vmove_bridge_types::adapter`.

use std::process::Stdio;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use vmove_bridge_types::adapter::{Answer, Request, VERSION};

/// Why an adapter gave no valid answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The program cannot be run.
    #[error("could not run the adapter {program}: {reason}; give another by --adapter NAME=COMMAND")]
    Command {
        /// The program.
        program: String,
        /// The error.
        reason: std::io::Error,
    },
    /// The program failed.
    #[error("the adapter {program} failed: {output}")]
    Failed {
        /// The program.
        program: String,
        /// Its standard error.
        output: String,
    },
    /// The answer breaks the contract.
    #[error("the adapter {program} answered {found:?}; expected {expected}")]
    Answer {
        /// The program.
        program: String,
        /// The beginning of the answer.
        found: String,
        /// What was expected.
        expected: String,
    },
}

/// Sends a request to an adapter.
///
/// # Errors
/// It cannot be run, fails, or its answer breaks the contract.
pub async fn call(command: &[String], request: &Request) -> Result<Answer, AdapterError> {
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
        // An adapter that fails before it reads says why below.
        let _ = input.write_all(&serde_json::to_vec(request).unwrap_or_default()).await;
    }
    let output = child.wait_with_output().await.map_err(not_run)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let output = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(AdapterError::Failed { program: program.to_owned(), output });
    }
    let wrong = |expected: String| AdapterError::Answer {
        program: program.to_owned(),
        found: text.chars().take(80).collect(),
        expected,
    };
    let answer: Answer =
        serde_json::from_str(&text).map_err(|e| wrong(format!("JSON of the contract ({e})")))?;
    let asked: Vec<&str> = request.environments.iter().map(|e| e.name.as_str()).collect();
    let answered: Vec<&str> = answer.environments.iter().map(|e| e.name.as_str()).collect();
    if answer.version != VERSION || asked != answered {
        return Err(wrong(format!("version {VERSION} and the environments {asked:?}")));
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use vmove_bridge_types::adapter::{Action, Environment};

    use super::*;

    fn request() -> Request {
        let environments = vec![Environment { name: "web".into(), ..Environment::default() }];
        Request { version: VERSION, action: Action::Status, cluster: "c".into(), environments }
    }

    async fn shell(script: &str) -> Result<Answer, AdapterError> {
        call(&["sh".to_owned(), "-c".to_owned(), script.to_owned()], &request()).await
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
        call(&["/nonexistent".into()], &request()).await.unwrap_err();
    }
}
