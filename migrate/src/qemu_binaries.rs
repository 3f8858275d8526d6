//! What the QEMU binaries of this host are. Each is asked once.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::OnceCell;
use vmove_qmp::inspect::{HostQemu, InspectHostError, inspect_binary};

/// What a QEMU binary is: asked once, since that means starting it (0.1 s), and again when the file has changed. Who wants to know
/// while it is being asked waits for that answer.
pub(crate) async fn known_qemu(path: &Path) -> Result<HostQemu, InspectHostError> {
    type Known = HashMap<(PathBuf, Option<SystemTime>), Arc<OnceCell<HostQemu>>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    // By whatever name it is called.
    let file = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let key = (file, std::fs::metadata(path).and_then(|m| m.modified()).ok());
    let known = {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.get_or_insert_default().entry(key).or_default())
    };
    // A failure is not kept.
    known.get_or_try_init(|| inspect_binary(path)).await.cloned()
}

/// Asks these QEMU binaries what they are, one after the other, so that the first migration that wants one need not wait for
/// that.
pub async fn learn_qemus(paths: &[PathBuf]) {
    for path in paths {
        if let Err(error) = known_qemu(path).await {
            tracing::info!(path = %path.display(), error = vmove_types::problem::chain(&error), "not a QEMU that can be used");
        }
    }
}
