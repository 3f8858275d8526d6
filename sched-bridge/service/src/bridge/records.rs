//! Accounting records, of which there are many, in a form that is copied in little time: views are copied whenever something changes
//! while somebody looks.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Records of one part. Only the newest part grows.
const PART: usize = 512;

type Part = BTreeMap<String, Arc<str>>;

/// Records as they were written, by key. Keys begin with the time.
#[derive(Debug, Clone, Default)]
pub(super) struct Records {
    full: Vec<Arc<Part>>,
    newest: Part,
}

impl Records {
    pub fn insert(&mut self, key: String, text: Arc<str>) {
        self.remove(&key);
        self.newest.insert(key, text);
        if self.newest.len() >= PART {
            self.full.push(Arc::new(std::mem::take(&mut self.newest)));
        }
    }

    pub fn remove(&mut self, key: &str) {
        if self.newest.remove(key).is_none()
            && let Some(part) = self.full.iter_mut().rev().find(|part| part.contains_key(key))
        {
            Arc::make_mut(part).remove(key);
        }
    }

    /// All, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let parts = self.full.iter().map(AsRef::as_ref).chain([&self.newest]);
        // Bridges write with clocks of their own: parts may overlap.
        let mut all: Vec<(&str, &str)> =
            parts.flatten().map(|(key, text)| (key.as_str(), text.as_ref())).collect();
        all.sort_unstable();
        all.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_in_order_whoever_wrote_them() {
        let mut records = Records::default();
        let key = |at: usize| format!("{:05}", (at * 7919) % 2003);
        for at in 0..2003 {
            records.insert(key(at), "old".into());
        }
        let copy = records.clone();
        records.insert(key(5), "new".into());
        records.remove(&key(6));
        records.remove("nobody");
        assert!(copy.iter().map(|(key, _)| key.to_owned()).eq((0..2003).map(|at| format!("{at:05}"))));
        assert!(copy.iter().all(|(_, text)| text == "old"));
        assert_eq!(records.iter().count(), 2002);
        assert_eq!(records.iter().filter(|(_, text)| *text == "new").count(), 1);
    }
}
