//! Disks of real QEMUs, by their monitors.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use vmove_qmp::disks::{
    self, CopyError, CopyOrder, CopyState, DiskCounters, DiskFact, ExportOrder, MoveOrder, MoveState,
    OldImage, StreamState, Writes,
};
use vmove_qmp::{Client, QmpError};
use vmove_types::disk_latency::DiskIo;

use super::disks::{ComparesDisks, CopiesDisks, MovesDisks, TakesDisks};
use super::qemu::Monitor;

/// QEMU 10 is told shortly before the guest stops. Older ones must be told at the beginning.
fn changes_over(client: &Client) -> bool {
    client.version().major >= 10
}

/// How a copy is begun.
fn first_writes(client: &Client) -> Writes {
    if changes_over(client) { Writes::Later } else { Writes::AtOnce }
}

#[async_trait]
impl CopiesDisks for Monitor {
    async fn disks(&self) -> Result<Vec<DiskFact>, QmpError> {
        disks::disks(self.client()).await
    }

    async fn begin_copies(&self, orders: &[CopyOrder], speed: u64) -> Result<Duration, (usize, QmpError)> {
        disks::begin(self.client(), orders, speed, first_writes(self.client())).await
    }

    async fn copies(&self) -> Result<Vec<CopyState>, QmpError> {
        disks::states(self.client()).await
    }

    async fn set_copy_speed(&self, number: usize, speed: u64) -> Result<(), QmpError> {
        disks::set_speed(self.client(), number, speed).await
    }

    fn guest_writes_both(&self) -> bool {
        !changes_over(self.client())
    }

    async fn hold_copy_in_step(&self, number: usize) -> Result<(), QmpError> {
        if changes_over(self.client()) { disks::hold_in_step(self.client(), number).await } else { Ok(()) }
    }

    async fn finish_copies(&self, numbers: &[usize], deadline: Duration) -> Result<(), CopyError> {
        disks::finish(self.client(), numbers, deadline).await
    }

    async fn io_counters(&self, devices: &[String]) -> Result<Vec<Option<DiskCounters>>, QmpError> {
        disks::counters(self.client(), devices).await
    }

    async fn begin_io_histograms(&self, devices: &[String]) {
        disks::begin_histograms(self.client(), devices).await;
    }

    async fn end_io_histograms(&self) {
        disks::end_histograms(self.client()).await;
    }

    async fn give_up_copies(&self, deadline: Duration) -> Result<(), QmpError> {
        disks::give_up(self.client(), deadline).await
    }
}

#[async_trait]
impl MovesDisks for Monitor {
    async fn begin_move(&self, order: &MoveOrder, speed: u64) -> Result<Duration, QmpError> {
        disks::begin_move(self.client(), order, speed, first_writes(self.client())).await
    }

    async fn set_move_speed(&self, id: &str, speed: u64) -> Result<(), QmpError> {
        disks::set_move_speed(self.client(), id, speed).await
    }

    async fn move_state(&self, id: &str) -> Result<Option<MoveState>, QmpError> {
        disks::move_state(self.client(), id).await
    }

    async fn hold_move_in_step(&self, id: &str) -> Result<(), QmpError> {
        if changes_over(self.client()) { disks::hold_move_in_step(self.client(), id).await } else { Ok(()) }
    }

    async fn switch_image(&self, id: &str, deadline: Duration) -> Result<(), QmpError> {
        disks::switch(self.client(), id, deadline).await
    }

    async fn close_old_image(&self, id: &str, old: &OldImage, deadline: Duration) -> Result<(), QmpError> {
        disks::close_old(self.client(), id, old, deadline).await
    }

    async fn undo_move(&self, id: &str, deadline: Duration) -> Result<(), QmpError> {
        disks::undo_move(self.client(), id, deadline).await
    }
}

#[async_trait]
impl ComparesDisks for Monitor {
    async fn note_writes(&self, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
        disks::note_writes(self.client(), vm_dir, images).await
    }

    async fn export_left(&self, socket: &Path, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
        disks::export_left(self.client(), socket, vm_dir, images).await
    }

    async fn export_present(&self, socket: &Path, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
        disks::export_present(self.client(), socket, vm_dir, images).await
    }

    async fn export_writes(&self, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
        disks::export_writes(self.client(), vm_dir, images).await
    }

    async fn end_comparison(&self, socket: &Path, keep_noting: bool) -> Result<(), QmpError> {
        disks::end_comparison(self.client(), socket, keep_noting).await
    }
}

#[async_trait]
impl TakesDisks for Monitor {
    async fn export_disks(&self, socket: &Path, images: &[ExportOrder]) -> Result<(), QmpError> {
        disks::export(self.client(), socket, images).await
    }

    async fn end_exports(&self, images: usize) -> Result<(), QmpError> {
        disks::end_exports(self.client(), images).await
    }

    async fn flush_disks(&self, images: &[PathBuf]) -> Result<(), QmpError> {
        disks::flush(self.client(), images).await
    }

    async fn bring_disks(&self, images: &[PathBuf], speed: u64) -> Result<Vec<StreamState>, QmpError> {
        disks::stream(self.client(), images, speed).await
    }

    async fn io_of_images(&self, images: &[PathBuf]) -> Result<Vec<Option<DiskIo>>, QmpError> {
        let all = disks::disks(self.client()).await?;
        let device = |image: &PathBuf| {
            let disk = all.iter().find(|disk| Path::new(&disk.file) == image);
            disk.map(|disk| disk.device.clone()).unwrap_or_default()
        };
        let devices: Vec<String> = images.iter().map(device).collect();
        let counters = disks::counters(self.client(), &devices).await?;
        Ok(counters.into_iter().map(|one| one.map(|counters| counters.since_start())).collect())
    }
}
