//! Phase Warm of a guest whose disks move: they are copied before its memory, and held in step just before it stops.

use std::time::Duration;

use tokio::time::sleep;
use vmove_node::peer::LinkKind;
use vmove_qmp::disks::CopyState;
use vmove_types::progress::Phase;

use super::conversation::{Heard, Serving, Until};
use super::disk_copies::{DiskCopies, Ground, LOOK_INTERVAL};
use super::error::{SourceError, Stop};
use super::session::Session;
use super::warm::Warm;
use crate::proto::message::ToSource;

/// While the guest's writes go to both disks, what is missing is small.
const IN_STEP_INTERVAL: Duration = Duration::from_millis(10);

impl Warm {
    /// Copies the disks that move, while the guest runs, until all follow it. Memory has the link for itself after that.
    pub(super) async fn copy_disks(&mut self, session: &mut Session) -> Result<(), Stop> {
        let moving = std::mem::take(&mut self.moving);
        // Those that follow the guest are not copied by QEMU here.
        if moving.is_empty() || session.spec().disks_after {
            return Ok(());
        }
        // Its QEMU exports its disks by then.
        self.wait_prepared(session).await?;
        session.publisher.enter(Phase::Disks);
        let record = session.journal.record();
        let ground = Ground {
            node: &session.node,
            to: session.to(),
            vm_dir: &record.vm.vm_dir,
            bandwidth: record.spec.bandwidth,
            pace: record.spec.disk_pace,
            hello: &|index| session.hello(LinkKind::Disk, index, record.token),
        };
        self.begins_copies = true;
        let copies = DiskCopies::begin(ground, &self.monitor, moving).await?;
        self.begins_copies = false;
        session.copies = Some(copies);
        self.until_disks(session, LOOK_INTERVAL, |state| state.ready).await
    }

    /// From here on the guest's writes go to both disks, so that nearly nothing is missing when it stops. Says whether there are any disks.
    pub(super) async fn hold_disks_in_step(&mut self, session: &mut Session) -> Result<bool, Stop> {
        let Some(copies) = &mut session.copies else { return Ok(false) };
        copies.look().await?;
        for number in 0..copies.len() {
            self.monitor.hold_copy_in_step(number).await.map_err(SourceError::Monitor)?;
        }
        self.until_disks(session, IN_STEP_INTERVAL, |state| state.in_step).await?;
        Ok(true)
    }

    /// Waits until all copies are so far.
    async fn until_disks(
        &mut self,
        session: &mut Session,
        interval: Duration,
        so_far: impl Fn(&CopyState) -> bool,
    ) -> Result<(), Stop> {
        loop {
            let Some(copies) = &mut session.copies else { return Ok(()) };
            let states = copies.look().await?;
            copies.catch_up(&states).await?;
            let progress = copies.progress(&states);
            copies.keep_speed(&states).await?;
            session.publisher.update(|p| p.disks = progress);
            if states.iter().all(&so_far) {
                return Ok(());
            }
            let next = copies.until_next_look(&states, interval);
            self.listen_for(session, next).await?;
        }
    }

    async fn listen_for(&mut self, session: &mut Session, time: Duration) -> Result<(), Stop> {
        let over = sleep(time);
        tokio::pin!(over);
        loop {
            let serving = Serving::Rounds(&mut self.pages);
            match session.next_until(&mut self.control, serving, &mut over).await? {
                Until::Over(()) => return Ok(()),
                Until::Heard(Heard::PagesRenewed) => {}
                Until::Heard(Heard::Message(ToSource::Prepared)) => self.prepared = true,
                Until::Heard(Heard::Message(other)) => return Err(session.unexpected(&other)),
            }
        }
    }
}
