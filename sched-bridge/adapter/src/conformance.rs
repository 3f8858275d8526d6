//! The conformance check: asks a program everything that the contract says, and tells line by line what holds.
//!
//! It starts two environments for a moment and stops them again, whatever holds.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use vmove_bridge_types::adapter::{Action, Environment, Request, State, Status, VERSION};

use crate::call::Adapter;

/// One thing that the contract says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What must hold.
    pub rule: &'static str,
    /// Whether it does.
    pub holds: bool,
    /// What was found, if it does not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub found: String,
}

/// What is started for the check.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Name of the cluster; nothing of it may run.
    pub cluster: String,
    /// Two environments of different names. They must run until they are stopped.
    pub environments: [Environment; 2],
    /// How long it may take until what was stopped has ended.
    pub patience: Duration,
}

/// Checks a program.
pub async fn check(adapter: &Adapter, subject: &Subject) -> Vec<Line> {
    let mut check = Check { adapter, subject, lines: Vec::new() };
    check.life().await;
    check.bad_input().await;
    check.lines
}

struct Check<'a> {
    adapter: &'a Adapter,
    subject: &'a Subject,
    lines: Vec<Line>,
}

impl Check<'_> {
    fn note(&mut self, rule: &'static str, found: Result<(), String>) {
        self.lines.push(Line { rule, holds: found.is_ok(), found: found.err().unwrap_or_default() });
    }

    fn request(&self, action: Action, environments: &[Environment]) -> Request {
        let cluster = self.subject.cluster.clone();
        Request { version: VERSION, action, cluster, environments: environments.to_vec() }
    }

    /// Asks, and expects this of each status.
    async fn expect(
        &self,
        action: Action,
        environments: &[Environment],
        wanted: &str,
        is: impl Fn(&Status) -> bool,
    ) -> Result<Vec<Status>, String> {
        let answers =
            self.adapter.call(&self.request(action, environments)).await.map_err(|e| e.to_string())?;
        match answers.iter().find(|own| !is(own)) {
            None => Ok(answers),
            Some(wrong) => {
                let why =
                    if wrong.message.is_empty() { String::new() } else { format!(" ({})", wrong.message) };
                Err(format!("{} is {}{why}; expected {wanted}", wrong.name, wrong.state.word()))
            }
        }
    }

    /// Waits until none is alive.
    async fn stop(&self, environments: &[Environment]) -> Result<(), String> {
        let request = self.request(Action::Stop, environments);
        let now = self.adapter.stop(&request, self.subject.patience).await.map_err(|e| e.to_string())?;
        match now.iter().find(|own| own.state.is_alive()) {
            None => Ok(()),
            Some(left) => Err(format!(
                "{} is {} {} s after it was stopped; expected ended, failed or absent",
                left.name,
                left.state.word(),
                self.subject.patience.as_secs_f32()
            )),
        }
    }

    /// From the start of two environments to their end.
    async fn life(&mut self) {
        let both = self.subject.environments.clone();
        let [first, second] = both.each_ref();
        let alive = |own: &Status| own.state.is_alive();
        let absent = |own: &Status| own.state == State::Absent;
        let found = self.expect(Action::Status, &both, "absent", absent).await.map(drop);
        self.note("status of what was never started is absent", found);

        let started = self.expect(Action::Start, &both, "running or waiting", alive).await;
        self.note("start starts two environments", started.as_ref().map(drop).map_err(Clone::clone));
        let found = self.expect(Action::Status, &both, "running or waiting", alive).await.map(drop);
        self.note("status tells what was started", found);
        let again = self.expect(Action::Start, &both, "running or waiting", alive).await;
        self.note("start again changes nothing", same_handles(started, again));

        let found = self.stop(std::slice::from_ref(first)).await;
        self.note("stop stops one environment", found);
        let rest = std::slice::from_ref(second);
        let found = self.expect(Action::Status, rest, "running or waiting", alive).await.map(drop);
        self.note("the other environment still runs", found);
        let found = self.stop(&both).await;
        self.note("stop stops both, also the one that is stopped already", found);
        let found = self.stop(&both).await;
        self.note("stop again succeeds", found);
        let found = self.expect(Action::Status, &both, "ended, failed or absent", |own| !alive(own)).await;
        self.note("status tells that both have ended", found.map(drop));
    }

    /// What is no request must be refused, with a reason.
    async fn bad_input(&mut self) {
        let good = serde_json::to_value(self.request(Action::Status, &self.subject.environments));
        let good = good.unwrap_or_default();
        let with = |key: &str, value: Value| {
            let mut changed = good.clone();
            changed[key] = value;
            changed.to_string()
        };
        let found = self.refuses(&with("action", json!("dance"))).await;
        self.note("an unknown action is refused", found);
        let found = self.refuses(&with("version", json!(VERSION + 1))).await;
        self.note("an unknown version is refused", found);
        let found = self.refuses("hello").await;
        self.note("what is not JSON is refused", found);
        let found = self.refuses("{}").await;
        self.note("an object that is no request is refused", found);

        let mut more = good.clone();
        more["new"] = json!({ "some": "thing" });
        more["environments"][0]["new"] = json!(1);
        let found = match self.adapter.send(more.to_string().as_bytes()).await {
            Ok(ended) if ended.exit_code == Some(0) => Ok(()),
            Ok(ended) => Err(format!("exit code {:?}: {}", ended.exit_code, ended.stderr)),
            Err(error) => Err(error.to_string()),
        };
        self.note("unknown fields are ignored", found);
        let found = self.takes_no_option_for_a_name().await;
        self.note("a name that is an option or a list starts nothing", found);
    }

    async fn refuses(&self, text: &str) -> Result<(), String> {
        let ended = self.adapter.send(text.as_bytes()).await.map_err(|e| e.to_string())?;
        match ended.exit_code {
            Some(0) => Err(format!("exit code 0 for {text:.60}; expected another")),
            None => Err(format!("a signal ended it for {text:.60}; expected an exit code")),
            Some(_) if ended.stderr.is_empty() => Err(format!("no reason on standard error for {text:.60}")),
            Some(_) => Ok(()),
        }
    }

    async fn takes_no_option_for_a_name(&self) -> Result<(), String> {
        for name in ["--help", "a,b", "../x", "a b;c"] {
            let odd = Environment { name: name.to_owned(), ..self.subject.environments[0].clone() };
            let request = self.request(Action::Start, &[odd]);
            let text = serde_json::to_vec(&request).unwrap_or_default();
            let ended = self.adapter.send(&text).await.map_err(|e| e.to_string())?;
            if ended.exit_code != Some(0) {
                continue;
            }
            let answer: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
            if answer["environments"][0]["state"] != State::Failed.word() {
                let _ = self.adapter.call(&Request { action: Action::Stop, ..request }).await;
                return Err(format!(
                    "started {name:?}; expected another exit code than 0, or the state failed"
                ));
            }
        }
        Ok(())
    }
}

fn same_handles(
    first: Result<Vec<Status>, String>,
    again: Result<Vec<Status>, String>,
) -> Result<(), String> {
    let first = first.map_err(|_| "nothing was started before".to_owned())?;
    for (before, now) in first.iter().zip(again?) {
        if before.handle != now.handle {
            let (name, before) = (&before.name, &before.handle);
            return Err(format!(
                "{name} was {before:?} and is {:?} now; expected the same handle",
                now.handle
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// An adapter whose environments are files; `change` is done to its text.
    fn adapter(folder: &Path, change: impl Fn(&str) -> String) -> Adapter {
        let script = r#"
asked=$(cat)
refuse() { echo "$1" >&2; exit 1; }
case $asked in *'"version":1'[,}]*) ;; *) refuse "expected version 1" ;; esac
action=$(echo "$asked" | sed -n 's/.*"action":"\([a-z]*\)".*/\1/p')
case $action in start|status|stop) ;; *) refuse "expected start, status or stop" ;; esac
echo "$asked" | grep -o '"name":"[^"]*"' | cut -d'"' -f4 >names.$$
answers=
while IFS= read -r name; do
    case $name in -*|*[!A-Za-z0-9._-]*) refuse "a name that is none" ;; esac
    case $action in start) touch "is.$name" ;; stop) rm -f "is.$name" ;; esac
    state=absent
    [ -e "is.$name" ] && state=running
    answers="$answers,{\"name\":\"$name\",\"state\":\"$state\",\"handle\":\"file:$name\"}"
done <names.$$
echo "{\"version\":1,\"environments\":[${answers#,}]}"
"#;
        let script = format!("cd '{}'\n{}", folder.display(), change(script));
        Adapter { command: vec!["sh".to_owned(), "-c".to_owned(), script], limit: Duration::from_secs(30) }
    }

    async fn broken(change: impl Fn(&str) -> String) -> Vec<Line> {
        let folder = tempfile::tempdir().unwrap();
        let environment = |name: &str| Environment {
            name: name.to_owned(),
            kind: "container".to_owned(),
            ..Environment::default()
        };
        let subject = Subject {
            cluster: "check".to_owned(),
            environments: [environment("one"), environment("two")],
            patience: Duration::from_millis(300),
        };
        let lines = check(&adapter(folder.path(), change), &subject).await;
        assert_eq!(lines.len(), 15);
        lines.into_iter().filter(|line| !line.holds).collect()
    }

    #[tokio::test]
    async fn an_adapter_that_keeps_the_contract_passes_and_each_breach_is_told() {
        assert_eq!(broken(str::to_owned).await, []);
        let breaches = [
            ("touch \"is.$name\"", ":", "status tells what was started"),
            ("rm -f \"is.$name\"", ":", "stop stops one environment"),
            ("file:$name", "$$", "start again changes nothing"),
            ("refuse \"expected start, status or stop\"", ":", "an unknown action is refused"),
            ("refuse \"a name that is none\"", ":", "a name that is an option or a list starts nothing"),
        ];
        for (from, to, rule) in breaches {
            let found = broken(|script| {
                assert!(script.contains(from), "{from}");
                script.replace(from, to)
            })
            .await;
            assert!(
                found.iter().any(|line| line.rule == rule && !line.found.is_empty()),
                "{rule}: {found:?}"
            );
        }
    }
}
