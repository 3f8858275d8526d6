//! Where lines of a scale are.

/// 1, 2 or 5 times a power of ten: the next that is not less; 0 if there is none.
#[must_use]
pub fn round_step(least: f64) -> f64 {
    if least <= 0.0 || !least.is_finite() {
        return 0.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|times| times * power)
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}

/// Powers of ten around all values above 0: the exponents of the first and the last, which differ.
#[must_use]
pub fn decades(values: impl Iterator<Item = f64>) -> (i32, i32) {
    let values = values.filter(|value| *value > 0.0 && value.is_finite());
    let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)));
    let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
    // Exponents of floating-point numbers are small.
    let exponent = |value: f64| (-400..400).find(|e| f64::from(*e) >= value).unwrap_or(400);
    let low = exponent(low.log10().floor());
    (low, exponent(high.log10().ceil()).max(low + 1))
}

/// Moves labels down so that each is at least `room` below the one before; `wanted` in any order.
#[must_use]
pub fn apart(wanted: &[f64], room: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut placed = wanted.to_vec();
    for pair in order.windows(2) {
        placed[pair[1]] = placed[pair[1]].max(placed[pair[0]] + room);
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (least, step) in
            [(0.3, 0.5), (0.7, 1.0), (1.0, 1.0), (130.0, 200.0), (21.0, 50.0), (501.0, 1000.0)]
        {
            assert!((round_step(least) - step).abs() < 1e-9, "{least}: {}", round_step(least));
        }
        assert!(round_step(0.0).abs() < 1e-9 && round_step(f64::NAN).abs() < 1e-9);
    }

    #[test]
    fn decades_are_around_all_values() {
        assert_eq!(decades([0.4, 65.0].into_iter()), (-1, 2));
        assert_eq!(decades([10.0].into_iter()), (1, 2));
        assert_eq!(decades([0.0, -1.0].into_iter()), (0, 1));
    }

    #[test]
    fn labels_do_not_cover_each_other() {
        assert_eq!(apart(&[50.0, 10.0, 52.0, 12.0], 14.0), [50.0, 10.0, 64.0, 24.0]);
    }
}
