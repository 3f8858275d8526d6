//! Files with inputs: `tests/fuzz/corpus/TARGET/`.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// The folder with inputs of a target.
#[must_use]
pub fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// All inputs of a folder, by their names.
///
/// # Errors
/// The folder or a file cannot be read.
pub fn read(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        paths.push(entry?.path());
    }
    paths.sort();
    paths.into_iter().map(|path| fs::read(&path).map(|bytes| (path, bytes))).collect()
}

/// Writes inputs into a folder, by numbers.
///
/// # Errors
/// The folder or a file cannot be written.
pub fn write(folder: &Path, inputs: &[Vec<u8>]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (number, input) in inputs.iter().enumerate() {
        fs::write(folder.join(format!("seed-{number:03}")), input)?;
    }
    Ok(())
}

/// Keeps an input that failed, below cargo's target folder. Where it is.
#[must_use]
pub fn keep_failed(target: &str, input: &[u8]) -> PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), PathBuf::from)
        .join("fuzz/failed");
    let path = folder.join(format!("{target}-{}", std::process::id()));
    if let Err(error) = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, input)) {
        eprintln!("the input could not be written to {}: {error}; it is {input:?}", path.display());
    }
    path
}
