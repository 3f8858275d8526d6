//! Runs adapters.

use std::time::{Duration, Instant};

use tokio::process::Command;
use vmove_bridge_types::adapter::{Action, Answer, Request, State, Status, VERSION};

use crate::program::{IN_ADAPTER, ProgramError, run_with_input};

/// Between two questions whether what was stopped has ended.
const ASK_INTERVAL: Duration = Duration::from_millis(200);

/// An adapter: its program, and how long it may take for one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// After this time it is killed, with everything that it has started.
    pub limit: Duration,
}

/// Why an adapter gave no valid answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The program cannot be run, or has not ended in time.
    #[error("adapter: {0}; look at it, or give another by --adapter NAME=COMMAND")]
    Program(#[from] ProgramError),
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

/// What became of a program that got a text: its exit code (none if a signal ended it) and its output.
#[derive(Debug)]
pub struct Ended {
    /// Exit code.
    pub exit_code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Adapter {
    /// Its program, for messages.
    #[must_use]
    pub fn program(&self) -> &str {
        self.command.first().map_or("", String::as_str)
    }

    /// Sends it any text.
    ///
    /// # Errors
    /// It cannot be run, or has not ended in time.
    pub async fn send(&self, text: &[u8]) -> Result<Ended, ProgramError> {
        let mut command = Command::new(self.program());
        command.args(self.command.iter().skip(1));
        command.env(IN_ADAPTER, "1");
        let output = run_with_input(&mut command, self.program(), self.limit, text).await?;
        Ok(Ended {
            exit_code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Sends it a request. Gives one status for each environment, in the same sequence.
    ///
    /// # Errors
    /// It cannot be run, has not ended in time, fails, or its answer breaks the contract.
    pub async fn call(&self, request: &Request) -> Result<Vec<Status>, AdapterError> {
        let ended = self.send(&serde_json::to_vec(request).unwrap_or_default()).await?;
        let program = self.program().to_owned();
        if ended.exit_code != Some(0) {
            let output = if ended.stderr.is_empty() {
                ended.exit_code.map_or_else(
                    || "a signal ended it".to_owned(),
                    |code| format!("exit code {code}, without a word on standard error"),
                )
            } else {
                ended.stderr
            };
            return Err(AdapterError::Failed { program, output });
        }
        let wrong = |expected: String| AdapterError::Answer {
            program,
            found: ended.stdout.chars().take(80).collect(),
            expected,
        };
        let answer: Answer = match serde_json::from_str(&ended.stdout) {
            Ok(answer) => answer,
            Err(error) => return Err(wrong(format!("JSON of the contract ({error})"))),
        };
        let asked: Vec<&str> = request.environments.iter().map(|e| e.name.as_str()).collect();
        let answered: Vec<&str> = answer.environments.iter().map(|e| e.name.as_str()).collect();
        if answer.version != VERSION || asked != answered {
            return Err(wrong(format!("version {VERSION} and the environments {asked:?}")));
        }
        Ok(answer.environments)
    }

    /// Asks it for the status of environments.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn status(&self, request: &Request) -> Result<Vec<Status>, AdapterError> {
        self.call(&Request { action: Action::Status, ..request.clone() }).await
    }

    /// Has it start environments. What it says it has started is asked for: it must be there. What waits is believed, since a question
    /// may be taken as the end of a wish (Slurm).
    ///
    /// # Errors
    /// As [`Self::call`]. What failed, or is not there, is told by the status of each.
    pub async fn start(&self, request: &Request) -> Result<Vec<Status>, AdapterError> {
        let mut answers = self.call(&Request { action: Action::Start, ..request.clone() }).await?;
        if answers.iter().any(|own| matches!(own.state, State::Failed | State::Absent)) {
            return Ok(answers);
        }
        let said_done =
            |name: &str| answers.iter().any(|own| own.name == name && own.state != State::Waiting);
        let environments: Vec<_> =
            request.environments.iter().filter(|own| said_done(&own.name)).cloned().collect();
        if !environments.is_empty() {
            for now in self.status(&Request { environments, ..request.clone() }).await? {
                for own in answers.iter_mut().filter(|own| own.name == now.name) {
                    let message = format!("it said {}; {}", own.state.word(), now.message);
                    *own = if now.state == State::Absent {
                        Status { message: message.trim_end_matches("; ").to_owned(), ..now.clone() }
                    } else {
                        now.clone()
                    };
                }
            }
        }
        Ok(answers)
    }

    /// Has it stop environments, and asks for their status until none is alive, or `patience` is over. Gives their last status.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn stop(&self, request: &Request, patience: Duration) -> Result<Vec<Status>, AdapterError> {
        let start = Instant::now();
        self.call(&Request { action: Action::Stop, ..request.clone() }).await?;
        loop {
            let now = self.status(request).await?;
            if now.iter().all(|own| !own.state.is_alive()) || start.elapsed() > patience {
                return Ok(now);
            }
            tokio::time::sleep(ASK_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use vmove_bridge_types::adapter::Environment;

    use super::*;

    fn request() -> Request {
        let environments = vec![Environment { name: "web".into(), ..Environment::default() }];
        Request { version: VERSION, action: Action::Status, cluster: "c".into(), environments }
    }

    fn shell(script: &str, limit: Duration) -> Adapter {
        Adapter { command: ["sh", "-c", script].map(str::to_owned).to_vec(), limit }
    }

    const ENOUGH: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn an_adapter_that_breaks_the_contract_is_named() {
        let good =
            r#"cat >/dev/null; echo '{"version":1,"environments":[{"name":"web","state":"running"}]}'"#;
        assert_eq!(shell(good, ENOUGH).call(&request()).await.unwrap()[0].state, State::Running);
        for (script, wanted) in [
            ("echo broken >&2; exit 3", "broken"),
            ("exit 4", "exit code 4"),
            ("kill -9 $$", "a signal"),
            ("echo hello", "JSON of the contract"),
            (r#"echo '{"version":2,"environments":[]}'"#, "version 1"),
            (r#"echo '{"version":1,"environments":[]}'"#, "[\"web\"]"),
            (r#"echo '{"version":1,"environments":[{"name":"web","state":"fine"}]}'"#, "unknown variant"),
        ] {
            let error = shell(script, ENOUGH).call(&request()).await.unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let none = Adapter { command: vec!["/nonexistent".into()], limit: ENOUGH };
        none.call(&request()).await.unwrap_err();
    }

    #[tokio::test]
    async fn one_that_hangs_is_killed() {
        let hangs = shell("sleep 1000", Duration::from_millis(200));
        let error = hangs.call(&request()).await.unwrap_err().to_string();
        assert!(error.contains("has not ended within 0.2 s and was killed"), "{error}");
    }

    #[tokio::test]
    async fn what_it_says_it_did_is_asked_for() {
        // Says that it has started or stopped something, and has not.
        let lies = r#"case $(cat) in *status*) state=STATUS;; *) state=ACTION;; esac
            echo '{"version":1,"environments":[{"name":"web","state":"'$state'"}]}'"#;
        let started = shell(&lies.replace("STATUS", "absent").replace("ACTION", "running"), ENOUGH);
        assert_eq!(started.start(&request()).await.unwrap()[0].state, State::Absent);
        let stopped = shell(&lies.replace("STATUS", "running").replace("ACTION", "absent"), ENOUGH);
        let now = stopped.stop(&request(), Duration::from_millis(100)).await.unwrap();
        assert_eq!(now[0].state, State::Running);
    }
}
