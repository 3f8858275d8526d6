//! Groups of guests that move at one barrier, as the daemon's engine begins, shows and ends them.

mod listed;
mod run;

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::engine::{Engine, EngineError, New};
use crate::group::barrier::{Barrier, Fate};
use crate::group::handles::GroupHandle;
use crate::group::record::{CalledOff, GroupRecord, GroupState, MemberRecord, groups_dir, journal_path};
use vmove_node::journal::Journal;
use vmove_node::peer::{PeerTarget, SessionId};
use vmove_types::group::GroupReport;
use vmove_types::spec::{MigrationSpec, Visit};

/// A VM that is to move with others.
#[derive(Debug, Clone)]
pub struct GroupMember {
    /// Its name.
    pub vm: String,
    /// Where to.
    pub to: PeerTarget,
    /// Options.
    pub spec: MigrationSpec,
}

/// A group that was begun.
#[derive(Debug, Clone)]
pub struct GroupBegun {
    /// Its id.
    pub id: SessionId,
    /// Those of its members' migrations, in their order.
    pub members: Vec<SessionId>,
}

impl Engine {
    /// Moves several VMs from this node at one barrier: all of them, or none.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was changed then.
    pub async fn start_group(self: &Arc<Self>, members: Vec<GroupMember>) -> Result<GroupBegun, EngineError> {
        check(&members)?;
        let vms: Result<Vec<_>, _> = members.iter().map(|member| self.node.vms.get(&member.vm)).collect();
        let (id, vms) = (SessionId::random(), vms?);
        let of = |GroupMember { vm, to, spec }| {
            let session = SessionId::random();
            MemberRecord { vm, session, to, spec, followers: Vec::new() }
        };
        let members: Vec<MemberRecord> = members.into_iter().map(of).collect();
        let sessions: Vec<SessionId> = members.iter().map(|member| member.session).collect();
        let (barrier, places) = Barrier::new(vms.iter().map(|vm| vm.name.clone()).collect());
        let new = members.iter().zip(vms).zip(places).map(|((member, vm), place)| New {
            id: member.session,
            vm,
            to: member.to.clone(),
            spec: member.spec.clone(),
            group: Some(id),
            member: Some(Arc::new(place)),
            home: None,
            choice: None,
        });
        let new: Vec<New> = new.collect();
        // Before its members' journals, which name it.
        let journal = self.create_journal(id, members)?;
        let cancel = CancellationToken::new();
        let (show, record) = watch::channel(journal.record().clone());
        let handle = GroupHandle { record, barrier: Some(Arc::clone(&barrier)), cancel: cancel.clone() };
        self.groups.lock().insert(id, handle);
        if let Err(error) = self.begin_all(new, &cancel) {
            self.groups.lock().remove(&id);
            self.remove_group(id);
            return Err(error);
        }
        let span = tracing::info_span!("group", %id);
        let run = run::run(Arc::clone(self), Some(barrier), journal, show);
        vmove_node::task::spawn(run.instrument(span));
        Ok(GroupBegun { id, members: sessions })
    }

    fn create_journal(
        &self,
        id: SessionId,
        members: Vec<MemberRecord>,
    ) -> Result<Journal<GroupRecord>, EngineError> {
        let record = GroupRecord {
            id,
            members,
            state: GroupState::Gathering,
            off: None,
            incomplete: None,
            over: false,
            report: GroupReport::default(),
        };
        let path = journal_path(&self.node.config.sessions_dir, id);
        let disk = self.node.disk();
        let dir = path.parent().unwrap_or(&path);
        let created = disk.create_dir_all(dir).and_then(|()| Journal::create_on(disk, &path, record));
        created.map_err(|source| EngineError::Io { path: path.clone(), source })
    }

    /// Calls a group off: every guest goes on at the source. `id` may be any unambiguous prefix.
    ///
    /// # Errors
    /// [`EngineError::UnknownGroup`] or [`EngineError::GroupTooLate`].
    pub async fn cancel_group(&self, id: &str) -> Result<SessionId, EngineError> {
        let (id, handle) = self.find_group(id)?;
        let Some(barrier) = handle.barrier else { return Err(EngineError::GroupTooLate(id)) };
        let why = "cancelled by the operator".to_owned();
        let off = CalledOff { vm: None, why, cancelled: true, refused: false };
        match barrier.call_off(off).await {
            Fate::Stays => {
                handle.cancel.cancel();
                Ok(id)
            }
            Fate::Committed => Err(EngineError::GroupTooLate(id)),
        }
    }

    fn find_group(&self, id: &str) -> Result<(SessionId, GroupHandle), EngineError> {
        let unknown = || EngineError::UnknownGroup(id.to_owned());
        let groups = self.groups.lock();
        let mut matching =
            groups.iter().filter(|(known, _)| !id.is_empty() && known.to_string().starts_with(id));
        let (found, handle) = matching.next().ok_or_else(unknown)?;
        if matching.next().is_some() { Err(unknown()) } else { Ok((*found, handle.clone())) }
    }

    /// Takes up the groups that an earlier process of the daemon left: their members were taken up just before.
    pub(crate) fn resume_groups(self: &Arc<Self>) {
        let (disk, sessions_dir) = (self.node.disk(), &self.node.config.sessions_dir);
        for id in crate::history::session_ids(disk, &groups_dir(sessions_dir)) {
            let path = journal_path(sessions_dir, id);
            match Journal::<GroupRecord>::open_begun_on(disk, &path) {
                Ok(None) => self.remove_group(id),
                Ok(Some(journal)) => {
                    let (show, record) = watch::channel(journal.record().clone());
                    let handle = GroupHandle { record, barrier: None, cancel: CancellationToken::new() };
                    self.groups.lock().insert(id, handle);
                    if !journal.record().over {
                        let span = tracing::info_span!("group", %id);
                        let run = run::run(Arc::clone(self), None, journal, show);
                        vmove_node::task::spawn(run.instrument(span));
                    }
                }
                // Its members are listed with that.
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "the journal of a group cannot be read: nothing is done with it");
                }
            }
        }
    }

    fn remove_group(&self, id: SessionId) {
        let path = journal_path(&self.node.config.sessions_dir, id);
        if let Some(dir) = path.parent()
            && let Err(error) = self.node.disk().remove_dir_all(dir)
        {
            tracing::warn!(dir = %dir.display(), %error, "could not remove the journal of a group that did not begin");
        }
    }

    /// Removes the journals of groups whose members' are gone.
    pub(crate) fn forget_groups(&self) {
        let (disk, sessions_dir) = (self.node.disk(), &self.node.config.sessions_dir);
        let known: HashSet<SessionId> = crate::history::session_ids(disk, sessions_dir).into_iter().collect();
        let old: Vec<SessionId> = {
            let mut groups = self.groups.lock();
            let is_old = |record: &GroupRecord| {
                record.over && record.members.iter().all(|member| !known.contains(&member.last_session()))
            };
            let old: Vec<SessionId> = groups
                .iter()
                .filter(|(_, handle)| is_old(&handle.record.borrow()))
                .map(|(id, _)| *id)
                .collect();
            groups.retain(|id, _| !old.contains(id));
            old
        };
        old.into_iter().for_each(|id| self.remove_group(id));
    }
}

fn check(members: &[GroupMember]) -> Result<(), EngineError> {
    if members.len() < 2 {
        let why = format!("members: expected two VMs or more, found {}", members.len());
        return Err(EngineError::BadSpec(why));
    }
    let mut devices = HashSet::new();
    for (index, member) in members.iter().enumerate() {
        let vm = &member.vm;
        member.spec.validate().map_err(|why| EngineError::BadSpec(format!("{vm}: {why}")))?;
        if member.spec.visit != Visit::No || member.spec.reads_bytes.is_some() {
            let why = format!("{vm}: visit, reads_bytes: a guest visits alone, and a group moves for good");
            return Err(EngineError::BadSpec(why));
        }
        if member.spec.disks_after {
            let why = format!(
                "{vm}: disks_after: the disks of guests that move together cannot follow them; leave it out, or move {vm} alone"
            );
            return Err(EngineError::BadSpec(why));
        }
        if members[..index].iter().any(|other| other.vm == *vm) {
            return Err(EngineError::BadSpec(format!("members: expected each VM once, found {vm} again")));
        }
        for device in &member.spec.devices {
            if !devices.insert((member.to.address.clone(), device.0.address)) {
                let (address, to) = (device.0.address, &member.to);
                return Err(EngineError::BadSpec(format!(
                    "{vm}: expected each device of {to} once in a group, found {address} again"
                )));
            }
        }
    }
    Ok(())
}
