//! What is struck, with what, and when: every sensible combination is a card, and a seed shuffles the deck.
//!
//! A step's card depends on the seed and the step's number alone, so that one step can be run again without those before it.

use std::fmt;
use std::time::Duration;

use vmove_guest::pattern::mix;

/// How far the work is when the blow falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// Nothing is under way.
    Idle,
    /// The migration has just been asked for.
    Prepare,
    /// Memory crosses; the guest runs at the source.
    Rounds,
    /// The guest is stopped; its device state is on its way.
    Switchover,
    /// The destination holds the device state; the source has not been told.
    Loaded,
    /// The source has given the guest away; the destination has not been told.
    Committed,
    /// The guest runs at the destination, and pages are missing.
    Fetch,
    /// The destination has every page; the source has not been told.
    Complete,
    /// The guest is being forked on its host.
    Fork,
    /// A child is being given memory of its own.
    Promote,
}

/// What is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Victim {
    /// The daemon of the node that has the guest at first.
    Source,
    /// The daemon of the other node.
    Destination,
    /// Both daemons.
    Both,
    /// The QEMU that has the guest at first.
    SourceQemu,
    /// The QEMU at the other node.
    DestinationQemu,
    /// The QEMU of a forked child.
    Child,
    /// The connections between the nodes.
    Link,
}

/// What happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP for longer than the other side waits, then SIGCONT.
    Freeze,
    /// The state folder has no byte left for a while.
    FullDisk,
    /// All connections are reset.
    Cut,
    /// All connections are reset, and new ones are refused for a while.
    Refuse,
    /// Connections stay open and pass nothing, for longer than either side waits.
    BlackHole,
}

/// A step of the soak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// When.
    pub moment: Moment,
    /// Whom.
    pub victim: Victim,
    /// How.
    pub blow: Blow,
    /// Mode of the migration; not used without one.
    pub mode: &'static str,
    /// Time between the moment and the blow.
    pub delay: Duration,
    /// Time until the blow is undone; [`Blow::Freeze`] and [`Blow::BlackHole`] have their own.
    pub outage: Duration,
    /// Children of a fork.
    pub children: u32,
}

const MOMENTS: [Moment; 10] = [
    Moment::Idle,
    Moment::Prepare,
    Moment::Rounds,
    Moment::Switchover,
    Moment::Loaded,
    Moment::Committed,
    Moment::Fetch,
    Moment::Complete,
    Moment::Fork,
    Moment::Promote,
];

const BLOWS: [(Victim, Blow); 14] = [
    (Victim::Source, Blow::Kill),
    (Victim::Source, Blow::Freeze),
    (Victim::Source, Blow::FullDisk),
    (Victim::Destination, Blow::Kill),
    (Victim::Destination, Blow::Freeze),
    (Victim::Destination, Blow::FullDisk),
    (Victim::Both, Blow::Kill),
    (Victim::SourceQemu, Blow::Kill),
    (Victim::SourceQemu, Blow::Freeze),
    (Victim::DestinationQemu, Blow::Kill),
    (Victim::DestinationQemu, Blow::Freeze),
    (Victim::Link, Blow::Cut),
    (Victim::Link, Blow::Refuse),
    (Victim::Link, Blow::BlackHole),
];

/// Whether the victim is there at that moment, and the blow is another one than at the moment before.
fn sensible(moment: Moment, victim: Victim, blow: Blow) -> bool {
    match moment {
        Moment::Idle => matches!(victim, Victim::Source | Victim::SourceQemu),
        Moment::Fork | Moment::Promote => {
            matches!(victim, Victim::Source | Victim::SourceQemu | Victim::Child)
        }
        // A QEMU that is being started is not there to be struck.
        Moment::Prepare => victim != Victim::DestinationQemu,
        // The guest has left the source's QEMU for good.
        Moment::Complete => victim != Victim::SourceQemu || blow == Blow::Kill,
        _ => victim != Victim::Child,
    }
}

/// When what is struck with what.
pub type Combination = (Moment, Victim, Blow);

/// Every combination, in a fixed order.
#[must_use]
pub fn all() -> Vec<Combination> {
    let mut all = Vec::new();
    for moment in MOMENTS {
        let plain = BLOWS.into_iter().filter(|(victim, blow)| sensible(moment, *victim, *blow));
        all.extend(plain.map(|(victim, blow)| (moment, victim, blow)));
    }
    all.push((Moment::Fork, Victim::Child, Blow::Kill));
    all
}

/// Numbers that look random and depend on the seed only.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// Those of a round.
    #[must_use]
    pub const fn new(seed: u64, round: u64) -> Self {
        Self::from(mix(seed).wrapping_add(mix(round ^ 0x5eed)))
    }

    /// Those that follow from this number (SplitMix64).
    #[must_use]
    pub const fn from(start: u64) -> Self {
        Self(start)
    }

    /// Any number.
    pub const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `sides`.
    pub const fn roll(&mut self, sides: u64) -> u64 {
        self.number() % sides
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[usize::try_from(self.roll(among.len() as u64)).unwrap_or_default()]
    }
}

/// Those combinations that have each of `words` as their moment, victim or blow.
#[must_use]
pub fn of_words(words: &[String]) -> Vec<Combination> {
    let has = |(moment, victim, blow): &Combination, word: &String| {
        [moment.to_string(), victim.to_string(), blow.to_string()].contains(word)
    };
    let mut deck = all();
    deck.retain(|combination| words.iter().all(|word| has(combination, word)));
    deck
}

/// The card of step `step` (from 0) of a deck; none of an empty one.
///
/// The deck is shuffled anew when it has been dealt, so that each combination comes before any comes again.
#[must_use]
pub fn card(seed: u64, step: u64, deck: &[Combination]) -> Option<Card> {
    let mut deck = deck.to_vec();
    let size = deck.len() as u64;
    if size == 0 {
        return None;
    }
    let mut shuffle = Dice::new(seed, step / size);
    for left in (1..deck.len()).rev() {
        deck.swap(left, usize::try_from(shuffle.roll(left as u64 + 1)).unwrap_or_default());
    }
    let (moment, victim, blow) = deck[usize::try_from(step % size).ok()?];
    let mut dice = Dice::new(seed ^ 0xca4d, step);
    let mode = match moment {
        Moment::Rounds => dice.pick(&["precopy", "hybrid"]),
        Moment::Fetch | Moment::Complete => "postcopy",
        _ => dice.pick(&["precopy", "postcopy", "hybrid"]),
    };
    let ms = Duration::from_millis;
    let delay = match moment {
        Moment::Idle | Moment::Switchover | Moment::Loaded | Moment::Committed | Moment::Complete => ms(0),
        Moment::Prepare | Moment::Promote => ms(dice.roll(80)),
        Moment::Fork => ms(dice.roll(250)),
        Moment::Rounds | Moment::Fetch => ms(dice.roll(600)),
    };
    let outage = ms(dice.pick(&[0, 200, 1000]));
    let children = dice.pick(&[1, 2]);
    Some(Card { moment, victim, blow, mode, delay, outage, children })
}

impl Moment {
    /// Whether a migration is under way then.
    #[must_use]
    pub const fn migrates(self) -> bool {
        !matches!(self, Self::Idle | Self::Fork | Self::Promote)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Idle => "idle",
            Self::Prepare => "prepare",
            Self::Rounds => "rounds",
            Self::Switchover => "switchover",
            Self::Loaded => "loaded",
            Self::Committed => "committed",
            Self::Fetch => "fetch",
            Self::Complete => "complete",
            Self::Fork => "fork",
            Self::Promote => "promote",
        })
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Both => "both",
            Self::SourceQemu => "source-qemu",
            Self::DestinationQemu => "destination-qemu",
            Self::Child => "child-qemu",
            Self::Link => "link",
        })
    }
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kill => "kill",
            Self::Freeze => "freeze",
            Self::FullDisk => "full-disk",
            Self::Cut => "cut",
            Self::Refuse => "refuse",
            Self::BlackHole => "black-hole",
        })
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { moment, victim, blow, .. } = self;
        write!(f, "{moment} {victim} {blow}")?;
        if moment.migrates() {
            write!(f, " ({})", self.mode)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_deck_is_dealt_whole_before_a_card_comes_again() {
        let size = all().len() as u64;
        let of = |from: u64| -> HashSet<Combination> {
            let cards = (from..from + size).filter_map(|step| card(7, step, &all()));
            cards.map(|card| (card.moment, card.victim, card.blow)).collect()
        };
        assert_eq!(of(0), all().into_iter().collect());
        assert_eq!(of(size), all().into_iter().collect());
    }

    #[test]
    fn the_seed_decides_everything() {
        let deal =
            |seed: u64| -> Vec<Option<Card>> { (0..40).map(|step| card(seed, step, &all())).collect() };
        assert_eq!(deal(1), deal(1));
        assert_ne!(deal(1), deal(2));
    }

    #[test]
    fn words_choose_among_the_cards() {
        let deck = of_words(&["fetch".to_owned(), "kill".to_owned()]);
        for step in 0..50 {
            let card = card(3, step, &deck).expect("there are such cards");
            assert_eq!((card.moment, card.blow), (Moment::Fetch, Blow::Kill));
        }
        assert_eq!(card(3, 0, &of_words(&["nonsense".to_owned()])), None);
    }
}
