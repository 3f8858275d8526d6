//! Containers by podman, on the host where this program runs.
//!
//! Each environment is a container called `CLUSTER.NAME`. Its artifact is an image, and the words of a command if it is not that of the
//! image. A container is ours if it has the label; others of that name are left alone.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use serde::Deserialize;
use tokio::process::Command;
use vmove_bridge_types::adapter::{Action, Environment, Request, State, Status};

use crate::network::RESOLVERS;
use crate::program::run;
use crate::serve;

/// What containers of ours have.
const LABEL: &str = "vmove.blueprint";
/// What podman may take longer than a container that is stopped. An image may have to be fetched.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs containers by podman on this host: an adapter, which reads one JSON object from standard input and writes one to standard output.
#[derive(Debug, Parser)]
#[command(name = "vmove-podman-adapter", version)]
struct Arguments {
    /// Podman, with its global options in one word
    #[arg(long, value_name = "COMMAND", default_value = "podman")]
    podman: String,
    /// Options of `podman run`, in one word
    #[arg(long, value_name = "OPTIONS", default_value = "", allow_hyphen_values = true)]
    options: String,
    /// Do not limit processors and memory of containers to what was asked for; where there are no control groups
    #[arg(long)]
    no_limits: bool,
    /// Seconds that a container has to end by itself when it is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    stop_s: u32,
}

/// Runs the adapter on standard input and output.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    serve::run("vmove-podman-adapter", async |request: &Request| {
        let podman = Podman(&arguments);
        let answers = serve::each(request, async |environment| {
            let (cluster, name) = (&request.cluster, format!("{}.{}", request.cluster, environment.name));
            match request.action {
                Action::Start => podman.start(cluster, &name, environment).await,
                Action::Status => podman.status(cluster, &name).await,
                Action::Stop => podman.stop(cluster, &name).await,
            }
        });
        Ok::<_, String>(answers.await)
    })
}

/// A container, as `podman ps` lists it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    id: String,
    state: String,
    #[serde(default)]
    exit_code: i32,
    labels: Option<BTreeMap<String, String>>,
}

impl Container {
    fn is_of(&self, cluster: &str) -> bool {
        self.labels.as_ref().and_then(|labels| labels.get(LABEL)).is_some_and(|own| own == cluster)
    }

    fn status(&self) -> Status {
        let (state, message) = match self.state.as_str() {
            "running" | "paused" | "stopping" => (State::Running, String::new()),
            "exited" | "stopped" if self.exit_code == 0 => (State::Ended, String::new()),
            "exited" | "stopped" => (State::Failed, format!("exit code {}", self.exit_code)),
            other => (State::Failed, format!("podman says {other}")),
        };
        let id: String = self.id.chars().take(12).collect();
        Status::unnamed(state, format!("podman:{id}"), message)
    }
}

struct Podman<'a>(&'a Arguments);

impl Podman<'_> {
    async fn start(&self, cluster: &str, name: &str, wanted: &Environment) -> Result<Status, String> {
        let words: Vec<&str> = wanted.artifact.split_whitespace().collect();
        if wanted.kind != "container" {
            return Err(format!("kind {:?}: expected container", wanted.kind));
        }
        if words.first().is_none_or(|image| image.starts_with('-')) {
            return Err(format!("artifact {:?}: expected an image and its command", wanted.artifact));
        }
        if wanted.gpus > 0 {
            return Err(format!(
                "expected no GPUs, found {}: give devices to containers by --options",
                wanted.gpus
            ));
        }
        match self.find(name).await? {
            Some(own) if !own.is_of(cluster) => {
                return Err(format!(
                    "the name {name} is taken by a container that is not of blueprint {cluster}: remove it, or give the blueprint another name"
                ));
            }
            Some(own) if own.status().state.is_alive() => return Ok(own.status()),
            // Its name is free again only when what has ended is removed.
            Some(_) => drop(self.ask(&["rm", "--force", name]).await?),
            None => {}
        }
        let network = self.network(wanted)?;
        let label = format!("{LABEL}={cluster}");
        let (cores, memory) = (wanted.cores.to_string(), format!("{}m", wanted.memory_mib));
        let mut command = vec!["run", "--detach", "--name", name, "--label", &label];
        if !self.0.no_limits && wanted.cores > 0 {
            command.extend(["--cpus", &cores]);
        }
        if !self.0.no_limits && wanted.memory_mib > 0 {
            command.extend(["--memory", &memory]);
        }
        command.extend(network.iter().map(String::as_str));
        command.extend(self.0.options.split_whitespace());
        command.push("--");
        command.extend(words);
        if let Err(reason) = self.ask(&command).await {
            // Podman leaves a container that it could not start.
            self.stop(cluster, name).await?;
            return Err(reason);
        }
        self.status(cluster, name).await
    }

    /// Options that put a container into the network namespace that the adapter `network` has made for it, and give it the name server of
    /// that; none if it is on no network of a blueprint.
    fn network(&self, wanted: &Environment) -> Result<Vec<String>, String> {
        let namespace = &wanted.namespace;
        if namespace.is_empty() {
            return Ok(Vec::new());
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
        if namespace.starts_with(['.', '-']) || !namespace.chars().all(is_name) {
            return Err(format!("namespace {namespace:?}: expected the name of a network namespace"));
        }
        if self
            .0
            .options
            .split_whitespace()
            .any(|word| word.split('=').next().is_some_and(|own| own == "--network" || own == "--net"))
        {
            return Err(
                "--options names a network, and the blueprint another: leave --network out, or `node` of the environment"
                    .to_owned(),
            );
        }
        let (path, resolver) =
            (format!("/run/netns/{namespace}"), format!("{RESOLVERS}/{namespace}/resolv.conf"));
        if !Path::new(&path).exists() {
            return Err(format!(
                "there is no network namespace {namespace} here: expected this adapter to run on {}, the `node` of the environment",
                wanted.nodes.join(", ")
            ));
        }
        let mut options = vec![format!("--network=ns:{path}")];
        if Path::new(&resolver).exists() {
            options.push(format!("--volume={resolver}:/etc/resolv.conf:ro"));
        }
        Ok(options)
    }

    async fn status(&self, cluster: &str, name: &str) -> Result<Status, String> {
        let found = self.find(name).await?.filter(|own| own.is_of(cluster));
        Ok(found.map_or_else(|| Status::unnamed(State::Absent, "", ""), |own| own.status()))
    }

    async fn stop(&self, cluster: &str, name: &str) -> Result<Status, String> {
        if self.find(name).await?.is_some_and(|own| own.is_of(cluster)) {
            let time = self.0.stop_s.to_string();
            self.ask(&["rm", "--force", "--time", &time, name]).await?;
        }
        self.status(cluster, name).await
    }

    /// The container of exactly this name.
    async fn find(&self, name: &str) -> Result<Option<Container>, String> {
        // A regular expression, in which a dot of a name means only itself.
        let filter = format!("name=^{}$", name.replace('.', "\\."));
        let text = self.ask(&["ps", "--all", "--format", "json", "--filter", &filter]).await?;
        let found: Vec<Container> = serde_json::from_str(&text)
            .map_err(|error| format!("expected containers from `podman ps`, found {text:.80}: {error}"))?;
        Ok(found.into_iter().next())
    }

    async fn ask(&self, arguments: &[&str]) -> Result<String, String> {
        let mut words = self.0.podman.split_whitespace();
        let program = words.next().unwrap_or("podman");
        let mut command = Command::new(program);
        command.args(words).args(arguments);
        let limit = LIMIT + Duration::from_secs(self.0.stop_s.into());
        let output = run(&mut command, program, limit).await.map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
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
}
