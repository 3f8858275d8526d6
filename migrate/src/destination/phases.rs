//! The phases of a session at the destination, one after the other. Each ends by becoming the next, or ends the session.
//!
//! ```text
//! Filling ──▶ Switchover ──▶ Loaded ──▶ Owner ──▶ Complete
//!    │            │            │          │           │
//!    └────────────┴────────────┴─▶ Gone   └───────────┴─▶ handed to the operator, if something fails here
//! ```
//!
//! In the journal Filling and Switchover are one state: what stands in it then never owned the guest.

use tracing::{Instrument as _, Span, info_span};

use super::filling::Filling;
use super::loaded::Loaded;
use super::owner::Owner;
use super::session::{Control, Session};

fn phase(name: &'static str) -> Span {
    info_span!("phase", name)
}

/// Runs all phases of a new session. The fault thread is started in Filling.
pub(super) async fn run(session: &mut Session, control: Control) {
    let filling = Filling::begin(session);
    let Some((switchover, control)) = filling.run(session, control).instrument(phase("Filling")).await else {
        return;
    };
    let switched = switchover.run(session, control).instrument(phase("Switchover")).await;
    let Some((loaded, control)) = switched else { return };
    run_from_loaded(session, loaded, control).await;
}

/// Runs the phases from Loaded on. Without `control`, it waits for the source to dial again.
pub(super) async fn run_from_loaded(session: &mut Session, loaded: Loaded, control: Option<Control>) {
    let Some((owner, control)) = loaded.run(session, control).instrument(phase("Loaded")).await else {
        return;
    };
    run_from_owner(session, owner, Some(control)).await;
}

/// Runs the phases from Owner on. Without `control`, it waits for the source to dial again.
pub(super) async fn run_from_owner(session: &mut Session, owner: Owner, control: Option<Control>) {
    if let Some((complete, control)) = owner.run(session, control).instrument(phase("Owner")).await {
        complete.run(session, control).instrument(phase("Complete")).await;
    }
    session.node.visits.forget(session.journal.record().id);
}
