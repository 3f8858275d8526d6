//! A session's journal at the source, read with its group in mind: the group's line commits its members before their own lines do.

use std::io;
use std::path::Path;

use vmove_node::disk::Disk;
use vmove_node::journal::Journal;
use vmove_node::peer::SessionId;

use super::record::{GroupRecord, journal_path};
use crate::ownership::SourceState;
use crate::records::SourceRecord;

/// The newest record of a session at the source; nothing if it has not begun.
pub(crate) fn read(disk: &dyn Disk, sessions_dir: &Path, id: SessionId) -> io::Result<Option<SourceRecord>> {
    let record = Journal::<SourceRecord>::read_begun_on(disk, &path(sessions_dir, id))?;
    let Some(mut record) = record else { return Ok(None) };
    if is_committed_by_group(disk, sessions_dir, &record)? {
        record.enter(SourceState::Committed);
    }
    Ok(Some(record))
}

/// Opens the journal of a session at the source; nothing if it has not begun. A line that its group's decision stands for is written, or owed.
pub(crate) fn open(
    disk: &dyn Disk,
    sessions_dir: &Path,
    id: SessionId,
) -> io::Result<Option<Journal<SourceRecord>>> {
    let journal = Journal::<SourceRecord>::open_begun_on(disk, &path(sessions_dir, id))?;
    let Some(mut journal) = journal else { return Ok(None) };
    if is_committed_by_group(disk, sessions_dir, journal.record())? {
        // Safe without its line: whoever finds the older one comes here again.
        if let Err(error) = journal.update_owing(|r| r.enter(SourceState::Committed)) {
            tracing::warn!(migration = %id, %error, "the journal does not take what its group has decided; it is written with the next line");
        }
    }
    Ok(Some(journal))
}

/// A group whose journal cannot be read, or is not there, may have decided anything: an error, never "no".
fn is_committed_by_group(disk: &dyn Disk, sessions_dir: &Path, record: &SourceRecord) -> io::Result<bool> {
    let Some(group) = record.group.filter(|_| record.state == SourceState::Stopped) else { return Ok(false) };
    let path = journal_path(sessions_dir, group);
    let of_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let group = Journal::<GroupRecord>::read_on(disk, &path).map_err(of_path)?;
    Ok(group.has_committed(record.id))
}

fn path(sessions_dir: &Path, id: SessionId) -> std::path::PathBuf {
    sessions_dir.join(id.to_string()).join("source.jsonl")
}
