//! Tests that the documents name and that are not there.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

/// The document whose tables name a test for each step that can fail.
const DOCUMENT: &str = "docs/protocol.md";
/// Words in a test's name, at least: fields and functions have fewer.
const WORDS: usize = 4;

/// Names of tests in [`DOCUMENT`] that no function in `sources` has.
pub fn missing<'a>(root: &Path, sources: impl Iterator<Item = &'a Path>) -> Result<Vec<String>> {
    let path = root.join(DOCUMENT);
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    let mut wanted = named(&text);
    for source in sources {
        if wanted.is_empty() {
            break;
        }
        let text = std::fs::read_to_string(source)
            .with_context(|| format!("could not read {}", source.display()))?;
        wanted.retain(|name| !text.contains(&format!("fn {name}(")));
    }
    Ok(wanted.into_iter().map(|name| format!("{DOCUMENT} names {name}, which is no test any more")).collect())
}

/// What looks like the name of a test, between backticks.
fn named(text: &str) -> BTreeSet<&str> {
    let is_name = |word: &&str| {
        word.split('_').count() >= WORDS
            && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).filter(is_name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_test_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let source = dir.path().join("tests.rs");
        std::fs::create_dir(dir.path().join("docs")).expect("makes it");
        std::fs::write(&source, "fn this_one_is_there() {}").expect("writes");
        let text = "| `page_bytes` | `this_one_is_there`, `this_one_is_not` |\n`PagesLost` this_is_no_name\n";
        std::fs::write(dir.path().join(DOCUMENT), text).expect("writes");
        let found = missing(dir.path(), [source.as_path()].into_iter()).expect("it can be read");
        assert_eq!(found, ["docs/protocol.md names this_one_is_not, which is no test any more"]);
    }
}
