//! Taking the command line of a QEMU that someone else started.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{CommandLine, CommandLineError, Item, options::Options};

/// Options whose whole argument is a path.
const PATHS: &[&str] = &[
    "D", "L", "bios", "cdrom", "dtb", "fda", "fdb", "hda", "hdb", "hdc", "hdd", "initrd", "kernel", "pflash",
    "sd", "shim", "",
];

/// Options with a path under a key.
const KEYED: &[(&str, &[&str])] = &[
    ("drive", &["file"]),
    ("blockdev", &["filename", "file.filename"]),
    ("chardev", &["path", "logfile"]),
    ("object", &["mem-path", "file", "filename"]),
    ("fsdev", &["path"]),
    ("virtfs", &["path"]),
    ("fw_cfg", &["file"]),
];

impl CommandLine {
    /// The command line of process `pid`, as a template for its destination: paths that exist relative to its working
    /// directory are made absolute.
    ///
    /// # Errors
    /// [`CommandLineError::Proc`], and those of [`CommandLine::parse`].
    pub fn from_proc(pid: u32) -> Result<Self, CommandLineError> {
        let path = PathBuf::from(format!("/proc/{pid}/cmdline"));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CommandLineError::Proc { pid, path, source }
        };
        let mut bytes = std::fs::read(&path).map_err(failed(&path))?;
        for _ in 0..20 {
            // Empty in the midst of exec, and for good of a process that has ended.
            if !bytes.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
            bytes = std::fs::read(&path).map_err(failed(&path))?;
        }
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
        let words = bytes.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
        let mut line = Self::parse(words.collect())?;
        let folder = PathBuf::from(format!("/proc/{pid}/cwd"));
        let folder = std::fs::read_link(&folder).map_err(failed(&folder))?;
        line.make_absolute(&folder);
        // The path of the binary, where the first word is only a name looked up in someone else's PATH.
        let binary = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
        if let Some(binary) = binary.filter(|path| path.exists() && !Path::new(&line.program).is_absolute()) {
            line.program = binary.into();
        }
        Ok(line)
    }

    /// Removes the monitor that listens on `socket`: the destination gets one of its own.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn remove_monitor(&mut self, socket: &Path) -> Result<(), CommandLineError> {
        let mut chardevs = Vec::new();
        for item in self.named("chardev") {
            let options = item.options()?;
            if options.get("path", false).is_some_and(|path| Path::new(&path) == socket) {
                chardevs.extend(options.get("id", false));
            }
        }
        self.items.retain(|item| {
            let options = item.options().ok();
            let get = |key, implied| options.as_ref().and_then(|options| options.get(key, implied));
            let gone = match item.name() {
                "qmp" | "qmp-pretty" => {
                    let first = options.as_ref().and_then(|options| match options {
                        Options::Pairs(pairs) => pairs.first().and_then(|first| first.strip_prefix("unix:")),
                        Options::Json(_) => None,
                    });
                    let named = get("unix:path", false);
                    first.or(named.as_deref()).map(Path::new) == Some(socket)
                }
                "mon" => get("chardev", true).is_some_and(|id| chardevs.contains(&id)),
                "chardev" => get("id", false).is_some_and(|id| chardevs.contains(&id)),
                _ => false,
            };
            !gone
        });
        Ok(())
    }

    pub(super) fn make_absolute(&mut self, folder: &Path) {
        for item in &mut self.items {
            if PATHS.contains(&item.name()) {
                let path = item.value.as_ref().and_then(|path| absolute(folder, Path::new(path)));
                item.value = path.map(Into::into).or(item.value.take());
            }
            let keys = KEYED.iter().find(|(name, _)| item.name() == *name).map(|(_, keys)| *keys);
            for key in keys.unwrap_or_default() {
                make_key_absolute(item, key, folder);
            }
        }
    }
}

fn make_key_absolute(item: &mut Item, key: &str, folder: &Path) {
    let Ok(mut options) = item.options() else { return };
    let path = options.get(key, false).and_then(|path| absolute(folder, Path::new(&path)));
    if let Some(path) = path.as_ref().and_then(|path| path.to_str()) {
        options.set_text(key, path);
        item.set_options(&options);
    }
}

/// `path` under `folder`, if it is relative and exists there.
fn absolute(folder: &Path, path: &Path) -> Option<PathBuf> {
    let joined = folder.join(path);
    (path.is_relative() && !path.as_os_str().is_empty() && joined.exists()).then_some(joined)
}
