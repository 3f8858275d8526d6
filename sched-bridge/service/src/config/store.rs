//! Where the state is kept.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use vmove_http::client::{BadEndpoint, Endpoint};

use crate::store::{Embedded, Etcd, Store};

/// A store that can be opened.
#[derive(Debug)]
pub enum StoreChoice {
    /// A file of this host.
    Redb(PathBuf),
    /// Members of an etcd.
    Etcd {
        /// Their addresses.
        members: Vec<Endpoint>,
        /// Their `--max-txn-ops`.
        max_txn_ops: usize,
    },
}

impl StoreChoice {
    /// Reads `redb:FILE` or `etcd:URL[,URL...]`.
    ///
    /// # Errors
    /// It is neither.
    pub fn read(text: &str, max_txn_ops: usize) -> anyhow::Result<Self> {
        if let Some(path) = text.strip_prefix("redb:") {
            return Ok(Self::Redb(path.into()));
        }
        let Some(urls) = text.strip_prefix("etcd:") else {
            bail!("--store {text:?}: expected redb:FILE or etcd:http://HOST:PORT[,http://HOST:PORT...]");
        };
        let members: Result<Vec<Endpoint>, BadEndpoint> = urls.split(',').map(str::parse).collect();
        let members = members.map_err(|e| anyhow::anyhow!("--store {text:?}: {e}"))?;
        if members.iter().any(|member| matches!(member, Endpoint::Tls(_))) {
            bail!("--store {text:?}: etcd is asked by plain HTTP: expected http://HOST:PORT");
        }
        Ok(Self::Etcd { members, max_txn_ops })
    }

    /// Opens it.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(&self) -> anyhow::Result<Arc<dyn Store>> {
        match self {
            Self::Redb(path) => Ok(Arc::new(Embedded::open(path)?)),
            Self::Etcd { members, max_txn_ops } => {
                let etcd = Etcd::new(members.clone(), "/vmove/bridge/", Duration::from_secs(5));
                Ok(Arc::new(etcd.with_max_txn_ops(*max_txn_ops)))
            }
        }
    }
}

/// Opens `redb:FILE` or `etcd:URL[,URL...]`.
///
/// # Errors
/// It is neither, or the file cannot be opened.
pub fn open_store(text: &str, max_txn_ops: usize) -> anyhow::Result<Arc<dyn Store>> {
    StoreChoice::read(text, max_txn_ops)?.open()
}
