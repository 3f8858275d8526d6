//! Blows at forks on one host: parent and children must each be sound, or ended by their own QEMU's death; then the parent is given
//! memory of its own.

use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::aftermath::sound;
use super::deck::{Card, Moment, Victim};
use super::field::Field;
use super::harm::{Harm, Kind};
use super::operator::{Settled, end_everything, settle_at_rest};
use super::patience::Patience;
use super::strike::{Lengths, Struck, strike};
use crate::forks::{done, journals, names, vfork};
use crate::scene::NAME;

/// For a fork to be finished or undone.
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// Forks or promotes the guest, and strikes meanwhile. None if the victim was not there.
///
/// # Errors
/// The harm.
pub fn step(field: &mut Field, card: &Card, lengths: &Lengths) -> Result<Option<(Struck, Settled)>> {
    let request: Vec<String> = match card.moment {
        Moment::Promote => {
            let answer = done(field.source(), &["create", NAME, "--count", "1"])?;
            let child = names(&answer).into_iter().next().context("no child was made")?;
            vec!["promote".to_owned(), child]
        }
        _ => ["create", NAME, "--count", &card.children.to_string()].map(str::to_owned).into(),
    };
    let asking = ask(field, request)?;
    std::thread::sleep(card.delay);
    let struck = if card.victim == Victim::Child {
        // Until there is one.
        let mut patience = Patience::of(Duration::from_secs(20));
        loop {
            let struck = strike(field, card, None, lengths)?;
            if struck.is_some() || asking.is_finished() || patience.is_over() {
                break struck;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    } else {
        strike(field, card, None, lengths)?
    };
    // Whether it succeeded, or was cut off, is told by what is there.
    asking.join().ok().context("a thread panicked")??;
    finished(field)?;
    let Some(struck) = struck else {
        own_memory(field)?;
        return Ok(None);
    };
    let settled = settle_at_rest(field, card.victim, &struck)?;
    if settled.at.is_some() {
        sound(field, field.home, NAME)?;
        sound_children(field)?;
        end_children(field)?;
        own_memory(field)?;
    } else {
        end_everything(field)?;
    }
    Ok(Some((struck, settled)))
}

/// Runs `vfork` beside what follows.
fn ask(field: &Field, request: Vec<String>) -> Result<JoinHandle<Result<()>>> {
    let mut command = std::process::Command::new(crate::places::product("vfork")?);
    command.arg("--control").arg(field.source().control()).args(request);
    command.stdin(std::process::Stdio::null());
    Ok(std::thread::spawn(move || command.output().map(drop).context("vfork could not be run")))
}

/// Waits until no fork is under way.
fn finished(field: &Field) -> Result<()> {
    let mut patience = Patience::of(END_TIMEOUT);
    while !journals(field.source()).is_empty() {
        if patience.is_over() {
            let text = format!("a fork does not end: {:?}", journals(field.source()));
            return Err(Harm::of(Kind::Stuck, text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn children(field: &Field) -> Result<Vec<String>> {
    let all = field.source().vms()?;
    Ok(all.into_iter().filter(|name| name != NAME).collect())
}

/// Each child that runs is sound; one whose QEMU was killed has ended.
fn sound_children(field: &Field) -> Result<()> {
    for child in children(field)? {
        let status = field.source().vm(&child).map(|vm| vm.status);
        if !status.is_ok_and(|status| status == "ended") {
            sound(field, field.home, &child)?;
        }
    }
    Ok(())
}

fn end_children(field: &Field) -> Result<()> {
    let mut patience = Patience::of(END_TIMEOUT);
    loop {
        let left = children(field)?;
        if left.is_empty() {
            return Ok(());
        }
        for child in &left {
            let end = vfork(field.source(), &["kill", child])?;
            if patience.is_over() {
                return Err(Harm::of(Kind::Stuck, format!("child {child} is not to be ended: {}", end.said)));
            }
        }
    }
}

/// A guest whose fork was broken off may be left with private memory: it is given memory of its own.
fn own_memory(field: &Field) -> Result<()> {
    end_children(field)?;
    if !is_private(field)? {
        return Ok(());
    }
    done(field.source(), &["promote", NAME])?;
    ensure!(!is_private(field)?, "the guest has no memory of its own after it was promoted");
    Ok(())
}

fn is_private(field: &Field) -> Result<bool> {
    let tree = vfork(field.source(), &["tree", NAME])?;
    Ok(tree.answer["private"] == Value::Bool(true))
}
