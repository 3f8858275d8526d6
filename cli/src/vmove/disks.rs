//! `disks`, `move-disk`.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};
use vmove_client::{Client, Error};
use vmove_types::disk_move::{DiskMove, DiskMoveState, MoveDiskRequest, VmDisks};
use vmove_types::problem::{Code, Exit};
use vmove_types::units::{format_bytes, format_ms};

use super::bar::Bar;
use super::follow::RESTART_TIMEOUT;
use super::{Ended, disk_latency};
use crate::args::vmove::MoveDisk;
use crate::failure::Failure;
use crate::output::{End, note, say, say_either, say_json, table};

/// How often it is asked how far a move is.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

pub async fn list(client: &Client, vm: &str, json: bool) -> Result<Exit, End> {
    let disks = client.disks(vm).await?;
    say_either(&disks, json, listed)?;
    Ok(Exit::Done)
}

fn listed(all: &VmDisks) -> String {
    let rows: Vec<Vec<String>> = all
        .disks
        .iter()
        .map(|disk| {
            let access = if disk.read_only { "read only" } else { "read, write" };
            let (size, taken) = (format_bytes(disk.size_bytes), format_bytes(disk.allocated_bytes));
            [&disk.name, &disk.format, &size, &taken, access, &disk.file].map(str::to_owned).into()
        })
        .collect();
    let mut text = if rows.is_empty() {
        "The VM has no disk\n".to_owned()
    } else {
        table(&["NAME", "FORMAT", "SIZE", "ALLOCATED", "ACCESS", "FILE"], &rows)
    };
    for obstacle in all.disks.iter().filter(|disk| !disk.read_only).flat_map(|disk| &disk.obstacles) {
        text.push_str(&format!("\n{obstacle}"));
    }
    for one in &all.moves {
        text.push_str(&format!("\n{} {}", one.began_at, told(one)));
    }
    text
}

/// What became of a move, or how far it is.
fn told(one: &DiskMove) -> String {
    let DiskMove { disk, from, to, .. } = one;
    let mut text = match one.state {
        DiskMoveState::Copying => {
            let (done, total) = (one.progress.bytes_done, one.progress.bytes_total);
            format!("{disk} is copied to {to}: {} of {}", format_bytes(done), format_bytes(total))
        }
        DiskMoveState::Switching => format!("{disk} is being switched to {to}"),
        DiskMoveState::Closing => format!("{disk} is on {to}; {from} is being closed"),
        DiskMoveState::Moved => format!("{disk} is on {to}{}", figures(one)),
        DiskMoveState::Cancelled => format!("{disk} stays on {from}: its move to {to} was cancelled"),
        DiskMoveState::Failed => {
            let why = one.error.as_deref().unwrap_or("vmoved does not say why");
            format!("{disk} did not move to {to}: {why}")
        }
    };
    if one.state == DiskMoveState::Moved {
        text.push_str(&match &one.left_at {
            Some(left) => format!("; the old image is {left}"),
            None => "; the old image was deleted".to_owned(),
        });
    }
    if let Some(problem) = &one.problem {
        text.push_str(&format!(". {problem}"));
    }
    text
}

fn figures(one: &DiskMove) -> String {
    let copied = one.copy_ms.map(|ms| format!(": copied in {}", format_ms(ms)));
    let waited = one.switch_ms.map(|ms| format!(", its requests waited at most {}", format_ms(ms)));
    let still = (one.begin_pause_ms > 0.0)
        .then(|| format!(", the guest stood still for {} when it began", format_ms(one.begin_pause_ms)));
    let requests = disk_latency::told(&one.latency).map(|told| format!(", {told}"));
    [copied, waited, still, requests].into_iter().flatten().collect()
}

pub async fn move_disk(client: &Client, args: &MoveDisk, json: bool) -> Result<Ended, End> {
    let (vm, disk) = (args.vm.as_str(), args.disk.as_str());
    let Some(to) = &args.to else {
        let called_off = client.cancel_disk_move(vm, disk).await?;
        say_either(&called_off, json, |_| {
            format!("The move of {disk} is being called off; see: vmove disks {vm}")
        })?;
        return Ok(Ended::With(Exit::Done));
    };
    let not_utf8 = || Failure::bad_request(format!("{to:?} is not UTF-8: name an image whose path is"));
    let request = MoveDiskRequest {
        to: to.to_str().ok_or_else(not_utf8)?.to_owned(),
        bandwidth: args.bandwidth,
        disk_pace: args.disk_pace,
        source_disks: args.source_disks,
    };
    let begun = client.move_disk(vm, disk, &request).await?;
    if args.detach {
        say_either(&begun, json, |_| format!("Disk {disk} is being copied; see: vmove disks {vm}"))?;
        return Ok(Ended::With(Exit::Done));
    }
    let bar = Bar::new();
    let ended = follow(client, &begun, &bar).await;
    bar.clear();
    let Some(ended) = ended? else {
        if json {
            say_json(&begun)?;
        }
        return Ok(Ended::LeftRunning);
    };
    let moved = ended.state == DiskMoveState::Moved;
    if json {
        say_json(&ended)?;
    } else if moved {
        say(&format!("{vm}: {}", told(&ended)))?;
    } else {
        note(&format!("vmove: {vm}: {}", told(&ended)));
    }
    Ok(Ended::With(if moved { Exit::Done } else { Exit::Failed }))
}

/// Waits for the end of a move. Nothing if the operator leaves it running.
async fn follow(client: &Client, begun: &DiskMove, bar: &Bar) -> Result<Option<DiskMove>, End> {
    let mut presses = signal(SignalKind::interrupt())?;
    let mut cancelled = false;
    let mut lost: Option<Instant> = None;
    loop {
        tokio::select! {
            () = sleep(LOOK_INTERVAL) => {}
            _ = presses.recv() => {
                if cancelled {
                    bar.note(&format!("vmove: the move of {} goes on; see: vmove disks {}", begun.disk, begun.vm));
                    return Ok(None);
                }
                cancelled = true;
                bar.note("vmove: calling the move off; press Ctrl-C again to leave it running");
                if let Err(error) = client.cancel_disk_move(&begun.vm, &begun.disk).await {
                    bar.note(&format!("vmove: {}", Failure::from(error).message));
                }
            }
        }
        let disks = match client.disks(&begun.vm).await {
            Ok(disks) => disks,
            Err(error)
                if may_come_back(&error) && lost.is_none_or(|since| since.elapsed() < RESTART_TIMEOUT) =>
            {
                if lost.is_none() {
                    bar.note("vmove: lost the daemon, waiting for it to return; the move is not lost");
                }
                lost.get_or_insert_with(Instant::now);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        lost = None;
        let Some(now) = disks.moves.into_iter().find(|one| one.id == begun.id) else {
            let message = format!(
                "vmoved knows nothing of the move of {} any more: it ended while vmoved was restarted; see which image the disk has by: vmove disks {}",
                begun.disk, begun.vm
            );
            return Err(Failure::new(Code::Internal, message).into());
        };
        if now.state.has_ended() {
            return Ok(Some(now));
        }
        bar.update_disk(&now.progress);
    }
}

/// The daemon does not answer, or QEMU does not just now.
fn may_come_back(error: &Error) -> bool {
    match error {
        Error::Refused(problem) => matches!(problem.code, Code::ShuttingDown | Code::QmpFailed),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_became_of_a_move_is_one_sentence() {
        let moved = DiskMove {
            disk: "vda".to_owned(),
            from: "/a".to_owned(),
            to: "/b".to_owned(),
            state: DiskMoveState::Moved,
            copy_ms: Some(1500.0),
            switch_ms: Some(4.5),
            left_at: Some("/a.moved-1".to_owned()),
            ..DiskMove::default()
        };
        assert_eq!(
            told(&moved),
            "vda is on /b: copied in 1.50 s, its requests waited at most 4.5 ms; the old image is /a.moved-1"
        );
        let failed = DiskMove {
            state: DiskMoveState::Failed,
            error: Some("The copy ended: No space left on device".to_owned()),
            ..moved
        };
        assert_eq!(told(&failed), "vda did not move to /b: The copy ended: No space left on device");
    }
}
