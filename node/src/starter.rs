//! QEMUs are started in the control group of their VM, on its processors and with memory of its NUMA nodes.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use vmove_memory::RamFile;
use vmove_qmp::QemuProcess;
use vmove_qmp::confine::Confinement;
use vmove_qmp::process::{ProcessError, log_in};
use vmove_tuning::policy;

use crate::control_groups::ControlGroups;
use crate::pins::Pins;

/// What a node starts QEMUs by.
#[derive(Debug, Clone)]
pub struct Starter {
    /// Control groups of VMs.
    pub groups: Arc<ControlGroups>,
    /// Processors and memory that VMs have for themselves.
    pub pins: Arc<Pins>,
}

impl Starter {
    /// VMs get neither groups nor processors of their own.
    #[must_use]
    pub fn plain() -> Self {
        Self { groups: ControlGroups::none(), pins: Arc::new(Pins::none()) }
    }

    /// Starts the QEMU of a VM in its folder. Blocks; must be called in a tokio runtime, which reaps it.
    ///
    /// # Errors
    /// It did not start.
    pub fn start(
        &self,
        vm: &str,
        argv: &[OsString],
        folder: &Path,
        rights: &Confinement,
    ) -> Result<QemuProcess, ProcessError> {
        // Until it is dropped, this thread and what it starts are where the VM belongs.
        let there = match self.pins.starts(vm) {
            Ok(there) => there,
            Err(error) => {
                tracing::warn!(vm, %error, "the VM starts on any processors and NUMA nodes");
                None
            }
        };
        let group = self.groups.make(vm);
        let started = QemuProcess::spawn_in(argv, folder, &log_in(folder), rights, group.as_deref());
        drop(there);
        started
    }

    /// Whoever maps this file of a template writes on NUMA nodes of its own choice. Its pages stay where they are.
    pub fn unbind_memory(&self, vm: &str, file: &Path) {
        if self.pins.of(vm).is_none() {
            return;
        }
        if let Err(error) = open(file).and_then(|file| policy::unbind_file(&file)) {
            tracing::warn!(vm, %error, "what children write is on the NUMA nodes of their parent");
        }
    }

    /// Memory of a VM's RAM file is taken from the VM's NUMA nodes. To be called before anything touches it.
    pub fn bind_memory(&self, vm: &str, file: &RamFile) {
        if self.pins.of(vm).is_none() {
            return;
        }
        // A kernel without NUMA, or a container whose rules forbid it.
        if let Err(error) = open(file.path()).and_then(|file| self.pins.bind(vm, &file)) {
            tracing::warn!(vm, %error, "the memory of the VM comes from any NUMA node");
        }
    }
}

fn open(file: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(file)
}
