//! What a migration is to keep.

use clap::Args;
use vmove_types::goal::Goals;

use super::milliseconds;

/// Of `check` and `migrate`.
#[derive(Debug, Args)]
pub struct GoalArgs {
    /// Goal: longest pause of the guest in every mode, device state included, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub max_pause: Option<u64>,
    /// Goal: longest time for the whole migration without its disks, such as 60s
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub within: Option<u64>,
    /// Goal: largest share of all processors of each host for copying in the background, such as 50%; what the guest waits for is never held back
    #[arg(long, value_name = "SHARE", value_parser = percent)]
    pub host_cpu: Option<u64>,
}

impl GoalArgs {
    /// As the daemon takes them.
    #[must_use]
    pub const fn goals(&self) -> Goals {
        Goals { max_pause_ms: self.max_pause, within_ms: self.within, host_cpu_percent: self.host_cpu }
    }
}

/// A share such as `50%`.
fn percent(text: &str) -> Result<u64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim_end().parse().ok());
    number
        .filter(|share| (1..=100).contains(share))
        .ok_or_else(|| format!("expected a share of all processors from 1% to 100%, found \"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_has_its_sign_and_its_bounds() {
        assert_eq!((percent("1%"), percent("50 %"), percent("100%")), (Ok(1), Ok(50), Ok(100)));
        for bad in ["0%", "101%", "50", "half", "5.5%", "-3%", "%", ""] {
            assert!(percent(bad).unwrap_err().contains("from 1% to 100%"), "{bad}");
        }
    }
}
