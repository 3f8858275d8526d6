//! QEMU's way of writing sizes.

/// Reads a size such as `1G`, `1048576k`, `1.5G`, `0x1000` or `512`, in bytes; without a suffix the unit is
/// `default_unit` bytes. `None` if it is not a size, or over 2^64 - 1.
pub(super) fn parse_size(text: &str, default_unit: u64) -> Option<u64> {
    let text = text.trim();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok()?.checked_mul(default_unit);
    }
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let unit = match suffix.to_ascii_lowercase().as_str() {
        "" => default_unit,
        "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        "p" => 1 << 50,
        "e" => 1 << 60,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    whole.checked_add(fraction_of(fraction, unit)?)
}

/// `0.fraction * unit`, rounded down.
fn fraction_of(fraction: &str, unit: u64) -> Option<u64> {
    let digits = &fraction[..fraction.len().min(18)];
    if digits.is_empty() {
        return Some(0);
    }
    let scale = 10u128.pow(u32::try_from(digits.len()).ok()?);
    let part = u128::from(digits.parse::<u64>().ok()?) * u128::from(unit) / scale;
    u64::try_from(part).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn as_qemu_reads_them() {
        let cases = [
            ("1G", 1 << 30),
            ("1g", 1 << 30),
            ("1024", 1 << 30),
            ("1048576k", 1 << 30),
            ("1.5G", 3 << 29),
            ("0.5", 512 << 10),
            ("512M", 512 * MIB),
            ("4096b", 4096),
            ("0x400", 1 << 30),
            ("2T", 2 << 40),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text, MIB), Some(bytes), "{text}");
        }
        assert_eq!(parse_size("1073741824", 1), Some(1 << 30));
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "G", ".5G", "1X", "1GB", "-1", "1 G", "99999999999T", "1.2.3G", "1,5G"] {
            assert_eq!(parse_size(text, MIB), None, "{text}");
        }
    }
}
