//! Disks of played QEMUs: their guests have none, so that nothing is copied.

use async_trait::async_trait;
use vmove_migrate::vmm::{ComparesDisks, CopiesDisks, MovesDisks, TakesDisks};
use vmove_qmp::QmpError;
use vmove_qmp::disks::DiskFact;

use super::vmm::Qemu;

impl ComparesDisks for Qemu {}

impl MovesDisks for Qemu {}

#[async_trait]
impl CopiesDisks for Qemu {
    async fn disks(&self) -> Result<Vec<DiskFact>, QmpError> {
        self.asked("ask QEMU for its disks").await?;
        Ok(Vec::new())
    }
}

impl TakesDisks for Qemu {}
