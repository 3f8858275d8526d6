//! Files of this repository that go with a daemon, as its tests look at them.

use std::path::Path;

/// An example of a configuration (TOML) with all that is commented out in it: keys and headers of tables, but no sentences.
#[must_use]
pub fn uncommented(example: &str) -> String {
    let is_toml = |line: &&str| {
        line.starts_with('[') || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '))
    };
    let line =
        |line: &str| format!("{}\n", line.strip_prefix("# ").filter(is_toml).map_or(line, |rest| rest));
    example.lines().map(line).collect()
}

/// Checks that a man page is that of the command line, of which `page` was made. With `VMOVE_WRITE_MAN` in the environment it is written. `package`
/// has the test.
///
/// # Panics
/// It is another one, or cannot be written.
pub fn is_current_page(path: &Path, page: &[u8], package: &str) {
    if std::env::var_os("VMOVE_WRITE_MAN").is_some() {
        std::fs::write(path, page).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    assert!(
        std::fs::read(path).unwrap_or_default() == page,
        "{} is out of date: run VMOVE_WRITE_MAN=1 cargo test -p {package} man_page",
        path.display()
    );
}

/// The text of a file of this repository.
///
/// # Panics
/// It cannot be read.
#[must_use]
pub fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The metrics that a text names: words that begin so. A series of a histogram, whose name ends in a unit, is named as the histogram.
#[must_use]
pub fn metrics_in<'a>(text: &'a str, prefix: &str) -> Vec<&'a str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let histogram = |word: &'a str| {
        let name = ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end));
        name.filter(|name| name.ends_with("_seconds"))
    };
    words.filter(|word| word.starts_with(prefix)).map(|word| histogram(word).unwrap_or(word)).collect()
}
