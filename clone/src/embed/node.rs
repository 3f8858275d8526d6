//! A node inside a program, and what it can be asked.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tracing::Instrument;
use vmove_node::blocking::TaskFailed;
use vmove_node::embed;
use vmove_node::lock::StateLock;
use vmove_node::registry::Registry;
use vmove_types::fork::{ForkRequest, Promoted, Removed, TemplateInfo, TemplateRequest};
use vmove_types::fork_report::ForkReport;
use vmove_types::vm::{Stopped, VmDetail, VmSummary};

use super::error::EmbedError;
use crate::engine::{ForkEngine, ForkError};

/// Between looks whether a fork is at work on a VM.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A node. When it is dropped, its guests run on; [`Node::close`] also ends children that are only prepared.
///
/// Forks and templates are finished even if whoever asked for them does not wait for the end.
#[derive(Debug)]
pub struct Node {
    name: String,
    forks: Arc<ForkEngine>,
    registry: Arc<Registry>,
    _tasks: JoinSet<()>,
    /// After the tasks. What is at work beside them has it, too.
    lock: Arc<StateLock>,
}

impl Node {
    pub(super) const fn new(
        name: String,
        forks: Arc<ForkEngine>,
        registry: Arc<Registry>,
        tasks: JoinSet<()>,
        lock: Arc<StateLock>,
    ) -> Self {
        Self { name, forks, registry, _tasks: tasks, lock }
    }

    /// The engine behind it: progress, trees, prepared children, templates restored. It refuses other hosts only when it cannot reach them.
    #[must_use]
    pub const fn engine(&self) -> &Arc<ForkEngine> {
        &self.forks
    }

    /// Its VMs: show, pause, resume.
    #[must_use]
    pub const fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Starts a VM: QEMU and its arguments, in which `{vmdir}` and `{name}` are replaced, for each child anew.
    ///
    /// # Errors
    /// It does not start. Nothing is left then.
    pub async fn run<S: Into<String>>(
        &self,
        name: &str,
        command_line: impl IntoIterator<Item = S>,
    ) -> Result<VmDetail, EmbedError> {
        Ok(embed::run(&self.registry, name, command_line).await?)
    }

    /// Takes in a QEMU that runs already, by a QMP socket of its own. Its RAM must be a shared file on tmpfs or hugetlbfs; to be forked, one below
    /// the run folder's `memory/thp` or `memory/hugetlb-2m`, where a template can be a second name of it.
    ///
    /// # Errors
    /// It cannot be taken in; it is as it was then.
    pub async fn adopt(&self, name: &str, qmp: impl Into<PathBuf>) -> Result<VmDetail, EmbedError> {
        Ok(embed::adopt(&self.registry, name, qmp).await?)
    }

    /// Its VMs, children among them, by name.
    pub async fn vms(&self) -> Vec<VmSummary> {
        let mut vms = self.registry.list().await;
        self.forks.mark_unreadable(&mut vms);
        vms
    }

    /// Waits until no fork is at work on a VM: one that was [taken up](super::Builder::start), or one that has answered and still closes what it had open.
    /// While the VM's QEMU hangs, so does this.
    pub async fn at_rest(&self, vm: &str) {
        while self.forks.not_at_work(vm).is_err() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Forks a guest, or a template, on this host, once the guest is [at rest](Node::at_rest); waits until all children run.
    ///
    /// # Errors
    /// [`EmbedError::OtherHosts`] if the request names other nodes. [`EmbedError::Fork`]: no child is there then, and the guest runs on. Children
    /// that fail while others do not are told of in the report.
    pub async fn fork(&self, request: ForkRequest) -> Result<ForkReport, EmbedError> {
        let others = request.nodes.iter().filter(|node| **node != self.name);
        let nodes: Vec<String> = others.cloned().collect();
        if !nodes.is_empty() {
            return Err(EmbedError::OtherHosts { nodes });
        }
        if let Some(vm) = &request.vm {
            self.at_rest(vm).await;
        }
        self.finished(Arc::clone(&self.forks).create(request)).await
    }

    /// Gives a child memory of its own, so that it can be forked. The parent of a fork has its own when [`Node::fork`] answers.
    ///
    /// # Errors
    /// The guest runs on with what it has.
    pub async fn promote(&self, vm: &str) -> Result<Promoted, EmbedError> {
        self.finished(Arc::clone(&self.forks).promote(vm.to_owned())).await
    }

    /// Keeps a guest as it is once it is [at rest](Node::at_rest), in memory and on disk, under a name; the guest runs on.
    ///
    /// # Errors
    /// There is no template then, and the guest runs on.
    pub async fn save_template(&self, request: TemplateRequest) -> Result<TemplateInfo, EmbedError> {
        self.at_rest(&request.vm).await;
        self.finished(Arc::clone(&self.forks).save_template(request)).await
    }

    /// All templates, by name.
    ///
    /// # Errors
    /// Their folders cannot be read.
    pub async fn templates(&self) -> Result<Vec<TemplateInfo>, EmbedError> {
        Ok(self.forks.templates().await?.templates)
    }

    /// Brings a template from disk into memory, after a reboot, so that [`Node::fork`] can take children from it. One that is there stays.
    ///
    /// # Errors
    /// It is not known, damaged, or of another QEMU.
    pub async fn load_template(&self, name: &str) -> Result<TemplateInfo, EmbedError> {
        self.finished(Arc::clone(&self.forks).load_template(name.to_owned())).await
    }

    /// Removes a template from memory and disk. Children that came from it run on.
    ///
    /// # Errors
    /// It is not known, at work, or cannot be removed.
    pub async fn remove_template(&self, name: &str) -> Result<Removed, EmbedError> {
        self.finished(Arc::clone(&self.forks).remove_template(name.to_owned())).await
    }

    /// Ends a VM; with `force`, also one that was [taken in](Node::adopt), or that does not end by itself.
    ///
    /// # Errors
    /// It is not known, or does not end.
    pub async fn stop(&self, vm: &str, force: bool) -> Result<Stopped, EmbedError> {
        Ok(self.registry.stop(vm, force).await?)
    }

    /// Ends children that are only prepared, which nobody could find again. VMs run on.
    pub async fn close(self) {
        self.forks.end_prepared().await;
    }

    /// Runs what must not be cut off in the middle. The folders are kept from other nodes until it has ended.
    async fn finished<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ForkError>> + Send + 'static,
    ) -> Result<T, EmbedError> {
        let lock = Arc::clone(&self.lock);
        let work = async move {
            let done = work.await;
            drop(lock);
            done
        };
        let ended = tokio::spawn(work.in_current_span()).await;
        Ok(ended.map_err(|failed| ForkError::Task(TaskFailed::from(failed)))??)
    }
}
