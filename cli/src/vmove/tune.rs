//! `vmove tune`.

use vmove_client::Client;
use vmove_types::problem::Exit;
use vmove_types::tuning::{Advice, AdviceState, TuningReport};

use crate::args::vmove::Tune;
use crate::output::{End, say, say_json};

pub async fn tune(client: &Client, args: &Tune, json: bool) -> Result<Exit, End> {
    let vm = args.vm.as_deref();
    let report = if args.apply { client.apply_tuning(vm).await? } else { client.tuning(vm).await? };
    if json {
        say_json(&report)?;
    } else {
        say(&describe(&report))?;
    }
    let open = |advice: &Advice| matches!(advice.state, AdviceState::Better | AdviceState::CanApply);
    Ok(if report.advice.iter().any(open) { Exit::Refused } else { Exit::Done })
}

/// A line for each thing, and below it what would be better and the command that does it.
fn describe(report: &TuningReport) -> String {
    let mut lines = Vec::new();
    for advice in &report.advice {
        let state = match advice.state {
            AdviceState::Good => "good",
            AdviceState::Better | AdviceState::CanApply => "better",
            AdviceState::Applied => "applied",
            AdviceState::Unknown => "-",
        };
        let of = advice.vm.as_ref().map_or_else(String::new, |vm| format!("{vm}: "));
        lines.push(format!("{state:<8} {:<16} {of}{}", advice.topic, advice.found));
        if let AdviceState::Better | AdviceState::CanApply = advice.state {
            lines.extend(advice.better.iter().map(|why| format!("{:25} {why}", "")));
            lines.extend(advice.command.iter().map(|command| format!("{:25} $ {command}", "")));
        }
    }
    if report.advice.iter().any(|advice| advice.state == AdviceState::CanApply && advice.vm.is_none()) {
        lines.push("`vmove tune --apply` does what can be done without a restart".to_owned());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_be_better_has_its_command_below() {
        let good = r#"{"topic": "swap", "state": "good", "found": "no swap"}"#;
        let better = r#"{"topic": "pinning", "vm": "web", "state": "can-apply", "found": "2 on 0", "better": "moved", "command": "vmove tune --apply web"}"#;
        let report: TuningReport =
            serde_json::from_str(&format!(r#"{{"advice": [{good}, {better}]}}"#)).unwrap();
        let text = describe(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "good     swap             no swap");
        assert_eq!(lines[1], "better   pinning          web: 2 on 0");
        assert!(lines[3].ends_with("$ vmove tune --apply web"), "{text}");
        assert_eq!(lines.len(), 4, "of a VM nothing is said of the host: {text}");
    }
}
