//! `vmove hook`.

use vmove_client::Client;
use vmove_types::hook::{HookInfo, HookList, HookTest, HookTestRequest};
use vmove_types::problem::Exit;
use vmove_types::units;

use crate::args::vmove::HookTest as Args;
use crate::failure::Failure;
use crate::output::{End, say, say_either, say_json, table};

pub async fn list(client: &Client, json: bool) -> Result<Exit, End> {
    say_either(&client.hooks().await?, json, described)?;
    Ok(Exit::Done)
}

fn described(list: &HookList) -> String {
    let mut out = if list.hooks.is_empty() {
        "no hooks: see [[hook]] in the configuration of vmoved\n".to_owned()
    } else {
        let head = ["HOOK", "ON", "FOR", "DO", "DONE", "FAILED", "HELD BACK", "LAST"];
        table(&head, &list.hooks.iter().map(row).collect::<Vec<_>>())
    };
    for warning in &list.warnings {
        out.push_str(&format!("warning: {warning}\n"));
    }
    if list.events_dropped > 0 {
        out.push_str(&format!(
            "warning: {} events were dropped, since too many came at once\n",
            list.events_dropped
        ));
    }
    out
}

fn row(hook: &HookInfo) -> Vec<String> {
    let last = hook.last.as_ref().map_or_else(
        || "-".to_owned(),
        |run| format!("{} in {}: {}", run.outcome, units::format_ms(run.took_ms), run.said),
    );
    let action = if hook.dry_run { format!("{} (dry run)", hook.action) } else { hook.action.clone() };
    let loops = if hook.loops > 0 { format!(" ({} of its own making)", hook.loops) } else { String::new() };
    let failed = if hook.forbidden > 0 {
        format!("{} ({} forbidden)", hook.failed, hook.forbidden)
    } else {
        hook.failed.to_string()
    };
    vec![
        hook.name.clone(),
        hook.on.clone(),
        hook.vms.clone(),
        action,
        hook.done.to_string(),
        failed,
        format!("{}{loops}", hook.held_back),
        last,
    ]
}

pub async fn test(client: &Client, args: Args, json: bool) -> Result<Exit, End> {
    let event = args.event.as_deref().map(serde_json::from_str).transpose().map_err(|error| {
        Failure::bad_request(format!(
            "--event: expected a JSON object, found {:?} ({error})",
            args.event.as_deref().unwrap_or_default()
        ))
    })?;
    let request = HookTestRequest { event, vm: args.vm, run: args.run };
    let test = client.test_hook(&args.name, &request).await?;
    if json {
        say_json(&test)?;
    } else {
        say(&told(&test))?;
    }
    let any = |outcome: &str| test.runs.iter().any(|run| run.outcome == outcome);
    Ok(match () {
        () if any("failed") => Exit::Failed,
        () if test.why_not.is_some() || any("forbidden") => Exit::Refused,
        () => Exit::Done,
    })
}

fn told(test: &HookTest) -> String {
    if let Some(why) = &test.why_not {
        return format!("{} does not run: {why}", test.name);
    }
    let line = |run: &vmove_types::hook::HookTestRun| {
        let vm = run.vm.as_ref().map(|vm| format!("{vm}: ")).unwrap_or_default();
        let outcome = if run.outcome == "would" { String::new() } else { format!("{}: ", run.outcome) };
        format!("{vm}{outcome}{}", run.said)
    };
    test.runs.iter().map(line).collect::<Vec<_>>().join("\n")
}
