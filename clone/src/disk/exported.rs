//! Images that another node serves: overlays over them name a socket on this one.

use std::path::{Path, PathBuf};

use serde_json::json;
use vmove_node::image_server::EXPORT;

use super::{Disk, Overlay};

/// Where the images of a fork's disks are for its children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Images {
    /// At their own paths.
    #[default]
    Here,
    /// On another node, which serves them.
    Exported(Exported),
}

/// Sockets that lead to images on another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Their folder. It stays as long as anybody has an overlay over these images, so that overlays can be there, too: one that has
    /// become a base is needed for longer than its VM is there.
    pub folder: PathBuf,
    /// How long a guest that reads waits for a lost connection, in seconds; then it gets an error.
    pub patience: u64,
}

impl Exported {
    /// The socket of the `number`th disk.
    #[must_use]
    pub fn socket(folder: &Path, number: usize) -> PathBuf {
        folder.join(format!("{number}.sock"))
    }

    /// An overlay over the `number`th disk, in `folder`.
    #[must_use]
    pub fn overlay(&self, disk: &Disk, number: usize, vm: &str, folder: &Path) -> Overlay {
        let server = json!({ "type": "unix", "path": Self::socket(&self.folder, number) });
        let nbd =
            json!({ "driver": "nbd", "server": server, "export": EXPORT, "reconnect-delay": self.patience });
        let base = format!("json:{}", json!({ "driver": "raw", "file": nbd }));
        // Whatever the image is, its server shows what its guest sees.
        Overlay {
            base: base.into(),
            format: "raw".to_owned(),
            ..Overlay::new(disk, number, vm, Some(folder))
        }
    }
}
