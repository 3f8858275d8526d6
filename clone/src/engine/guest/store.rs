//! What outlives the daemon of guests that fork themselves: tickets, ends of children, and answers that guests wait for.
//!
//! ```text
//! forks/tickets/TICKET/ticket.json   its children and where they are; before any of them runs
//! forks/tickets/TICKET/NUMBER.json   how a child has ended; before the child is gone
//! forks/answers/VM.json              what a guest asked, or is to be told; until it was
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmove_node::disk::Disk;
use vmove_node::files::{read_all_json, write_atomically, write_durably_on};
use vmove_node::record::VmRecord;

use super::family::{Family, TicketRecord};

const TICKET: &str = "ticket.json";
/// Characters.
const LONGEST_TICKET: usize = 64;

/// What a guest waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Waits {
    /// The answer to its fork with this ticket.
    Fork(String),
    /// The ends of the children of this ticket.
    Join(String),
    /// The end of these.
    Kill(String),
    /// This line.
    Line(Value),
}

/// What a VM's guest waits for, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owed {
    vm: String,
    pid: i32,
    #[serde(with = "vmove_node::boot")]
    pid_start: u64,
    waits: Waits,
}

/// The files of a node's tickets.
#[derive(Debug, Clone)]
pub struct Store {
    disk: Arc<dyn Disk>,
    tickets: PathBuf,
    answers: PathBuf,
}

impl Store {
    /// Below the folder of journals of forks.
    pub fn new(journals: &Path, disk: Arc<dyn Disk>) -> Self {
        Self { disk, tickets: journals.join("tickets"), answers: journals.join("answers") }
    }

    /// Refuses what is no ticket: other nodes name them, too, and a path would lead elsewhere.
    fn folder(&self, ticket: &str) -> io::Result<PathBuf> {
        let is_ticket = (1..=LONGEST_TICKET).contains(&ticket.len())
            && ticket.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if is_ticket {
            return Ok(self.tickets.join(ticket));
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a ticket, found {ticket:?}")))
    }

    /// Writes a ticket down.
    pub fn put(&self, record: &TicketRecord) -> io::Result<()> {
        let folder = self.folder(&record.ticket)?;
        self.disk.create_dir_all(&folder)?;
        write_durably_on(&*self.disk, &folder.join(TICKET), record)
    }

    /// Writes the end of a child down.
    pub fn put_end(&self, ticket: &str, index: u32, end: &Value) -> io::Result<()> {
        write_durably_on(&*self.disk, &self.folder(ticket)?.join(format!("{index}.json")), end)
    }

    /// Forgets a ticket; that it is not there is fine.
    pub fn remove(&self, ticket: &str) -> io::Result<()> {
        match self.disk.remove_dir_all(&self.folder(ticket)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All tickets that an earlier life of the daemon has left. What cannot be read is told of in the log, and left.
    pub fn read_all(&self) -> Vec<Family> {
        let Ok(entries) = self.disk.list(&self.tickets) else { return Vec::new() };
        let mut found = Vec::new();
        for entry in entries {
            let folder = self.tickets.join(&entry.name);
            match self.read(&folder) {
                Ok(family) => found.push(family),
                // Its first line was not written: no child of it has run.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let _ = self.disk.remove_dir_all(&folder);
                }
                Err(error) => {
                    tracing::error!(path = %folder.display(), %error, "a ticket of a guest cannot be read: it is not known here");
                }
            }
        }
        found
    }

    fn read(&self, folder: &Path) -> io::Result<Family> {
        let parse = |name: &str| {
            let bytes = self.disk.read(&folder.join(name))?;
            serde_json::from_slice::<Value>(&bytes).map_err(io::Error::from)
        };
        let record: TicketRecord = serde_json::from_value(parse(TICKET)?)?;
        let mut ends = BTreeMap::new();
        for entry in self.disk.list(folder)? {
            let index = entry.name.strip_suffix(".json").and_then(|name| name.parse().ok());
            let Some(index) = index else { continue };
            ends.insert(index, parse(&entry.name)?);
        }
        Ok(Family::read(record, ends))
    }

    /// Notes what a VM's guest waits for. It need not survive the host: the guest does not either.
    pub fn owe(&self, vm: &VmRecord, waits: Waits) -> io::Result<()> {
        self.disk.create_dir_all(&self.answers)?;
        let owed = Owed { vm: vm.name.clone(), pid: vm.pid, pid_start: vm.pid_start, waits };
        write_atomically(&self.answer(&vm.name), &owed)
    }

    /// What the guest of a VM waits for.
    pub fn owed(&self, vm: &VmRecord) -> Option<Waits> {
        let bytes = self.disk.read(&self.answer(&vm.name)).ok()?;
        let owed: Owed = serde_json::from_slice(&bytes).ok()?;
        (owed.pid == vm.pid && owed.pid_start == vm.pid_start).then_some(owed.waits)
    }

    /// The guest was told, or is gone.
    pub fn told(&self, vm: &str) {
        match self.disk.remove_file(&self.answer(vm)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%vm, %error, "that a guest was answered cannot be noted");
            }
            _ => {}
        }
    }

    /// Forgets answers to VMs that `lives` does not know.
    pub fn sweep(&self, lives: impl Fn(&str) -> bool) {
        for (_, owed) in read_all_json::<Owed>(&self.answers) {
            if let Ok(owed) = owed
                && !lives(&owed.vm)
            {
                self.told(&owed.vm);
            }
        }
    }

    fn answer(&self, vm: &str) -> PathBuf {
        self.answers.join(format!("{vm}.json"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;
    use vmove_node::disk::KernelDisk;

    use super::*;
    use crate::engine::guest::family::Place;
    use crate::record::Lineage;

    #[test]
    fn tickets_and_ends_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), Arc::new(KernelDisk));
        assert!(store.read_all().is_empty());
        let record = TicketRecord {
            ticket: "t".to_owned(),
            parent: "web".to_owned(),
            home: None,
            lineage: Lineage { root: "a/web".to_owned(), depth: 1 },
            children: [(1, Place { vm: "web.1".to_owned(), node: None })].into(),
            size: 1,
            hosts: BTreeSet::new(),
            kill_on: BTreeSet::new(),
            closed: false,
        };
        store.put(&record).unwrap();
        assert_eq!(store.read_all()[0].results(), None);
        store.put_end("t", 1, &json!({ "result": [1] })).unwrap();
        let read = store.read_all().pop().unwrap();
        assert_eq!(read.record, record);
        assert_eq!(read.results(), Some(vec![json!({ "index": 1, "result": [1] })]));
        store.remove("t").unwrap();
        store.remove("t").unwrap();
        assert!(store.read_all().is_empty());
    }

    #[test]
    fn a_path_is_no_ticket() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("forks"), Arc::new(KernelDisk));
        let other = dir.path().join("other");
        std::fs::create_dir_all(dir.path().join("forks/tickets")).unwrap();
        std::fs::create_dir(&other).unwrap();
        for ticket in ["", ".", "..", "../../other", other.to_str().unwrap(), "a/b", "a\0b", &"a".repeat(65)]
        {
            assert_eq!(store.remove(ticket).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{ticket:?}");
            store.put_end(ticket, 1, &Value::Null).unwrap_err();
        }
        assert!(other.is_dir() && dir.path().join("forks/tickets").is_dir());
    }

    #[test]
    fn an_answer_is_owed_to_this_vm_and_no_later_one_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), Arc::new(KernelDisk));
        let record = |pid| -> VmRecord {
            serde_json::from_value(json!({
                "name": "web", "pid": pid, "pid_start": 8, "qmp_socket": "/q", "vm_dir": "/v",
                "backing": "thp", "command_line": [], "ram": [], "adopted": false,
            }))
            .unwrap()
        };
        store.owe(&record(7), Waits::Join("t".to_owned())).unwrap();
        assert_eq!(store.owed(&record(7)), Some(Waits::Join("t".to_owned())));
        assert_eq!(store.owed(&record(9)), None);
        store.sweep(|vm| vm == "web");
        assert!(store.owed(&record(7)).is_some());
        store.sweep(|_| false);
        assert_eq!(store.owed(&record(7)), None);
    }
}
