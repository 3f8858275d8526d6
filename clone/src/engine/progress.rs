//! How far forks are, and how the last ones went: for whoever asks.

use std::time::SystemTime;

use vmove_types::fork_report::{ForkProgress, ForkReport};
use vmove_types::report::PhaseTime;
use vmove_types::time::{Mono, ms};

use super::{ForkEngine, ForkError};

/// Forks that are remembered.
const REMEMBERED: usize = 64;
const DONE: &str = "done";
const FAILED: &str = "failed";

/// A fork with its clock.
#[derive(Debug)]
pub(super) struct Timed {
    told: ForkProgress,
    begun: Mono,
    phase_began: Mono,
    /// Its end was told by [`ForkEngine::newly_ended`].
    end_is_told: bool,
}

impl Timed {
    /// The request came at `begun`.
    fn begin(told: ForkProgress, begun: Mono) -> Self {
        let began_at = SystemTime::now() - Mono::now().since(begun);
        let began_at = Some(humantime::format_rfc3339_millis(began_at).to_string());
        Self { told: ForkProgress { began_at, ..told }, begun, phase_began: begun, end_is_told: false }
    }

    /// Changes it. The phase that it has left by that, if it has.
    fn change(&mut self, change: impl FnOnce(&mut ForkProgress)) -> Option<String> {
        let left = self.told.phase.clone();
        change(&mut self.told);
        if self.told.phase == left {
            return None;
        }
        let now = Mono::now();
        // Memory of its own may come after the end.
        if left != DONE && left != FAILED {
            self.told.phases.push(PhaseTime {
                name: left.clone(),
                start_ms: ms(self.phase_began.since(self.begun)),
                duration_ms: ms(now.since(self.phase_began)),
            });
        }
        self.phase_began = now;
        Some(left)
    }

    /// As it is now.
    pub(super) fn now(&self) -> ForkProgress {
        let mut now = self.told.clone();
        if !now.is_end() {
            now.elapsed_ms = ms(Mono::now().since(self.begun));
        }
        now
    }
}

impl ForkEngine {
    /// Where a fork stands. The last ones are remembered.
    ///
    /// # Errors
    /// [`ForkError::UnknownFork`].
    pub fn progress(&self, id: &str) -> Result<ForkProgress, ForkError> {
        let found = self.lock().progress.iter().find(|fork| fork.told.id == id).map(Timed::now);
        found.ok_or_else(|| ForkError::UnknownFork(id.to_owned()))
    }

    /// Those that have ended since this was last asked, oldest first. For one who asks.
    pub fn newly_ended(&self) -> Vec<ForkProgress> {
        let mut state = self.lock();
        let ended = state.progress.iter_mut().filter(|fork| fork.told.is_end() && !fork.end_is_told);
        ended
            .map(|fork| {
                fork.end_is_told = true;
                fork.now()
            })
            .collect()
    }

    /// A fork was asked for at `begun`.
    pub(super) fn begin_progress(&self, told: ForkProgress, begun: Mono) -> Result<(), ForkError> {
        let mut state = self.lock();
        if state.progress.iter().any(|fork| fork.told.id == told.id) {
            return Err(ForkError::IdTaken(told.id));
        }
        if state.progress.len() >= REMEMBERED {
            let oldest = state.progress.iter().position(|fork| fork.told.is_end()).unwrap_or(0);
            state.progress.remove(oldest);
        }
        state.progress.push(Timed::begin(told, begun));
        Ok(())
    }

    /// Something is new about a fork.
    pub(super) fn update(&self, id: &str, change: impl FnOnce(&mut ForkProgress)) {
        let entered = {
            let mut state = self.lock();
            let Some(fork) = state.progress.iter_mut().find(|fork| fork.told.id == id) else { return };
            let left = fork.change(change);
            left.map(|left| (fork.told.parent.clone(), fork.told.phase.clone(), left))
        };
        if let Some((parent, phase, left)) = entered {
            self.tell_phase(id, &parent, &phase, &left);
        }
    }

    /// What came of it is told to those who ask.
    pub(super) fn end_progress(&self, id: &str, begun: Mono, ended: Result<&ForkReport, &ForkError>) {
        self.update(id, |p| {
            p.elapsed_ms = ms(Mono::now().since(begun));
            match ended {
                Ok(report) => (p.phase, p.report) = (DONE.to_owned(), Some(report.clone())),
                Err(error) => {
                    p.phase = FAILED.to_owned();
                    p.error = Some(error.failure());
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn phases_follow_each_other_from_the_request_on() {
        let begun = Mono(Mono::now().0 - 2_000_000);
        let told = ForkProgress { phase: "check".to_owned(), ..ForkProgress::default() };
        let mut fork = Timed::begin(told, begun);
        let mut enter = |phase: &str| fork.change(|p| p.phase = phase.to_owned());
        assert_eq!(enter("freeze").as_deref(), Some("check"));
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(enter("freeze"), None);
        assert_eq!(enter("run").as_deref(), Some("freeze"));
        assert_eq!(enter(DONE).as_deref(), Some("run"));
        // Memory of its own, after the answer.
        assert_eq!(enter("rehome").as_deref(), Some(DONE));
        assert_eq!(enter(DONE).as_deref(), Some("rehome"));
        let phases = fork.now().phases;
        let names: Vec<_> = phases.iter().map(|phase| phase.name.as_str()).collect();
        assert_eq!(names, ["check", "freeze", "run", "rehome"]);
        assert!(phases[0].start_ms == 0.0 && phases[0].duration_ms >= 2.0, "{phases:?}");
        assert!(phases[1].duration_ms >= 1.0, "{phases:?}");
        let ends = phases[..3].windows(2).map(|two| two[1].start_ms - two[0].start_ms - two[0].duration_ms);
        assert!(ends.into_iter().all(|gap| gap.abs() < 1e-6), "{phases:?}");
    }

    #[test]
    fn a_fork_at_work_tells_its_time() {
        let fork = Timed::begin(ForkProgress::default(), Mono(Mono::now().0 - 3_000_000));
        assert!(fork.now().elapsed_ms >= 3.0);
        assert!(fork.now().began_at.is_some_and(|at| humantime::parse_rfc3339(&at).is_ok()));
    }
}
