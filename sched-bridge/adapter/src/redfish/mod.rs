//! Whole machines, switched on and off by Redfish.
//!
//! A machine belongs to the environment that has switched it on, which a file says. One that is on without such a file is somebody
//! else's, and is neither given to an environment nor switched off.

mod controller;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmove_bridge_types::adapter::{Action, Environment, Request, State, Status};
use vmove_types::typo;

use crate::serve;
use controller::{Controller, Machine};

/// Between two questions whether a machine is on or off.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

/// Switches machines on and off by Redfish: an adapter, which reads one JSON object from standard input and writes one to standard output.
#[derive(Debug, Parser)]
#[command(name = "vmove-redfish-adapter", version)]
struct Arguments {
    /// Configuration: the machines
    #[arg(
        long,
        value_name = "FILE",
        env = "VMOVE_REDFISH_CONFIG",
        default_value = "/etc/vmove/redfish-adapter.toml"
    )]
    config: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    /// Where it is kept which machine belongs to whom.
    #[serde(default = "state")]
    state: PathBuf,
    /// How long a machine may take until it is on. Unit: s.
    #[serde(default = "half_a_minute")]
    on_s: u64,
    /// How long its system may take to end by itself before the machine is switched off. Unit: s.
    #[serde(default = "half_a_minute")]
    off_s: u64,
    /// The machines.
    machines: BTreeMap<String, Machine>,
}

impl Config {
    fn read(file: &Path) -> Result<Self, String> {
        let text =
            std::fs::read_to_string(file).map_err(|e| format!("could not read {}: {e}", file.display()))?;
        toml::from_str(&text).map_err(|e| format!("{}: {}", file.display(), typo::hinted(&e.to_string())))
    }
}

fn state() -> PathBuf {
    "/var/lib/vmove/machines".into()
}

fn half_a_minute() -> u64 {
    30
}

/// To whom a machine belongs.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    cluster: String,
    environment: String,
}

/// Runs the adapter on standard input and output.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    serve::run("vmove-redfish-adapter", async |request: &Request| {
        let file = &arguments.config;
        let config = Config::read(file)?;
        let answers = serve::each(request, async |environment| {
            let place = Place::find(&config, &request.cluster, environment)?;
            match request.action {
                Action::Start => place.start(environment).await,
                Action::Status => place.status().await,
                Action::Stop => place.stop().await,
            }
        });
        Ok::<_, String>(answers.await)
    })
}

/// The machine of an environment.
struct Place<'a> {
    config: &'a Config,
    name: &'a str,
    system: &'a str,
    controller: Controller,
    file: PathBuf,
    owner: Owner,
}

impl<'a> Place<'a> {
    /// The machine that the artifact names, or else the environment.
    fn find(config: &'a Config, cluster: &str, wanted: &Environment) -> Result<Self, String> {
        let first = wanted.artifact.split_whitespace().next().unwrap_or_default();
        let named =
            config.machines.get_key_value(first).or_else(|| config.machines.get_key_value(&wanted.name));
        let (name, machine) = named.ok_or_else(|| {
            let known: Vec<&str> = config.machines.keys().map(String::as_str).collect();
            format!(
                "no machine is called {first:?} or {:?}: expected one of {}; add [machines.NAME] to the configuration",
                wanted.name,
                known.join(", ")
            )
        })?;
        let file = config.state.join(format!("{name}.json"));
        let owner = Owner { cluster: cluster.to_owned(), environment: wanted.name.clone() };
        Ok(Self {
            config,
            name,
            system: &machine.system,
            controller: Controller::new(name, machine)?,
            file,
            owner,
        })
    }

    async fn start(&self, wanted: &Environment) -> Result<Status, String> {
        if wanted.kind != "bare-metal" {
            return Err(format!("kind {:?}: expected bare-metal", wanted.kind));
        }
        let (owner, is_on) = (self.owner()?, self.is_on().await?);
        match owner {
            Some(other) if other != self.owner => {
                return Err(format!(
                    "machine {} belongs to {} of {}",
                    self.name, other.environment, other.cluster
                ));
            }
            None if is_on => {
                return Err(format!(
                    "machine {} is on, and not by a blueprint: switch it off first",
                    self.name
                ));
            }
            Some(_) if is_on => return Ok(self.running()),
            _ => {}
        }
        self.take()?;
        let done = async {
            self.reset("On").await?;
            self.wait_until(true, self.config.on_s).await
        };
        let reason = match done.await {
            Ok(true) => return Ok(self.running()),
            Ok(false) => format!("machine {} was not on after {} s", self.name, self.config.on_s),
            Err(reason) => reason,
        };
        // It may be on its way: what was asked for is undone.
        let undone =
            self.stop().await.map_or_else(|why| format!("not undone: {why}"), |_| "undone".to_owned());
        Err(format!("{reason}; {undone}"))
    }

    async fn status(&self) -> Result<Status, String> {
        if self.owner()?.as_ref() != Some(&self.owner) {
            return Ok(Status::unnamed(State::Absent, "", ""));
        }
        // A start waits until it is on: it has ended by itself since.
        let ended = || Status::unnamed(State::Ended, format!("redfish:{}", self.name), "the machine is off");
        Ok(if self.is_on().await? { self.running() } else { ended() })
    }

    async fn stop(&self) -> Result<Status, String> {
        if self.owner()?.as_ref() == Some(&self.owner) {
            if self.is_on().await? {
                // Not every controller knows it, and not every system heeds it.
                let asked = self.reset("GracefulShutdown").await;
                if asked.is_err() || !self.wait_until(false, self.config.off_s).await? {
                    self.reset("ForceOff").await?;
                    if !self.wait_until(false, self.config.off_s).await? {
                        return Err(format!(
                            "machine {} is still on after {} s",
                            self.name, self.config.off_s
                        ));
                    }
                }
            } else if let Err(why) = self.reset("ForceOff").await {
                // It may have been asked to switch on a moment ago. Some controllers refuse this for a machine that is off.
                if self.is_on().await? {
                    return Err(why);
                }
            }
            std::fs::remove_file(&self.file)
                .map_err(|e| format!("could not remove {}: {e}", self.file.display()))?;
        }
        Ok(Status::unnamed(State::Absent, "", ""))
    }

    fn running(&self) -> Status {
        let handle = format!("redfish:{}", self.name);
        Status { nodes: vec![self.name.to_owned()], ..Status::unnamed(State::Running, handle, "") }
    }

    async fn is_on(&self) -> Result<bool, String> {
        let answer = self.controller.ask(Method::GET, self.system, Bytes::new()).await?;
        match answer["PowerState"].as_str() {
            Some("On" | "PoweringOff" | "Paused") => Ok(true),
            Some("Off" | "PoweringOn") => Ok(false),
            other => Err(format!("machine {}: expected a PowerState, found {other:?}", self.name)),
        }
    }

    async fn wait_until(&self, on: bool, limit_s: u64) -> Result<bool, String> {
        let start = Instant::now();
        while self.is_on().await? != on {
            if start.elapsed() > Duration::from_secs(limit_s) {
                return Ok(false);
            }
            tokio::time::sleep(ASK_INTERVAL).await;
        }
        Ok(true)
    }

    async fn reset(&self, kind: &str) -> Result<(), String> {
        let path = format!("{}/Actions/ComputerSystem.Reset", self.system.trim_end_matches('/'));
        self.controller
            .ask(Method::POST, &path, json!({ "ResetType": kind }).to_string().into())
            .await
            .map(drop)
    }

    fn owner(&self) -> Result<Option<Owner>, String> {
        let text = match std::fs::read(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("could not read {}: {error}", self.file.display())),
        };
        serde_json::from_slice(&text).map(Some).map_err(|e| format!("{}: {e}", self.file.display()))
    }

    /// Makes the machine its own. Of two at once, one has it.
    fn take(&self) -> Result<(), String> {
        if self.owner()?.is_some() {
            return Ok(());
        }
        let wrong = |e: std::io::Error| format!("could not write {}: {e}", self.file.display());
        std::fs::create_dir_all(&self.config.state).map_err(wrong)?;
        // Whole or not at all, and only if nobody has it.
        let beside = self.file.with_extension(format!("new-{}", std::process::id()));
        let written = std::fs::File::create(&beside).and_then(|mut file| {
            file.write_all(&serde_json::to_vec(&self.owner).unwrap_or_default())?;
            file.sync_all()?;
            std::fs::hard_link(&beside, &self.file)
        });
        let _ = std::fs::remove_file(&beside);
        written.map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use vmove_skip::installed::man_page_is_current;

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-adapter --lib the_checked_in` writes it. `vmove man` installs it with the others.
    #[test]
    fn the_checked_in_man_page_is_current() {
        man_page_is_current(Arguments::command(), "sched-bridge/adapter/dist", "vmove-adapter");
    }

    #[test]
    fn a_misspelt_key_is_named_with_file_line_and_the_nearest_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("redfish-adapter.toml");
        for (text, line, key, near) in [
            ("\nmachine = 3\n", 2, "`machine`", "`machines`?"),
            ("[machines.m]\nurll = \"https://b\"\n", 2, "`urll`", "`url`?"),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = Config::read(&path).unwrap_err();
            assert!(said.starts_with(&path.display().to_string()), "{said}");
            assert!(said.contains(&format!("line {line}, ")) && said.contains(key), "{said}");
            assert!(said.contains(&format!("did you mean {near}")), "{said}");
        }
    }
}
