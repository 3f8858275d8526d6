//! Whether a guest that is to read data of another node goes there.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::{format_bytes, format_ms};

/// Where a guest reads data of another node from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ReadsFrom {
    /// From afar: it stays where it is.
    Stay,
    /// There, on a visit.
    Visit,
    /// There, between a migration to and one fro.
    Migrate,
}

impl ReadsFrom {
    /// The word in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stay => "stay",
            Self::Visit => "visit",
            Self::Migrate => "migrate",
        }
    }
}

impl fmt::Display for ReadsFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What one of them costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ReadsCost {
    /// Until the data is read and the guest is where it was: the reading, and both ways. Unit: milliseconds.
    pub time_ms: f64,
    /// What crosses the link: the data, or the guest's memory, both ways. Unit: bytes.
    pub link_bytes: u64,
}

/// The cheapest of them, computed before anything is changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Choice {
    /// The cheapest.
    pub choice: ReadsFrom,
    /// Reading from afar.
    pub stay: ReadsCost,
    /// A visit. `None`: this guest, or these options, cannot visit.
    pub visit: Option<ReadsCost>,
    /// A migration to and fro. `None`: no mode comes to an end.
    pub migrate: Option<ReadsCost>,
    /// From so much data on it is faster to go there. Unit: bytes. `None`: it never is.
    pub pays_from_bytes: Option<u64>,
    /// What it is computed from, for people.
    pub basis: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cost =
            |cost: &ReadsCost| format!("{} ({})", format_ms(cost.time_ms), format_bytes(cost.link_bytes));
        let or_none = |of: &Option<ReadsCost>| of.as_ref().map_or_else(|| "not possible".to_owned(), cost);
        let (stay, visit, migrate) = (cost(&self.stay), or_none(&self.visit), or_none(&self.migrate));
        write!(
            f,
            "{}: from afar {stay}, by a visit {visit}, by a migration to and fro {migrate}",
            self.choice
        )?;
        match self.pays_from_bytes {
            Some(from) => write!(f, "; going there pays from {}", format_bytes(from)),
            None => write!(f, "; going there never pays"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_told_in_a_line() {
        let choice = Choice {
            choice: ReadsFrom::Visit,
            stay: ReadsCost { time_ms: 27_000.0, link_bytes: 2 << 30 },
            visit: Some(ReadsCost { time_ms: 5_100.0, link_bytes: 48 << 20 }),
            migrate: None,
            pays_from_bytes: Some(100 << 20),
            basis: String::new(),
        };
        let told = "visit: from afar 27.00 s (2.00 GiB), by a visit 5.10 s (48.00 MiB), by a migration to and fro not possible; going there pays from 100.00 MiB";
        assert_eq!(choice.to_string(), told);
        let never = Choice { choice: ReadsFrom::Stay, pays_from_bytes: None, ..choice };
        assert!(never.to_string().ends_with("never pays"), "{never}");
        assert_eq!(serde_json::to_value(&never).unwrap()["choice"], "stay");
    }
}
