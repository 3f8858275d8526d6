//! The nearest right name of a misspelt one.

/// Below it two names have nothing to do with each other.
const ALIKE: f64 = 0.75;

/// The name that is most like `text`, whatever its case, if any is.
pub(crate) fn nearest<'a>(text: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |name: &str| name.to_ascii_lowercase().replace('_', "-");
    let text = plain(text);
    let like = |name: &'a str| (strsim::jaro_winkler(&text, &plain(name)), name);
    let best = known.map(like).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= ALIKE).then_some(best.1)
}
