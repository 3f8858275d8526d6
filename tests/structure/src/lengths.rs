//! Files that hold more than one idea.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Lines that a file may have.
pub const LONGEST: usize = 600;
/// Files that people write and read.
const KINDS: [&str; 6] = ["rs", "sh", "py", "s", "c", "h"];
/// Folders of which nobody writes the files.
const NOT_OURS: [&str; 1] = ["target"];

/// Files below `root` that people write, in order.
pub fn written(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    collect(root, &mut files)?;
    files.sort();
    Ok(files)
}

/// Those of `files` that are too long.
pub fn too_long(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for path in files {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        let lines = text.lines().count();
        if lines > LONGEST {
            let path = path.strip_prefix(root).unwrap_or(path).display();
            found.push(format!("{path} has {lines} lines; at most {LONGEST} are read as one"));
        }
    }
    Ok(found)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("could not list {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let kind = entry.file_type()?;
        if kind.is_dir() && !name.starts_with('.') && !NOT_OURS.contains(&&*name) {
            collect(&path, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|e| KINDS.iter().any(|kind| e == *kind)) {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_are_named_and_what_is_built_is_not_looked_at() {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |path: &str, lines: usize| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("makes it");
            std::fs::write(path, "line\n".repeat(lines)).expect("writes");
        };
        write("a/src/long.rs", LONGEST + 1);
        write("a/src/fits.rs", LONGEST);
        write("a/src/data.txt", 2 * LONGEST);
        write("target/made.rs", 2 * LONGEST);
        let found = too_long(dir.path(), &written(dir.path()).expect("a list")).expect("it can be read");
        assert_eq!(found, ["a/src/long.rs has 601 lines; at most 600 are read as one"]);
    }
}
