//! What lives as long as a session at the source.

use std::sync::Arc;

use super::disk_copies::DiskCopies;
use super::error::{SourceError, Stop, unexpected};
use super::served_disks::ServedDisks;
use super::steering::Steering;
use crate::frames::Copies;
use crate::group::barrier::Membership;
use crate::group::resuming::ResumePlace;
use crate::host_cpu::HostCpu;
use crate::node::Node;
use crate::owed;
use crate::ownership::{SourceEvent, SourceState};
use crate::past::{By, Measured, OfVisit, WayOfVisit};
use crate::proto::message::{Counted, ToSource};
use crate::publish::Publisher;
use crate::records::SourceRecord;
use vmove_node::clock::PeerClock;
use vmove_node::journal::Journal;
use vmove_node::peer::{Hello, LinkKind, PROTOCOL_VERSION, PeerTarget, Token};
use vmove_node::record::VmRecord;
use vmove_types::progress::GuestPlace;
use vmove_types::report::{Report, VisitEnd};
use vmove_types::spec::{MigrationSpec, Mode};

/// What lives as long as the session, whatever phase it is in. Ids and options are in the journal.
#[derive(Debug)]
pub(super) struct Session {
    pub node: Arc<Node>,
    pub journal: Journal<SourceRecord>,
    pub publisher: Publisher,
    pub report: Report,
    /// The mode in use; with `auto` it is chosen after a look at the guest.
    pub mode: Mode,
    /// The destination's.
    pub clock: PeerClock,
    /// What the destination has told last.
    pub counted: Counted,
    /// Copies of its guest's disks.
    pub copies: Option<DiskCopies>,
    /// Its guest's images, once the guest is given up and as long as disks follow it.
    pub served: Option<ServedDisks>,
    /// Its place among those that it moves with, in the process that has begun it.
    pub member: Option<Arc<Membership>>,
    /// Where its script waits for the devices of those that it moves with.
    pub resume: Option<Arc<ResumePlace>>,
    /// Copies of frames that come for the guest while it stands still.
    pub frames: Copies,
    /// How its goals say how it goes, if it has any.
    pub steering: Option<Steering>,
    /// They have ended its rounds.
    pub hurried: bool,
    /// For how long its guest was watched before that, in milliseconds.
    pub watched_ms: f64,
    /// When the destination's QEMU waited for the guest, in milliseconds after the request.
    pub ready_ms: Option<f64>,
    /// Pages that the destination lacked when the guest had stopped.
    pub pages_at_stop: u64,
    /// What is used of the processors here.
    pub cpu: Arc<HostCpu>,
}

impl Session {
    pub(super) fn new(
        node: Arc<Node>,
        journal: Journal<SourceRecord>,
        publisher: Publisher,
        report: Report,
        mode: Mode,
    ) -> Self {
        let (clock, counted) = (PeerClock::default(), Counted::default());
        let percent = journal.record().spec.goals.host_cpu_percent;
        let cpu = Arc::new(HostCpu::new(percent, node.config.vmm.page_workers()));
        Self {
            node,
            journal,
            publisher,
            report,
            mode,
            clock,
            counted,
            copies: None,
            served: None,
            member: None,
            resume: None,
            frames: Copies::default(),
            steering: None,
            hurried: false,
            watched_ms: 0.0,
            ready_ms: None,
            pages_at_stop: 0,
            cpu,
        }
    }

    /// Its guest has its devices, or it is known that it does not get them.
    pub(super) fn has_devices(&self) {
        self.resume.iter().for_each(|place| place.has_devices());
    }

    pub(super) fn vm(&self) -> &VmRecord {
        &self.journal.record().vm
    }

    /// Whether something is to be done in the guest before its memory is read.
    pub(super) fn owns_devices(&self) -> bool {
        let spec = self.spec();
        !self.vm().devices.is_empty() || spec.quiesce.is_some() || spec.resume.is_some()
    }

    pub(super) fn to(&self) -> &PeerTarget {
        &self.journal.record().to
    }

    pub(super) fn spec(&self) -> &MigrationSpec {
        &self.journal.record().spec
    }

    pub(super) fn state(&self) -> SourceState {
        self.journal.record().state
    }

    /// Asks the ownership machine, writes the answer down, and only then lets the caller act.
    pub(super) fn advance(&mut self, event: SourceEvent) -> Result<(), SourceError> {
        let next = self.state().step(event)?;
        let report = self.report.clone();
        self.write(|r| {
            r.enter(next);
            r.report = report;
        })
    }

    /// The same for a step that is safe though it is not written down: it is taken, and the line is [owed](Self::write_owed).
    pub(super) fn advance_owing(&mut self, event: SourceEvent) -> Result<(), SourceError> {
        let next = self.state().step(event)?;
        let report = self.report.clone();
        self.write_owing(|r| {
            r.enter(next);
            r.report = report;
        });
        Ok(())
    }

    /// Changes the record, and writes it down if the disk takes it.
    pub(super) fn write_owing(&mut self, change: impl FnOnce(&mut SourceRecord)) {
        if let Err(error) = self.journal.update_owing(change) {
            self.publisher.cannot_write(self.journal.path(), &error);
        }
    }

    /// Waits until everything is written down. Whoever ends the session waits first: until then it holds its VM, and no other migration
    /// may take the guest away while a journal says that it is to go on here.
    pub(super) async fn write_owed(&mut self) {
        owed::write_owed(&mut self.journal, &self.publisher).await;
    }

    /// Serves the images of a guest that is given up, if its disks follow it.
    pub(super) fn serve_disks(&mut self, anew: bool) {
        let record = self.journal.record();
        let hello = |index| self.hello(LinkKind::Disk, index, record.token);
        self.served = ServedDisks::begin(&self.node, record, hello, anew);
    }

    /// Nobody reads the images of a guest any more: it has them all, or goes on here.
    pub(super) async fn end_served_disks(&mut self) {
        if let Some(served) = self.served.take() {
            served.end().await;
        }
    }

    /// After a step that was not taken: waits until no later process of the daemon can take it for one that was.
    pub(super) async fn cut_back(&mut self) {
        owed::cut_back(&mut self.journal, &self.publisher).await;
    }

    /// Writes a line of the journal.
    pub(super) fn write(&mut self, change: impl FnOnce(&mut SourceRecord)) -> Result<(), SourceError> {
        let path = self.journal.path().to_owned();
        self.journal.update(change).map_err(|source| SourceError::Journal { path, source })
    }

    /// Keeps what was measured for migrations that follow this one.
    pub(super) fn remember_what_was_measured(&self) {
        let (link_bytes_per_s, times) = (self.report.link_bytes_per_s, self.times());
        let visit = (self.report.visit == Some(VisitEnd::Home)).then(|| OfVisit {
            vm: self.vm().name.clone(),
            way: WayOfVisit::There,
            bytes: self.report.bytes_sent,
        });
        if link_bytes_per_s.is_some() || times.is_some() || visit.is_some() {
            let measured = Measured::now(&self.to().name, &self.report.fabric, By::Migration);
            let measured = Measured { link_bytes_per_s, times, visit, ..measured };
            self.node.past.remember(&self.node.config.disk, measured);
        }
    }

    pub(super) fn hello(&self, kind: LinkKind, index: u8, token: Token) -> Hello {
        hello(&self.node, self.journal.record(), kind, index, token)
    }

    pub(super) fn unexpected(&self, message: &ToSource) -> Stop {
        unexpected(self.to(), self.state(), message)
    }

    pub(super) fn end_badly(&self, error: impl std::fmt::Display, guest: GuestPlace) {
        self.publisher.fail(error, guest, false);
    }
}

/// The greeting of a connection of a session.
pub(super) fn hello(node: &Node, record: &SourceRecord, kind: LinkKind, index: u8, token: Token) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind,
        index,
        session: record.id,
        token,
        rdma: false,
        node: node.config.node.clone(),
    }
}
