//! Which of the datagrams that the root says to have sent are lost, and which are only late.
//!
//! A mark comes by another connection than the datagrams it tells of, and waits neither in the sender's queue of them nor in the
//! receiver's. So it may be far ahead of the last of them, most of all on hosts that have little processor time. What tells a loss from
//! that is the order: datagrams hardly overtake each other, so when the last one of a mark is here, what is missing before it is lost.

use std::collections::VecDeque;
use std::time::Duration;

use vmove_bitset::BitSet;

use crate::pace::Time;
use crate::span::Span;

/// How long a datagram may be behind one that was sent later.
pub(crate) const REORDER_TIMEOUT: Duration = Duration::from_millis(3);
/// How long the last datagram of a mark may be behind the mark. Less than the time for which the root waits for what several hosts answer.
const LATE_TIMEOUT: Duration = Duration::from_millis(48);
/// It is waited for so many times longer than it was behind lately.
const MARGIN: u32 = 4;

#[derive(Debug)]
struct Mark {
    number: u32,
    spans: Vec<Span>,
    last: Last,
}

/// The datagram that was sent last of a mark.
#[derive(Debug, Clone, Copy)]
struct Last {
    /// `None`: nothing of the mark is on its way to this host.
    piece: Option<u32>,
    /// When the mark arrived.
    heard: Time,
    /// It has come, or was here before.
    came: bool,
    /// How long after the mark that was seen.
    behind: Option<Duration>,
}

/// Marks that have no answer yet, oldest first.
#[derive(Debug)]
pub(crate) struct Marks {
    open: VecDeque<Mark>,
    /// That of the newest mark that was answered without it.
    given_up: Option<Last>,
    /// How long the last datagram is waited for, [`REORDER_TIMEOUT`] to [`LATE_TIMEOUT`]. Not longer than needed: the root waits for who does not answer.
    late: Duration,
}

impl Default for Marks {
    fn default() -> Self {
        Self { open: VecDeque::new(), given_up: None, late: LATE_TIMEOUT }
    }
}

impl Marks {
    /// The root has sent `spans`, of which `last` was the last; `None`: nothing of it is on its way to this host. What is `here` already is
    /// not waited for, and tells nothing if it comes again.
    pub(crate) fn hear(
        &mut self,
        now: Time,
        number: u32,
        spans: Vec<Span>,
        last: Option<u32>,
        here: &BitSet,
    ) {
        let came = last.is_none_or(|last| here.contains(last));
        let behind = came.then_some(Duration::ZERO);
        let last = Last { piece: last, heard: now, came, behind };
        self.open.push_back(Mark { number, spans, last });
    }

    /// A datagram with this piece has arrived. READs do not count: they say nothing about datagrams.
    pub(crate) fn landed(&mut self, piece: u32) {
        let open = self.open.iter_mut().map(|mark| &mut mark.last);
        open.chain(&mut self.given_up).for_each(|last| last.came |= last.piece == Some(piece));
    }

    /// Forgets all of them.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.given_up = None;
    }

    /// The oldest mark, if what is not `here` of it will not come: its number and what it told.
    pub(crate) fn due(&mut self, now: Time, here: &BitSet) -> Option<(u32, Vec<Span>)> {
        self.look(now);
        let mark = self.open.front()?;
        let whole = mark.spans.iter().all(|span| here.contains_all(span.range()));
        if !whole && now.saturating_sub(mark.last.heard) < self.wait() {
            return None;
        }
        let Mark { number, spans, last } = self.open.pop_front()?;
        self.late = (self.late / 2).max(REORDER_TIMEOUT);
        match last.behind {
            Some(behind) => self.was_behind(behind),
            None => self.given_up = Some(last),
        }
        Some((number, spans))
    }

    /// When [`due`](Self::due) has one at the latest, if nothing more comes.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.open.front().map(|mark| mark.last.heard + self.wait())
    }

    /// Takes note of what has come.
    fn look(&mut self, now: Time) {
        for last in self.open.iter_mut().map(|mark| &mut mark.last).filter(|last| last.came) {
            last.behind.get_or_insert(now.saturating_sub(last.heard));
        }
        if let Some(last) = self.given_up.filter(|last| last.came) {
            self.given_up = None;
            self.was_behind(now.saturating_sub(last.heard));
        }
    }

    fn was_behind(&mut self, behind: Duration) {
        self.late = self.late.max(behind * MARGIN).min(LATE_TIMEOUT);
    }

    /// How long what is missing of the oldest mark is waited for. When its last datagram has come, or one that was sent later, only what
    /// a path mixes up is still to come.
    fn wait(&self) -> Duration {
        let overtaken = self.open.iter().any(|mark| mark.last.behind.is_some());
        if overtaken { REORDER_TIMEOUT } else { self.late }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four pieces from `first`.
    fn span(first: u32) -> Vec<Span> {
        vec![Span { first, count: 4 }]
    }

    fn hear(marks: &mut Marks, now: Time, number: u32, here: &BitSet) {
        marks.hear(now, number, span(number * 4), Some(number * 4 + 3), here);
    }

    fn here(pieces: impl IntoIterator<Item = u32>) -> BitSet {
        let mut here = BitSet::empty(100);
        pieces.into_iter().for_each(|piece| assert!(here.insert(piece)));
        here
    }

    fn ms(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn what_was_sent_before_what_has_come_is_lost() {
        let mut marks = Marks::default();
        let some = here([0, 1, 3]);
        hear(&mut marks, Time::ZERO, 0, &some);
        assert_eq!(marks.due(REORDER_TIMEOUT / 2, &some), None, "a path may mix up what is close together");
        assert_eq!(marks.next_due(), Some(REORDER_TIMEOUT));
        assert_eq!(marks.due(REORDER_TIMEOUT, &some), Some((0, span(0))));
    }

    #[test]
    fn a_mark_may_be_far_ahead_of_its_datagrams() {
        let mut marks = Marks::default();
        hear(&mut marks, Time::ZERO, 0, &here([0, 1]));
        assert_eq!((marks.due(ms(15), &here([0, 1])), marks.next_due()), (None, Some(LATE_TIMEOUT)));
        marks.landed(3);
        assert_eq!(marks.due(ms(18), &here([0, 1, 3])), Some((0, span(0))));
        // What the next mark tells has come, so the last of this one will not.
        hear(&mut marks, ms(50), 1, &here(0..7));
        assert_eq!(marks.due(ms(60), &here(0..7)), None);
        hear(&mut marks, ms(60), 2, &here(0..7));
        marks.landed(11);
        assert_eq!(marks.due(ms(60), &here((0..7).chain(8..12))), Some((1, span(4))));
    }

    /// The root would wait, and all other hosts with it.
    #[test]
    fn nothing_is_waited_for_in_vain_again_and_again() {
        let (mut marks, nothing) = (Marks::default(), here([]));
        let (mut now, mut waits) = (Time::ZERO, Vec::new());
        for number in 0..6 {
            hear(&mut marks, now, number, &nothing);
            let due = marks.next_due().unwrap();
            waits.push(due.checked_sub(now).unwrap());
            now = due;
            assert_eq!(marks.due(now, &nothing), Some((number, span(number * 4))));
        }
        assert_eq!(
            waits,
            [
                LATE_TIMEOUT,
                LATE_TIMEOUT / 2,
                LATE_TIMEOUT / 4,
                LATE_TIMEOUT / 8,
                REORDER_TIMEOUT,
                REORDER_TIMEOUT
            ]
        );
        // The last of the newest is READ, which is no sign; then the datagram comes after all.
        hear(&mut marks, now + ms(3), 6, &nothing);
        let wait = |marks: &mut Marks, at| (marks.due(now + ms(at), &here(20..24)), marks.next_due());
        assert_eq!(wait(&mut marks, 4), (None, Some(now + ms(3) + REORDER_TIMEOUT)));
        marks.landed(23);
        assert_eq!(wait(&mut marks, 5), (None, Some(now + ms(3) + (REORDER_TIMEOUT + ms(5)) * MARGIN)));
    }

    #[test]
    fn what_is_never_late_is_not_waited_for_when_it_is_lost() {
        let mut marks = Marks::default();
        let mut some = here([]);
        for number in 0..5 {
            (number * 4..number * 4 + 4).for_each(|piece| assert!(some.insert(piece)));
            hear(&mut marks, Time::ZERO, number, &some);
            assert_eq!(marks.due(Time::ZERO, &some), Some((number, span(number * 4))));
        }
        hear(&mut marks, Time::ZERO, 5, &some);
        assert_eq!((marks.due(Time::ZERO, &some), marks.next_due()), (None, Some(REORDER_TIMEOUT)));
    }
}
