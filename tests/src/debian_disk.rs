//! A guest with a Debian 12 on its disk, which moves with it: PostgreSQL, SQLite and fio are there. Tests type in it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use vmove_guest::config::{Config, Rate};

use crate::disks::{Moved, drive, operator};
use crate::guest::{Guest, VIRTIO};
use crate::places;
use crate::sandbox::Sandbox;
use crate::scene::NAME;
use crate::typist::{Typist, keyboard};

const MOUNT_TIMEOUT: Duration = Duration::from_secs(120);

/// Checks that the disk is there.
///
/// # Errors
/// When it is not; the error says what to do.
pub fn ready() -> Result<()> {
    places::debian_disk().map(drop)
}

/// Boots it on the first of two nodes, with a proxy between them. Its disk is mounted on `/mnt`, and memory on `/mnt/tmp`.
///
/// # Errors
/// When something does not start.
pub fn guest() -> Result<(Moved, Typist)> {
    let disk = places::debian_disk()?;
    let moved = Moved::with_guest(Sandbox::new()?, |image| {
        let copied = Command::new("cp").arg("--sparse=always").args([&disk, image]).status()?;
        ensure!(copied.success(), "{} could not be copied", disk.display());
        on(image)
    })?;
    let mut typist = Typist::at(&moved.scene.a, NAME)?;
    let mount = "mkdir -p /mnt && mount -t ext4 /dev/vda /mnt && mount --bind /dev /mnt/dev && mount -t proc proc /mnt/proc \
                 && mount -t tmpfs tmpfs /mnt/tmp && chmod 1777 /mnt/tmp";
    let mounted = typist.line(mount, MOUNT_TIMEOUT)?;
    ensure!(mounted.code == 0, "the disk could not be mounted: {}", mounted.printed);
    Ok((moved, typist))
}

fn on(image: &Path) -> Result<Guest> {
    let config =
        Config { working_set_mib: 8, rate: Rate::PagesPerSecond(200), verify: 200, ..Config::default() };
    let mut guest = Guest::new(512, config)?;
    guest.modules = VIRTIO.into_iter().chain(["virtio_blk", "virtio_console"]).collect();
    guest.extra = drive(image, "raw", "");
    guest.extra.extend(keyboard());
    guest.extra.extend(operator());
    Ok(guest)
}
