//! Phase Complete: the guest is ours and whole. The source is told, and frees its side.

use std::ops::ControlFlow;
use std::sync::Arc;

use tokio::task::JoinHandle;
use vmove_memory::{PageSize, Process, RemoteUffd, close_in_qemu, collapse, fill_locked_in_qemu};

use super::error::DestinationError;
use super::guest_memory::GuestMemory;
use super::session::{Control, End, Event, Session};
use crate::past::{By, Measured, OfVisit, WayOfVisit};
use crate::proto::message::{self, DestinationStand, SourceStand, ToDestination, ToSource};
use crate::vmm::Attached;
use vmove_node::record::VmRecord;
use vmove_types::problem::chain;
use vmove_types::progress::Outcome;
use vmove_types::report::Report;
use vmove_types::time::Mono;

/// A guest that needs nobody any more.
#[derive(Debug)]
pub(super) struct Complete {
    /// What the source is told.
    pub figures: Box<message::Complete>,
    /// Mappings are huge, as far as they can be.
    pub is_huge: bool,
}

impl Complete {
    /// Tells the source, and goes on until it has freed its side, or is lost: should it have missed the word, it asks again and is
    /// answered from the journal.
    pub(super) async fn run(self, session: &mut Session, mut control: Control) {
        let told = control.send(&ToSource::Complete(self.figures.clone())).await;
        drop(close_descriptor(session, self.is_huge));
        let end = match told {
            Ok(()) => self.until_released(session, &mut control).await,
            Err(error) => Err(error.into()),
        };
        match end {
            Ok(told) => {
                let report = Box::new(report(session, told));
                session.write_owing(|r| (r.released, r.whole_report) = (true, Some(report.clone())));
                end_session(session, report);
                session.write_owed().await;
            }
            Err(End::Lost(_)) => finish(session),
            Err(end) => {
                control.tell_failure(&end).await;
                session.give_up_owned(end.why());
            }
        }
    }

    /// What the source has told in the end, if it can be read.
    async fn until_released(
        &self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<Option<Report>, End> {
        loop {
            let event = session.next(control).await?;
            if let ControlFlow::Break(told) = self.event(event, session, control).await? {
                return Ok(serde_json::from_str(&told).ok());
            }
        }
    }

    async fn event(
        &self,
        event: Event,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<ControlFlow<String>, End> {
        match event {
            Event::Message(message) => {
                let flow = self.message(message, session, control).await?;
                control.count_silence_anew();
                return Ok(flow);
            }
            Event::Tick => {
                // QEMU may end: the guest is the node's own by now.
                session.look_at_source(control)?;
                session.tell_progress(control).await?;
            }
            // Of page connections, which have ended.
            Event::PageConnection
            | Event::DeviceState(_)
            | Event::Frames(_)
            | Event::PagesLost(_)
            | Event::PagesFailed(_)
            | Event::NothingLeft => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    async fn message(
        &self,
        message: ToDestination,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<ControlFlow<String>, End> {
        match message {
            ToDestination::Released(told) => return Ok(ControlFlow::Break(told)),
            ToDestination::Ping(token) => control.send(&ToSource::Pong { token, now: Mono::now() }).await?,
            // Said again, or on their way when the last page had been fetched.
            ToDestination::Commit
            | ToDestination::AllAttached
            | ToDestination::Regions(_)
            | ToDestination::Runs(_)
            | ToDestination::FinalEnd
            | ToDestination::Hashes(_)
            | ToDestination::HashesEnd
            | ToDestination::DiskHashes(_)
            | ToDestination::DiskRead(_)
            | ToDestination::HostCpu(_)
            // It is told that the guest is whole here.
            | ToDestination::RunsHere => {}
            ToDestination::Resume(SourceStand::Committed) => {
                control.send(&ToSource::Resume(DestinationStand::Complete)).await?;
                control.send(&ToSource::Complete(self.figures.clone())).await?;
            }
            ToDestination::Resume(SourceStand::Aborted) | ToDestination::Abort(_) => {
                return Err(DestinationError::AbortTooLate(session.state()).into());
            }
            other => return Err(session.out_of_order(other.name())),
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Turns 4 KiB mappings into 2 MiB ones, and has locked memory mapped as a whole again, in the background. Once, and before guest memory is
/// pinned for a device.
pub(super) fn make_huge(session: &Session) -> Option<JoinHandle<()>> {
    let locked = session.files.locked;
    in_background(session, move |process, memory, attached| huge(process, memory, attached, locked))
}

/// Closes the fault descriptor in QEMU, and makes mappings huge that are not yet, in the background. Only when the journal says that the guest
/// is whole: before that, a daemon started anew needs the descriptor to take the session up.
fn close_descriptor(session: &Session, is_huge: bool) -> Option<JoinHandle<()>> {
    let (fault_fd, locked) = (session.journal.record().fault_fd, session.files.locked);
    in_background(session, move |process, memory, attached| {
        // A second descriptor of the same context: ours ends with the session, QEMU's must be closed in QEMU.
        let Ok(fd) = attached.context.as_fd().try_clone_to_owned() else { return };
        if let Err(error) = close_in_qemu(process, RemoteUffd { fd, fd_in_qemu: fault_fd }) {
            tracing::warn!(error = chain(&error), "the fault descriptor stays open in QEMU; it does no harm");
        }
        if !is_huge {
            huge(process, memory, attached, locked);
        }
    })
}

fn in_background(
    session: &Session,
    work: impl FnOnce(&Process, &GuestMemory, &Attached) + Send + 'static,
) -> Option<JoinHandle<()>> {
    let vm = session.journal.record().vm.as_ref()?;
    let (pid, start) = (vm.pid.unsigned_abs(), vm.pid_start);
    let memory = Arc::clone(&session.files.memory);
    memory.attached()?;
    Some(vmove_node::blocking::spawn_blocking(move || {
        let Ok(process) = Process::reopen(pid, start) else { return };
        if let Some(attached) = memory.attached() {
            work(&process, &memory, attached);
        }
    }))
}

fn huge(process: &Process, memory: &GuestMemory, attached: &Attached, locked: bool) {
    let small = |file: usize| memory.blocks[file].page_size == PageSize::Base4K;
    for mapping in attached.mappings.iter().filter(|m| small(m.file_index)) {
        if let Err(error) = collapse(process, mapping.hva, mapping.len) {
            tracing::debug!(error = chain(&error), "guest memory keeps 4 KiB mappings");
        }
    }
    let filled = if locked { fill_locked_in_qemu(process, &attached.mappings) } else { Ok(()) };
    if let Err(error) = filled {
        tracing::warn!(error = chain(&error), "locked memory gets mapped only as it is touched");
    }
    tracing::info!("guest memory is settled: mappings are huge where they can be");
}

/// What a guest has brought from its visit, for whoever considers the next one.
fn remember_way_home(session: &Session) {
    let record = session.journal.record();
    if let (Some(_), Some(figures)) = (record.prepare.home, &record.complete) {
        let bytes = figures.counted.wire_bytes.saturating_add(figures.state_bytes);
        let visit = OfVisit { vm: record.prepare.vm.clone(), way: WayOfVisit::Back, bytes };
        let fabric = record.report().fabric;
        let measured = Measured::now(&record.prepare.source, &fabric, By::Migration);
        session.node.past.remember(&session.node.config.disk, Measured { visit: Some(visit), ..measured });
    }
}

/// The source was lost after it had heard that it may free its side, or is needed no more.
pub(super) fn finish(session: &Session) {
    end_session(session, Box::new(report(session, None)));
}

fn end_session(session: &Session, report: Box<Report>) {
    session.files.remove_tables(session.node.disk());
    // An operator may have ended the VM meanwhile. The store's record has what came after the journal's: ports of devices.
    let here = |vm: &VmRecord| {
        let here = session.node.vms.get(&vm.name).ok();
        here.filter(|here| (here.pid, here.pid_start) == (vm.pid, vm.pid_start))
    };
    if let Some(mut vm) = session.journal.record().vm.as_ref().and_then(here) {
        vm.session = None;
        if let Err(error) = session.node.vms.put_owing(vm) {
            tracing::warn!(error = chain(&error), "could not update the VM's record");
        }
    }
    remember_way_home(session);
    session.publisher.finish(Outcome::Done { report });
}

/// What both sides know, or this one alone. Where the time went is told of this side.
fn report(session: &Session, told: Option<Report>) -> Report {
    let record = session.journal.record();
    let mut report = told.unwrap_or_else(|| Report {
        destination: session.node.config.node.clone(),
        faults: session.files.memory.latencies.stats(),
        slowest_faults: session.files.memory.slowest_faults(),
        visit: record.complete.as_ref().and_then(|figures| figures.visit),
        ..record.report()
    });
    report.began_at.clone_from(&record.began_at);
    report.total_ms = session.publisher.elapsed_ms();
    report.phases = session.publisher.phases();
    report
}
