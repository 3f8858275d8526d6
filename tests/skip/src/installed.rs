//! Files of this repository that go with a daemon, as its tests look at them.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::Command;
use clap_complete::{Generator, Shell};

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

/// Set by whoever wants checked-in pages written anew instead of compared.
const WRITE: &str = "VMOVE_WRITE_DOCS";

/// Checks that a file that is made from the program is current. With `VMOVE_WRITE_DOCS` in the environment it is written. `package` has the
/// test, whose name begins with `the_checked_in`.
///
/// # Panics
/// It is another one, or cannot be written.
pub fn is_current(path: &str, made: &[u8], package: &str) {
    let path = root().join(path);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, made).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    assert!(
        std::fs::read(&path).unwrap_or_default() == made,
        "{} is out of date: run {WRITE}=1 cargo test -p {package} --lib the_checked_in",
        path.display()
    );
}

/// Checks the man page of a program, which is in `folder`: `vmove man` installs it with the others.
///
/// # Panics
/// As [`is_current`].
pub fn man_page_is_current(command: Command, folder: &str, package: &str) {
    let mut page = Vec::new();
    let path = format!("{folder}/{}.1", command.get_name());
    clap_mangen::Man::new(command.disable_help_subcommand(true)).render(&mut page).expect("into memory");
    is_current(&path, &page, package);
}

/// Checks the completions of a program for bash, zsh and fish, which are in `folder`.
///
/// # Panics
/// As [`is_current`].
pub fn completions_are_current(mut command: Command, folder: &str, package: &str) {
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, &name, &mut script);
        is_current(&format!("{folder}/{}", shell.file_name(&name)), &script, package);
    }
}

/// The folder of this repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Checks that the example of a configuration names every key that the program takes in a table, `""` being the top one. `read` reads a
/// configuration, refuses keys that it does not know, and says which it knows.
///
/// # Panics
/// A key is missing, or unknown keys are not refused.
pub fn has_every_key<T, E: Display>(example: &str, table: &str, read: impl Fn(&str) -> Result<T, E>) {
    const UNKNOWN: &str = "no-such-key";
    let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
    let Err(error) = read(&format!("{header}{UNKNOWN} = 1\n")) else { panic!("[{table}] takes any key") };
    let error = error.to_string();
    let (_, known) = error.split_once("expected").unwrap_or_else(|| panic!("[{table}]: {error}"));
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    assert!(!known.is_empty(), "[{table}]: {error}");
    let all: toml::Table = uncommented(example).parse().expect("what is commented out is valid");
    let path = table.trim_matches(['[', ']']).split('.').filter(|name| !name.is_empty());
    let mut shown = vec![&all];
    for name in path {
        let below = shown.iter().filter_map(|at| at.get(name.trim_matches('"')));
        shown = below
            .flat_map(|value| match value {
                toml::Value::Array(all) => all.iter().filter_map(toml::Value::as_table).collect(),
                one => Vec::from_iter(one.as_table()),
            })
            .collect();
    }
    // One key may be written in two ways.
    let is = |shown: &str, key: &str| shown.replace('-', "_") == key.replace('-', "_");
    let is_missing = |key: &&str| !shown.iter().flat_map(|at| at.keys()).any(|one| is(one, key));
    let missing: Vec<&str> = known.into_iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "the example does not show {missing:?} of [{table}]");
}

/// The text of a file of this repository.
///
/// # Panics
/// It cannot be read.
#[must_use]
pub fn text(path: &str) -> String {
    let path = root().join(path);
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
