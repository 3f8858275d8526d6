//! Asking the QEMU of a VM.

use vmove_migrate::vm::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::inspect::{self, VmFacts};

use super::Registry;
use crate::api::problem::{Code, Problem};

impl Registry {
    /// The monitor of a VM.
    pub(in crate::server) async fn monitor(&self, record: &VmRecord) -> Result<Client, Problem> {
        self.monitors.client(&record.qmp_socket).await.map_err(|e| Problem::from_error(Code::QmpFailed, &e))
    }

    /// The monitor of a VM, and what it tells of the VM.
    pub(in crate::server) async fn inspect(&self, record: &VmRecord) -> Result<(Client, VmFacts), Problem> {
        let client = self.monitor(record).await?;
        let facts = inspect::facts(&client, record.pid.unsigned_abs(), None)
            .await
            .map_err(|e| Problem::from_error(Code::QmpFailed, &e))?;
        Ok((client, facts))
    }
}
