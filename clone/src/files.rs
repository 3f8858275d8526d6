//! Files that may be gone already.

use std::io;
use std::path::Path;

use crate::CloneError;

/// Removes a file; that it is not there is fine.
pub(crate) fn remove_file(path: &Path) -> Result<(), CloneError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(CloneError::io("remove", path)(source))
        }
        _ => Ok(()),
    }
}
