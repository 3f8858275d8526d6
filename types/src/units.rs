//! Human units: what the commands read and print.

use std::fmt::Write as _;
use std::time::Duration;

/// `512MiB`, `2GiB`, `1GB` or a plain number, in bytes.
///
/// # Errors
/// What was expected, what was found.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "kB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return Err(format!("expected a size such as 64MiB or 1GiB, found \"{text}\"")),
    };
    let number: Option<u64> = text[..digits].parse().ok();
    number
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| format!("expected a size such as 64MiB or 1GiB, found \"{text}\""))
}

/// Reads a data rate such as `10Gbit`, `1GiB`, `500MB/s` or `2.5 Gbit/s`.
///
/// Returns bytes per second. Bits are decimal (`Gbit` = 10^9 bits), `MB` is 10^6 and `MiB` 2^20 bytes.
///
/// # Errors
/// A sentence that says what was expected and found. A bare number is refused: nobody knows its unit.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let trimmed = trimmed.strip_suffix("/s").unwrap_or(trimmed);
    let (number, unit) = split_number(trimmed);
    let factor = match unit {
        "kbit" | "Kbit" | "kbps" => 1e3 / 8.0,
        "Mbit" | "mbit" | "Mbps" => 1e6 / 8.0,
        "Gbit" | "gbit" | "Gbps" => 1e9 / 8.0,
        "Tbit" | "tbit" | "Tbps" => 1e12 / 8.0,
        other => match byte_factor(other) {
            Some(factor) => factor,
            None => {
                return Err(format!(
                    "expected a rate with its unit, such as 10Gbit, 500MB or 1GiB, found \"{text}\""
                ));
            }
        },
    };
    scaled(number, factor)
        .ok_or_else(|| format!("expected a positive number before the unit, found \"{text}\""))
}

/// Reads a duration such as `300ms`, `1.5s`, `2m`, `1h` or `1m30s`. `0` and `none` are zero.
///
/// # Errors
/// A sentence that says what was expected and found. Any other bare number is refused.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected =
        || format!("expected a duration with its unit, such as 300ms, 120s or 5m, found \"{text}\"");
    let mut rest = text.trim();
    if rest == "0" || rest == "none" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(expected());
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, after) = split_number(rest);
        let unit_len = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_len);
        let seconds = match unit.trim() {
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" | "sec" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return Err(expected()),
        };
        let value: f64 = number.parse().map_err(|_| expected())?;
        let part = Duration::try_from_secs_f64(value * seconds).map_err(|_| expected())?;
        total = total.checked_add(part).ok_or_else(expected)?;
        rest = next;
    }
    Ok(total)
}

/// `1.50 GiB`; exact below one KiB.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = to_f64(bytes) / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.2} {unit}")
}

/// `1.16 GiB/s`: in the units of [`format_bytes`], so that what is left and how fast it goes can be compared.
#[must_use]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
pub fn format_rate(bytes_per_s: f64) -> String {
    let known = bytes_per_s.is_finite() && bytes_per_s > 0.0;
    let bytes = if known { bytes_per_s.min(1e18) as u64 } else { 0 };
    format!("{}/s", format_bytes(bytes))
}

/// `1 child`, `3 children`.
#[must_use]
pub fn number_of(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// `4.2 ms`, `1.50 s`, `2m 05s`, `1h 02m`.
#[must_use]
pub fn format_ms(ms: f64) -> String {
    if !ms.is_finite() || ms < 0.0 {
        return "?".to_owned();
    }
    if ms < 1000.0 {
        return format!("{ms:.1} ms");
    }
    if ms < 60_000.0 {
        return format!("{:.2} s", ms / 1000.0);
    }
    let seconds = Duration::from_secs_f64((ms / 1000.0).min(1e9)).as_secs();
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = if seconds < 3600 {
        write!(out, "{}m {:02}s", seconds / 60, seconds % 60)
    } else {
        write!(out, "{}h {:02}m", seconds / 3600, seconds % 3600 / 60)
    };
    out
}

/// Nearest float; exact below 2^53, which is enough for anything shown to people.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn to_f64(value: u64) -> f64 {
    value as f64
}

fn split_number(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim())
}

fn byte_factor(unit: &str) -> Option<f64> {
    Some(match unit {
        "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
fn scaled(number: &str, factor: f64) -> Option<u64> {
    let value = number.parse::<f64>().ok()? * factor;
    (value.is_finite() && (1.0..9e18).contains(&value)).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rates_in_bits_and_bytes() {
        for (text, bytes) in [
            ("10Gbit", 1_250_000_000),
            ("10 Gbit/s", 1_250_000_000),
            ("1GiB", 1 << 30),
            ("1.5MiB/s", 1_572_864),
            ("500MB", 500_000_000),
            ("100Mbps", 12_500_000),
            ("64kbit", 8_000),
        ] {
            assert_eq!(parse_rate(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn rates_without_or_with_an_ambiguous_unit_are_refused() {
        for text in ["", "10", "10G", "10Gb", "Gbit", "-1Gbit", "0Gbit", "1e9B", "1.2.3MB", "999999999999TiB"]
        {
            let error = parse_rate(text).unwrap_err();
            assert!(error.contains(&format!("found \"{text}\"")), "{error}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in [
            ("300ms", 300),
            ("1.5s", 1500),
            ("120s", 120_000),
            ("2m", 120_000),
            ("1m30s", 90_000),
            ("1h", 3_600_000),
            ("0", 0),
            ("none", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "300", "5 parsecs", "s", "-1s", "1s2", "1e5s", "99999999999999999999d"] {
            let error = parse_duration(text).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn figures_for_people() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(3 << 29), "1.50 GiB");
        assert_eq!(format_bytes(u64::MAX), "16384.00 PiB");
        assert_eq!(format_rate(1.25e9), "1.16 GiB/s");
        assert_eq!(format_rate(1e6), "976.56 KiB/s");
        assert_eq!(format_rate(f64::NAN), "0 B/s");
        assert_eq!(number_of(1, "child", "children"), "1 child");
        assert_eq!(number_of(0, "child", "children"), "0 children");
        assert_eq!(format_ms(4.25), "4.2 ms");
        assert_eq!(format_ms(1500.0), "1.50 s");
        assert_eq!(format_ms(125_000.0), "2m 05s");
        assert_eq!(format_ms(3_720_000.0), "1h 02m");
        assert_eq!(format_ms(f64::INFINITY), "?");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC{0,24}") {
            let _ = parse_rate(&text);
            let _ = parse_duration(&text);
        }

        #[test]
        fn whole_milliseconds_come_back(ms in 1_u64..1_000_000_000) {
            prop_assert_eq!(parse_duration(&format!("{ms}ms")), Ok(Duration::from_millis(ms)));
        }
    }
}
