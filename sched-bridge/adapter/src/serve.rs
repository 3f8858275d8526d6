//! The frame of an adapter that is a program of ours: one JSON object in, one out.

use std::process::ExitCode;

use sched_bridge::model::{ClusterName, IdError, NodeName, VmName};
use vmove_bridge_types::adapter::{Answer, Environment, Request, Status, VERSION};

/// Reads a request from standard input, has it answered, and writes the answer to standard output. `program` is its name in messages.
///
/// A request that is not one of the contract, and an error of `answer`, end with exit code 1 and the reason on standard error.
#[must_use]
pub fn run<E: std::fmt::Display>(
    program: &str,
    answer: impl AsyncFnOnce(&Request) -> Result<Vec<Status>, E>,
) -> ExitCode {
    let text = std::io::read_to_string(std::io::stdin()).map_err(|e| e.to_string());
    let answered = text.and_then(|text| read(&text)).and_then(|request| {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        let environments = runtime.block_on(answer(&request)).map_err(|e| e.to_string())?;
        serde_json::to_string(&Answer { version: VERSION, environments }).map_err(|e| e.to_string())
    });
    match answered {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One status for each environment, in the same sequence; an error is the state `failed` of that environment alone.
pub async fn each<E: std::fmt::Display>(
    request: &Request,
    mut one: impl AsyncFnMut(&Environment) -> Result<Status, E>,
) -> Vec<Status> {
    let mut answers = Vec::new();
    for environment in &request.environments {
        let status = one(environment).await.unwrap_or_else(|error| {
            Status::unnamed(vmove_bridge_types::adapter::State::Failed, "", error.to_string())
        });
        answers.push(Status { name: environment.name.clone(), ..status });
    }
    answers
}

fn read(text: &str) -> Result<Request, String> {
    let request: Request =
        serde_json::from_str(text).map_err(|e| format!("expected a request of version {VERSION}: {e}"))?;
    if request.version != VERSION {
        return Err(format!("expected a request of version {VERSION}, found {}", request.version));
    }
    check_names(&request).map_err(|e| e.to_string())?;
    Ok(request)
}

/// Names become arguments of commands: none may be an option, or a list of several.
fn check_names(request: &Request) -> Result<(), IdError> {
    ClusterName::new(&request.cluster)?;
    for environment in &request.environments {
        // Of the same form as the name of a VM.
        VmName::new(&environment.name)?;
        for node in environment.nodes.iter().chain(&environment.near) {
            NodeName::new(node)?;
        }
        for member in &environment.members {
            VmName::new(&member.name)?;
            NodeName::new(&member.node)?;
            for alias in &member.aliases {
                VmName::new(alias)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmove_bridge_types::adapter::Action;

    use super::*;

    #[test]
    fn no_name_reaches_a_command_as_an_option_or_a_list() {
        let request = |cluster: &str, name: &str, node: &str| Request {
            version: VERSION,
            action: Action::Stop,
            cluster: cluster.into(),
            environments: vec![Environment {
                name: name.into(),
                nodes: vec![node.to_owned()],
                ..Environment::default()
            }],
        };
        check_names(&request("bp", "web", "n1")).unwrap();
        for (cluster, name, node) in [("-u", "web", "n1"), ("bp", "a,b", "n1"), ("bp", "web", "-w")] {
            check_names(&request(cluster, name, node)).unwrap_err();
        }
    }

    #[test]
    fn what_is_no_request_is_refused_with_what_was_expected() {
        for (text, wanted) in [
            ("hello", "expected a request of version 1"),
            (r#"{"version":1,"action":"dance","cluster":"c","environments":[]}"#, "dance"),
            (r#"{"version":7,"action":"stop","cluster":"c","environments":[]}"#, "found 7"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
