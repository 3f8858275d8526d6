//! What is asked of QEMU about devices of the host that its guest owns, and of programs inside the guest.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};
use vmove_qmp::Client;
use vmove_qmp::agent::{Agent, AgentError, ExecRequest, Finish, socket_of};
use vmove_qmp::hotplug::{self, HotplugError, Port, Seat, UnplugLimits};

/// Small questions.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(10);
/// For the guest agent to say that it is there.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The monitor of a QEMU whose guest owns devices.
#[async_trait]
pub trait DeviceMonitor: Send + Sync + fmt::Debug {
    /// The device of this id, if the guest has it.
    ///
    /// # Errors
    /// [`HotplugError::Qmp`].
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError>;

    /// Ports that devices can be plugged into.
    ///
    /// # Errors
    /// [`HotplugError::Qmp`].
    async fn ports(&self) -> Result<Vec<Port>, HotplugError>;

    /// Asks the guest to let a device go, and waits until it has. How long that took. Cancel-safe: what was asked stands.
    ///
    /// # Errors
    /// [`HotplugError`].
    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError>;

    /// Plugs a device in: `properties` as `device_add` takes them. How long that took.
    ///
    /// # Errors
    /// [`HotplugError`].
    async fn plug(
        &self,
        properties: &Map<String, Value>,
        deadline: Duration,
    ) -> Result<Duration, HotplugError>;

    /// Runs a program in the guest, by its agent. One that takes too long goes on.
    ///
    /// # Errors
    /// [`InGuestError`].
    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError>;
}

/// A program that has ended in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// How.
    pub finish: Finish,
    /// The last that it said.
    pub said: String,
}

/// Why a program did not run in the guest.
#[derive(Debug, thiserror::Error)]
pub enum InGuestError {
    /// There is no way to one.
    #[error(
        "The guest has no port for an agent: start it with -device virtserialport,name=org.qemu.guest_agent.0 and run qemu-ga in it"
    )]
    NoPort,
    /// QEMU could not be asked for its port.
    #[error(transparent)]
    Qmp(#[from] vmove_qmp::QmpError),
    /// The agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

#[async_trait]
impl DeviceMonitor for Client {
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError> {
        hotplug::find(self, id, QUESTION_TIMEOUT).await
    }

    async fn ports(&self) -> Result<Vec<Port>, HotplugError> {
        Ok(hotplug::ports(self, QUESTION_TIMEOUT).await?)
    }

    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError> {
        Ok(hotplug::unplug(self, id, limits).await?.took)
    }

    async fn plug(
        &self,
        properties: &Map<String, Value>,
        deadline: Duration,
    ) -> Result<Duration, HotplugError> {
        Ok(hotplug::plug(self, properties, deadline).await?.took)
    }

    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError> {
        let socket = socket_of(self, QUESTION_TIMEOUT).await?.ok_or(InGuestError::NoPort)?;
        let mut agent = Agent::connect(&socket, AGENT_TIMEOUT.min(request.time)).await?;
        let ended = agent.execute(request).await?;
        let said = if ended.err.is_empty() { &ended.out } else { &ended.err };
        Ok(Ran { finish: ended.finish, said: last_of(said) })
    }
}

/// The end of what a program said, on one line.
fn last_of(said: &[u8]) -> String {
    const MOST: usize = 300;
    let text = String::from_utf8_lossy(&said[said.len().saturating_sub(MOST)..]).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
