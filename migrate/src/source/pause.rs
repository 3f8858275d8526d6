//! What the guest's pause consists of, for the report: where the milliseconds between STOP and RESUME go.

use vmove_types::report::PhaseTime;
use vmove_types::time::Mono;

/// A pause that is under way.
#[derive(Debug, Clone)]
pub(super) struct Pause {
    stopped: Mono,
    last: Mono,
    steps: Vec<PhaseTime>,
}

impl Pause {
    /// The guest stopped then.
    pub(super) const fn since(stopped: Mono) -> Self {
        Self { stopped, last: stopped, steps: Vec::new() }
    }

    /// A step has ended.
    pub(super) fn step(&mut self, name: &str) {
        self.step_until(name, Mono::now());
    }

    /// A step ended then, by our clock.
    pub(super) fn step_until(&mut self, name: &str, end: Mono) {
        let duration_ms = end.ms_since(self.last).max(0.0);
        let start_ms = self.last.ms_since(self.stopped);
        self.steps.push(PhaseTime { name: name.to_owned(), start_ms, duration_ms });
        self.last = end;
    }

    /// The guest runs again, since then.
    pub(super) fn end(mut self, resumed: Mono) -> Vec<PhaseTime> {
        self.step_until("resume", resumed);
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other_from_stop_to_resume() {
        let mut pause = Pause::since(Mono(1_000_000));
        pause.step_until("drain", Mono(3_000_000));
        let steps = pause.end(Mono(7_000_000));
        let told: Vec<_> = steps.iter().map(|s| (s.name.as_str(), s.start_ms, s.duration_ms)).collect();
        assert_eq!(told, [("drain", 0.0, 2.0), ("resume", 2.0, 4.0)]);
    }
}
