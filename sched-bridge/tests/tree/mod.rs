//! Trees of `/sys` and `/proc`, as recorded.

use std::os::unix::fs::symlink;

use tempfile::TempDir;

/// Makes files and links of a manifest, but for those that `skip` says.
pub fn expand(manifest: &str, skip: impl Fn(&str) -> bool) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for line in manifest.lines().filter(|line| !line.starts_with('#') && !skip(line)) {
        let (head, rest) = line.split_once('\t').unwrap();
        let (kind, path) = head.split_once(' ').unwrap();
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        match kind {
            "F" => std::fs::write(path, rest.replace("\\n", "\n")).unwrap(),
            "L" => symlink(rest, path).unwrap(),
            other => panic!("{other}"),
        }
    }
    root
}
