//! The file of a VM's configuration (`/etc/pve/qemu-server/VMID.conf`), changed line by line: what is not changed stays as it is, to the byte.

/// A part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// What the VM has now: the lines before the first `[...]`.
    Main,
    /// What it gets at its next start: `[PENDING]`.
    Pending,
    /// Snapshots, and what Proxmox VE notes for itself.
    Other,
}

/// A configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// With their line ends.
    lines: Vec<String>,
}

/// `key: value` on a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Where it stands.
    pub section: Section,
    /// Before the colon.
    pub key: &'a str,
    /// After it, without blanks around it.
    pub value: &'a str,
}

impl Config {
    /// Reads the text of the file. Lines of no known form are kept, and mean nothing.
    #[must_use]
    pub fn read(text: &str) -> Self {
        Self { lines: text.split_inclusive('\n').map(str::to_owned).collect() }
    }

    /// The text of the file.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines.concat()
    }

    /// All entries, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        self.numbered().map(|(_, entry)| entry)
    }

    /// What stands behind a key. Of two lines the later one counts.
    #[must_use]
    pub fn value(&self, section: Section, key: &str) -> Option<&str> {
        self.entries().filter(|entry| entry.section == section && entry.key == key).last().map(|e| e.value)
    }

    /// Whether a switch of the main section is on.
    #[must_use]
    pub fn is_on(&self, key: &str) -> bool {
        self.value(Section::Main, key).is_some_and(is_switched_on)
    }

    /// Puts a value behind a key; a key that is new is put where Proxmox VE, which sorts them, would write it.
    pub fn set(&mut self, section: Section, key: &str, value: &str) {
        let line = format!("{key}: {value}{}", self.line_end());
        let found = self.numbered().filter(|(_, e)| e.section == section && e.key == key).last();
        if let Some((at, _)) = found {
            self.lines[at] = line;
            return;
        }
        let next = self.numbered().find(|(_, e)| e.section == section && e.key > key).map(|(at, _)| at);
        let end = self.numbered().filter(|(_, e)| e.section == section).last().map(|(at, _)| at + 1);
        match (next.or(end), section) {
            (Some(at), _) => self.insert(at, line),
            (None, Section::Pending) => self.begin_pending(line),
            (None, _) => self.insert(self.first_header(), line),
        }
    }

    /// Takes a key away; a `[PENDING]` with nothing left goes with it.
    pub fn remove(&mut self, section: Section, key: &str) {
        let gone: Vec<usize> = self
            .numbered()
            .filter(|(_, entry)| entry.section == section && entry.key == key)
            .map(|(at, _)| at)
            .collect();
        for at in gone.iter().rev() {
            self.lines.remove(*at);
        }
        if section == Section::Pending && !gone.is_empty() {
            self.end_pending_if_empty();
        }
    }

    fn numbered(&self) -> impl Iterator<Item = (usize, Entry<'_>)> {
        let mut section = Section::Main;
        self.lines.iter().enumerate().filter_map(move |(at, line)| {
            if let Some(found) = header(line) {
                section = found;
                return None;
            }
            let (key, value) = key_and_value(line)?;
            Some((at, Entry { section, key, value }))
        })
    }

    /// The first `[...]`, or the end of the file.
    fn first_header(&self) -> usize {
        let found = self.lines.iter().position(|line| header(line).is_some());
        let end = found.unwrap_or(self.lines.len());
        // The blank lines before it belong to it.
        let blank = self.lines[..end].iter().rev().take_while(|line| line.trim().is_empty()).count();
        end - blank
    }

    fn insert(&mut self, at: usize, line: String) {
        let end = self.line_end();
        if let Some(before) = at.checked_sub(1).and_then(|before| self.lines.get_mut(before))
            && !before.ends_with('\n')
        {
            before.push_str(end);
        }
        self.lines.insert(at, line);
    }

    fn begin_pending(&mut self, line: String) {
        let (at, end) = (self.first_header(), self.line_end());
        for (offset, line) in [end.to_owned(), format!("[PENDING]{end}"), line].into_iter().enumerate() {
            self.insert(at + offset, line);
        }
    }

    fn end_pending_if_empty(&mut self) {
        let Some(begin) = self.lines.iter().position(|line| header(line) == Some(Section::Pending)) else {
            return;
        };
        let rest = self.lines[begin + 1..].iter();
        let inside = rest.take_while(|line| header(line).is_none() && line.trim().is_empty()).count();
        let next = self.lines.get(begin + 1 + inside);
        if next.is_some_and(|line| header(line).is_none()) {
            return;
        }
        self.lines.remove(begin);
        if begin > 0 && self.lines[begin - 1].trim().is_empty() {
            self.lines.remove(begin - 1);
        }
    }

    /// As the first line ends.
    fn line_end(&self) -> &'static str {
        if self.lines.first().is_some_and(|line| line.ends_with("\r\n")) { "\r\n" } else { "\n" }
    }
}

/// Whether this value of a switch means on.
pub(crate) fn is_switched_on(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

fn header(line: &str) -> Option<Section> {
    let name = line.trim_end().strip_prefix('[')?.strip_suffix(']')?;
    Some(if name.eq_ignore_ascii_case("pending") { Section::Pending } else { Section::Other })
}

/// Keys are lower case letters with `_` and `-`, and perhaps a number.
fn key_and_value(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let letters = key.trim_end_matches(|c: char| c.is_ascii_digit());
    let good = letters.starts_with(|c: char| c.is_ascii_lowercase())
        && letters.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_' || byte == b'-');
    let value = value.trim();
    (good && !value.is_empty()).then_some((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The forms that Proxmox VE writes, and a line that nobody knows.
    const FILE: &str = "#A web server%3A see the wiki\n#second line\nboot: order=scsi0;net0\ncores: 2\nmemory: 2048\nmeta: creation-qemu=9.2.0,ctime=1745000000\nname: web\nnet0: virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1\nscsi0: ceph:vm-100-disk-0,iothread=1,size=32G\nstrange key without meaning\n\n[PENDING]\nmemory: 4096\n\n[special:cloudinit]\nname: web\n\n[before-upgrade]\n#taken by hand\nmemory: 1024\nsnaptime: 1745000001\nargs: -object x\n";

    #[test]
    fn what_is_not_changed_stays() {
        assert_eq!(Config::read(FILE).text(), FILE);
        for ends in [FILE.replace('\n', "\r\n"), FILE.trim_end().to_owned(), String::new()] {
            assert_eq!(Config::read(&ends).text(), ends);
        }
    }

    #[test]
    fn a_value_is_of_its_section() {
        let config = Config::read(FILE);
        assert_eq!(config.value(Section::Main, "memory"), Some("2048"));
        assert_eq!(config.value(Section::Pending, "memory"), Some("4096"));
        assert_eq!(config.value(Section::Main, "args"), None, "that of a snapshot is not the VM's");
        assert_eq!(config.value(Section::Main, "description"), None);
        let twice = Config::read("name: a\r\nname: b\r\n");
        assert_eq!(twice.value(Section::Main, "name"), Some("b"));
    }

    #[test]
    fn a_new_key_is_where_proxmox_would_write_it() {
        let mut config = Config::read(FILE);
        config.set(Section::Main, "lock", "migrate");
        assert!(config.text().contains("cores: 2\nlock: migrate\nmemory: 2048\n"), "{}", config.text());
        config.set(Section::Main, "vmgenid", "1");
        let text = config.text();
        assert!(text.contains("size=32G\nvmgenid: 1\nstrange key"), "{text}");
        config.remove(Section::Main, "lock");
        config.remove(Section::Main, "vmgenid");
        assert_eq!(config.text(), FILE);
    }

    #[test]
    fn changes_are_undone_to_the_byte() {
        let texts = [
            FILE.to_owned(),
            FILE.replace('\n', "\r\n"),
            FILE.replace("[PENDING]\nmemory: 4096\n\n", ""),
            "name: web\n".to_owned(),
            "#only a description\n".to_owned(),
            "name: web\n\n[snap]\nname: x\n".to_owned(),
        ];
        for text in texts {
            for section in [Section::Main, Section::Pending] {
                let mut config = Config::read(&text);
                config.set(section, "args", "-foo");
                config.set(section, "args", "-foo bar");
                assert_eq!(Config::read(&config.text()).value(section, "args"), Some("-foo bar"));
                config.remove(section, "args");
                assert_eq!(config.text(), text, "{section:?}");
            }
        }
    }

    #[test]
    fn a_file_without_its_last_line_end_stays_readable() {
        let mut config = Config::read("name: web");
        config.set(Section::Main, "args", "-x");
        config.set(Section::Main, "vga", "std");
        assert_eq!(config.text(), "args: -x\nname: web\nvga: std\n");
    }

    #[test]
    fn a_pending_section_is_before_snapshots() {
        let mut config = Config::read("name: web\n\n[snap]\nname: x\n");
        config.set(Section::Pending, "args", "-x");
        assert_eq!(config.text(), "name: web\n\n[PENDING]\nargs: -x\n\n[snap]\nname: x\n");
    }
}
