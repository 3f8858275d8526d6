//! The HTTP interface as both ends see it: requests, answers, problems. Version 1.

pub mod forks;
pub mod problem;
pub mod schema;
pub mod types;

use vmove_migrate::progress::Outcome;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Everything that may not stand for itself in one segment of a path.
const SEGMENT: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'`')
    .add(b'/')
    .add(b'{')
    .add(b'}')
    .add(b'\\')
    .add(b'^')
    .add(b'|')
    .add(b'[')
    .add(b']');

/// A name as one segment of a path: `two words` becomes `two%20words`.
#[must_use]
pub fn segment(name: &str) -> String {
    utf8_percent_encode(name, SEGMENT).to_string()
}

/// A value of a query: also `&`, `=`, `+` are encoded.
#[must_use]
pub fn query_value(value: &str) -> String {
    const QUERY: &AsciiSet = &SEGMENT.add(b'&').add(b'=').add(b'+').add(b';');
    utf8_percent_encode(value, QUERY).to_string()
}

/// Whether there is nothing more to come.
pub fn is_end(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Running | Outcome::Reconnecting { .. } => false,
        Outcome::Done { .. } | Outcome::Refused { .. } | Outcome::Failed { .. } => true,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_of_any_script_become_one_segment() {
        assert_eq!(super::segment("two words"), "two%20words");
        assert_eq!(super::segment("機械?#%"), "%E6%A9%9F%E6%A2%B0%3F%23%25");
        assert_eq!(super::query_value("a&b=c+d"), "a%26b%3Dc%2Bd");
    }
}
