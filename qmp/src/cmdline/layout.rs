//! Where a guest's files are on one node, and the placeholders that stand for them.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};
use vmove_types::Backing;

use serde::{Deserialize, Serialize};

use super::{CommandLine, CommandLineError, Item, options, table};
use crate::client::MAX_SOCKET_PATH;
use crate::confine::Confinement;

/// Where a guest's files are on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunLayout {
    /// Monitor for vmove. If the path is too long for a socket it must lie in `vm_dir`.
    pub qmp_socket: PathBuf,
    /// QEMU's working directory; replaces `{vmdir}`. Absolute.
    pub vm_dir: PathBuf,
    /// Directory for the RAM files, on a file system of the kind that `backing` says. Absolute.
    pub memory_dir: PathBuf,
    /// What the RAM files are made of.
    pub backing: Backing,
    /// The guest's name; replaces `{name}`. May hold blanks, commas and non-ASCII letters.
    pub name: String,
    /// With which rights QEMU runs there.
    pub confinement: Confinement,
}

/// A file of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamFileSpec {
    /// QEMU's id of the back end; also the name of the RAM block in migration.
    pub id: String,
    /// The file. Absolute, unless the command line gives a relative one.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
}

impl RunLayout {
    /// Where the RAM of back end `id` is on this node. Different names or ids never have the same file.
    #[must_use]
    pub fn ram_file(&self, id: &str) -> PathBuf {
        // No dot in the second part: with dots in both, `a.b` with `c` would have the file of `a` with `b.c`.
        let id = file_name_part(id).replace('.', "%2E");
        self.memory_dir.join(format!("{}.{id}", file_name_part(&self.name)))
    }

    /// The monitor socket as QEMU shall be told it: relative to its working directory, if the full path is too long.
    pub(super) fn socket_argument(&self) -> Result<PathBuf, CommandLineError> {
        let fits = |path: &Path| path.as_os_str().len() <= MAX_SOCKET_PATH;
        if fits(&self.qmp_socket) {
            return Ok(self.qmp_socket.clone());
        }
        match self.qmp_socket.strip_prefix(&self.vm_dir) {
            Ok(relative) if fits(relative) => Ok(relative.to_owned()),
            _ => Err(CommandLineError::SocketPath {
                path: self.qmp_socket.clone(),
                length: self.qmp_socket.as_os_str().len(),
            }),
        }
    }
}

/// A name as part of a file name: `/`, `%`, control characters and a leading dot are percent-encoded. It is not cut: two names could
/// become one. A name of a VM has 64 bytes at most; what is too long for a file is refused by the kernel.
fn file_name_part(name: &str) -> String {
    let mut out = String::new();
    for (at, c) in name.char_indices() {
        let bad = c == '/' || c == '%' || c.is_control() || (at == 0 && c == '.');
        if bad {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

impl CommandLine {
    /// Replaces the placeholders, each by the rules of the place it stands in.
    pub(super) fn substitute(&mut self, layout: &RunLayout) {
        for item in &mut self.items {
            let plain = table::is_plain(item.name(), item.value().as_bytes());
            let new = item.value.as_deref().and_then(|value| substituted(value, plain, layout));
            item.value = new.or(item.value.take());
        }
    }
}

/// The value with its placeholders replaced; `None` if it has none.
fn substituted(value: &OsStr, plain: bool, layout: &RunLayout) -> Option<OsString> {
    let bytes = value.as_bytes();
    if !contains(bytes, b"{vmdir}") && !contains(bytes, b"{name}") {
        return None;
    }
    let json = bytes.first() == Some(&b'{') && bytes[1..].trim_ascii_start().first() == Some(&b'"');
    let write = |text: &OsStr| -> Vec<u8> {
        match (text.to_str(), plain, json) {
            (Some(text), _, true) => {
                let quoted = serde_json::to_string(text).unwrap_or_default();
                quoted.as_bytes().get(1..quoted.len().saturating_sub(1)).unwrap_or_default().to_vec()
            }
            (Some(text), false, false) => options::escape(text).into_bytes(),
            _ => text.as_bytes().to_vec(),
        }
    };
    let named = match (bytes.strip_prefix(b"unix:{"), layout.vm_dir.to_str()) {
        (Some(rest), Some(dir)) if !plain => [unix(dir).as_bytes(), b"{", rest].concat(),
        _ => bytes.to_vec(),
    };
    let bytes = replace(&named, b"{vmdir}", &write(layout.vm_dir.as_os_str()));
    let bytes = replace(&bytes, b"{name}", &write(OsStr::new(&layout.name)));
    Some(OsString::from_vec(bytes))
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

fn replace(bytes: &[u8], needle: &[u8], with: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, tail)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(needle) {
            out.extend_from_slice(with);
            rest = after;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

/// What stands before the path of a socket. QEMU takes a path with an equals sign for the name of an option, unless it is named itself.
fn unix(path: &str) -> &'static str {
    if path.contains('=') { "unix:path=" } else { "unix:" }
}

/// `-qmp` for vmove itself.
pub(super) fn own_monitor(layout: &RunLayout) -> Result<Item, CommandLineError> {
    let path = layout.socket_argument()?;
    let text = path.to_str().ok_or_else(|| CommandLineError::Unreadable {
        option: "-qmp".to_owned(),
        value: path.display().to_string(),
        expected: "the path of the monitor socket must be UTF-8",
    })?;
    Ok(Item::new("-qmp", format!("{}{},server=on,wait=off", unix(text), options::escape(text))))
}
