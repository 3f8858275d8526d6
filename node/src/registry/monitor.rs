//! Asking the QEMU of a VM.

use crate::record::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::inspect::{self, VmFacts};

use super::{Registry, RegistryError};

impl Registry {
    /// The monitor of a VM.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn monitor(&self, record: &VmRecord) -> Result<Client, RegistryError> {
        Ok(self.monitors.client(&record.qmp_socket).await?)
    }

    /// The monitor of a VM, and what it tells of the VM.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn inspect(&self, record: &VmRecord) -> Result<(Client, VmFacts), RegistryError> {
        let client = self.monitor(record).await?;
        let facts = inspect::facts(&client, record.pid.unsigned_abs(), None).await?;
        Ok((client, facts))
    }
}
