//! Collapse of a real child's memory while a userfaultfd watches it.

use std::time::Duration;

use super::{Collapsed, collapse, huge_mapped, map_folio};
use crate::testing::ram::{Dir, Guest, poke};
use crate::testing::server::event_waits;
use crate::{
    Backing, ByteLen, EventBatch, FaultContext, Keep, Outcome, PageIndex, PageRun, PageSize, UffdEvent,
    UffdFeatures, create_uffd,
};

const FOLIO: ByteLen = ByteLen::mib(2);

fn watched(dir: &Dir) -> (Guest, FaultContext) {
    let guest = Guest::start(vec![dir.file("ram", 8)]);
    let map = guest.files[0].map().expect("map");
    map.populate(PageRun::new(PageIndex(0), 1024)).expect("memory");
    for page in 0..1024 {
        poke(&map, page * 4096, page + 1);
    }
    let context =
        FaultContext::new(create_uffd(&guest.process, UffdFeatures::Faults, Keep::InQemu).expect("create"));
    context.register(&guest.mappings).expect("register");
    (guest, context)
}

#[test]
fn a_landed_folio_becomes_one_huge_page_and_waiters_go_on() {
    let dir = vmove_skip::need!(Dir::new(Backing::Thp, 8));
    let (mut guest, context) = watched(&dir);
    let hva = guest.mappings[0].hva;
    let huge = |guest: &Guest| huge_mapped(&guest.process, hva, FOLIO).expect("pagemap");

    guest.target.ask("later-read 0 8192");
    event_waits(&context);
    let mut batch = EventBatch::new(4);
    assert_eq!(context.read_events(&mut batch).expect("read"), 1);
    assert!(matches!(batch.events(), [UffdEvent::Fault { .. }]));
    // What must not be relied on: the collapse maps pages that were never CONTINUEd, and wakes nobody.
    assert_eq!(collapse(&guest.process, hva, FOLIO).expect("collapse"), Collapsed::Done);
    assert_eq!(huge(&guest), FOLIO);
    assert_eq!(guest.reads(4096 * 100), 101, "no fault");
    assert_eq!(guest.target.reply_within(Duration::from_millis(200)), None, "the first reader still waits");
    assert_eq!(map_folio(&guest.process, &context, hva).expect("again"), Collapsed::Done);
    assert_eq!(guest.target.reply_within(Duration::from_secs(5)).as_deref(), Some("done 8192 3"));

    let second = hva.add(FOLIO);
    assert_eq!(context.continue_range(second, FOLIO, PageSize::Base4K).expect("map"), Outcome::Mapped(FOLIO));
    assert_eq!(huge_mapped(&guest.process, second, FOLIO).expect("pagemap"), ByteLen(0));
    assert_eq!(map_folio(&guest.process, &context, second).expect("collapse"), Collapsed::Done);
    assert_eq!(huge_mapped(&guest.process, second, FOLIO).expect("pagemap"), FOLIO);
    let outcome = context.continue_range(second, FOLIO, PageSize::Base4K).expect("continue");
    assert_eq!(outcome, Outcome::AlreadyMapped);
    assert_eq!(guest.reads(FOLIO.0 + 4096 * 5), 518);
}

#[test]
fn a_hole_is_not_collapsed() {
    let dir = vmove_skip::need!(Dir::new(Backing::Thp, 8));
    let (guest, context) = watched(&dir);
    let hole = guest.mappings[0].hva.add(ByteLen::mib(6));
    assert_ne!(map_folio(&guest.process, &context, hole).expect("no error"), Collapsed::Done);
    assert!(guest.files[0].is_hole(crate::ByteRange::new(crate::FileOffset(6 << 20), FOLIO)).expect("seek"));
}
