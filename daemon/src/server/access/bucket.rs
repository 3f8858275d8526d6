//! How often a client may ask: a bucket of tokens.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::Rate;

/// Holds up to `burst` tokens, and gets `per_second` of them each second. A request takes one.
#[derive(Debug)]
pub struct Bucket {
    rate: Rate,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    /// A full one.
    pub fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, state: Mutex::new(State { tokens: f64::from(rate.burst), at: now }) }
    }

    /// How often.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Takes a token.
    ///
    /// # Errors
    /// There is none: for how long.
    pub fn take(&self, now: Instant) -> Result<(), Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let per_second = f64::from(self.rate.per_second);
        let since = now.saturating_duration_since(state.at).as_secs_f64();
        let tokens = since.mul_add(per_second, state.tokens).min(f64::from(self.rate.burst));
        state.at = state.at.max(now);
        if tokens < 1.0 {
            state.tokens = tokens;
            return Err(Duration::from_secs_f64((1.0 - tokens) / per_second));
        }
        state.tokens = tokens - 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_as_many_as_the_rate_says() {
        let begin = Instant::now();
        let after = |ms| begin + Duration::from_millis(ms);
        let bucket = Bucket::new(Rate { per_second: 10, burst: 3 }, begin);
        for _ in 0..3 {
            bucket.take(begin).unwrap();
        }
        assert_eq!(bucket.take(begin).unwrap_err().as_millis(), 100);
        assert!(bucket.take(after(60)).unwrap_err() < Duration::from_millis(41), "refusals cost nothing");
        bucket.take(after(101)).unwrap();
        bucket.take(after(101)).unwrap_err();
        // No more than the burst is saved up, and a clock that is behind changes nothing.
        for _ in 0..3 {
            bucket.take(after(60_000)).unwrap();
        }
        bucket.take(after(59_000)).unwrap_err();
    }
}
