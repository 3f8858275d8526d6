//! Journals and records of forks that cannot be read. They are never taken for ones that are not there: each is listed, holds the VMs that
//! it is known to be about, and is left as it is until an operator has put it right, or gives up what cannot be read.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmove_node::blocking::run_blocking;
use vmove_node::journal::Journal;
use vmove_types::fork::{ForkList, ForkRecovered};
use vmove_types::fork_report::{ForkFailure, ForkProgress};
use vmove_types::problem::{Code, ProblemCode};
use vmove_types::vm::VmSummary;

use super::ForkEngine;
use super::error::ForkError;
use super::progress::Timed;
use crate::CloneError;
use crate::record::ForkRecord;

/// What is said of a parent that no line names.
const UNKNOWN: &str = "unknown";

/// A file about a fork that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unreadable {
    fork: String,
    path: PathBuf,
    /// What the kernel or the parser said.
    why: String,
    /// The fork was begun on this node: it is a journal. Otherwise it is the record of children that another node has ordered.
    own: bool,
    /// As far as an older line names them.
    parent: Option<String>,
    children: Vec<String>,
}

/// What a journal says that could not be read before.
enum Read {
    /// It can be read now.
    Whole(Journal<ForkRecord>),
    /// What stands after its newest line that can be read was given up.
    Older(Journal<ForkRecord>),
    /// It has no line.
    NeverBegun,
    /// No line can be read.
    Nothing,
}

impl Unreadable {
    /// The journal of a fork of this node.
    pub(super) fn journal(path: PathBuf, error: &io::Error) -> Self {
        let older = Journal::<ForkRecord>::read_older(&path);
        let (parent, children) =
            older.map_or((None, Vec::new()), |record| (Some(record.vm.name), record.children));
        Self { fork: fork_of(&path), why: error.to_string(), path, own: true, parent, children }
    }

    /// The record of this node's part in a fork of another node.
    pub(super) fn hosted(path: PathBuf, error: &io::Error) -> Self {
        let (parent, children) = (None, Vec::new());
        Self { fork: fork_of(&path), why: error.to_string(), path, own: false, parent, children }
    }

    fn is_about(&self, vm: &str) -> bool {
        self.parent.as_deref() == Some(vm) || self.children.iter().any(|child| child == vm)
    }

    fn progress(&self) -> ForkProgress {
        let message = format!(
            "{}: put the file right, or give up what cannot be read; then `vfork recover {}`",
            self.why, self.fork
        );
        let code = Code::Internal;
        let error = ForkFailure { code: code.word(), message, exit_code: code.mapping().1.code() };
        ForkProgress {
            id: self.fork.clone(),
            parent: self.parent.clone().unwrap_or_else(|| UNKNOWN.to_owned()),
            phase: unknown_see(&self.path),
            children: self.children.len(),
            error: Some(error),
            ..ForkProgress::default()
        }
    }
}

/// The file has the fork's id as its name.
fn fork_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn unknown_see(path: &Path) -> String {
    format!("unknown, see {}", path.display())
}

impl ForkEngine {
    /// Lists a fork of which nobody knows where it stands. Nothing is done with it.
    pub(super) fn enter_unreadable(&self, mut found: Unreadable) {
        if !found.own {
            // Which children came of it was noted for each of them, too.
            let of_it = self.members.list().into_iter().filter(|member| member.fork == found.fork);
            found.children = of_it.map(|member| member.vm).collect();
        }
        tracing::error!(path = %found.path.display(), parent = found.parent, children = ?found.children, error = found.why,
            "a fork's journal cannot be read: nothing is done with this fork");
        self.lock().unreadable.push(found);
    }

    /// Those whose files are still there.
    fn unreadable(&self) -> Vec<Unreadable> {
        let mut state = self.lock();
        state.unreadable.retain(|found| found.path.exists());
        state.unreadable.clone()
    }

    /// Refuses what would change a VM of which nobody knows how a fork of it stands.
    pub(super) fn is_readable(&self, vm: &str) -> Result<(), ForkError> {
        let of_fork = self.unreadable().into_iter().find(|found| found.is_about(vm));
        if let Some(Unreadable { fork, path, .. }) = of_fork {
            return Err(ForkError::Unreadable { vm: vm.to_owned(), fork, path });
        }
        match self.members.unreadable(vm) {
            Some(path) => Err(ForkError::UnreadableMember { vm: vm.to_owned(), path }),
            None => Ok(()),
        }
    }

    /// Says of VMs in a list that a fork of them cannot be told, and where to look.
    pub fn mark_unreadable(&self, vms: &mut [VmSummary]) {
        let forks = self.unreadable();
        for vm in vms.iter_mut().filter(|vm| vm.waiting.is_none()) {
            let of_fork = forks.iter().find(|found| found.is_about(&vm.name));
            let path = of_fork.map(|found| found.path.clone()).or_else(|| self.members.unreadable(&vm.name));
            vm.waiting = path.map(|path| format!("its fork: {}", unknown_see(&path)));
        }
    }

    /// Forks whose journals cannot be read, then those of this daemon's life that are remembered, the newest first.
    #[must_use]
    pub fn list(&self) -> ForkList {
        let unreadable = self.unreadable();
        let mut forks: Vec<ForkProgress> = unreadable.iter().map(Unreadable::progress).collect();
        forks.extend(self.lock().progress.iter().rev().map(Timed::now));
        ForkList { forks }
    }

    /// Takes up a fork whose journal could not be read. If it still cannot be read, the lines after the last one that can be read are given
    /// up; the file as it was stays beside it.
    ///
    /// # Errors
    /// [`ForkError::NothingToRecover`]; or why the fork cannot be taken up: the file is there then, or beside it as it was.
    pub async fn recover_fork(self: Arc<Self>, id: String) -> Result<ForkRecovered, ForkError> {
        let Some(found) = self.unreadable().into_iter().find(|found| found.fork == id) else {
            return Err(ForkError::NothingToRecover(id));
        };
        let note = if found.own {
            self.recover_own(&found).await?
        } else {
            self.recover_hosted_fork(&found).await?
        };
        self.lock().unreadable.retain(|other| other.path != found.path);
        tracing::warn!(fork = %id, note, "a fork was taken up on request");
        Ok(ForkRecovered { id, note })
    }

    async fn recover_own(self: &Arc<Self>, found: &Unreadable) -> Result<String, ForkError> {
        let path = found.path.clone();
        let read = move || match Journal::<ForkRecord>::open_begun(&path) {
            Ok(Some(journal)) => Ok(Read::Whole(journal)),
            // Somebody has emptied it: nothing was done yet.
            Ok(None) => std::fs::remove_file(&path).map(|()| Read::NeverBegun),
            Err(_) => Journal::open_older(&path).map(|older| older.map_or(Read::Nothing, Read::Older)),
        };
        let read = run_blocking(read).await?.map_err(CloneError::io("read", &found.path))?;
        let kept = || format!("{}.damaged", found.path.display());
        let (journal, whole) = match read {
            Read::Whole(journal) => (journal, true),
            Read::Older(journal) => (journal, false),
            Read::NeverBegun => return Ok("it had not begun; its journal was removed".to_owned()),
            Read::Nothing => {
                return Ok(format!(
                    "no line of it could be read; it is kept as {}. If a VM stands still that should not, `vmove resume` it; end children that \
                     should not be with `vfork kill`",
                    kept()
                ));
            }
        };
        // Otherwise it would be in its own way.
        self.lock().unreadable.retain(|other| other.path != found.path);
        let phase = journal.record().phase.word();
        let parent = journal.record().vm.name.clone();
        if let Err(error) = self.clone().take_up_held(journal).await {
            self.lock().unreadable.push(found.clone());
            return Err(error);
        }
        Ok(match whole {
            true => format!("the fork of {parent:?} was undone as far as it was not complete"),
            false => format!(
                "the fork of {parent:?} was taken up where the last line that can be read says that it stood ({phase}); the journal as it was \
                 is kept as {}",
                kept()
            ),
        })
    }

    async fn recover_hosted_fork(self: &Arc<Self>, found: &Unreadable) -> Result<String, ForkError> {
        if let Ok(record) = self.hosted_record(&found.path).await? {
            self.lock().unreadable.retain(|other| other.path != found.path);
            self.clone().take_up_hosted(record).await;
            return Ok("its children here that could not be completed were ended".to_owned());
        }
        // Memory of theirs may be missing, and nobody can tell.
        let why = format!("the record of fork {} could not be read, and an operator gave it up", found.fork);
        for child in found.children.iter().filter(|child| self.registry.vms().get(child).is_ok()) {
            self.registry.end_because(child, &why).await?;
        }
        let kept = PathBuf::from(format!("{}.damaged", found.path.display()));
        std::fs::rename(&found.path, &kept).map_err(CloneError::io("rename", &found.path))?;
        let ended = found.children.len();
        Ok(format!(
            "its {ended} children here were ended, since memory of theirs may be missing; the record is kept as {}",
            kept.display()
        ))
    }
}
