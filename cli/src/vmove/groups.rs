//! `migrate` of several VMs, and `status` and `cancel` of a group.

use std::io::IsTerminal as _;

use indicatif::{MultiProgress, ProgressDrawTarget};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use vmove_client::Client;
use vmove_types::group::{GroupOutcome, GroupProgress, GroupReport, GroupRequest};
use vmove_types::migration::MigrateRequest;
use vmove_types::problem::Exit;
use vmove_types::progress::Outcome;
use vmove_types::units::format_ms;

use super::Ended;
use super::bar::Bar;
use super::follow::{Interrupt, reconnect};
use super::progress_text::{blocker_line, final_object, note_missing, state};
use super::snapshots::{Reader, Snapshots};
use super::waiting::asked;
use crate::failure::Failure;
use crate::output::{End, fields, note, say, say_json, table};

/// Moves several VMs at one barrier.
pub async fn migrate(
    client: &Client,
    members: Vec<MigrateRequest>,
    detach: bool,
    json: bool,
) -> Result<Ended, End> {
    let vms: Vec<&str> = members.iter().map(|member| member.vm.as_str()).collect();
    let wait = asked(&vms, json);
    let taken = wait.answer(client.migrate_group(&GroupRequest { members: members.clone() })).await?;
    taken.notes.iter().for_each(|first| note(&format!("vmove: {first}")));
    if !detach {
        return finish(client, &taken.id, Interrupt::Cancels, json).await;
    }
    if json {
        say_json(&taken)?;
    } else {
        say(&format!("Group {0} is at work; follow it by: vmove status {0} --follow", taken.id))?;
    }
    Ok(Ended::With(Exit::Done))
}

/// Shows a group, or follows it to its end.
pub async fn status(client: &Client, id: &str, follow: bool, json: bool) -> Result<Ended, End> {
    if follow {
        return finish(client, id, Interrupt::Leaves, json).await;
    }
    let group = client.group(id).await?;
    if json {
        say_json(&group)?;
    } else {
        say(&describe(&group))?;
    }
    Ok(Ended::With(Exit::Done))
}

/// Calls a group off.
pub async fn cancel(client: &Client, id: &str, json: bool) -> Result<Exit, End> {
    let taken = client.cancel_group(id).await?;
    if json {
        say_json(&taken)?;
    } else {
        say(&format!("Group {0} is being called off; see: vmove status {0}", taken.id))?;
    }
    Ok(Exit::Done)
}

/// Waits for the end and says how it was.
async fn finish(client: &Client, id: &str, interrupt: Interrupt, json: bool) -> Result<Ended, End> {
    let Some(group) = follow(client, id, interrupt, json).await? else {
        if json {
            say_json(&json!({ "id": id, "error": "interrupted; the group goes on" }))?;
        }
        return Ok(Ended::LeftRunning);
    };
    let exit = group.exit();
    if json {
        say_json(&object(&group, exit))?;
    } else if exit == Exit::Done {
        say(&describe(&group))?;
    } else {
        note(&format!("vmove: {}", describe(&group)));
    }
    group.members.iter().for_each(note_missing);
    Ok(Ended::With(exit))
}

/// The one object that ends `migrate --json` of several VMs.
fn object(group: &GroupProgress, exit: Exit) -> Value {
    let members: Vec<Value> =
        group.members.iter().map(|member| final_object(member, Exit::of_progress(member))).collect();
    json!({ "id": group.id, "group": group.outcome, "members": members, "exit_code": exit.code() })
}

/// One bar for each member, above each other; lines of each where there is no terminal.
struct Bars {
    all: Option<MultiProgress>,
    json: bool,
    reader: Reader,
    told: Snapshots,
    of: Vec<Bar>,
}

impl Bars {
    fn new(interrupt: Interrupt, json: bool) -> Self {
        let reader = Reader::of(interrupt.only_follows(), json);
        let terminal = reader == Reader::Waiting && std::io::stderr().is_terminal();
        let all = terminal.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)));
        Self { all, json, reader, told: Snapshots::of(reader), of: Vec::new() }
    }

    fn bar(&self) -> Bar {
        match (&self.all, self.reader) {
            (Some(all), _) => Bar::within(all),
            (None, Reader::Lines) => Bar::lines_on_stdout(),
            (None, Reader::Waiting | Reader::Objects) => Bar::without_terminal(self.json),
        }
    }

    fn update(&mut self, group: &GroupProgress) -> Result<(), End> {
        while self.of.len() < group.members.len() {
            self.of.push(self.bar());
        }
        for (bar, member) in self.of.iter().zip(&group.members) {
            let gate = group.gate.filter(|_| !group.waiting_for.contains(&member.vm));
            let waits =
                gate.map(|gate| format!("{}: waits for {}", gate.as_str(), group.waiting_for.join(", ")));
            bar.update_named(&member.vm, member, waits)?;
        }
        // The slowest member tells how far all are.
        let phase = group.members.iter().map(|member| member.phase).min();
        phase.map_or(Ok(()), |phase| self.told.add(group, phase))
    }

    fn note(&self, text: &str) {
        match &self.all {
            Some(all) => all.suspend(|| note(text)),
            None => note(text),
        }
    }

    fn clear(&self) {
        self.of.iter().for_each(Bar::clear);
    }
}

/// Follows a group to its end; nothing if the operator does not want to wait.
async fn follow(
    client: &Client,
    id: &str,
    interrupt: Interrupt,
    json: bool,
) -> Result<Option<GroupProgress>, End> {
    let mut bars = Bars::new(interrupt, json);
    let ended = watch(client, id, interrupt, &mut bars).await;
    bars.clear();
    ended
}

async fn watch(
    client: &Client,
    id: &str,
    interrupt: Interrupt,
    bars: &mut Bars,
) -> Result<Option<GroupProgress>, End> {
    let mut snapshots = client.follow_group(id).await?;
    let mut presses = signal(SignalKind::interrupt())?;
    let mut asked = false;
    loop {
        tokio::select! {
            next = snapshots.next() => match next {
                Ok(Some(group)) if group.outcome.is_end() => return Ok(Some(group)),
                Ok(Some(group)) => bars.update(&group)?,
                Ok(None) | Err(_) => {
                    bars.note("vmove: lost the daemon, waiting for it to return; the group is not lost");
                    snapshots = reconnect(|| client.follow_group(id), id, &mut presses).await?;
                }
            },
            _ = presses.recv() => {
                if asked || interrupt == Interrupt::Leaves {
                    bars.note(&format!("vmove: group {id} goes on; follow it by: vmove status {id} --follow"));
                    return Ok(None);
                }
                asked = true;
                bars.note("vmove: cancelling; press Ctrl-C again to leave the group running");
                if let Err(error) = client.cancel_group(id).await {
                    bars.note(&format!("vmove: {}", Failure::from(error).message));
                }
            }
        }
    }
}

/// All of a group, for people.
fn describe(group: &GroupProgress) -> String {
    let rows: Vec<Vec<String>> = group
        .members
        .iter()
        .map(|member| vec![member.vm.clone(), member.id.clone(), member.peer.clone(), state(member)])
        .collect();
    let members = table(&["VM", "MIGRATION", "TO", "STATE"], &rows);
    let first = match &group.outcome {
        GroupOutcome::Gathering => gathering(group),
        GroupOutcome::Decided => {
            format!("Group {}: decided; every guest goes to its destination", group.id)
        }
        GroupOutcome::Done { report } => format!("Group {} has moved\n{}", group.id, figures(report)),
        GroupOutcome::CalledOff { error, .. } => {
            format!("Group {}: no guest has moved: {error}", group.id)
        }
        GroupOutcome::Incomplete { error } => {
            format!("Group {} was handed over, and is not whole: {error}", group.id)
        }
    };
    let blockers = group.members.iter().filter_map(|member| match &member.outcome {
        Outcome::Refused { blockers } => Some((member, blockers)),
        _ => None,
    });
    let blockers = blockers.flat_map(|(member, all)| {
        all.iter().map(|blocker| format!("\n  {}: {}", member.vm, blocker_line(blocker)))
    });
    format!("{first}{}\n{members}", blockers.collect::<String>())
}

fn gathering(group: &GroupProgress) -> String {
    match group.gate {
        Some(gate) => {
            format!("Group {}: waits at \"{}\" for {}", group.id, gate.as_str(), group.waiting_for.join(", "))
        }
        None => format!("Group {}: at work", group.id),
    }
}

/// The group's own figures.
fn figures(report: &GroupReport) -> String {
    let mut rows = Vec::new();
    let mut row = |name, ms: Option<f64>| rows.extend(ms.map(|ms| (name, format_ms(ms))));
    row("time", report.total_ms);
    row("downtime of all", report.downtime_ms);
    row("stops within", report.stop_spread_ms);
    row("resumes within", report.resume_spread_ms);
    let waits: Vec<String> = report
        .waits
        .iter()
        .filter(|wait| wait.ms >= 0.05)
        .map(|wait| format!("{} at {} {}", wait.vm, wait.gate.as_str(), format_ms(wait.ms)))
        .collect();
    if !waits.is_empty() {
        rows.push(("waited", waits.join(", ")));
    }
    if !report.followed.is_empty() {
        rows.push(("followed later", report.followed.join(", ")));
    }
    fields(&rows)
}

#[cfg(test)]
mod tests {
    use vmove_types::group::{Gate, GateWait};
    use vmove_types::progress::{GuestPlace, Progress, Role};

    use super::*;

    fn group(outcome: GroupOutcome) -> GroupProgress {
        let failed = Outcome::Failed { error: "cut".to_owned(), guest: GuestPlace::Source, cancelled: false };
        let member = |vm: &str| Progress {
            outcome: failed.clone(),
            ..Progress::begun(format!("id-{vm}"), vm, Role::Source, "n2")
        };
        let members = vec![member("a"), member("b")];
        GroupProgress { id: "9".to_owned(), members, gate: None, waiting_for: Vec::new(), outcome }
    }

    #[test]
    fn the_reason_and_each_member_are_told() {
        let error = "b: cut".to_owned();
        let off = group(GroupOutcome::CalledOff { error, cancelled: false, refused: false });
        let text = describe(&off);
        assert!(text.contains("no guest has moved: b: cut") && text.contains("id-a"), "{text}");
        let object = object(&off, off.exit());
        assert_eq!((&object["exit_code"], &object["group"]["state"]), (&json!(1), &json!("called-off")));
        assert_eq!(object["members"][1]["guest"], "source");
    }

    #[test]
    fn waits_and_spreads_are_told() {
        let waits = vec![GateWait { gate: Gate::Loaded, vm: "a".to_owned(), ms: 12.0 }];
        let report = GroupReport { waits, stop_spread_ms: Some(3.0), ..GroupReport::default() };
        let text = describe(&group(GroupOutcome::Done { report: Box::new(report) }));
        assert!(text.contains("a at loaded 12.0 ms") && text.contains("3.0 ms"), "{text}");
    }
}
