//! Requests about disks of VMs.

use vmove_http::client::encoded;
use vmove_types::disk_move::{DiskMove, MoveDiskRequest, VmDisks};

use crate::vms::path;
use crate::{Client, Error};

/// Disks. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// The disks of a VM, and the moves of its disks since the daemon was started.
    pub async fn disks(&self, vm: &str) -> Result<VmDisks, Error> {
        self.0.get(&path(vm, "/disks")).await
    }

    /// Moves a disk to another image on the node while its guest runs. Answers once QEMU copies; [`Client::disks`] tells the rest.
    pub async fn move_disk(
        &self,
        vm: &str,
        disk: &str,
        request: &MoveDiskRequest,
    ) -> Result<DiskMove, Error> {
        self.0.post(&of(vm, disk), request).await
    }

    /// Calls such a move off. [`Client::disks`] tells its end.
    pub async fn cancel_disk_move(&self, vm: &str, disk: &str) -> Result<DiskMove, Error> {
        self.0.delete(&of(vm, disk)).await
    }
}

fn of(vm: &str, disk: &str) -> String {
    path(vm, &format!("/disks/{}/move", encoded(disk)))
}
