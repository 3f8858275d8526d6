//! The guest lets its devices go before its memory is read.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use vmove_node::record::VmRecord;
use vmove_qmp::hotplug::HotplugError;
use vmove_types::device::VmDevice;
use vmove_types::report::DeviceTimes;
use vmove_types::time::Mono;

use super::error::{SourceError, Stop};
use super::session::Session;
use super::warm::Warm;
use crate::devices::detach::{DetachError, detach};
use crate::devices::script;
use crate::records::Asked;

/// The destination takes longer silence for death.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

impl Warm {
    /// Has the guest let its devices go: from here on nothing but QEMU writes its memory. What is begun is written down first, so that whoever finds it
    /// can undo it.
    pub(super) async fn detach_devices(&mut self, session: &mut Session) -> Result<(), Stop> {
        let vm = session.vm().clone();
        for device in &vm.devices {
            let role = device.request.role.clone();
            let seat = self.monitor.seat(&device.id).await;
            if seat.map_err(|source| not_away(&role, source.into()))?.is_none() {
                tracing::info!(role, "this device is not plugged in");
                continue;
            }
            let asked = Asked { role: role.clone(), asked_at: Mono::now(), gone_at: None, refused: false };
            session.write(|r| r.detached.asked.push(asked))?;
        }
        for device in &vm.devices {
            if session.journal.record().detached.asked.iter().any(|asked| asked.role == device.request.role) {
                self.detach_one(session, &vm, device).await?;
            }
        }
        Ok(())
    }

    /// Has the guest stop what it is at, if a script was named for that.
    pub(super) async fn quiesce(&mut self, session: &mut Session) -> Result<(), Stop> {
        let spec = session.spec();
        let limit = Duration::from_millis(spec.script_timeout_ms);
        if spec.quiesce.is_none() && spec.resume.is_none() {
            return Ok(());
        }
        let quiesce = spec.quiesce.clone();
        session.write(|r| r.detached.quiesced = true)?;
        let Some(quiesce) = quiesce else { return Ok(()) };
        let begun = Mono::now();
        let monitor = Arc::clone(&self.monitor);
        let running = async move { script::run(&*monitor, &quiesce, limit).await };
        self.while_pinging(running).await?.map_err(SourceError::Script)?;
        session.report.quiesce_ms = Some(Mono::now().ms_since(begun));
        Ok(())
    }

    async fn detach_one(
        &mut self,
        session: &mut Session,
        vm: &VmRecord,
        device: &VmDevice,
    ) -> Result<(), Stop> {
        let role = device.request.role.clone();
        let limit = Duration::from_millis(session.spec().unplug_timeout_ms);
        let begun = Mono::now();
        note(session, &role, |asked| asked.asked_at = begun);
        let monitor = Arc::clone(&self.monitor);
        let (node, vm, owned) = (Arc::clone(&session.node), vm.name.clone(), device.clone());
        let leaving = async move { detach(&*monitor, &*node.config.devices, &vm, &owned, limit).await };
        if let Err(error) = self.while_pinging(leaving).await? {
            if let DetachError::Unplug(HotplugError::GuestRefused { .. }) = error {
                note(session, &role, |asked| asked.refused = true);
            }
            return Err(not_away(&role, error).into());
        }
        let gone_at = Mono::now();
        note(session, &role, |asked| asked.gone_at = Some(gone_at));
        session.report.devices.push(DeviceTimes {
            role,
            source: device.request.address.to_string(),
            unplug_ms: gone_at.ms_since(begun),
            ..DeviceTimes::default()
        });
        Ok(())
    }

    /// Does something that may take long, and keeps the destination from taking us for dead.
    async fn while_pinging<T>(&mut self, work: impl Future<Output = T>) -> Result<T, SourceError> {
        tokio::pin!(work);
        loop {
            match timeout(KEEPALIVE_INTERVAL, &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => self.control.keep_alive().await?,
            }
        }
    }
}

fn not_away(role: &str, source: DetachError) -> SourceError {
    SourceError::Detach { role: role.to_owned(), source }
}

/// Without its line only a figure would be lost.
fn note(session: &mut Session, role: &str, change: impl FnOnce(&mut Asked)) {
    session.write_owing(|r| {
        if let Some(asked) = r.detached.asked.iter_mut().find(|asked| asked.role == role) {
            change(asked);
        }
    });
}
