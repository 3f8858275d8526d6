//! Who owns the guest: the two state machines that make sure it never runs twice.
//!
//! Pure: no clock, no I/O. The drivers in `source` and `destination` ask these machines before they act, and write
//! the new state to the journal before the act. The rule that everything else serves:
//!
//! * the source may run the guest in [`SourceState::Warm`] and [`SourceState::Aborted`] only;
//! * the destination may run it in [`DestinationState::Owner`] and [`DestinationState::Complete`] only;
//! * the destination becomes `Owner` only on a commit, which the source sends only in [`SourceState::Committed`];
//! * from there the guest comes back to the source by itself in one case only: the destination's QEMU has ended before it was given the
//!   guest, so that the destination is [`DestinationState::Gone`] for ever, and says so;
//! * of libvirt's guests the commit says where the guest is to run, and libvirt has it run. If it has it run at the source after the commit, the guest
//!   stands still there until the destination has said whose it is: if its QEMU there has run it ever, it is the destination's, and QEMU at the
//!   source is ended; if not, QEMU at the destination is ended first ([`DestinationEvent::NeverRan`]), and it goes on at the source;
//! * an operator who knows that the guest has ended at the destination may have the source's copy run again ([`SourceEvent::Reclaim`]).
//!
//! A step is durable before it is acted on, except where that would keep the guest waiting for room on a disk, and whoever finds the older
//! line comes to the same end. Those lines are owed, and the session holds its VM until they are written:
//!
//! | Step | Safe without its line, since a daemon started anew |
//! |---|---|
//! | source: to `Aborted` by `GiveUp` | finds `Warm` or `Stopped`, and gives up, too |
//! | source: to `Aborted` by `PeerGone` | finds `Committed` and asks; the destination stays gone |
//! | source: to `Released` | finds `Committed` and asks; the destination is whole, and says so until it hears `Released`, which is sent later |
//! | destination: to `Gone` | finds `Filling`, or `Loaded` and that QEMU has ended |
//!
//! All others are not taken without their line: `Stopped` and `Loaded` (the migration is called off instead), `Committed` (likewise), `Owner`
//! (QEMU is ended, and the guest given back), `Complete` (tried again; the source keeps the memory), and `Reclaim` (refused).
//!
//! "Durable" means: in the journal file, handed to the kernel by `write(2)`. A daemon that is killed finds it again. A host that
//! loses power loses the guest's memory too, so there is nothing left that could run twice (`docs/decisions/0004-journal.md`).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The source's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceState {
    /// The guest runs here; memory may be crossing.
    Warm,
    /// The guest is being stopped or is stopped here, and may still go on here.
    Stopped,
    /// The guest is given up: it is the destination's, unless that says that it is gone without ever having had it.
    Committed,
    /// The destination holds everything; QEMU and memory here are (being) freed.
    Released,
    /// The migration is off; the guest goes on here.
    Aborted,
}

/// What can happen to the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// It is about to stop the guest.
    Stop,
    /// The destination says that it holds the device state.
    PeerLoaded,
    /// The destination says that it holds every page.
    PeerComplete,
    /// The destination says that it is [`DestinationState::Gone`]: it never ran the guest and never will.
    PeerGone,
    /// Cancelled, timed out, something failed, the peer was lost, or this daemon was started anew.
    GiveUp,
    /// An operator says that the guest has ended at the destination, and wants the copy that is left here to run.
    Reclaim,
}

/// The destination's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationState {
    /// Making room, taking pages and device state.
    Filling,
    /// Device state loaded; waits for the source's word, however long.
    Loaded,
    /// The guest is ours; pages are missing.
    Owner,
    /// The guest is ours and whole.
    Complete,
    /// Nothing of the session is left here.
    Gone,
}

/// What can happen to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// QEMU has loaded the device state.
    StateLoaded,
    /// The source has given the guest up.
    Commit,
    /// The source keeps the guest.
    PeerAborted,
    /// All pages are there.
    AllPages,
    /// QEMU has ended: what it held can never run.
    QemuEnded,
    /// Of libvirt's: it has the guest run at the source, it never had it run here, and QEMU here has been ended.
    NeverRan,
    /// Something failed here, the peer was lost, or this daemon was started anew.
    GiveUp,
}

/// An event that must not come in this state: a bug, or a peer that does not keep the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Protocol violation: {event} in state {state}")]
pub struct IllegalStep {
    /// State it came in.
    pub state: String,
    /// What came.
    pub event: String,
}

fn illegal<T>(state: impl fmt::Display, event: impl fmt::Display) -> Result<T, IllegalStep> {
    Err(IllegalStep { state: state.to_string(), event: event.to_string() })
}

/// By the names that `docs/protocol.md` uses.
macro_rules! named {
    ($type:ident: $($name:ident)*) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$name => stringify!($name),)* })
            }
        }
    };
}

named!(SourceState: Warm Stopped Committed Released Aborted);
named!(SourceEvent: Stop PeerLoaded PeerComplete PeerGone GiveUp Reclaim);
named!(DestinationState: Filling Loaded Owner Complete Gone);
named!(DestinationEvent: StateLoaded Commit PeerAborted AllPages QemuEnded NeverRan GiveUp);

impl SourceState {
    /// Whether guest code may be running at the source.
    #[must_use]
    pub const fn may_run(self) -> bool {
        matches!(self, Self::Warm | Self::Aborted)
    }

    /// The next state.
    ///
    /// # Errors
    /// [`IllegalStep`].
    pub fn step(self, event: SourceEvent) -> Result<Self, IllegalStep> {
        use {SourceEvent as E, SourceState as S};
        match (self, event) {
            (S::Warm, E::Stop) => Ok(S::Stopped),
            (S::Stopped, E::PeerLoaded) => Ok(S::Committed),
            (S::Committed, E::PeerComplete) => Ok(S::Released),
            (S::Warm | S::Stopped | S::Aborted, E::GiveUp) => Ok(S::Aborted),
            (S::Warm | S::Stopped | S::Committed | S::Aborted, E::PeerGone) => Ok(S::Aborted),
            (S::Committed, E::Reclaim) => Ok(S::Aborted),
            // After the commit nothing is given up: the session is taken up again instead.
            (S::Committed | S::Released, E::GiveUp) => Ok(self),
            // A destination that was restarted may say things again.
            (S::Committed | S::Released, E::PeerLoaded) | (S::Released, E::PeerComplete) => Ok(self),
            (state, event) => illegal(state, event),
        }
    }
}

impl DestinationState {
    /// Whether guest code may be running at the destination.
    #[must_use]
    pub const fn may_run(self) -> bool {
        matches!(self, Self::Owner | Self::Complete)
    }

    /// The next state.
    ///
    /// # Errors
    /// [`IllegalStep`].
    pub fn step(self, event: DestinationEvent) -> Result<Self, IllegalStep> {
        use {DestinationEvent as E, DestinationState as D};
        match (self, event) {
            (D::Filling, E::StateLoaded) => Ok(D::Loaded),
            (D::Loaded, E::Commit) => Ok(D::Owner),
            (D::Owner, E::AllPages) => Ok(D::Complete),
            (D::Filling, E::GiveUp | E::PeerAborted) | (D::Loaded, E::PeerAborted) => Ok(D::Gone),
            // It was never told to run the guest, and there is no other QEMU that could.
            (D::Filling | D::Loaded, E::QemuEnded) => Ok(D::Gone),
            // libvirt, not the commit, lets it run.
            (D::Loaded | D::Owner, E::NeverRan) => Ok(D::Gone),
            // From here on only the source's word counts: it may have committed already.
            (D::Loaded | D::Owner | D::Complete | D::Gone, E::GiveUp) => Ok(self),
            // Too late to be taken; the source is told.
            (D::Gone, E::Commit | E::QemuEnded | E::NeverRan) => Ok(self),
            // Said again after a reconnection.
            (D::Owner | D::Complete, E::Commit) | (D::Complete, E::AllPages) | (D::Gone, E::PeerAborted) => {
                Ok(self)
            }
            (state, event) => illegal(state, event),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    /// Both ends and the wire between them. Messages may be lost (with the connection) or delayed, but not reordered or made up.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World {
        source: SourceState,
        destination: DestinationState,
        to_source: Vec<Word>,
        to_destination: Vec<Word>,
        connected: bool,
        /// The last lines of the journals.
        source_line: SourceState,
        destination_line: DestinationState,
        /// QEMUs outlive the daemons: whether the source's runs the guest.
        runs_at_source: bool,
        /// Whether the destination's ever ran it: the copy at the source is old then.
        ran_there: bool,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Word {
        Loaded,
        Commit,
        Abort,
        Complete,
        Gone,
        ResumeCommitted,
        ResumeAborted,
    }

    impl World {
        fn cut(&mut self) {
            self.connected = false;
            self.to_source.clear();
            self.to_destination.clear();
        }

        /// Every world that one action can lead to: with the disks written to, and with full ones where a line may be owed.
        fn successors(&self) -> Vec<Self> {
            let mut out = Vec::new();
            for mut next in self.actions() {
                if next.source != self.source {
                    next.runs_at_source = next.source.may_run();
                }
                let at_source = next.source == self.source
                    || matches!(next.source, SourceState::Aborted | SourceState::Released);
                let at_destination =
                    next.destination == self.destination || next.destination == DestinationState::Gone;
                next.ran_there |= next.destination.may_run();
                if !at_source {
                    next.source_line = next.source;
                }
                if !at_destination {
                    next.destination_line = next.destination;
                }
                out.push(Self { source_line: next.source, ..next.clone() });
                out.push(Self { destination_line: next.destination, ..next.clone() });
                out.push(Self {
                    source_line: next.source,
                    destination_line: next.destination,
                    ..next.clone()
                });
                out.push(next);
            }
            out.extend([self.source_killed(), self.destination_killed()]);
            out
        }

        fn source_killed(&self) -> Self {
            let mut w = self.clone();
            w.cut();
            w.source = w.source_line.step(SourceEvent::GiveUp).unwrap();
            w.runs_at_source |= w.source.may_run();
            w
        }

        fn destination_killed(&self) -> Self {
            let mut w = self.clone();
            w.cut();
            let qemu_ended = self.destination == DestinationState::Gone;
            w.destination = match w.destination_line {
                DestinationState::Loaded if qemu_ended => DestinationState::Gone,
                line => line.step(DestinationEvent::GiveUp).unwrap(),
            };
            w
        }

        /// Every world that one action of one part can lead to. Mirrors what the drivers do.
        fn actions(&self) -> Vec<Self> {
            let mut out = Vec::new();
            let mut with = |f: &dyn Fn(&mut Self)| {
                let mut w = self.clone();
                f(&mut w);
                out.push(w);
            };
            // Source's own decisions.
            if self.source == SourceState::Warm && self.connected {
                with(&|w| w.source = w.source.step(SourceEvent::Stop).unwrap());
            }
            if matches!(self.source, SourceState::Warm | SourceState::Stopped) {
                with(&|w| {
                    w.source = w.source.step(SourceEvent::GiveUp).unwrap();
                    if w.connected {
                        w.to_destination.push(Word::Abort);
                    }
                });
            }
            // Destination's own progress.
            if self.destination == DestinationState::Filling
                && self.source == SourceState::Stopped
                && self.connected
            {
                with(&|w| {
                    w.destination = w.destination.step(DestinationEvent::StateLoaded).unwrap();
                    w.to_source.push(Word::Loaded);
                });
            }
            if self.destination == DestinationState::Loaded {
                with(&|w| {
                    w.destination = w.destination.step(DestinationEvent::QemuEnded).unwrap();
                    if w.connected {
                        w.to_source.push(Word::Gone);
                    }
                });
            }
            if self.destination == DestinationState::Owner && self.connected {
                with(&|w| {
                    w.destination = w.destination.step(DestinationEvent::AllPages).unwrap();
                    w.to_source.push(Word::Complete);
                });
            }
            // Cut.
            if self.connected {
                with(&|w| {
                    w.cut();
                    w.source = w.source.step(SourceEvent::GiveUp).unwrap();
                });
                with(&|w| {
                    w.cut();
                    w.destination = w.destination.step(DestinationEvent::GiveUp).unwrap();
                });
            }
            // The source dials again.
            if !self.connected {
                with(&|w| {
                    w.source = w.source.step(SourceEvent::GiveUp).unwrap();
                    w.destination = w.destination.step(DestinationEvent::GiveUp).unwrap();
                    w.connected = true;
                    let committed = matches!(w.source, SourceState::Committed | SourceState::Released);
                    w.to_destination.push(if committed {
                        Word::ResumeCommitted
                    } else {
                        Word::ResumeAborted
                    });
                });
            }
            // Delivery.
            if let Some(word) = self.to_destination.first().copied() {
                with(&|w| {
                    w.to_destination.remove(0);
                    let event = match word {
                        Word::Commit | Word::ResumeCommitted => DestinationEvent::Commit,
                        _ => DestinationEvent::PeerAborted,
                    };
                    w.destination = w.destination.step(event).unwrap_or_else(|e| panic!("{e} in {self:?}"));
                    match (word, w.destination) {
                        (Word::ResumeCommitted, DestinationState::Complete) => {
                            w.to_source.push(Word::Complete);
                        }
                        (Word::ResumeCommitted, DestinationState::Gone) => {
                            w.to_source.push(Word::Gone);
                        }
                        _ => {}
                    }
                });
            }
            if let Some(word) = self.to_source.first().copied() {
                with(&|w| {
                    w.to_source.remove(0);
                    match word {
                        // An abort and a Loaded may cross: the abort stands.
                        Word::Loaded if w.source == SourceState::Aborted => {}
                        Word::Loaded => {
                            w.source = w
                                .source
                                .step(SourceEvent::PeerLoaded)
                                .unwrap_or_else(|e| panic!("{e} in {self:?}"));
                            w.to_destination.push(Word::Commit);
                        }
                        Word::Gone => {
                            w.source = w
                                .source
                                .step(SourceEvent::PeerGone)
                                .unwrap_or_else(|e| panic!("{e} in {self:?}"));
                        }
                        _ => {
                            w.source = w
                                .source
                                .step(SourceEvent::PeerComplete)
                                .unwrap_or_else(|e| panic!("{e} in {self:?}"));
                        }
                    }
                });
            }
            out
        }
    }

    /// Walks every reachable world: cuts, kills, restarts, full disks and crossings at every step.
    #[test]
    fn the_guest_never_runs_twice_and_is_never_lost() {
        let start = World {
            source: SourceState::Warm,
            destination: DestinationState::Filling,
            to_source: Vec::new(),
            to_destination: Vec::new(),
            connected: true,
            source_line: SourceState::Warm,
            destination_line: DestinationState::Filling,
            runs_at_source: true,
            ran_there: false,
        };
        let mut seen = HashSet::from([start.clone()]);
        let mut todo = vec![start];
        let mut before: HashMap<World, Vec<World>> = HashMap::new();
        while let Some(world) = todo.pop() {
            let at_source = world.source.may_run() || world.runs_at_source;
            let there = world.destination.may_run() || world.ran_there;
            assert!(!(at_source && there), "two owners: {world:?}");
            if world.source == SourceState::Released {
                assert_eq!(world.destination, DestinationState::Complete, "freed too early: {world:?}");
            }
            for next in world.successors() {
                if next.to_source.len() + next.to_destination.len() < 6 {
                    before.entry(next.clone()).or_default().push(world.clone());
                    if seen.insert(next.clone()) {
                        todo.push(next);
                    }
                }
            }
        }
        // From wherever it stands there is a way to a world in which one side may run the guest.
        let mut saved: HashSet<World> =
            seen.iter().filter(|w| w.source.may_run() || w.destination.may_run()).cloned().collect();
        let mut todo: Vec<World> = saved.iter().cloned().collect();
        while let Some(world) = todo.pop() {
            for earlier in before.remove(&world).unwrap_or_default() {
                if saved.insert(earlier.clone()) {
                    todo.push(earlier);
                }
            }
        }
        let lost = seen.difference(&saved).next();
        assert!(lost.is_none(), "no owner and no way back: {lost:?}");
        let returned = seen
            .iter()
            .any(|w| w.destination == DestinationState::Gone && w.to_destination.contains(&Word::Commit));
        assert!(returned, "a commit that comes too late must be reachable");
        assert!(seen.len() > 30, "only {} worlds reached", seen.len());
        let done = seen
            .iter()
            .any(|w| w.source == SourceState::Released && w.destination == DestinationState::Complete);
        let back =
            seen.iter().any(|w| w.source == SourceState::Aborted && w.destination == DestinationState::Gone);
        assert!(done && back, "both ends must be reachable");
    }

    /// The same walk finds the fault if a lost peer made a loaded destination run by itself.
    #[test]
    fn the_walk_would_find_a_destination_that_runs_without_the_commit() {
        let source = SourceState::Stopped.step(SourceEvent::GiveUp).unwrap();
        let wrong = DestinationState::Owner;
        assert!(source.may_run() && wrong.may_run());
        DestinationState::Filling.step(DestinationEvent::Commit).unwrap_err();
        SourceState::Aborted.step(SourceEvent::PeerLoaded).unwrap_err();
        DestinationState::Owner.step(DestinationEvent::PeerAborted).unwrap_err();
        // Once it was given the guest, a dead QEMU gives nothing back: the guest has run.
        DestinationState::Owner.step(DestinationEvent::QemuEnded).unwrap_err();
        SourceState::Released.step(SourceEvent::PeerGone).unwrap_err();
        // One that has every page has run, or was settled: the source is about to free its memory.
        DestinationState::Complete.step(DestinationEvent::NeverRan).unwrap_err();
    }
}
