//! Slurm's hostlists: `tux[0-3,7]`, `rack[1-2]n[01-16]`, `login,io1`.

use super::TopologyError;

/// Most names in one list.
const MOST: usize = 1 << 20;
/// Most bytes that they may take together.
const MOST_BYTES: usize = 32 << 20;

/// All names of a hostlist. Numbers keep their leading zeros.
///
/// # Errors
/// Brackets that do not match, invalid or empty ranges, empty names; with `line` in the message.
pub fn expand(text: &str, line: usize) -> Result<Vec<String>, TopologyError> {
    let (mut names, mut bytes) = (Vec::new(), 0);
    for item in split(text, line)? {
        let before = names.len();
        let mut partial = vec![String::new()];
        let mut rest = item;
        while let Some(open) = rest.find('[') {
            let (literal, bracket) = rest.split_at(open);
            let close = bracket.find(']').ok_or_else(|| unclosed(text, line))?;
            let numbers = numbers(&bracket[1..close], text, line)?;
            let longest = |all: &[String]| all.iter().map(String::len).max().unwrap_or(0);
            let count = partial.len().saturating_mul(numbers.len());
            let bytes = longest(&partial) + literal.len() + longest(&numbers) + bracket.len() - close;
            if count > MOST || count.saturating_mul(bytes) > MOST_BYTES {
                return Err(too_many(text, line));
            }
            partial = partial
                .iter()
                .flat_map(|head| numbers.iter().map(move |number| format!("{head}{literal}{number}")))
                .collect();
            rest = &bracket[close + 1..];
        }
        for name in &mut partial {
            name.push_str(rest);
        }
        if partial.iter().any(String::is_empty) {
            return Err(TopologyError::syntax(
                line,
                format!("an empty name in {text:?}"),
                "names between commas",
            ));
        }
        if let Some(name) = partial.iter().find(|name| name.contains(['\\', '=', '"', '#'])) {
            return Err(TopologyError::syntax(
                line,
                format!("{name:?} is not a name"),
                "names without \\, =, \" and #",
            ));
        }
        names.append(&mut partial);
        bytes += names[before..].iter().map(String::len).sum::<usize>();
        if names.len() > MOST || bytes > MOST_BYTES {
            return Err(too_many(text, line));
        }
    }
    Ok(names)
}

/// Of the text only the beginning is told: it may be long itself.
fn too_many(text: &str, line: usize) -> TopologyError {
    let begin: String = text.chars().take(80).collect();
    TopologyError::syntax(
        line,
        format!("the list that begins with {begin:?} contains too many names, or too long ones"),
        format!("at most {MOST} names, and {} MiB", MOST_BYTES >> 20),
    )
}

fn unclosed(text: &str, line: usize) -> TopologyError {
    TopologyError::syntax(line, format!("brackets of {text:?} do not match"), "a list like tux[0-3,7]")
}

/// Items between commas outside of brackets.
fn split(text: &str, line: usize) -> Result<Vec<&str>, TopologyError> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return Err(unclosed(text, line)),
            ',' if !inside => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err(unclosed(text, line));
    }
    parts.push(text[start..].trim());
    Ok(parts)
}

fn numbers(list: &str, text: &str, line: usize) -> Result<Vec<String>, TopologyError> {
    let bad = |part: &str, why: &str| {
        TopologyError::syntax(line, format!("{part:?} in {text:?} {why}"), "numbers and ranges like 0-3,7")
    };
    let number = |part: &str| -> Option<u64> {
        let digits = !part.is_empty() && part.len() <= 18 && part.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| part.parse().ok()).flatten()
    };
    let mut numbers = Vec::new();
    for part in list.split(',').map(str::trim) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (Some(low), Some(high)) = (number(from), number(to)) else {
            return Err(bad(part, "is not a range"));
        };
        if low > high {
            return Err(bad(part, "is empty: its end is before its start"));
        }
        if high - low >= MOST as u64 || numbers.len() > MOST {
            return Err(bad(part, "contains too many numbers"));
        }
        let width = from.len();
        numbers.extend((low..=high).map(|value| format!("{value:0width$}")));
    }
    Ok(numbers)
}

/// A short hostlist of these names in their order: neighbours that differ only in their last number are joined.
#[must_use]
pub fn compress<S: AsRef<str>>(names: &[S]) -> String {
    // Prefix, width of numbers with leading zeros, numbers.
    let mut groups: Vec<(&str, Option<usize>, Vec<u64>)> = Vec::new();
    for name in names {
        let name = name.as_ref();
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count().min(18);
        let (prefix, number) = name.split_at(name.len() - digits);
        let width = (digits > 0).then_some(digits);
        let value = number.parse().unwrap_or(0);
        let fits = |last: &(&str, Option<usize>, Vec<u64>)| {
            // A list is written with the width of its first number: a shorter number would be padded.
            let grown = width > last.1 && no_zeros(last.1, &last.2) && width == Some(decimal(value));
            last.0 == prefix && width.is_some() && last.1.is_some() && (last.1 == width || grown)
        };
        match groups.last_mut() {
            Some(last) if fits(last) => last.2.push(value),
            _ => groups.push((prefix, width, vec![value])),
        }
    }
    let words: Vec<String> =
        groups.iter().map(|(prefix, width, values)| word(prefix, *width, values)).collect();
    words.join(",")
}

fn decimal(value: u64) -> usize {
    value.to_string().len()
}

fn no_zeros(width: Option<usize>, values: &[u64]) -> bool {
    values.first().is_some_and(|first| width == Some(decimal(*first)))
}

fn word(prefix: &str, width: Option<usize>, values: &[u64]) -> String {
    let Some(width) = width else { return prefix.to_owned() };
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for value in values {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *value => *last = *value,
            _ => ranges.push((*value, *value)),
        }
    }
    let text = |(from, to): &(u64, u64)| {
        if from == to { format!("{from:0width$}") } else { format!("{from:0width$}-{to:0width$}") }
    };
    let ranges: Vec<String> = ranges.iter().map(text).collect();
    let list = ranges.join(",");
    if values.len() == 1 { format!("{prefix}{list}") } else { format!("{prefix}[{list}]") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_expand_and_compress() {
        for (list, names) in [
            ("tux[0-3,7]", "tux0 tux1 tux2 tux3 tux7"),
            ("a[08-11]", "a08 a09 a10 a11"),
            ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
            ("login,io1", "login io1"),
            ("n[1-1]x", "n1x"),
        ] {
            assert_eq!(expand(list, 1).unwrap().join(" "), names);
        }
        for (names, list) in [
            ("n9 n10 n11", "n[9-11]"),
            ("n08 n09 n10", "n[08-10]"),
            ("a b1 b2 c", "a,b[1-2],c"),
            ("n1 n01", "n1,n01"),
            ("n10 n9", "n10,n9"),
        ] {
            assert_eq!(compress(&names.split(' ').collect::<Vec<_>>()), list);
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (list, words) in [
            ("tux[3-1]", "is empty"),
            ("tux[1", "do not match"),
            ("tux1]", "do not match"),
            ("tux[[1]]", "do not match"),
            ("tux[a-b]", "is not a range"),
            ("a,,b", "empty name"),
            ("", "empty name"),
            ("n[0-99999999]", "too many"),
            ("n[1-1000]n[1-1000]n[1-1000]", "too many"),
            (&format!("{}[1-1000000]", "n".repeat(200)), "too long"),
            (&format!("[1-9999]{}", "n".repeat(20_000)), "too long"),
        ] {
            let error = expand(list, 7).unwrap_err();
            assert_eq!(error.line(), 7);
            assert!(error.to_string().contains(words), "{list}: {error}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,40}") {
            let _ = expand(&text, 1);
        }

        #[test]
        fn brackets_never_panic(text in "[a-c0-9,\\[\\]-]{0,24}") {
            if let Ok(names) = expand(&text, 1) {
                prop_assert_eq!(expand(&compress(&names), 1).unwrap(), names);
            }
        }
    }
}
