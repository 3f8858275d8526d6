//! A single condition from its words.

use super::{Clause, Key, Op, RequestError};

/// A condition from key, operator and value.
pub(super) fn clause(key: Key, op: &str, value: &str, place: String) -> Result<Clause, RequestError> {
    if value.is_empty() {
        return Err(RequestError::syntax(place, format!("{key} has no value"), "a value after the operator"));
    }
    let op =
        if key.is_number() { number_op(&key, op, value, &place)? } else { word_op(&key, op, value, &place)? };
    Ok(Clause { key, op, place })
}

fn number_op(key: &Key, op: &str, value: &str, place: &str) -> Result<Op, RequestError> {
    let number = |text: &str| {
        number(text).ok_or_else(|| {
            RequestError::syntax(
                place,
                format!("{text:?} as {key}"),
                "a whole number, as in 16384 or 16K, or FROM..TO",
            )
        })
    };
    if let Some((from, to)) = value.split_once("..") {
        let (from, to) = (number(from)?, number(to)?);
        if op != "=" && op != "==" {
            return Err(RequestError::syntax(place, format!("{key} {op} a range"), "= before FROM..TO"));
        }
        if from > to {
            return Err(RequestError::syntax(
                place,
                format!("{key}={value} is an empty range"),
                "FROM not above TO",
            ));
        }
        return Ok(Op::Within(from, to));
    }
    let value = number(value)?;
    let nothing =
        || RequestError::syntax(place, format!("{key} {op} {value} is an empty range"), "a limit above 0");
    Ok(match op {
        "=" | "==" => Op::Within(value, value),
        ">=" => Op::Within(value, u64::MAX),
        "<=" => Op::Within(0, value),
        ">" => Op::Within(value.checked_add(1).ok_or_else(nothing)?, u64::MAX),
        "<" => Op::Within(0, value.checked_sub(1).ok_or_else(nothing)?),
        _ => {
            return Err(RequestError::syntax(place, format!("operator {op} for {key}"), "=, >=, <=, > or <"));
        }
    })
}

fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K' | 'k') => (&text[..at], 10),
        (at, 'M' | 'm') => (&text[..at], 20),
        (at, 'G' | 'g') => (&text[..at], 30),
        _ => (text, 0),
    };
    let valid = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    valid.then(|| digits.parse::<u64>().ok()?.checked_mul(1 << shift)).flatten()
}

fn word_op(key: &Key, op: &str, value: &str, place: &str) -> Result<Op, RequestError> {
    let words: Vec<String> = value.split(',').map(|word| word.trim().to_owned()).collect();
    if words.iter().any(String::is_empty) {
        return Err(RequestError::syntax(
            place,
            format!("an empty word in {key}={value:?}"),
            "words between commas",
        ));
    }
    match op {
        "=" | "==" => Ok(Op::AllOf(words)),
        "!=" => Ok(Op::NoneOf(words)),
        _ => Err(RequestError::syntax(place, format!("operator {op} for {key}"), "= or !=")),
    }
}
