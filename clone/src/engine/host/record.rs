//! What another host's part in a fork leaves behind if its daemon is killed: one small file names it all.

use std::path::{Path, PathBuf};

use crate::CloneError;
use crate::template;
use serde::{Deserialize, Serialize};
use vmove_node::files::{read_all_json, write_atomically};

/// Children and template of a fork that was begun elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// Id of the fork.
    pub fork: String,
    /// Name of the parent, and its node.
    pub parent: String,
    pub node: String,
    /// Names of the children.
    pub children: Vec<String>,
    /// They may run before the template is whole: what they miss then, nobody can give them any more.
    pub fetching: bool,
    /// Folders of the template: it is in nobody's way to remove them once children map what is in them.
    pub template: Vec<PathBuf>,
}

impl HostRecord {
    fn path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.json", self.fork))
    }

    /// Writes it down, before anything that it names is made.
    pub fn write(&self, dir: &Path) -> Result<(), CloneError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CloneError::Io { action: "write", path, source }
        };
        std::fs::create_dir_all(dir).map_err(failed(dir))?;
        let path = self.path(dir);
        write_atomically(&path, self).map_err(failed(&path))
    }

    /// Nothing that it names has to be looked after any more, but for the template.
    pub fn close(&self, dir: &Path) {
        template::remove(&self.template);
        if let Err(error) = std::fs::remove_file(self.path(dir)) {
            tracing::warn!(fork = %self.fork, %error, "the record of a fork from another node is left");
        }
    }

    /// Those that an earlier life of the daemon left, each with its file.
    pub fn left(dir: &Path) -> Vec<(PathBuf, std::io::Result<Self>)> {
        read_all_json(dir)
    }
}
