//! What journals on a node's disk say, read by somebody who knows nothing of the daemon's types.

use std::path::Path;

use serde_json::Value;

use crate::plan::NodeIndex;
use crate::world::World;

/// The last whole line of a journal.
fn last_line(bytes: &[u8]) -> Option<Value> {
    let whole = &bytes[..=bytes.iter().rposition(|byte| *byte == b'\n')?];
    let line = whole.trim_ascii_end().rsplit(|byte| *byte == b'\n').next()?;
    serde_json::from_slice(line).ok()
}

/// A session to a node.
#[derive(Debug)]
pub struct Session {
    pub id: String,
    /// The guest came for a visit, and was not told to stay.
    pub is_visit: bool,
}

/// The session to a node that has brought this QEMU.
#[must_use]
pub fn session_of(world: &World, node: NodeIndex, pid: i32) -> Option<Session> {
    let files = std::sync::Arc::clone(&world.state().nodes[node].files);
    let files = files.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut journals = files.paths();
    journals.retain(|path| path.file_name() == Some("destination.jsonl".as_ref()));
    journals.iter().find_map(|path| {
        let record = last_line(&files.bytes(path)?)?;
        (record.get("vm")?.get("pid")?.as_i64() == Some(i64::from(pid))).then_some(())?;
        let id = path.parent().and_then(Path::file_name)?.to_str()?.to_owned();
        let goes = record.pointer("/prepare/spec/visit").and_then(Value::as_str) == Some("go");
        let stays = record.get("stays").and_then(Value::as_bool) == Some(true);
        Some(Session { id, is_visit: goes && !stays })
    })
}
