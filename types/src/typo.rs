//! Names that are misspelt, and the right ones.

/// Below it two names have nothing to do with each other.
const ALIKE: f64 = 0.75;

/// So many right names are still read by whoever has misspelt one.
const READABLE: usize = 8;

/// The name that is most like `text`, whatever its case, if any is.
#[must_use]
pub fn nearest<'a>(text: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let text = plain(text);
    let like = |name: &'a str| (strsim::jaro_winkler(&text, &plain(name)), name);
    let best = known.map(like).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= ALIKE).then_some(best.1)
}

/// What two ways to write one name have in common.
fn plain(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

/// An unknown name in a text of serde, which has all right ones.
struct Unknown<'a> {
    /// Up to and with the unknown name.
    found: &'a str,
    name: &'a str,
    /// Each once, though it may be written in two ways.
    known: Vec<&'a str>,
    after: &'a str,
}

impl<'a> Unknown<'a> {
    /// The first in the text.
    fn find(text: &'a str) -> Option<Self> {
        let starts = ["unknown field `", "unknown variant `"];
        let at = starts.iter().filter_map(|start| Some(text.find(start)? + start.len())).min()?;
        let end = at + text[at..].find('`')?;
        let (found, mut after) = text.split_at(end + 1);
        after = after.strip_prefix(", expected ")?;
        after = after.strip_prefix("one of ").unwrap_or(after);
        let mut known: Vec<&str> = Vec::new();
        while let Some((name, rest)) = after.strip_prefix('`').and_then(|rest| rest.split_once('`')) {
            if !known.iter().any(|one| plain(one) == plain(name)) {
                known.push(name);
            }
            let next = [", ", " or "].iter().find_map(|between| rest.strip_prefix(between));
            after = next.filter(|next| next.starts_with('`')).unwrap_or(rest);
            if next.is_none() {
                break;
            }
        }
        (!known.is_empty()).then_some(Self { found, name: &text[at..end], known, after })
    }

    /// Right names, if they are few or none is like the unknown one, and the nearest.
    fn expected(&self) -> String {
        let near = nearest(self.name, self.known.iter().copied());
        let all = match &self.known[..] {
            known if near.is_some() && known.len() > READABLE => format!("one of {} names", known.len()),
            [one] => format!("`{one}`"),
            [one, other] => format!("`{one}` or `{other}`"),
            known => format!("one of `{}`", known.join("`, `")),
        };
        near.map(|near| format!("{all}; did you mean `{near}`?")).unwrap_or(all)
    }
}

/// A text of serde that names an unknown field or variant, with the nearest right one. Of many right names it keeps their number only. Every
/// other text is left as it is.
#[must_use]
pub fn hinted(text: &str) -> String {
    let Some(unknown) = Unknown::find(text) else { return text.to_owned() };
    format!("{}, expected {}{}", unknown.found, unknown.expected(), unknown.after)
}

/// The same in two parts: what was found, and what was expected, if the text names an unknown field or variant.
#[must_use]
pub fn parted(text: &str) -> Option<(String, String)> {
    let unknown = Unknown::find(text)?;
    Some((unknown.found.to_owned(), unknown.expected()))
}

/// The unknown field or variant that a text of serde names.
#[must_use]
pub fn unknown(text: &str) -> Option<&str> {
    Unknown::find(text).map(|unknown| unknown.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_told_and_long_lists_are_not() {
        let many = ["state-dir", "b1", "c2", "d3", "e4", "f5", "g6", "h7", "i8"].join("`, `");
        for (text, wanted) in [
            (
                "unknown field `nod`, expected `node`",
                "unknown field `nod`, expected `node`; did you mean `node`?",
            ),
            (
                "unknown variant `rot`, expected `root` or `user`\n",
                "unknown variant `rot`, expected `root` or `user`; did you mean `root`?\n",
            ),
            (
                "a: unknown field `KEYS`, expected one of `key`, `ca`, `cert` at line 3",
                "a: unknown field `KEYS`, expected one of `key`, `ca`, `cert`; did you mean `key`? at line 3",
            ),
            // Written in two ways, it is one key.
            (
                "unknown field `look_for`, expected one of `look-s`, `look_s`, `b`",
                "unknown field `look_for`, expected `look-s` or `b`; did you mean `look-s`?",
            ),
            ("unknown field `x`, expected `node` or `ca`", "unknown field `x`, expected `node` or `ca`"),
            (
                &format!("unknown field `stat_dir`, expected one of `{many}`"),
                "unknown field `stat_dir`, expected one of 9 names; did you mean `state-dir`?",
            ),
            // Nothing is like it: the list is all that helps.
            (
                &format!("unknown field `quux`, expected one of `{many}`"),
                &format!("unknown field `quux`, expected one of `{many}`"),
            ),
            ("unknown field `x`, there are no fields", "unknown field `x`, there are no fields"),
            ("missing field `name`", "missing field `name`"),
            ("unknown field `", "unknown field `"),
            ("unknown field `x`, expected `", "unknown field `x`, expected `"),
        ] {
            assert_eq!(hinted(text), wanted);
        }
        let parts = parted("vms[0]: unknown field `cuont`, expected `name` or `count` at line 1").unwrap();
        assert_eq!(parts.0, "vms[0]: unknown field `cuont`");
        assert_eq!(parts.1, "`name` or `count`; did you mean `count`?");
        assert_eq!(unknown("a: unknown field `x`, expected `node` or `ca`"), Some("x"));
        assert_eq!((parted("missing field `name`"), unknown("missing field `name`")), (None, None));
    }
}
