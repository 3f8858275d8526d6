//! Whether a guest that is to read data of another node goes there: what each way costs, and which is the cheapest. Arithmetic only.

use super::Outlook;
use super::course::whole;
use vmove_types::choice::{Choice, ReadsCost, ReadsFrom};

/// What a protocol that reads data over a link gets of what the link carries for pages.
pub const FAR_SHARE: f64 = 0.65;
/// What data is read at where it is, if nobody says so: a SATA SSD. Unit: bytes per second.
pub const NEAR: f64 = 5e8;
/// What a guest touches on a visit beside what it writes, most of it its kernel's, and what is read ahead of that. Unit: bytes.
pub const TOUCHED: f64 = 32.0 * MIB;
/// What of this has changed when it comes home.
pub const CHANGED: f64 = 16.0 * MIB;
/// What one page fault brings on average, with what is read ahead of it.
const FAULT_BRINGS: f64 = 64.0 * 1024.0;
/// What it waits beside the bytes. Unit: milliseconds.
const FAULT_MS: f64 = 0.2;
const MIB: f64 = 1_048_576.0;
/// More data than anybody reads: where it still does not pay, it never does. Unit: bytes.
const MOST: f64 = 1e18;

/// What a guest is to read there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reads {
    /// Bytes.
    pub bytes: f64,
    /// The rate at which it reads them there. Unit: bytes per second.
    pub near_bytes_per_s: f64,
    /// What the link carries for pages that no limit holds back. Unit: bytes per second.
    pub link_bytes_per_s: f64,
}

/// What visits of the guest have brought. Unit: bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Brought {
    /// To the node that it visits.
    pub there: f64,
    /// Back home.
    pub back: f64,
}

/// What is known of the ways.
#[derive(Debug, Clone, Copy)]
pub struct Ways<'a> {
    /// The guest, and what a migration takes beside memory.
    pub outlook: &'a Outlook,
    /// What earlier visits have brought; `None`: it is assumed.
    pub brought: Option<Brought>,
    /// It can visit.
    pub visits: bool,
    /// A migration there: its time and its bytes. `None`: it cannot be made.
    pub migration: Option<ReadsCost>,
}

impl Reads {
    /// The rate from afar.
    fn far(&self) -> f64 {
        (FAR_SHARE * self.link_bytes_per_s).min(self.near_bytes_per_s).max(1.0)
    }

    fn near_ms(&self) -> f64 {
        self.bytes / self.near_bytes_per_s.max(1.0) * 1e3
    }

    fn stay(&self) -> ReadsCost {
        ReadsCost { time_ms: self.bytes / self.far() * 1e3, link_bytes: whole(self.bytes) }
    }

    fn visit(&self, ways: &Ways<'_>) -> ReadsCost {
        let beside = &ways.outlook.beside;
        let brought = ways.brought.unwrap_or_else(|| {
            let written = ways.outlook.writes.after_ms(self.near_ms());
            Brought { there: TOUCHED + written, back: CHANGED + written }
        });
        let bytes = brought.there + brought.back;
        let on_link_ms = bytes / self.link_bytes_per_s.max(1.0) * 1e3;
        let faults_ms = brought.there / FAULT_BRINGS * FAULT_MS;
        // Until QEMU is ready there the guest runs and reads on, from afar.
        let slower_ms = beside.ready_ms * (1.0 - self.far() / self.near_bytes_per_s.max(1.0)).max(0.0);
        let ways_ms = slower_ms + 2.0 * beside.pause_ms + on_link_ms + faults_ms;
        ReadsCost { time_ms: self.near_ms() + ways_ms, link_bytes: whole(bytes) }
    }

    fn migrate(&self, once: ReadsCost) -> ReadsCost {
        let time_ms = self.near_ms() + 2.0 * once.time_ms;
        ReadsCost { time_ms, link_bytes: once.link_bytes.saturating_mul(2) }
    }

    /// What it takes to go there by the faster way; `None` if there is none.
    fn going_ms(&self, ways: &Ways<'_>) -> Option<f64> {
        let visit = ways.visits.then(|| self.visit(ways).time_ms);
        let migrate = ways.migration.map(|once| self.migrate(once).time_ms);
        visit.into_iter().chain(migrate).min_by(f64::total_cmp)
    }
}

/// The cheapest way, and what each costs. Of ways that cost the same, the one that moves less.
#[must_use]
pub fn choose(reads: &Reads, ways: &Ways<'_>, basis: String) -> Choice {
    let stay = reads.stay();
    let visit = ways.visits.then(|| reads.visit(ways));
    let migrate = ways.migration.map(|once| reads.migrate(once));
    let others = [(ReadsFrom::Visit, visit), (ReadsFrom::Migrate, migrate)];
    let mut best = (ReadsFrom::Stay, stay.time_ms);
    for (way, cost) in others {
        if let Some(cost) = cost.filter(|cost| cost.time_ms < best.1) {
            best = (way, cost.time_ms);
        }
    }
    Choice { choice: best.0, stay, visit, migrate, pays_from_bytes: pays_from(reads, ways), basis }
}

/// From how much data on it is faster to go there.
fn pays_from(reads: &Reads, ways: &Ways<'_>) -> Option<u64> {
    let pays = |bytes: f64| {
        let reads = Reads { bytes, ..*reads };
        reads.going_ms(ways).is_some_and(|ms| ms < reads.stay().time_ms)
    };
    if !pays(MOST) {
        return None;
    }
    // Once it pays it always does: what a guest writes meanwhile becomes no more than what it writes in the end.
    let (mut least, mut most) = (0.0, MOST);
    while most - least > 1.0_f64.max(most * 1e-6) {
        let middle = f64::midpoint(least, most);
        if pays(middle) {
            most = middle;
        } else {
            least = middle;
        }
    }
    Some(whole(most))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::course::tests::{BESIDE, outlook};
    use super::super::{Beside, MODES, course};
    use super::*;
    use vmove_types::spec::Mode;

    fn once(outlook: &Outlook) -> Option<ReadsCost> {
        let courses = MODES.into_iter().filter_map(|mode| course(mode, outlook).ok());
        let course = courses.min_by(|a, b| a.time_ms.total_cmp(&b.time_ms))?;
        Some(ReadsCost { time_ms: course.time_ms, link_bytes: whole(course.sent_bytes) })
    }

    fn ways(outlook: &Outlook) -> Ways<'_> {
        Ways { outlook, brought: None, visits: true, migration: once(outlook) }
    }

    fn chosen(reads: &Reads, outlook: &Outlook) -> ReadsFrom {
        choose(reads, &ways(outlook), String::new()).choice
    }

    #[test]
    fn little_is_read_from_afar_and_much_on_a_visit() {
        // 1 Gbit/s, 8 GiB of memory.
        let guest = outlook(8e9, 1e6, 6.4e7, 1.17e8);
        let reads = |bytes| Reads { bytes, near_bytes_per_s: NEAR, link_bytes_per_s: 1.17e8 };
        let little = choose(&reads(1e7), &ways(&guest), String::new());
        assert_eq!(little.choice, ReadsFrom::Stay);
        let from = little.pays_from_bytes.unwrap();
        assert!((5e7..3e8).contains(&(from as f64)), "{from}");
        assert_eq!(chosen(&reads(2.0 * from as f64), &guest), ReadsFrom::Visit);
        assert_eq!(chosen(&reads(0.5 * from as f64), &guest), ReadsFrom::Stay);
        // All memory crosses twice: 137 s.
        assert_eq!(chosen(&reads(1e13), &guest), ReadsFrom::Visit);
        let no_visit = Ways { visits: false, ..ways(&guest) };
        assert_eq!(choose(&reads(1e13), &no_visit, String::new()).choice, ReadsFrom::Migrate);
        assert_eq!(choose(&reads(2.0 * from as f64), &no_visit, String::new()).choice, ReadsFrom::Stay);
    }

    #[test]
    fn a_guest_that_brings_all_of_its_memory_migrates() {
        let guest = outlook(2e9, 1e6, 6.4e7, 1.25e9);
        let all = Ways { brought: Some(Brought { there: 2e9, back: 2e9 }), ..ways(&guest) };
        let reads = Reads { bytes: 1e12, near_bytes_per_s: 5e9, link_bytes_per_s: 1.25e9 };
        assert_eq!(choose(&reads, &all, String::new()).choice, ReadsFrom::Migrate);
    }

    #[test]
    fn where_the_link_is_no_slower_than_the_disk_it_never_pays() {
        let guest = outlook(2e9, 0.0, 0.0, 1.25e10);
        let reads = Reads { bytes: 1e14, near_bytes_per_s: NEAR, link_bytes_per_s: 1.25e10 };
        let choice = choose(&reads, &ways(&guest), String::new());
        assert_eq!((choice.choice, choice.pays_from_bytes), (ReadsFrom::Stay, None));
    }

    /// The table of docs/visits.md.
    #[test]
    fn the_threshold_of_a_visit_is_within_twice_of_what_was_measured() {
        // Link in Mbit/s, working set and MiB/s of reading there; measured: from how many MiB on a visit paid.
        for (mbit, working_set, near, measured) in [
            (100.0, 8.0, 119.0, 36.0),
            (100.0, 64.0, 140.0, 31.0),
            (1000.0, 8.0, 82.0, 361.0),
            (1000.0, 64.0, 175.0, 165.0),
        ] {
            // Page payload of TCP, and a guest that writes 500 pages a second.
            let link = mbit * 1e6 / 8.0 * 0.94;
            let guest = outlook((192.0 + working_set + 60.0) * MIB, 2.05e6, working_set * MIB, link);
            let beside = Beside { ready_ms: 700.0, pause_ms: 15.0, ..BESIDE };
            let guest = Outlook { beside, ..guest };
            let reads = Reads { bytes: 1.0, near_bytes_per_s: near * MIB, link_bytes_per_s: link };
            let from = choose(&reads, &ways(&guest), String::new()).pays_from_bytes.unwrap() as f64 / MIB;
            eprintln!("{mbit} Mbit/s, {working_set} MiB: pays from {from:.0} MiB, measured {measured} MiB");
            assert!((0.5..=2.0).contains(&(from / measured)), "{mbit} {working_set}: {from} and {measured}");
        }
    }

    prop_compose! {
        fn any_guest()(content in 1e7..1e11, rate in 0.0..5e8, reach in 0.0..1.0, link in 1e6..2e10) -> Outlook {
            outlook(content, rate, reach * content, link)
        }
    }

    fn reads(outlook: &Outlook, bytes: f64, near_bytes_per_s: f64) -> Reads {
        Reads { bytes, near_bytes_per_s, link_bytes_per_s: outlook.link_bytes_per_s }
    }

    proptest! {
        /// More to read never keeps a guest at home that would have gone, and the threshold is where it goes.
        #[test]
        fn who_goes_for_little_goes_for_more(guest in any_guest(), bytes in 1e3..1e13, more in 1.0..100.0, near in 1e7..1e10) {
            let few = reads(&guest, bytes, near);
            let many = Reads { bytes: bytes * more, ..few };
            let goes = |reads: &Reads| chosen(reads, &guest) != ReadsFrom::Stay;
            prop_assert!(!goes(&few) || goes(&many));
            let from = choose(&few, &ways(&guest), String::new()).pays_from_bytes;
            let margin = 1.001;
            match from {
                None => prop_assert!(!goes(&few)),
                Some(from) if bytes > from as f64 * margin => prop_assert!(goes(&few)),
                Some(from) if bytes * margin < from as f64 => prop_assert!(!goes(&few)),
                Some(_) => {}
            }
        }

        /// A slower link never keeps a guest at home that would have visited.
        #[test]
        fn who_visits_over_a_fast_link_does_not_stay_over_a_slow_one(guest in any_guest(), bytes in 1e3..1e13, slower in 1.0..50.0, near in 1e7..1e10) {
            let link = guest.link_bytes_per_s / slower;
            let slow = Outlook { link_bytes_per_s: link, again_bytes_per_s: link, ..guest };
            if chosen(&reads(&guest, bytes, near), &guest) == ReadsFrom::Visit {
                prop_assert_ne!(chosen(&reads(&slow, bytes, near), &slow), ReadsFrom::Stay);
            }
        }

        /// A guest that brings more is not sent for a visit that it would not have been sent for otherwise; nor does a larger one migrate.
        #[test]
        fn what_costs_more_is_not_chosen_for_it(guest in any_guest(), bytes in 1e3..1e13, near in 1e7..1e10, there in 0.0..1e10, more in 1.0..10.0) {
            let reads = reads(&guest, bytes, near);
            let with = |there| Ways { brought: Some(Brought { there, back: there / 2.0 }), ..ways(&guest) };
            let of = |ways: &Ways<'_>| choose(&reads, ways, String::new()).choice;
            if of(&with(there * more)) == ReadsFrom::Visit {
                prop_assert_eq!(of(&with(there)), ReadsFrom::Visit);
            }
            let larger = Outlook { content_bytes: guest.content_bytes * more, ..guest };
            let post = |outlook: &Outlook| course(Mode::Postcopy, outlook).map(|course| ReadsCost { time_ms: course.time_ms, link_bytes: 0 }).ok();
            let by_post = |outlook| of(&Ways { migration: post(outlook), ..with(there) });
            if by_post(&larger) == ReadsFrom::Migrate {
                prop_assert_eq!(by_post(&guest), ReadsFrom::Migrate);
            }
        }

        /// It costs what the cheapest costs.
        #[test]
        fn the_cheapest_is_chosen(guest in any_guest(), bytes in 1e3..1e13, near in 1e7..1e10) {
            let choice = choose(&reads(&guest, bytes, near), &ways(&guest), String::new());
            let of = |way| match way {
                ReadsFrom::Stay => choice.stay.time_ms,
                ReadsFrom::Visit => choice.visit.map_or(f64::MAX, |cost| cost.time_ms),
                ReadsFrom::Migrate => choice.migrate.map_or(f64::MAX, |cost| cost.time_ms),
            };
            for way in [ReadsFrom::Stay, ReadsFrom::Visit, ReadsFrom::Migrate] {
                prop_assert!(of(choice.choice) <= of(way));
            }
        }
    }
}
