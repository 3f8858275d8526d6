//! Up to the hand-over. Every step can be dropped: [`super::giving_up`] then puts back what had been done.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use vmove_memory::{PageIndex, RamFile};
use vmove_qmp::inspect::VmFacts;
use vmove_qmp::switchover::{Hold, Outbound, Source, SourceOptions, StateReceiver};

use super::memory::SourceMemory;
use super::session::{Naming, Session, Stop};
use crate::clock::Mono;
use crate::destination::chain;
use crate::destination::verify::{ZERO_PAGE, page_hash};
use crate::node::Node;
use crate::ownership::SourceEvent;
use crate::pending::PageSet;
use crate::progress::Phase;
use crate::proto::hello::{LinkKind, Token};
use crate::proto::message::{BlockInfo, DestinationStand, Final, Hashes, Prepare, ToDestination, ToSource};
use crate::spec::MigrationSpec;
use crate::vm::VmRecord;

/// The destination looks for blockers, which starts a QEMU twice to ask what it is.
pub(super) const ANSWER: Duration = Duration::from_secs(60);
/// QEMU sends what little RAM of its own is not shared (video memory), then stops the guest.
const STOP: Duration = Duration::from_secs(60);
/// Hashes sent at once: 512 KiB.
const HASHES: usize = 64 << 10;

/// Describes a VM to a destination.
pub(super) fn prepare_message(
    node: &Node,
    vm: &VmRecord,
    spec: &MigrationSpec,
    facts: &VmFacts,
    blocks: Vec<BlockInfo>,
    token: Token,
    check_only: bool,
) -> Prepare {
    Prepare {
        vm: vm.name.clone(),
        source: node.config.node.clone(),
        boot_id: crate::clock::boot_id(),
        token,
        spec: spec.clone(),
        check_only,
        command_line: vm.command_line.clone(),
        environment: vm.environment.clone(),
        backing: vm.backing.clone(),
        blocks,
        qemu_version: facts.version.clone(),
        machine: facts.machine.clone(),
        was_running: facts.status == "running",
        disks: crate::check::source::disks(facts),
        fabrics: node.config.dialer.fabrics(),
    }
}

impl Session {
    /// Everything until the destination holds the device state and waits for the commit.
    pub(super) async fn up_to_hand_over(&mut self) -> Result<(), Stop> {
        let facts = self.look_at_the_guest().await?;
        self.ask_for_room(&facts).await?;
        self.publisher.enter(Phase::Prepare);
        self.serve_pages().await?;
        self.ask_clock().await?;
        self.report.setup_ms = self.publisher.elapsed_ms();
        self.rounds().await?;
        if !self.prepared {
            self.wait_prepared().await?;
            // The guest went on writing meanwhile.
            if self.rounds_would_pay()? {
                self.rounds().await?;
            }
        }
        self.all_registered().await?;
        self.switch_over().await
    }

    async fn look_at_the_guest(&mut self) -> Result<VmFacts, Stop> {
        let client = self.node.config.monitors.client(&self.vm.qmp_socket).await.map_err(|e| chain(&e))?;
        self.client = Some(client.clone());
        let facts = vmove_qmp::inspect::facts(&client, self.vm.pid.unsigned_abs(), None)
            .await
            .map_err(|e| chain(&e))?;
        let mut blockers = crate::check::source::blockers(&facts);
        blockers.extend(crate::check::source::private_ram(&self.vm)?);
        let mode = self.spec.mode.fixed();
        // `auto` takes what is left; a named mode must be possible.
        let bad: Vec<_> =
            blockers.into_iter().filter(|b| mode.map_or(b.modes.is_empty(), |m| b.rules_out(m))).collect();
        if !bad.is_empty() {
            return Err(Stop::Refused(bad));
        }
        self.direct_io = facts.has_direct_io();
        let how = if self.direct_io {
            "guest stopped and drained for each scan"
        } else {
            "no disk bypasses the page cache"
        };
        how.clone_into(&mut self.report.direct_io);
        let was_running = facts.status == "running";
        self.journal
            .update(|r| r.was_running = was_running)
            .map_err(|e| format!("Could not write the journal: {e}"))?;
        Ok(facts)
    }

    async fn ask_for_room(&mut self, facts: &VmFacts) -> Result<(), Stop> {
        self.dial_control(Token::default()).await?;
        // Registered with the fabric once that is agreed on; what is asked here is the layout.
        let blocks = layout(&self.vm)?;
        let prepare = prepare_message(&self.node, &self.vm, &self.spec, facts, blocks, self.token, false);
        self.send(&ToDestination::Prepare(Box::new(prepare))).await?;
        let answer = timeout(ANSWER, self.next())
            .await
            .map_err(|_| format!("{} did not answer within {} s", self.to, ANSWER.as_secs()))?;
        let accepted = match answer? {
            ToSource::Accepted(accepted) => *accepted,
            other => return Err(self.unexpected(&other)),
        };
        self.report.destination.clone_from(&accepted.destination);
        self.report.fabric = accepted.fabric.to_string();
        self.report.fabric_reason.clone_from(&accepted.fabric_reason);
        self.show_fabric();
        self.report.memory.clone_from(&self.vm.backing);
        let vm = self.vm.clone();
        let memory = tokio::task::spawn_blocking(move || SourceMemory::open(&vm))
            .await
            .map_err(|e| e.to_string())??;
        self.report.pages_total = memory.total_pages();
        self.report.page_size = memory.page_bytes();
        self.publisher.update(|p| p.bytes_total = memory.content_bytes());
        self.memory = Some(Arc::new(memory));
        let (kind, address, bulk) =
            (accepted.fabric, accepted.fabric_address.clone(), accepted.bulk_connections);
        let may_fall_back = accepted.may_fall_back;
        self.journal
            .update(|r| {
                r.fabric = Some(kind);
                r.fabric_address = address;
                r.bulk_connections = bulk;
                r.may_fall_back = may_fall_back;
            })
            .map_err(|e| format!("Could not write the journal: {e}"))?;
        if crate::clock::is_of_this_kernel(&accepted.boot_id) {
            self.clock.is_ours();
        }
        self.accepted = Some(accepted);
        Ok(())
    }

    pub(super) async fn wait_prepared(&mut self) -> Result<(), Stop> {
        while !self.prepared {
            match self.next().await? {
                ToSource::Prepared => {}
                other => return Err(self.unexpected(&other)),
            }
        }
        Ok(())
    }

    /// Stops the guest, names the last pages, moves the device state.
    async fn switch_over(&mut self) -> Result<(), Stop> {
        let client = self.client.clone().ok_or_else(|| "no monitor".to_owned())?;
        // QEMU 10 says when the guest is drained without being made to wait (2 ms less pause); older ones say it only when all is sent,
        // which may be never if the destination needs a page to take it in.
        let hold = if client.version().major >= 10 { Hold::Never } else { Hold::AtOnce };
        let options = SourceOptions::default().hold(hold);
        let source = Arc::new(Source::prepare(&client, &options).await.map_err(|e| chain(&e))?);
        self.qmp = Some(Arc::clone(&source));
        let hello = self.hello(LinkKind::State, 0, self.token);
        let mut to = self.node.config.dialer.stream(&self.to, &hello).await?;
        let (mut from, theirs) = StateReceiver::pair().map_err(|e| chain(&e))?;
        self.relay = Some(tokio::spawn(async move {
            let relayed = vmove_qmp::switchover::relay(&mut from, &mut to).await;
            relayed.map(|stats| stats.bytes).map_err(|e| format!("device state stream: {e}"))
        }));
        self.advance(SourceEvent::Stop)?;
        self.publisher.enter(Phase::Switchover);
        source.start(Outbound::Fd(theirs)).await.map_err(|e| chain(&e))?;
        let stopped = source.stopped(STOP).await.map_err(|e| chain(&e))?;
        // Drained: nothing in QEMU writes guest memory from here on.
        source.held(STOP).await.map_err(|e| chain(&e))?;
        self.stopped_at = stopped.was_running.then_some(Mono(stopped.at.0));
        self.name_final_pages(Mono(stopped.at.0)).await?;
        self.publisher.enter(Phase::HandOver);
        loop {
            match self.next().await? {
                ToSource::Loaded => break,
                ToSource::Prepared => {}
                other => return Err(self.unexpected(&other)),
            }
        }
        // Until QEMU has completed, a lost stream makes it run the guest on by itself: no commit before that.
        source.completed(STOP).await.map_err(|e| chain(&e))?;
        self.not_failed_meanwhile()
    }

    /// A destination that has failed since it said `Loaded` is not given the guest.
    fn not_failed_meanwhile(&mut self) -> Result<(), Stop> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        while let Some(message) = channel.received() {
            match message? {
                ToSource::Failed(why) => return Err(Stop::Failed(format!("{}: {why}", self.to))),
                // It says why in its next message, which `give_up` waits for.
                ToSource::Resume(DestinationStand::Gone) => return Err(Stop::Failed(self.gave_back())),
                _ => {}
            }
        }
        Ok(())
    }

    async fn name_final_pages(&mut self, stopped_at: Mono) -> Result<(), Stop> {
        let memory = self.memory()?.clone();
        let scanned = Arc::clone(&memory);
        self.meanwhile_alive(tokio::task::spawn_blocking(move || scanned.scan())).await??;
        self.refresh_regions().await?;
        self.final_sets = memory.take_pending();
        let last = Final {
            sets: self.final_sets.iter().map(PageSet::encode).collect(),
            stopped_at,
            mode: self.mode,
        };
        self.send(&ToDestination::Stopped(last)).await?;
        self.start_naming();
        self.start_hashing();
        Ok(())
    }

    /// Hashes every page for `--verify`; [`Session::next`] passes the hashes on.
    pub(super) fn start_hashing(&mut self) {
        self.hashes = self.memory.as_ref().filter(|_| self.spec.verify).map(hash_all);
    }

    /// Names the pages of the final set; [`Session::next`] passes them on.
    pub(super) fn start_naming(&mut self) {
        if let Some(memory) = &self.memory {
            let (batches, task) = memory.name_pages(self.final_sets.clone(), Arc::clone(&self.gate));
            self.final_runs = Some(Naming { batches, task });
        }
    }
}

fn layout(vm: &VmRecord) -> Result<Vec<BlockInfo>, Stop> {
    let backing = crate::node::backing_named(&vm.backing)
        .ok_or_else(|| format!("unknown backing {:?} in the VM's record", vm.backing))?;
    let info = |ram: &crate::vm::RamFileRecord| -> Result<BlockInfo, Stop> {
        let file = RamFile::open(&ram.path).map_err(|e| chain(&e))?;
        let data = super::memory::parts_with_data(&file)?;
        Ok(BlockInfo { id: ram.id.clone(), size: ram.size, page_size: backing.page_bytes(), data })
    };
    vm.ram.iter().map(info).collect()
}

/// Hashes every page of the stopped guest, from a thread of its own.
fn hash_all(memory: &Arc<SourceMemory>) -> mpsc::Receiver<Hashes> {
    let (sender, receiver) = mpsc::channel(4);
    let memory = Arc::clone(memory);
    tokio::task::spawn_blocking(move || {
        for (number, block) in (0u16..).zip(&memory.blocks) {
            let extents = block.file.data_extents().unwrap_or_default();
            let page_bytes = block.file.page_size().bytes();
            let pages = block.file.pages();
            let mut start = 0;
            while start < pages {
                let end = (start + HASHES as u64).min(pages);
                let hash = |page: u64| {
                    let at = page * page_bytes;
                    let next = extents.partition_point(|e| e.end().0 <= at);
                    // Looking at a hole would fill it.
                    let in_hole = extents.get(next).is_none_or(|e| e.start.0 >= at + page_bytes);
                    if in_hole { ZERO_PAGE } else { page_hash(&block.mapping, PageIndex(page)) }
                };
                let hashes = Hashes { block: number, start, hashes: (start..end).map(hash).collect() };
                if sender.blocking_send(hashes).is_err() {
                    return;
                }
                start = end;
            }
        }
    });
    receiver
}
