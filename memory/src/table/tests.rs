//! The table against a plain model, and its file.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;

use super::{Landing, PageState, PageTable, Want};
use crate::error::MemoryError;
use crate::units::{PageIndex, PageRun};

fn page(n: u64) -> PageIndex {
    PageIndex(n)
}

#[test]
fn a_page_goes_its_way() {
    let table = PageTable::anonymous(8).expect("memory");
    let ticket = table.claim(page(3)).expect("absent");
    assert!(table.claim(page(3)).is_none(), "one winner");
    assert_eq!(table.state(page(3)), PageState::Asked);
    assert!(matches!(ticket.landed(), Landing::Ready { wanted: false }));
    assert_eq!(table.state(page(3)), PageState::Landed);
    assert_eq!(table.mark_mapped(PageRun::new(page(0), 8)), 1);
    assert_eq!(table.state(page(3)), PageState::Mapped);
    assert_eq!(table.mark_stale(table.all()), 7, "a mapped page is never fetched again");
    assert_eq!(table.mark_zero(table.all()), 7);
    assert!(table.all_landed(table.all()));
    assert!(table.claim(page(8)).is_none(), "outside of the table");
    assert_eq!(table.state(page(8)), PageState::Poisoned);
}

#[test]
fn who_lands_a_wanted_page_is_told() {
    let table = PageTable::anonymous(4).expect("memory");
    let ticket = table.claim(page(1)).expect("absent");
    assert!(matches!(table.want(page(1)), Want::OnItsWay));
    assert!(matches!(ticket.landed(), Landing::Ready { wanted: true }));
    assert!(matches!(table.want(page(1)), Want::MapNow));
    let Want::Fetch(ticket) = table.want(page(2)) else { panic!("nobody had it") };
    assert!(matches!(ticket.zero(), Landing::Ready { wanted: true }));
    assert!(matches!(table.want(page(2)), Want::ZeroNow));
    table.mark_mapped(table.all());
    assert!(matches!(table.want(page(2)), Want::MapAgain));
}

#[test]
fn a_dropped_ticket_keeps_the_wish() {
    let table = PageTable::anonymous(4).expect("memory");
    let ticket = table.claim(page(1)).expect("absent");
    assert!(matches!(table.want(page(1)), Want::OnItsWay));
    assert_eq!(table.find_wanted(table.all()), None, "it is on its way");
    drop(ticket);
    assert_eq!((table.state(page(1)), table.find_wanted(table.all())), (PageState::Stale, Some(page(1))));
    let ticket = table.claim(page(1)).expect("stale");
    assert!(matches!(ticket.landed(), Landing::Ready { wanted: true }));
    assert_eq!(table.find_wanted(table.all()), None);
}

#[test]
fn news_about_a_page_on_its_way_is_not_lost() {
    let table = PageTable::anonymous(4).expect("memory");
    let ticket = table.claim(page(0)).expect("absent");
    table.mark_stale(table.all());
    assert!(matches!(ticket.landed(), Landing::Superseded { wanted: false }));
    assert_eq!(table.state(page(0)), PageState::Stale);

    let ticket = table.claim(page(0)).expect("stale");
    table.mark_discarded(table.all());
    let Landing::Discarded(ticket) = ticket.landed() else { panic!("it was discarded") };
    assert_eq!(table.state(page(0)), PageState::Asked, "until the bytes are gone");
    assert!(matches!(ticket.zero(), Landing::Ready { wanted: false }));
    assert_eq!(table.counts().zero, 4);
}

#[test]
fn runs_are_claimed_around_obstacles() {
    let table = PageTable::anonymous(20).expect("memory");
    let obstacle = table.claim(page(5)).expect("absent");
    let mut run = table.claim_run(table.all(), 8).expect("room");
    assert_eq!(run.run(), PageRun::new(page(0), 5));
    let next = table.claim_run(table.all(), 8).expect("room");
    assert_eq!(next.run(), PageRun::new(page(6), 8));
    let tail = run.split_off(2);
    assert_eq!((run.run().len, tail.run()), (2, PageRun::new(page(2), 3)));
    assert!(matches!(table.want(page(1)), Want::OnItsWay));
    let mut told = Vec::new();
    assert!(
        run.landed(|page, landing| told.push((page.0, matches!(landing, Landing::Ready { wanted: true }))))
    );
    assert_eq!(told, [(0, false), (1, true)]);
    drop((tail, obstacle));
    assert_eq!(table.find_claimable(table.all()), Some(page(2)));
    assert_eq!(table.prefix(PageRun::new(page(2), 18), PageState::is_claimable).len, 4);
    drop(next);
    assert!(table.claim_run(PageRun::new(page(0), 2), 8).is_none(), "all landed there");
}

#[test]
fn poison_stays() {
    let table = PageTable::anonymous(2).expect("memory");
    assert!(!table.claim(page(0)).expect("absent").poison());
    assert!(matches!(table.want(page(0)), Want::Poisoned));
    assert_eq!(table.mark_stale(table.all()) + table.mark_landed(table.all()), 2, "the other page, twice");
    assert_eq!(table.state(page(0)), PageState::Poisoned);
}

#[test]
fn a_table_outlives_who_made_it() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = dir.path().join("table");
    let table = PageTable::create(&path, 10_000).expect("create");
    assert!(matches!(table.create_again(&path), Err(MemoryError::Path { .. })));
    std::mem::forget(table.claim(page(9_999)));
    assert!(matches!(table.want(page(9_999)), Want::OnItsWay));
    table.mark_landed(PageRun::new(page(0), 5_000));
    drop(table);

    let table = PageTable::open(&path).expect("open");
    assert_eq!((table.pages(), table.counts().landed, table.counts().asked), (10_000, 5_000, 1));
    assert_eq!(table.recover(), 1);
    assert_eq!((table.counts().stale, table.find_wanted(table.all())), (1, None));
    drop(table);

    let file = fs::File::options().write(true).open(&path).expect("open");
    file.set_len(5_000).expect("truncate");
    assert!(matches!(PageTable::open(&path), Err(MemoryError::TableFormat { .. })));
    fs::write(&path, "something else, and long enough").expect("write");
    assert!(matches!(PageTable::open(&path), Err(MemoryError::TableFormat { .. })));
    let on_disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("temp dir");
    let path = on_disk.path().join("table");
    assert!(matches!(PageTable::create(&path, 8), Err(MemoryError::TableNotInMemory { .. })));
    assert!(!path.exists());
}

impl PageTable {
    fn create_again(&self, path: &std::path::Path) -> crate::Result<std::sync::Arc<Self>> {
        Self::create(path, self.pages())
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim(u64),
    Want(u64),
    Land(u64),
    Zero(u64),
    GiveUp(u64),
    Mapped(u64, u64),
    Stale(u64, u64),
    Landed(u64, u64),
    Discarded(u64, u64),
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    let at = 0..PAGES;
    let run = (0..PAGES, 1..4_u64);
    prop_oneof![
        at.clone().prop_map(Step::Claim),
        at.clone().prop_map(Step::Want),
        at.clone().prop_map(Step::Land),
        at.clone().prop_map(Step::Zero),
        at.prop_map(Step::GiveUp),
        run.clone().prop_map(|(a, n)| Step::Mapped(a, n)),
        run.clone().prop_map(|(a, n)| Step::Stale(a, n)),
        run.clone().prop_map(|(a, n)| Step::Landed(a, n)),
        run.prop_map(|(a, n)| Step::Discarded(a, n)),
        Just(Step::Recover),
    ]
}

const PAGES: u64 = 6;

/// What the table promises, said plainly: whoever waits for a page is known until it is mapped or handed to somebody.
#[derive(Clone, Copy, Debug, Default)]
struct Model {
    mapped: bool,
    waiting: bool,
}

proptest! {
    #[test]
    fn promises_hold_in_any_order(steps in prop::collection::vec(step(), 0..80)) {
        let table = PageTable::anonymous(PAGES).expect("memory");
        let mut tickets = BTreeMap::new();
        let at = |page: u64| usize::try_from(page).expect("small");
        let mut model = vec![Model::default(); at(PAGES)];
        for step in steps {
            match step {
                Step::Claim(p) => {
                    let free = table.state(page(p)).is_claimable();
                    let ticket = table.claim(page(p));
                    prop_assert_eq!(ticket.is_some(), free && !tickets.contains_key(&p));
                    if let Some(ticket) = ticket { tickets.insert(p, ticket); }
                }
                Step::Want(p) => match table.want(page(p)) {
                    Want::Fetch(ticket) => {
                        prop_assert!(tickets.insert(p, ticket).is_none());
                        model[at(p)].waiting = true;
                    }
                    Want::OnItsWay => {
                        prop_assert!(tickets.contains_key(&p));
                        model[at(p)].waiting = true;
                    }
                    Want::MapNow | Want::ZeroNow | Want::MapAgain => {
                        prop_assert!(table.state(page(p)).is_final());
                    }
                    Want::Poisoned => prop_assert!(false, "nothing is poisoned here"),
                },
                Step::Land(p) | Step::Zero(p) => {
                    let Some(ticket) = tickets.remove(&p) else { continue };
                    let landing = if matches!(step, Step::Land(_)) { ticket.landed() } else { ticket.zero() };
                    match landing {
                        Landing::Ready { wanted } => {
                            prop_assert_eq!(wanted, model[at(p)].waiting);
                            model[at(p)].waiting = false;
                        }
                        Landing::Superseded { wanted } => prop_assert_eq!(wanted, model[at(p)].waiting),
                        Landing::Discarded(ticket) => drop(tickets.insert(p, ticket)),
                    }
                }
                Step::GiveUp(p) => drop(tickets.remove(&p)),
                Step::Mapped(p, n) => {
                    table.mark_mapped(PageRun::new(page(p), n));
                    for q in p..(p + n).min(PAGES) {
                        model[at(q)].mapped |= table.state(page(q)) == PageState::Mapped;
                    }
                }
                Step::Stale(p, n) => drop(table.mark_stale(PageRun::new(page(p), n))),
                Step::Landed(p, n) => {
                    table.mark_landed(PageRun::new(page(p), n));
                    for q in p..(p + n).min(PAGES) {
                        // Warm phase only: nobody waits then.
                        if table.state(page(q)) == PageState::Landed { model[at(q)].waiting = false; }
                    }
                }
                Step::Discarded(p, n) => {
                    table.mark_discarded(PageRun::new(page(p), n));
                    for q in p..(p + n).min(PAGES) {
                        if table.state(page(q)) == PageState::Zero { model[at(q)].waiting = false; }
                    }
                }
                Step::Recover => {
                    let abandoned = std::mem::take(&mut tickets);
                    prop_assert_eq!(table.recover(), abandoned.len() as u64);
                    for ticket in abandoned.into_values() { std::mem::forget(ticket); }
                    for m in &mut model { m.waiting = false; }
                }
            }
            for p in 0..PAGES {
                prop_assert_eq!(table.state(page(p)) == PageState::Asked, tickets.contains_key(&p));
                if model[at(p)].mapped {
                    prop_assert_eq!(table.state(page(p)), PageState::Mapped, "mapped for good");
                }
            }
            let counts = table.counts();
            prop_assert_eq!(counts.asked, tickets.len() as u64);
            prop_assert_eq!(counts.missing() == 0, table.all_landed(table.all()));
            prop_assert_eq!(counts.missing(), table.missing(), "counted as it goes");
        }
    }
}
