//! The side that will have the guest.

use std::{os::fd::OwnedFd, path::PathBuf, time::Duration};
use vmove_types::time::Mono;

use serde_json::{Value, json};

use super::{
    MigrationStatus, SwitchoverError, query_migration,
    settings::{self, Capabilities},
    track::{Known, Track},
};
use crate::{Client, QemuTime, client::COMMAND_TIMEOUT};

/// Name of the descriptor given to QEMU for its stream.
const STREAM_FD: &str = "vmove-state-in";

/// First QEMU that can survive a failed load (`exit-on-error=false`), major and minor.
const SURVIVES_BAD_LOAD: (u32, u32) = (9, 1);

/// How a destination is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationOptions {}

/// Where QEMU reads its stream.
#[derive(Debug)]
pub enum Inbound {
    /// One end of a socket pair, from [`super::StateSender::pair`].
    Fd(OwnedFd),
    /// A unix socket that QEMU shall listen on. At most 107 bytes; relative to QEMU's working directory.
    Unix(PathBuf),
}

/// All device state has been read; the guest is stopped, its disks are not taken yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedAt {
    /// When `completed` was read.
    pub at: Mono,
}

/// The guest runs here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumedAt {
    /// When the RESUME event was read.
    pub at: Mono,
    /// When QEMU made it, by its wall clock.
    pub qemu_time: QemuTime,
}

/// How often and how fast the guest's network addresses are announced (`announce-self`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announce {
    /// Before the second round. Default 50 ms.
    pub initial: Duration,
    /// Longest time between rounds. Default 550 ms.
    pub max: Duration,
    /// Number of rounds, 1..=1000. Default 5.
    pub rounds: u16,
    /// Added to the time between rounds each time. Default 50 ms.
    pub step: Duration,
}

impl Default for Announce {
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(50),
            max: Duration::from_millis(550),
            rounds: 5,
            step: Duration::from_millis(50),
        }
    }
}

/// A destination QEMU, prepared. Started with `-incoming defer -S`.
#[derive(Debug)]
pub struct Destination {
    client: Client,
    track: Track,
}

impl Destination {
    /// Sets capabilities and parameters: `late-block-activate`, so that the disks are taken by `cont` and not by the end
    /// of the load; no announcement at the end of the load, since the guest does not run here yet.
    ///
    /// # Errors
    /// [`SwitchoverError::RunState`] if this QEMU does not wait for a migration, [`SwitchoverError::NoCapability`],
    /// [`SwitchoverError::Qmp`].
    pub async fn prepare(client: &Client, _options: &DestinationOptions) -> Result<Self, SwitchoverError> {
        let run_state = client.run_state(COMMAND_TIMEOUT).await;
        let run_state = run_state.map_err(SwitchoverError::at("asking for the run state"))?;
        if run_state != "inmigrate" {
            return Err(SwitchoverError::RunState { run_state });
        }
        let capabilities =
            Capabilities::from([("events", true), ("x-ignore-shared", true), ("late-block-activate", true)]);
        let mut parameters = serde_json::Map::new();
        parameters.insert("announce-rounds".to_owned(), 0.into());
        settings::apply(client, &capabilities, &parameters).await?;
        let status = query_migration(client, COMMAND_TIMEOUT).await?.status;
        Ok(Self { client: client.clone(), track: Track::begin(client, status, None) })
    }

    /// Lets QEMU read from here on. Can be done long before the source starts.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`].
    pub async fn listen(&self, inbound: Inbound) -> Result<(), SwitchoverError> {
        let uri = match inbound {
            Inbound::Fd(fd) => {
                use std::os::fd::AsFd;
                let given = self.client.get_fd(STREAM_FD, fd.as_fd()).await;
                given.map_err(SwitchoverError::at("handing the stream to QEMU"))?;
                format!("fd:{STREAM_FD}")
            }
            Inbound::Unix(path) => format!("unix:{}", path.display()),
        };
        let mut arguments = json!({ "uri": uri });
        let version = self.client.version();
        if (version.major, version.minor) >= SURVIVES_BAD_LOAD {
            arguments["exit-on-error"] = false.into();
        }
        let reply = self.client.execute_raw("migrate-incoming", arguments, COMMAND_TIMEOUT).await;
        reply.map(drop).map_err(SwitchoverError::at("preparing for the stream"))
    }

    /// Waits until all device state has been read.
    ///
    /// # Errors
    /// [`SwitchoverError::Gone`]: QEMU before 9.1 ends when it cannot load the state, its log says why;
    /// [`SwitchoverError::Failed`] from 9.1 on; [`SwitchoverError::Timeout`].
    pub async fn loaded(&self, deadline: Duration) -> Result<LoadedAt, SwitchoverError> {
        let done = |known: &Known| known.entered(&MigrationStatus::Completed);
        let stamp = self.track.wait("the loading of the device state", deadline, done).await?;
        Ok(LoadedAt { at: stamp.at })
    }

    /// Runs the guest here, and waits for its RESUME event. Point of no return: call it only once the source has said
    /// [`super::Source::completed`] and has durably given the guest up.
    ///
    /// May be called before [`Destination::loaded`], and waits for that: QEMU would take an earlier `cont`, but tries to
    /// take the disks at once then, and 7.2 fails to.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`] when QEMU refuses, for instance because a disk is still in use elsewhere: the guest
    /// has not run. [`SwitchoverError::Gone`], [`SwitchoverError::Timeout`]: it may have run.
    pub async fn resume(&self, deadline: Duration) -> Result<ResumedAt, SwitchoverError> {
        self.loaded(deadline).await?;
        let reply = self.client.execute_raw("cont", Value::Null, deadline).await;
        reply.map_err(SwitchoverError::at("resuming the guest"))?;
        let stamp = self.track.wait("the RESUME event", deadline, |known| known.resume).await?;
        Ok(ResumedAt { at: stamp.at, qemu_time: stamp.qemu })
    }

    /// Tells the network where the guest is now: gratuitous ARP and RARP from each of its NICs.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`].
    pub async fn announce(&self, announce: Announce) -> Result<(), SwitchoverError> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let arguments = json!({
            "initial": millis(announce.initial), "max": millis(announce.max),
            "rounds": announce.rounds, "step": millis(announce.step),
        });
        let reply = self.client.execute_raw("announce-self", arguments, COMMAND_TIMEOUT).await;
        reply.map(drop).map_err(SwitchoverError::at("announcing the guest"))
    }
}
