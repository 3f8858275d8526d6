//! Sets of processors.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kernel numbers no more (`NR_CPUS` of Debian's kernel).
const MOST: u32 = 8192;

/// Processors, by their numbers. Written as in `/sys` (`0-3,8`; see "list format" in `cpuset(7)`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(BTreeSet<u32>);

/// What is no set of processors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected processors such as \"0-3,8\", found {0:?}")]
pub struct BadCpus(String);

impl Cpus {
    /// None.
    #[must_use]
    pub const fn none() -> Self {
        Self(BTreeSet::new())
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this processor is one of them.
    #[must_use]
    pub fn has(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// The one with the lowest number.
    #[must_use]
    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Those of this set and of another.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// Those of either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    /// Those of this set that are not in another.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }
}

impl FromIterator<u32> for Cpus {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for Cpus {
    type Err = BadCpus;

    fn from_str(text: &str) -> Result<Self, BadCpus> {
        let bad = || BadCpus(text.to_owned());
        let number = |text: &str| text.trim().parse().ok().filter(|cpu| *cpu < MOST).ok_or_else(bad);
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            match part.split_once('-') {
                None => {
                    cpus.insert(number(part)?);
                }
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if first > last {
                        return Err(bad());
                    }
                    cpus.extend(first..=last);
                }
            }
        }
        Ok(Self(cpus))
    }
}

impl TryFrom<String> for Cpus {
    type Error = BadCpus;

    fn try_from(text: String) -> Result<Self, BadCpus> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> Self {
        cpus.to_string()
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if_eq(&(last + 1)) {
                last = next;
            }
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        let read = |text: &str| text.parse::<Cpus>().map(|cpus| cpus.iter().collect::<Vec<_>>());
        assert_eq!(read("0-2,8\n").unwrap(), [0, 1, 2, 8]);
        assert_eq!(read("").unwrap(), [0_u32; 0]);
        for bad in ["x", "3-1", "-1", "1-", "0-9000", "1;2"] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains("0-3,8"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(cpus: BTreeSet<u8>) {
            let cpus: Cpus = cpus.into_iter().map(u32::from).collect();
            prop_assert_eq!(cpus.to_string().parse::<Cpus>().unwrap(), cpus);
        }
    }
}
