//! A deadline that does not pass while the machine, or all of the soak with it, stands still.

use std::time::{Duration, Instant};

/// Time between two looks that counts at most: whoever looks does so more often.
const LONGEST_LOOK: Duration = Duration::from_secs(10);

/// See the [module](self).
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    /// Lasts for `time` from now.
    #[must_use]
    pub fn of(time: Duration) -> Self {
        Self { left: time, looked: Instant::now() }
    }

    /// Whether the time has passed. To be asked again and again.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub((now - self.looked).min(LONGEST_LOOK));
        self.looked = now;
        self.left.is_zero()
    }
}
