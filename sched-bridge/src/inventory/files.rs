//! Small files below a root folder, and notes on those that are not as expected.

use std::path::{Path, PathBuf};

/// Files below a root folder.
pub(super) struct Files {
    root: PathBuf,
    notes: Vec<String>,
}

impl Files {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf(), notes: Vec::new() }
    }

    pub fn into_notes(self) -> Vec<String> {
        self.notes
    }

    pub fn note(&mut self, path: &str, what: &str) {
        self.notes.push(format!("{}: {what}", self.root.join(path).display()));
    }

    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The trimmed text of an optional file; none if it is missing or empty.
    pub fn read(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.root.join(path)).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The text of a required file; empty, with a note, if it is missing.
    pub fn expect(&mut self, path: &str) -> String {
        match std::fs::read(self.root.join(path)) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                self.note(path, &format!("cannot be read ({error}); what it describes is left out"));
                String::new()
            }
        }
    }

    /// A decimal number from an optional file, with a note if the file contains something else.
    pub fn number(&mut self, path: &str) -> Option<i64> {
        let text = self.read(path)?;
        let number = text.parse().ok();
        if number.is_none() {
            self.note(path, &format!("{text:?}, expected a decimal number"));
        }
        number
    }

    /// A hexadecimal number with `0x` from a required file, with a note if it is missing or something else.
    pub fn hex(&mut self, path: &str) -> Option<u32> {
        let text = self.expect(path);
        let number = text.trim().strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        if number.is_none() && !text.is_empty() {
            self.note(path, &format!("{:?}, expected a number like 0x10de", text.trim()));
        }
        number
    }

    /// Names in a folder, sorted; none if it is missing.
    pub fn list(&self, path: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The target of a symbolic link, as written.
    pub fn link(&self, path: &str) -> Option<PathBuf> {
        std::fs::read_link(self.root.join(path)).ok()
    }

    /// The last component of the target of a symbolic link.
    pub fn link_name(&self, path: &str) -> Option<String> {
        Some(self.link(path)?.file_name()?.to_str()?.to_owned())
    }
}
