//! What a change of a text changes, for people.

/// Lines that are in one and not in the other, with `-` or `+` before: each line that changes is there once.
pub fn changed_lines(old: &str, new: &str) -> Vec<String> {
    let only = |these: &str, not: &str, sign: &str| {
        let known: Vec<&str> = not.lines().collect();
        let lines = these.lines().filter(|line| !known.contains(line));
        lines.map(|line| format!("{sign}{line}")).collect::<Vec<_>>()
    };
    [only(old, new, "-"), only(new, old, "+")].concat()
}
