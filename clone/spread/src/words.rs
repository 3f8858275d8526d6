//! Figures for people.

/// `1.50 GiB`, in the same units as the commands print.
pub(crate) fn bytes(count: f64) -> String {
    let (mut value, mut unit) = (count.max(0.0), "B");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{value:.0} B") } else { format!("{value:.2} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_unit_that_fits() {
        assert_eq!([0.0, 1023.0, 1024.0, 4.5e9].map(bytes), ["0 B", "1023 B", "1.00 KiB", "4.19 GiB"]);
    }
}
