//! Tests that the documents name and that are not there, and rows of their tables that name no test.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

/// The document whose tables name a test for each step that can fail.
const DOCUMENT: &str = "docs/protocol.md";
/// The last column of those tables.
const COLUMN: &str = "Test";
/// In that column: the test of the row above.
const SAME: &str = "the same";
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
    let missing =
        wanted.into_iter().map(|name| format!("{DOCUMENT} names {name}, which is no test any more"));
    let untested =
        untested(&text).into_iter().map(|row| format!("{DOCUMENT} names no test in the row {row:?}"));
    Ok(missing.chain(untested).collect())
}

/// First cells of rows without a test, in tables whose last column is [`COLUMN`].
fn untested(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut is_due = false;
    for line in text.lines() {
        let Some(row) = line.strip_prefix('|').and_then(|line| line.trim_end().strip_suffix('|')) else {
            is_due = false;
            continue;
        };
        let last = row.rsplit('|').next().unwrap_or_default().trim();
        let is_ruler = last.bytes().all(|byte| byte == b'-' || byte == b':');
        if last == COLUMN {
            is_due = true;
        } else if is_due && !is_ruler && last != SAME && named(last).is_empty() {
            found.push(row.split('|').next().unwrap_or_default().trim());
        }
    }
    found
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

    #[test]
    fn a_row_without_a_test_is_found() {
        let text = "| What | Test |\n|---|---|\n| cut | `this_one_is_there` |\n| killed | the same |\n| full | soon |\n\n\
                    | What | Who |\n|---|---|\n| other | nobody |\n";
        assert_eq!(untested(text), ["full"]);
    }
}
