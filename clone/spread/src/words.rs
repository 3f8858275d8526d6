//! Figures for people.

use vmove_types::units::format_bytes;

/// `1.50 GiB`: of a computed number, in the form of all others.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast ends at 0 and at the largest number"
)]
pub(crate) fn bytes(count: f64) -> String {
    format_bytes(count as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_unit_that_fits() {
        assert_eq!([0.0, 1023.0, 1024.0, 4.5e9].map(bytes), ["0 B", "1023 B", "1.00 KiB", "4.19 GiB"]);
    }
}
