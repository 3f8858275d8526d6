//! Trees of `/sys` and `/proc`, as recorded: one line for each file (`F PATH<tab>TEXT`, a newline as `\\n`), link (`L PATH<tab>TARGET`) and empty
//! folder (`D PATH`).

use std::os::unix::fs::symlink;

use tempfile::TempDir;

/// Makes files, links and folders of a manifest, but for the lines that `skip` says.
///
/// # Panics
/// A line is none of a manifest, or the disk is full.
#[must_use]
pub fn expand(manifest: &str, skip: impl Fn(&str) -> bool) -> TempDir {
    let root = tempfile::tempdir().expect("a folder");
    for line in manifest.lines().filter(|line| !line.starts_with('#') && !skip(line)) {
        let (head, rest) = match line.split_once('\t') {
            Some(parts) => parts,
            None if line.starts_with("D ") => (line, ""),
            None => panic!("{line}: expected a tab"),
        };
        let (kind, path) = head.split_once(' ').expect("a kind and a path");
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder above it")).expect("made");
        match kind {
            "F" => std::fs::write(path, rest.replace("\\n", "\n")).expect("written"),
            "L" => symlink(rest, path).expect("linked"),
            "D" => std::fs::create_dir_all(path).expect("made"),
            other => panic!("{other}: expected F, L or D"),
        }
    }
    root
}
