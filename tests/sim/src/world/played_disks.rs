//! Disks of played QEMUs: their guests have none, so that nothing is copied.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use vmove_migrate::vmm::{CopiesDisks, TakesDisks};
use vmove_qmp::QmpError;
use vmove_qmp::disks::{CopyError, CopyOrder, CopyState, DiskFact, ExportOrder};

use super::vmm::Qemu;

fn no_disk(command: &str) -> QmpError {
    let (class, description) = ("GenericError".to_owned(), "this guest has no disks".to_owned());
    QmpError::Refused { command: command.to_owned(), class, description }
}

#[async_trait]
impl CopiesDisks for Qemu {
    async fn disks(&self) -> Result<Vec<DiskFact>, QmpError> {
        self.asked("ask QEMU for its disks").await?;
        Ok(Vec::new())
    }

    async fn begin_copy(&self, _: &CopyOrder, _: u64) -> Result<(), QmpError> {
        Err(no_disk("blockdev-mirror"))
    }

    async fn copies(&self) -> Result<Vec<CopyState>, QmpError> {
        Ok(Vec::new())
    }

    async fn set_copy_speed(&self, _: usize, _: u64) -> Result<(), QmpError> {
        Err(no_disk("block-job-set-speed"))
    }

    async fn hold_copy_in_step(&self, _: usize) -> Result<(), QmpError> {
        Err(no_disk("block-job-change"))
    }

    async fn finish_copies(&self, _: &[usize], _: Duration) -> Result<(), CopyError> {
        Err(no_disk("block-job-cancel").into())
    }

    async fn give_up_copies(&self, _: Duration) -> Result<(), QmpError> {
        Ok(())
    }
}

#[async_trait]
impl TakesDisks for Qemu {
    async fn export_disks(&self, _: &Path, _: &[ExportOrder]) -> Result<(), QmpError> {
        Err(no_disk("block-export-add"))
    }

    async fn end_exports(&self, _: usize) -> Result<(), QmpError> {
        Ok(())
    }

    async fn flush_disks(&self, _: &[PathBuf]) -> Result<(), QmpError> {
        Ok(())
    }
}
