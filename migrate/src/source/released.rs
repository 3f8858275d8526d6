//! Phase Released: the destination is whole. QEMU here is ended, its memory freed, the VM forgotten.

use std::time::Duration;

use tokio::time::timeout;

use super::control::Control;
use super::devices;
use super::disks_aside::put_aside;
use super::error::{ReleaseError, SourceError};
use super::frames;
use super::hold::Hold;
use super::session::Session;
use super::stopped_qemu::Kept;
use super::visits::{guest_runs_there, let_qemu_go};
use crate::disk_hash::tell_verified;
use crate::disk_io::tell_after;
use crate::kept_memory::{is_kept, let_memory_go, remove_names_in_vain};
use crate::ownership::SourceEvent;
use crate::proto::message::{Complete, ToDestination};
use vmove_types::disk::DiskVerified;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Outcome, Phase};
use vmove_types::report::Report;

/// QEMU gives its memory back to the kernel: about 0.1 s per GiB with 4 KiB pages.
const QUIT_TIMEOUT: Duration = Duration::from_secs(20);
/// For the word that this side is free.
const RELEASED_TIMEOUT: Duration = Duration::from_secs(2);

/// Frees everything, and ends the session.
pub(super) async fn run(
    mut session: Session,
    (kept, hold): (Kept, Hold),
    figures: &Complete,
    control: Option<Control>,
) {
    session.publisher.enter(Phase::Finish);
    // Also if nobody has said so before: an earlier process of this daemon may have heard it.
    guest_runs_there(&session);
    // Safe without its line: a daemon started anew that finds Committed asks, and the destination is whole. What is freed may be the
    // very room that the line needs.
    if let Err(error) = session.advance_owing(SourceEvent::PeerComplete) {
        return session.end_badly(chain(&error), GuestPlace::Destination);
    }
    if let Some(copies) = &mut session.copies {
        copies.count_last().await;
    }
    add_to_report(&mut session, figures);
    session.end_served_disks().await;
    frames::end(&mut session, figures).await;
    let hold = if session.report.paused {
        // libvirt, which has not let it run there, may have it run here.
        hold.let_on().await;
        Hold::none()
    } else {
        hold
    };
    if let Err(source) = release(&mut session, kept).await {
        let error = SourceError::NotReleased { to: session.to().clone(), source: Box::new(source) };
        return session.end_badly(chain(&error), GuestPlace::Destination);
    }
    // Before the word: a destination that has it forgets the session.
    session.write_owed().await;
    session.report.total_ms = session.publisher.elapsed_ms();
    session.report.phases = session.publisher.phases();
    session.report.host_cpu.source = session.cpu.used();
    session.report.verdict = session.verdict();
    if let Some(mut control) = control {
        let told = serde_json::to_string(&session.report).unwrap_or_default();
        let _ = timeout(RELEASED_TIMEOUT, control.send(&ToDestination::Released(told))).await;
    }
    session.report.over_time = session.publisher.over_time();
    let report = session.report.clone();
    session.write_owing(|r| r.report = report);
    session.write_owed().await;
    session.remember_what_was_measured();
    session.node.visits.forget(session.journal.record().id);
    if let Some(error) = difference(&session.report, figures) {
        return session.end_badly(error, GuestPlace::Destination);
    }
    session.publisher.finish(Outcome::Done { report: Box::new(session.report) });
    hold.guard_on(session.journal.record(), session.publisher);
}

fn add_to_report(session: &mut Session, figures: &Complete) {
    let verify = session.spec().verify;
    session.counted = figures.counted;
    let report = &mut session.report;
    figures.add_to(report);
    devices::add_to_report(session, figures);
    if let Some(copies) = &session.copies {
        session.report.disks = copies.reports();
    }
    if let Some(served) = &session.served {
        session.report.disks = served.reports();
    }
    tell_after(&mut session.report.disks, &figures.disk_io);
    for disk in session.report.disks.iter_mut().filter(|disk| disk.after) {
        disk.latency.gave_way.clone_from(&figures.gave_way);
    }
    tell_verified(&mut session.report.disks, &figures.verified_disks);
    let report = &mut session.report;
    if report.pages_zero == 0 {
        report.pages_zero = figures.pages_zero;
    }
    // A destination that was started anew has no hashes of what it had mapped before.
    let pages = figures.differing_pages.map(|pages| pages == 0);
    let disks = figures.verified_disks.iter().map(|(_, disk)| disk.is_right());
    report.verified = if verify { all_right(disks.chain([pages])) } else { None };
    let rounds = report.rounds.len();
    if rounds > 0 {
        let gib = (report.pages_total * report.page_size) as f64 / f64::from(1 << 30);
        let scans: f64 = report.rounds.iter().map(|r| r.scan_us).sum();
        report.scan_us_per_gib = scans / rounds as f64 / gib;
    }
}

/// Whether all is known to be right; `None` if nothing is known to be wrong, and not all is known.
fn all_right(mut parts: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    parts
        .try_fold(Some(true), |so_far, part| match part {
            Some(false) => Err(()),
            Some(true) => Ok(so_far),
            None => Ok(None),
        })
        .unwrap_or(Some(false))
}

/// What differs at the destination, in words.
fn difference(report: &Report, figures: &Complete) -> Option<String> {
    let pages = figures.differing_pages.filter(|pages| *pages > 0);
    let pages = pages.map(|pages| format!("{pages} pages of its memory"));
    let disk = |(name, disk): &(String, DiskVerified)| {
        let first = disk.first_difference?;
        let kept = report.disks.iter().find(|known| known.name == *name);
        let kept = kept.and_then(|known| known.left_at.as_deref());
        let kept = kept.map(|path| format!(", and its image as the guest left it is {path}"));
        let (chunks, kib) = (disk.differing_chunks, disk.chunk_bytes >> 10);
        let kept = kept.unwrap_or_default();
        let chunks = if chunks == 1 { "1 chunk".to_owned() } else { format!("{chunks} chunks") };
        Some(format!("{chunks} of {kib} KiB of disk {name}, the first at byte {first}{kept}"))
    };
    let all: Vec<String> = pages.into_iter().chain(figures.verified_disks.iter().filter_map(disk)).collect();
    (!all.is_empty()).then(|| {
        let all = all.join("; ");
        format!("Verification failed: the guest at the destination differs from the source's in {all}. Do not trust this guest")
    })
}

async fn release(session: &mut Session, kept: Kept) -> Result<(), ReleaseError> {
    let (vm, vmm) = (session.vm().clone(), &session.node.config.vmm);
    if vm.libvirt.is_some() {
        // libvirt ends QEMU, and has removed its files.
        drop(kept);
        let_memory_go(session.node.disk(), &vm);
        session.write_owing(|r| r.freed = true);
        return Ok(());
    }
    if is_kept(&vm) {
        // Most of it was done when the guest had left for its visit.
        drop(kept);
        let_qemu_go(&session.node, &vm).await?;
        let_memory_go(session.node.disk(), &vm);
        session.write_owing(|r| r.freed = true);
        return Ok(());
    }
    if vmm.is_there(&vm) {
        vmm.end_left(&vm, matches!(kept, Kept::InMemory(_)), QUIT_TIMEOUT).await?;
    }
    drop(kept);
    vmm.forget_monitor(&vm.qmp_socket).await;
    // The VM may have come back since this session's daemon was killed: what is here now is not ours to free.
    let now = session.node.vms.get(&vm.name);
    if now.is_ok_and(|now| now.pid == vm.pid && now.pid_start == vm.pid_start) {
        devices::give_back(session).await;
        put_aside(session);
        free_files(session)?;
        remove_names_in_vain(session.node.disk(), session.journal.record().id, &vm);
    }
    session.write_owing(|r| r.freed = true);
    Ok(())
}

fn free_files(session: &Session) -> Result<(), ReleaseError> {
    let (vm, disk) = (session.vm(), session.node.disk());
    for ram in &vm.ram {
        match disk.remove_file(&ram.path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(ReleaseError::File { path: ram.path.clone(), source });
            }
            _ => {}
        }
    }
    if !vm.adopted {
        // QEMU's log stays for whoever wonders; sockets in it are dead.
        let _ = disk.remove_file(&vm.qmp_socket);
    }
    Ok(session.node.vms.remove(&vm.name)?)
}
