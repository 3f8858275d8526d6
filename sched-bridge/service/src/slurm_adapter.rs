//! Containers and bare-metal environments as jobs of Slurm.
//!
//! Each environment is one job, named `CLUSTER.NAME`, on the nodes where it was placed. The artifact of a `bare-metal` environment is a
//! command line, which has its nodes to itself (`--exclusive`); that of a `container` is an image and a command line, run by the
//! command of `--container`.
//!
//! An environment that was not placed but is connected with VMs is kept off nodes that are farther from them than necessary, if there
//! is room on closer ones. That is a preference: if the job still waits when its status is requested, it may run anywhere from then
//! on.

mod proximity;

use std::process::ExitCode;

use clap::Parser;
use vmove_adapter::serve;
use vmove_bridge_types::adapter::{Action, Environment, Request, State, Status};

use crate::slurm::{Slurm, SlurmError};

/// Runs containers and bare-metal environments as jobs of Slurm: an adapter, which reads one JSON object from standard input and writes one
/// to standard output.
#[derive(Debug, Parser)]
#[command(name = "vmove-slurm-adapter", version)]
struct Arguments {
    /// Runs a container: this command, the image and the command line of the artifact, in one word
    #[arg(long, value_name = "COMMAND", env = "VMOVE_CONTAINER_RUN", default_value = "apptainer exec")]
    container: String,
}

/// Runs the adapter on standard input and output.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    serve::run("vmove-slurm-adapter", async |request: &Request| {
        Ok::<_, SlurmError>(answer(&Slurm::default(), request, &arguments.container).await)
    })
}

/// Handles a request, one environment after the other.
async fn answer(slurm: &Slurm, request: &Request, container: &str) -> Vec<Status> {
    serve::each(request, async |environment| {
        let name = format!("{}.{}", request.cluster, environment.name);
        match request.action {
            Action::Start => start(slurm, &name, environment, container).await,
            Action::Status => status_freeing_waiting_job(slurm, &name, environment).await,
            Action::Stop => stop(slurm, &name).await,
        }
    })
    .await
}

async fn start(
    slurm: &Slurm,
    name: &str,
    wanted: &Environment,
    container: &str,
) -> Result<Status, SlurmError> {
    let existing = status(slurm, name).await?;
    if existing.state.is_alive() {
        return Ok(existing);
    }
    let command = match wanted.kind.as_str() {
        "container" => format!("{container} {}", wanted.artifact),
        "bare-metal" => wanted.artifact.clone(),
        other => {
            let message = format!("kind {other:?}: expected container or bare-metal");
            return Ok(Status::unnamed(State::Failed, "", message));
        }
    };
    let (job_name, wrap) = (format!("--job-name={name}"), format!("--wrap={command}"));
    let mut options = vec![format!("--nodes={}", wanted.nodes.len().max(1)), "--output=/dev/null".to_owned()];
    if !wanted.nodes.is_empty() {
        options.push(format!("--nodelist={}", wanted.nodes.join(",")));
    } else if !wanted.near.is_empty() {
        let far = proximity::nodes_too_far(slurm, wanted).await?;
        if !far.is_empty() {
            options.push(format!("--exclude={}", far.join(",")));
        }
    }
    if wanted.kind == "bare-metal" {
        options.push("--exclusive".to_owned());
    } else {
        options.push(format!("--cpus-per-task={}", wanted.cores.max(1)));
    }
    if wanted.gpus > 0 {
        options.push(format!("--gres=gpu:{}", wanted.gpus));
    }
    if wanted.memory_mib > 0 {
        options.push(format!("--mem={}M", wanted.memory_mib));
    }
    let mut words = vec!["sbatch", "--parsable", &job_name];
    words.extend(options.iter().map(String::as_str));
    words.push(&wrap);
    let id = slurm.run(&words).await?;
    let id = id.trim().split(';').next().unwrap_or_default().to_owned();
    Ok(Status::unnamed(State::Waiting, format!("slurm:{id}"), ""))
}

async fn status(slurm: &Slurm, name: &str) -> Result<Status, SlurmError> {
    let jobs = slurm.run(&["squeue", "-h", "-t", "all", "-n", name, "-o", "%i %T %N"]).await?;
    // The newest job of this name: ids increase.
    let newest =
        jobs.lines().filter_map(|line| Some((line.split(' ').next()?.parse::<u64>().ok()?, line))).max();
    let Some((id, line)) = newest else { return Ok(Status::unnamed(State::Absent, "", "")) };
    let mut words = line.split(' ').skip(1);
    let (slurm_state, list) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let state = match slurm_state {
        "RUNNING" | "COMPLETING" | "SUSPENDED" => State::Running,
        "PENDING" | "CONFIGURING" => State::Waiting,
        "COMPLETED" | "CANCELLED" => State::Ended,
        _ => State::Failed,
    };
    let mut status = Status::unnamed(state, format!("slurm:{id}"), slurm_state);
    if !list.is_empty() {
        let hosts = slurm.hostnames(list).await?;
        status.nodes = hosts.lines().map(str::to_owned).collect();
    }
    Ok(status)
}

/// The status of a job. If the job still waits for a node close to VMs, it may now run anywhere.
async fn status_freeing_waiting_job(
    slurm: &Slurm,
    name: &str,
    wanted: &Environment,
) -> Result<Status, SlurmError> {
    let status = status(slurm, name).await?;
    if status.state == State::Waiting && wanted.nodes.is_empty() && !wanted.near.is_empty() {
        let job = status.handle.trim_start_matches("slurm:");
        // Fails if it has just started.
        let _ = slurm.run(&["scontrol", "update", &format!("JobId={job}"), "ExcNodeList="]).await;
    }
    Ok(status)
}

async fn stop(slurm: &Slurm, name: &str) -> Result<Status, SlurmError> {
    slurm.run(&["scancel", "--name", name]).await?;
    status(slurm, name).await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::CommandFactory;
    use test_servers::SlurmCluster;
    use vmove_bridge_types::adapter::VERSION;
    use vmove_skip::installed::man_page_is_current;
    use vmove_skip::need;

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-bridge --lib the_checked_in` writes it. `vmove man` installs it with the others.
    #[test]
    fn the_checked_in_man_page_is_current() {
        man_page_is_current(Arguments::command(), "sched-bridge/service/dist", "vmove-bridge");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_environment_runs_as_a_job_where_it_was_placed() {
        let cluster = need!(SlurmCluster::start(4, 2, 2));
        let slurm = Slurm::new(cluster.environment());
        let environment = |name: &str, kind: &str, nodes: &[&str]| Environment {
            name: name.into(),
            kind: kind.into(),
            artifact: "sleep 60".into(),
            nodes: nodes.iter().map(|n| (*n).to_owned()).collect(),
            cores: 1,
            ..Environment::default()
        };
        let mut request = Request {
            version: VERSION,
            action: Action::Start,
            cluster: "bp".into(),
            environments: vec![
                environment("db", "bare-metal", &["n2", "n3"]),
                environment("web", "container", &["n1"]),
                environment("odd", "vm", &[]),
            ],
        };
        let first = answer(&slurm, &request, "env").await;
        assert_eq!(first[2].state, State::Failed, "VMs are not Slurm's");
        request.environments.pop();
        request.action = Action::Status;
        let mut now = answer(&slurm, &request, "env").await;
        for _ in 0..1200 {
            if now.iter().all(|e| e.state == State::Running) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            now = answer(&slurm, &request, "env").await;
        }
        assert_eq!(now[0].nodes, ["n2", "n3"], "{now:?}");
        assert_eq!(now[1].nodes, ["n1"], "{now:?}");
        // Near to VMs: below the leaf of n1, which has room on n0 only.
        let mut near = Request {
            action: Action::Start,
            environments: vec![environment("log", "container", &[])],
            ..request.clone()
        };
        near.environments[0].near = vec!["n1".to_owned()];
        near.environments[0].cores = 8;
        answer(&slurm, &near, "env").await;
        let mut list = String::new();
        for _ in 0..600 {
            list = slurm.run(&["squeue", "-h", "-t", "R", "-n", "bp.log", "-o", "%N"]).await.unwrap();
            if !list.trim().is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(list.trim(), "n0");
        near.action = Action::Stop;
        answer(&slurm, &near, "env").await;
        // Started again, it is there already.
        request.action = Action::Start;
        assert_eq!(answer(&slurm, &request, "env").await[0].handle, now[0].handle);
        request.action = Action::Stop;
        answer(&slurm, &request, "env").await;
        a_wish_does_not_hold_a_job_for_ever(&slurm, near).await;
    }

    /// There was room near to VMs when it was started, and is none when its status is asked for.
    async fn a_wish_does_not_hold_a_job_for_ever(slurm: &Slurm, mut near: Request) {
        let excluded = async || {
            let jobs = slurm.run(&["squeue", "-h", "-t", "PD", "-n", "bp.late", "-o", "%x"]).await.unwrap();
            jobs.trim().to_owned()
        };
        near.environments[0].name = "late".to_owned();
        for _ in 0..600 {
            if slurm.run(&["squeue", "-h"]).await.unwrap().trim().is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // No job begins while it is submitted and its place is taken away.
        slurm.run(&["scontrol", "update", "PartitionName=all", "State=DOWN"]).await.unwrap();
        near.action = Action::Start;
        answer(slurm, &near, "env").await;
        assert_eq!(excluded().await, "n[0,2-3]");
        let drain = ["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"];
        slurm.run(&drain).await.unwrap();
        slurm.run(&["scontrol", "update", "PartitionName=all", "State=UP"]).await.unwrap();
        near.action = Action::Status;
        let mut now = answer(slurm, &near, "env").await;
        assert_eq!(now[0].state, State::Waiting, "{now:?}");
        assert_eq!(excluded().await, "");
        for _ in 0..600 {
            if now[0].state == State::Running {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            now = answer(slurm, &near, "env").await;
        }
        assert_eq!(now[0].state, State::Running, "{now:?}");
        assert_ne!(now[0].nodes, ["n1"]);
        near.action = Action::Stop;
        answer(slurm, &near, "env").await;
    }
}
