//! Guest RAM as QEMU has it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Ask, text};
use crate::QmpError;

/// What a RAM file's file system makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PageKind {
    /// tmpfs.
    Tmpfs,
    /// hugetlbfs.
    Hugetlbfs,
    /// A file on a disk, or on another file system.
    OtherFile,
    /// No named file.
    Anonymous,
}

/// One memory back end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RamFact {
    /// Its id; `None` for the RAM of a guest without `memory-backend` objects.
    pub id: Option<String>,
    /// Type, such as `memory-backend-file`.
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// Whether other processes that map it see the same bytes.
    pub share: bool,
    /// Its file, if it is a named one.
    pub path: Option<String>,
    /// What its file is on.
    pub pages: PageKind,
    /// Page size of its file, in bytes: 4096, or that of hugetlbfs.
    pub page_bytes: u64,
    /// Whether QEMU touched all of it at its start.
    pub prealloc: bool,
}

impl RamFact {
    /// Whether it is a shared named file, which is what can be moved.
    #[must_use]
    pub fn movable(&self) -> bool {
        self.share
            && self.kind == "memory-backend-file"
            && matches!(self.pages, PageKind::Tmpfs | PageKind::Hugetlbfs)
    }
}

pub(super) async fn facts(ask: &Ask<'_>) -> Result<Vec<RamFact>, QmpError> {
    let reply = ask.query("query-memdev").await?;
    let mut found = Vec::new();
    for entry in reply.as_array().map(Vec::as_slice).unwrap_or_default() {
        let id = text(entry, "id");
        let flag = |name| entry.get(name).and_then(Value::as_bool).unwrap_or(false);
        let (kind, path) = match &id {
            Some(id) => detail(ask, id).await?,
            None => (String::new(), None),
        };
        let (pages, page_bytes) = path.as_deref().map_or((PageKind::Anonymous, 4096), page_kind);
        found.push(RamFact {
            id,
            kind,
            size: entry.get("size").and_then(Value::as_u64).unwrap_or(0),
            share: flag("share"),
            path,
            pages,
            page_bytes,
            prealloc: flag("prealloc"),
        });
    }
    Ok(found)
}

async fn detail(ask: &Ask<'_>, id: &str) -> Result<(String, Option<String>), QmpError> {
    let object = format!("/objects/{id}");
    let string = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
    let kind = string(ask.property(&object, "type").await?).unwrap_or_default();
    let path = string(ask.property(&object, "mem-path").await?);
    Ok((kind, path.filter(|path| !path.is_empty())))
}

/// By `statfs`. A path that is a directory holds a nameless file.
fn page_kind(path: &str) -> (PageKind, u64) {
    const TMPFS: u64 = 0x0102_1994;
    const HUGETLBFS: u64 = 0x9584_58f6;
    let path = std::path::Path::new(path);
    let Ok(stat) = rustix::fs::statfs(path) else {
        return (PageKind::OtherFile, 4096);
    };
    if path.is_dir() {
        return (PageKind::Anonymous, 4096);
    }
    // The fields are signed on some libcs.
    let block = u64::try_from(stat.f_bsize).unwrap_or(4096);
    match u64::try_from(stat.f_type).unwrap_or(0) {
        TMPFS => (PageKind::Tmpfs, 4096),
        HUGETLBFS => (PageKind::Hugetlbfs, block),
        _ => (PageKind::OtherFile, 4096),
    }
}
