//! A guest that libvirt has given to the destination although this side could not go on as it was, or was started anew.

use std::sync::Arc;

use vmove_node::journal::Journal;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Phase};
use vmove_types::spec::Mode;

use super::aborted::tell_later;
use super::by_libvirt::VERDICT_TIMEOUT;
use super::committed::Committed;
use super::final_pages::FinalPages;
use super::page_service::PageService;
use super::session::Session;
use super::stopped_qemu::{Kept, StoppedQemu};
use crate::kept_memory::let_memory_go;
use crate::node::Node;
use crate::owed;
use crate::ownership::{SourceEvent, SourceState};
use crate::publish::Publisher;
use crate::records::SourceRecord;
use crate::vmm::Leaving;

/// The guest is the destination's, which may not have heard all that it must fetch: it is told of everything.
pub(super) async fn follow(mut session: Session, qemu: Arc<dyn Leaving>, pages: PageService) {
    if let Err(error) = session.advance_owing(SourceEvent::PeerLoaded) {
        return session.end_badly(chain(&error), GuestPlace::PausedAtSource);
    }
    session.publisher.enter(Phase::HandOver);
    let last = FinalPages::all(&pages.memory);
    let kept = Kept::InMemory(StoppedQemu { qemu, stopped_at: None, pause: None });
    Committed { kept, serving: Some((pages, last)), ..Committed::journaled() }.run(session, None).await;
}

/// Takes up, in a new life of the daemon, a migration of libvirt's: where the guest is, QEMU tells, or that it has ended.
pub(crate) async fn take_up_domain(
    node: Arc<Node>,
    mut journal: Journal<SourceRecord>,
    publisher: Publisher,
) {
    let record = journal.record().clone();
    // libvirt was not let go on: it has begun no migration of this one, and another (`virsh save`) is none of ours.
    let let_go = record.state != SourceState::Warm;
    let monitor = if let_go { node.config.vmm.monitor(&record.vm).await.ok() } else { None };
    let qemu = match monitor {
        Some(monitor) => monitor.take_up(record.was_running).await.ok(),
        None => None,
    };
    let sent = match &qemu {
        Some(qemu) => qemu.is_given_up(VERDICT_TIMEOUT).await.unwrap_or(true),
        // libvirt has ended it. What it held is kept until the destination has said that it needs nothing.
        None => true,
    };
    if !(sent && let_go) && record.state != SourceState::Committed {
        let why =
            "The daemon was started anew before the hand-over: libvirt has the guest go on at the source";
        let next = record.state.step(SourceEvent::GiveUp);
        let changed = next.map(|next| {
            journal.update_owing(|r| {
                r.enter(next);
                r.to_resume = false;
            })
        });
        drop(qemu);
        let_memory_go(node.disk(), &record.vm);
        if journal.record().untold {
            tell_later(&node, journal.record().clone(), None);
        }
        if let Ok(Err(error)) = changed {
            publisher.cannot_write(journal.path(), &error);
            owed::write_owed(&mut journal, &publisher).await;
        }
        return publisher.fail(why, GuestPlace::Source, false);
    }
    let mut report = record.report.clone();
    report.recoveries += 1;
    let mut session = Session::new(node, journal, publisher, report, Mode::Hybrid);
    let kept = match qemu {
        Some(qemu) => Kept::InMemory(StoppedQemu { qemu, stopped_at: None, pause: None }),
        None => Kept::Journaled,
    };
    if let Err(error) = session.advance_owing(SourceEvent::PeerLoaded) {
        return session.end_badly(chain(&error), GuestPlace::PausedAtSource);
    }
    session.publisher.enter(Phase::HandOver);
    // libvirt has had it run here meanwhile: it is asked whose it is.
    Committed { kept, returned: !sent, ..Committed::journaled() }.run(session, None).await;
}
