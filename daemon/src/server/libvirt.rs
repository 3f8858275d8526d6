//! What libvirt's hook asks at the destination of a `virsh migrate`.

use vmove_libvirt::Domain;
use vmove_migrate::domains::Carrier;
use vmove_types::libvirt::{DomainHook, DomainHookDone, DomainOperation};
use vmove_types::problem::{Code, Problem};

use super::problem::IntoProblem;

/// Answers the hook. Not before libvirt may go on.
pub async fn hook(carrier: &Carrier, hook: &DomainHook) -> Result<DomainHookDone, Problem> {
    let xml = Domain::read(&hook.xml).map_err(|error| Problem::from_error(Code::DomainRefused, &error))?;
    let own = xml.own_monitor().map_err(|error| Problem::from_error(Code::DomainRefused, &error))?;
    let Some(monitor) = own else { return Ok(DomainHookDone { migration: None }) };
    let done = match hook.operation {
        DomainOperation::Migrate => carrier.announce(xml.uuid(), xml.name()).await.map(|()| None),
        DomainOperation::Started => carrier.started(xml.uuid(), monitor).await,
    };
    let migration = done.map_err(IntoProblem::into_problem)?.map(|id| id.to_string());
    Ok(DomainHookDone { migration })
}
