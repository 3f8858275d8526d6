//! A guest of libvirt's that was given up stands still here, even if libvirt has it run: that does so where it has not heard that the guest runs at the
//! destination, because libvirtd there has died. The destination says whose the guest is then ([`super::committed`]).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::memory::SourceMemory;
use super::session::Session;
use crate::kept_memory::let_memory_go;
use crate::node::Node;
use crate::publish::Publisher;
use crate::records::SourceRecord;
use crate::vmm::Leaving;
use vmove_node::blocking::spawn_blocking;
use vmove_node::journal::Journal;
use vmove_node::record::VmRecord;
use vmove_node::task::spawn;
use vmove_types::problem::chain;
use vmove_types::progress::Outcome;
use vmove_types::vm::Running;

/// Between looks at a QEMU whose events may have gone to an earlier process of this daemon.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What keeps the guest from running on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fence {
    /// Not yet anything.
    Rising,
    /// Its memory: it runs no further than to its first touch.
    Up,
    /// QEMU, which is told to stop it: it may have run a moment.
    Stopped,
}

#[derive(Debug, Clone, Copy)]
struct Stand {
    fence: Fence,
    /// libvirt has had it run here.
    returned: bool,
}

/// Keeps it standing still. What stands still does so also when this is dropped, and when this daemon has ended.
#[derive(Debug, Default)]
pub(super) struct Hold(Option<Holding>);

#[derive(Debug)]
struct Holding {
    node: Arc<Node>,
    vm: VmRecord,
    qemu: Option<Arc<dyn Leaving>>,
    stand: watch::Receiver<Stand>,
    task: JoinHandle<()>,
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Hold {
    /// Of a guest that is nobody else's to resume.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    /// Begins, unless it has begun, or libvirt has no say in where this guest runs. `returned`: libvirt was found to have had it run here.
    pub(super) fn begin(
        &mut self,
        session: &Session,
        qemu: Option<Arc<dyn Leaving>>,
        memory: Option<Arc<SourceMemory>>,
        returned: bool,
    ) {
        let (node, vm) = (Arc::clone(&session.node), session.vm().clone());
        if self.0.is_some() || vm.libvirt.is_none() || node.config.vmm.has_ended(&vm) {
            return;
        }
        let (stands, stand) = watch::channel(Stand { fence: Fence::Rising, returned: false });
        let task = spawn(keep(Arc::clone(&node), vm.clone(), qemu.clone(), memory, (stands, returned)));
        self.0 = Some(Holding { node, vm, qemu, stand, task });
    }

    /// Ends when libvirt has had the guest run here. Cancel-safe.
    pub(super) async fn returned(&self) {
        if let Some(holding) = &self.0 {
            let mut stand = holding.stand.clone();
            if stand.wait_for(|stand| stand.returned).await.is_ok() {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Whether it has.
    pub(super) fn has_returned(&self) -> bool {
        self.0.as_ref().is_some_and(|holding| holding.stand.borrow().returned)
    }

    /// The guest is this side's: what libvirt has told QEMU counts.
    pub(super) async fn let_on(self) {
        let Some(holding) = self.0 else { return };
        let mut stand = holding.stand.clone();
        let risen = stand.wait_for(|stand| stand.fence != Fence::Rising).await.map(|stand| *stand);
        let_on(&holding.node, &holding.vm).await;
        let stopped = risen.is_ok_and(|stand| stand.returned && stand.fence == Fence::Stopped);
        if let Some(qemu) = holding.qemu.as_ref().filter(|_| stopped)
            && let Err(error) = qemu.overrule(Running::Running).await
        {
            tracing::error!(error = chain(&error), "the guest stands still: `virsh resume` it");
        }
    }

    /// It is the destination's, where it has run: QEMU here is ended. What is said of that.
    pub(super) async fn end(self) -> Option<String> {
        let holding = self.0?;
        let held = holding.stand.borrow().fence == Fence::Up;
        end_copy(&holding.node, &holding.vm, held).await
    }

    /// The destination is whole, and has run the guest: from now on nothing is asked.
    pub(super) fn guard_on(self, record: &SourceRecord, publisher: Publisher) {
        if let Some(holding) = self.0 {
            let (node, qemu) = (Arc::clone(&holding.node), holding.qemu.clone());
            drop(spawn(guard_until_it_ends(node, record.clone(), qemu, Some(publisher))));
        }
    }
}

/// Lets a guest run on that [`Hold`] keeps, or has kept in an earlier life of this daemon.
pub(super) async fn let_on(node: &Arc<Node>, vm: &VmRecord) {
    if vm.libvirt.is_none() || node.config.vmm.has_ended(vm) {
        return;
    }
    let (node, vm) = (Arc::clone(node), vm.clone());
    match spawn_blocking(move || node.config.vmm.let_on(&vm)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(error = chain(&error), "the guest's memory is still held here"),
        Err(error) => tracing::error!(%error, "the guest's memory is still held here"),
    }
}

/// The same for a guest whose migration from here was called off, and whose daemon was killed before it could let the guest go on.
pub(crate) fn let_domain_on(node: &Arc<Node>, record: &SourceRecord) {
    let (node, vm) = (Arc::clone(node), record.vm.clone());
    drop(spawn(async move {
        let_on(&node, &vm).await;
        let_memory_go(node.disk(), &vm);
    }));
}

/// Of a guest whose migration from here was over before this daemon was started.
pub(crate) fn guard(node: &Arc<Node>, record: &SourceRecord) {
    let vm = &record.vm;
    if vm.libvirt.is_some() && !record.report.paused && !node.config.vmm.has_ended(vm) {
        drop(spawn(guard_until_it_ends(Arc::clone(node), record.clone(), None, None)));
    }
}

async fn keep(
    node: Arc<Node>,
    vm: VmRecord,
    qemu: Option<Arc<dyn Leaving>>,
    memory: Option<Arc<SourceMemory>>,
    (stands, returned): (watch::Sender<Stand>, bool),
) {
    let (vmm, of) = (Arc::clone(&node), vm.clone());
    let raised = spawn_blocking(move || {
        // Nobody else may watch the memory.
        memory.iter().for_each(|memory| memory.end_tracking());
        vmm.config.vmm.keep_from_running(&of)
    });
    let fence = match raised.await {
        Ok(Ok(())) => Fence::Up,
        // libvirt ends it as soon as the guest runs at the destination.
        Ok(Err(_)) if node.config.vmm.has_ended(&vm) => return,
        Ok(Err(error)) => {
            tracing::warn!(
                error = chain(&error),
                "the memory of the guest that has left cannot be held: should libvirt have it run here, it is stopped"
            );
            Fence::Stopped
        }
        Err(_) => Fence::Stopped,
    };
    stands.send_modify(|stand| stand.fence = fence);
    if !returned {
        told_to_run(&node, &vm, qemu.as_ref()).await;
    }
    if let Some(qemu) = qemu.filter(|_| fence == Fence::Stopped)
        && let Err(error) = qemu.overrule(Running::Paused).await
    {
        tracing::error!(error = chain(&error), "the guest may run twice: it could not be stopped here");
    }
    tracing::warn!(
        vm = vm.name,
        "libvirt has the guest run at the source, which had given it up: it stands still until the destination has said whose it is"
    );
    stands.send_modify(|stand| stand.returned = true);
    // Until the holder is dropped.
    stands.closed().await;
}

/// Ends when libvirt has told QEMU to run the guest; never if QEMU ends before.
async fn told_to_run(node: &Node, vm: &VmRecord, qemu: Option<&Arc<dyn Leaving>>) {
    loop {
        let seen = async {
            match qemu {
                Some(qemu) => qemu.runs_again().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = seen => return,
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
        if node.config.vmm.has_ended(vm) {
            std::future::pending::<()>().await;
        }
        if node.config.vmm.was_told_to_run(vm).await {
            return;
        }
    }
}

async fn end_copy(node: &Node, vm: &VmRecord, held: bool) -> Option<String> {
    if node.config.vmm.has_ended(vm) {
        return None;
    }
    let ended = match node.config.vmm.adopt(vm) {
        Ok(qemu) => qemu.end_for_good().await,
        Err(error) => Err(error),
    };
    let ran = if held { "before it had run anything" } else { "after it had been stopped" };
    let told = match ended {
        Ok(()) => format!(
            "libvirt had the guest run at the source, too, where its QEMU was ended {ran}: it runs at the destination"
        ),
        Err(error) => format!(
            "libvirt has the guest run at the source, too, and its QEMU there does not end ({}): end it (`virsh destroy`)",
            chain(&error)
        ),
    };
    tracing::error!(vm = vm.name, pid = vm.pid, "{told}");
    Some(told)
}

async fn guard_until_it_ends(
    node: Arc<Node>,
    record: SourceRecord,
    qemu: Option<Arc<dyn Leaving>>,
    publisher: Option<Publisher>,
) {
    let ended = async {
        while !node.config.vmm.has_ended(&record.vm) {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    tokio::select! {
        () = told_to_run(&node, &record.vm, qemu.as_ref()) => {}
        () = ended => return,
    }
    // Its memory stays held.
    let Some(told) = end_copy(&node, &record.vm, true).await else { return };
    if let Some(publisher) = publisher {
        publisher.update(|p| {
            if let Outcome::Done { report } = &mut p.outcome {
                report.ended_copy = Some(told.clone());
            }
        });
    }
    let path = node.session_dir(record.id).join("source.jsonl");
    let noted = Journal::<SourceRecord>::open_on(node.disk(), &path)
        .and_then(|mut journal| journal.update(|r| r.report.ended_copy = Some(told)));
    if let Err(error) = noted {
        tracing::warn!(path = %path.display(), %error, "that is told here only, not in the history");
    }
}
