//! The source of a guest that goes for a visit: its home, which keeps its memory and nothing else of it.

use std::sync::Arc;
use std::time::Duration;

use super::error::{ReleaseError, SourceError};
use super::final_pages::FinalPages;
use super::memory::SourceMemory;
use super::session::Session;
use crate::engine_error::EngineError;
use crate::history::is_home_again;
use crate::kept_memory::{is_kept, keep_memory_at_home};
use crate::may_visit;
use crate::node::Node;
use crate::owed::TRY_AGAIN;
use crate::pending::PageSet;
use crate::proto::message::Complete;
use crate::visits::{Said, VisitStand};
use vmove_memory::MemoryError;
use vmove_node::disk::remove_files;
use vmove_node::record::VmRecord;
use vmove_types::go_home::GoHome;
use vmove_types::problem::chain;
use vmove_types::progress::{GoingHome, VISIT};
use vmove_types::report::VisitEnd;
use vmove_types::spec::{MigrationSpec, Visit};

/// For the word of the node that a guest had visited, which has the figures.
const SAYS_SO_ITSELF: Duration = Duration::from_secs(5);

/// The guest runs at the destination, and is never given back by it from here on.
pub(super) fn guest_runs_there(session: &Session) {
    if session.spec().visit == Visit::Go {
        let going_home = GoingHome::of(&session.spec().go_home);
        session.publisher.update(|p| {
            p.mode = Some(VISIT.to_owned());
            p.going_home = going_home;
        });
        let (node, vm) = (Arc::clone(&session.node), session.vm().clone());
        // Only the way home waits for it: pages are served from the files. It may be told more than once that the guest runs there.
        if node.visits.begins_to_leave(session.journal.record().id) {
            vmove_node::task::spawn(let_qemu_go_at_last(node, vm));
        }
    }
    if let Some(home) = session.journal.record().home {
        // What it had not touched on its visit is at home.
        session.node.visits.tell(home.visit, VisitStand::WentHome);
    }
}

/// Ends some time after the guest has come home from its visit, by which the node that it visited has had time to say so itself. Never if it was on none.
/// `earlier`: that may have been before this daemon was started anew. Cancel-safe.
pub(super) fn came_home(session: &Session, earlier: bool) -> impl Future<Output = Complete> + use<> {
    let (node, id) = (Arc::clone(&session.node), session.journal.record().id);
    // It may become one.
    let is_visit = session.spec().visit == Visit::Go;
    async move {
        if is_visit && earlier && is_home_again(node.disk(), &node.config.sessions_dir, id) {
            node.visits.tell(id, VisitStand::WentHome);
        }
        let mut told = node.visits.listen(id);
        while told.said().await != Said::WentHome {
            // It is not told to stay here, where it is not.
            if told.stand() != VisitStand::Visits {
                return std::future::pending().await;
            }
        }
        tokio::time::sleep(SAYS_SO_ITSELF).await;
        Complete { visit: Some(VisitEnd::Home), ..Complete::default() }
    }
}

/// Why the memory of a guest that runs at the destination is not kept for its return.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotKept {
    #[error("the guest moves with others")]
    InGroup,
    #[error("disks of the guest move along")]
    DisksMove,
    #[error("libvirt moves the guest")]
    OfLibvirt,
    #[error(transparent)]
    Options(#[from] EngineError),
    #[error("its memory could not be kept at home")]
    Names(#[source] std::io::Error),
    #[error(transparent)]
    Journal(#[from] SourceError),
}

/// The guest is on a visit from here on, if this side can be its home: keeps its memory, and writes that down.
///
/// # Errors
/// The migration goes on as it was.
pub(super) fn keep_home(session: &mut Session, go_home: GoHome) -> Result<(), NotKept> {
    let spec = MigrationSpec { go_home, ..session.spec().clone() }.of_visit();
    if session.spec().visit == Visit::Go {
        return Ok(session.write(|r| r.spec = spec)?);
    }
    if session.vm().libvirt.is_some() {
        return Err(NotKept::OfLibvirt);
    }
    if session.member.is_some() || session.journal.record().group.is_some() {
        return Err(NotKept::InGroup);
    }
    if session.copies.is_some() || !session.journal.record().disks.is_empty() {
        return Err(NotKept::DisksMove);
    }
    may_visit::in_the_way(&session.node, session.vm(), &spec)?;
    let kept = keep_memory_at_home(session.journal.record().id, session.vm().clone());
    let kept = kept.map_err(NotKept::Names)?;
    // If that fails, the names stay until all is released: the line may be there as a whole, and a daemon started anew would look for them.
    Ok(session.write(|r| (r.vm, r.spec) = (kept, spec))?)
}

/// Goes on until that is done: a VM that is not forgotten here cannot come home.
async fn let_qemu_go_at_last(node: Arc<Node>, vm: VmRecord) {
    let mut told = false;
    while let Err(error) = let_qemu_go(&node, &vm).await {
        if !told {
            let error = chain(&error);
            tracing::error!(
                vm = vm.name,
                error,
                "what a guest has here that visits another node is not freed: trying again"
            );
        }
        told = true;
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// Ends the stopped QEMU of a guest that visits another node, and forgets the VM: it may come home under the same name. By SIGKILL, since a QEMU that
/// ends by itself may give its memory's files back to the kernel (`discard-data=on`), and they are kept.
///
/// # Errors
/// QEMU does not end, or the VM's record cannot be removed.
pub(super) async fn let_qemu_go(node: &Node, vm: &VmRecord) -> Result<(), ReleaseError> {
    if !is_kept(vm) {
        return Ok(());
    }
    let _one = node.visits.leaving().await;
    let vmm = &node.config.vmm;
    if vmm.is_there(vm) {
        vmm.adopt(vm)?.kill().await?;
    }
    vmm.forget_monitor(&vm.qmp_socket).await;
    let Ok(here) = node.vms.get(&vm.name) else { return Ok(()) };
    if (here.pid, here.pid_start) != (vm.pid, vm.pid_start) {
        return Ok(());
    }
    remove_files(node.disk(), here.ram.iter().map(|ram| &ram.path).chain([&vm.qmp_socket]));
    Ok(node.vms.remove(&vm.name)?)
}

impl FinalPages {
    /// What is named of a guest whose pages come by demand: those that have no memory here, and so are zero.
    pub(super) fn holes(memory: &SourceMemory) -> Result<Self, MemoryError> {
        let content = memory.content()?;
        let holes = content.iter().map(|content| PageSet::full(content.capacity()).without(content));
        Ok(Self::new(holes.collect()))
    }
}
