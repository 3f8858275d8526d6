//! What is in the folder of an authority, and what is put there: all of it, or nothing.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::Deserialize;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use vmove_types::node::DEFAULT_PORT;

use crate::args::setup::NodeWanted;

/// The folders of nodes and of clients.
pub const NODES: &str = "nodes";
pub const CLIENTS: &str = "clients";

/// Why something is not as it should be in the folder.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// It is there already.
    #[error("{path} is there already, and nothing is overwritten; {remedy}")]
    There { path: PathBuf, remedy: &'static str },
    /// The kernel refuses it.
    #[error("could not {what} {path}: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// What an earlier run has made is damaged.
    #[error("{path} should be what an earlier run has made, and cannot be read ({why}); move it away")]
    Damaged { path: PathBuf, why: String },
}

/// Nodes and clients of earlier runs.
#[derive(Debug, Default)]
pub struct Known {
    pub nodes: Vec<NodeWanted>,
    /// Name, and `[[client]]` entry.
    pub clients: Vec<(String, String)>,
}

impl Known {
    /// Those in this folder, by name.
    pub fn read(folder: &Path) -> Result<Self, FolderError> {
        let nodes = names(&folder.join(NODES))?;
        let nodes = nodes.into_iter().map(|name| node(&folder.join(NODES).join(&name), name));
        let clients = names(&folder.join(CLIENTS))?.into_iter().map(|name| {
            let entry = read(&folder.join(CLIENTS).join(&name).join("client.toml"))?;
            Ok((name, entry))
        });
        Ok(Self { nodes: nodes.collect::<Result<_, _>>()?, clients: clients.collect::<Result<_, _>>()? })
    }

    /// Takes in those of another folder that are not here.
    pub fn add(&mut self, other: Self) {
        let (nodes, clients) = (other.nodes.into_iter(), other.clients.into_iter());
        let new: Vec<_> = nodes.filter(|new| self.nodes.iter().all(|n| n.name != new.name)).collect();
        self.nodes.extend(new);
        let new: Vec<_> = clients.filter(|(new, _)| self.clients.iter().all(|(n, _)| n != new)).collect();
        self.clients.extend(new);
    }
}

/// The names of the folders in a folder, sorted; none if it is not there.
fn names(folder: &Path) -> Result<Vec<String>, FolderError> {
    let failed = |source| FolderError::Io { what: "read", path: folder.to_owned(), source };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.path().is_dir() {
            found.extend(entry.file_name().into_string());
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<String, FolderError> {
    std::fs::read_to_string(path).map_err(|source| FolderError::Io {
        what: "read",
        path: path.to_owned(),
        source,
    })
}

/// What is needed of the vmoved.toml of a node.
#[derive(Debug, Deserialize)]
struct Settings {
    listen: Option<SocketAddr>,
}

/// A node, from its certificate and its settings.
fn node(folder: &Path, name: String) -> Result<NodeWanted, FolderError> {
    let (cert, settings) = (folder.join("node.pem"), folder.join("vmoved.toml"));
    let damaged = |path: &Path, why: String| FolderError::Damaged { path: path.to_owned(), why };
    let der = CertificateDer::from_pem_slice(read(&cert)?.as_bytes());
    let der = der.map_err(|error| damaged(&cert, error.to_string()))?;
    let (_, own) = X509Certificate::from_der(&der).map_err(|error| damaged(&cert, error.to_string()))?;
    let names = own.subject_alternative_name().ok().flatten();
    let hosts: Vec<String> =
        names.iter().flat_map(|names| &names.value.general_names).filter_map(host).collect();
    if hosts.is_empty() {
        return Err(damaged(&cert, "it is for no name or address".to_owned()));
    }
    let read: Settings =
        toml::from_str(&read(&settings)?).map_err(|error| damaged(&settings, error.to_string()))?;
    Ok(NodeWanted { name, hosts, port: read.listen.map_or(DEFAULT_PORT, |listen| listen.port()) })
}

fn host(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let four = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            four.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from)).ok().map(|a| a.to_string())
        }
        _ => None,
    }
}

/// What was made in this run. It is removed again unless it is [kept](Made::keep).
#[derive(Debug, Default)]
pub struct Made {
    files: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Made {
    /// Makes a folder, and those above it, for its owner only, unless it is there.
    pub fn folder(&mut self, path: &Path) -> Result<(), FolderError> {
        if path.is_dir() || path.as_os_str().is_empty() {
            return Ok(());
        }
        if let Some(above) = path.parent() {
            self.folder(above)?;
        }
        let made = DirBuilder::new().mode(0o700).create(path);
        made.map_err(|source| FolderError::Io { what: "make", path: path.to_owned(), source })?;
        self.folders.push(path.to_owned());
        Ok(())
    }

    /// Makes a file that all may read.
    pub fn file(&mut self, path: &Path, text: &str) -> Result<(), FolderError> {
        self.write(path, text, 0o644)
    }

    /// Makes a file for its owner only.
    pub fn secret(&mut self, path: &Path, text: &str) -> Result<(), FolderError> {
        self.write(path, text, 0o600)
    }

    fn write(&mut self, path: &Path, text: &str, mode: u32) -> Result<(), FolderError> {
        let failed = |source| FolderError::Io { what: "write", path: path.to_owned(), source };
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
        self.files.push(path.to_owned());
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)
    }

    /// All is there.
    pub fn keep(mut self) {
        self.files.clear();
        self.folders.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
        for folder in self.folders.iter().rev() {
            let _ = std::fs::remove_dir(folder);
        }
    }
}
