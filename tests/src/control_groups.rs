//! Control groups of a test's own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::sandbox::Sandbox;

/// A group that is removed with everything below it when this is dropped. Processes in it must have ended by then: so drop the sandbox first.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// Makes the group `name`, with these controllers for it and groups below it.
    ///
    /// # Errors
    /// When cgroup 2 is not mounted, or has not all of the controllers.
    pub fn new(name: &str, controllers: &[&str]) -> Result<Self> {
        let root = mount_of("cgroup2", |_| true)?.context("cgroup 2 is not mounted")?;
        let there = fs::read_to_string(root.join("cgroup.controllers"))?;
        for controller in controllers {
            let has = there.split_whitespace().any(|word| word == *controller);
            ensure!(
                has,
                "cgroup 2 has no {controller} controller here, but: {there:?} (cgroup 1 may have it)"
            );
            let path = root.join("cgroup.subtree_control");
            fs::write(&path, format!("+{controller}")).with_context(|| path.display().to_string())?;
        }
        let group = Self(root.join(format!("{name}-{}", std::process::id())));
        fs::create_dir(&group.0).with_context(|| group.0.display().to_string())?;
        Ok(group)
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes to one of its files.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, value).with_context(|| format!("{value} to {}", path.display()))
    }

    /// A program in `sandbox` that enters the group `inner` below this one (this one itself if that is empty) and becomes `program`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn program(&self, sandbox: &Sandbox, inner: &str, program: &Path) -> Result<PathBuf> {
        let path = sandbox.path().join("in-group");
        let text = format!(
            "#!/bin/sh\nset -e\nmkdir -p '{0}'\necho 0 > '{0}/cgroup.procs'\nexec '{1}' \"$@\"\n",
            self.0.join(inner).display(),
            program.display()
        );
        fs::write(&path, text)?;
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
        Ok(path)
    }

    /// A group whose processes may have at most `bytes` of memory from now on. What they have already does not count. With cgroup 1 where that
    /// has the memory controller.
    ///
    /// # Errors
    /// When there is no memory controller.
    pub fn with_memory(name: &str, bytes: u64) -> Result<Self> {
        let bound = bytes.to_string();
        if let Some(root) = mount_of("cgroup", |options| options.split(',').any(|word| word == "memory"))? {
            let group = Self(root.join(format!("{name}-{}", std::process::id())));
            fs::create_dir(&group.0).with_context(|| group.0.display().to_string())?;
            group.set("memory.limit_in_bytes", &bound)?;
            return Ok(group);
        }
        let group = Self::new(name, &["memory"])?;
        group.set("memory.max", &bound)?;
        Ok(group)
    }

    /// Names of the groups below it.
    #[must_use]
    pub fn inner(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let mut names: Vec<String> = dirs.map(|dir| dir.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Processes in the group `inner` below it.
    #[must_use]
    pub fn processes(&self, inner: &str) -> Vec<i32> {
        let text = fs::read_to_string(self.0.join(inner).join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

/// Where a file system of this type is mounted, whose options are such.
fn mount_of(kind: &str, are_such: impl Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = lines.find(|words| words.len() > 3 && words[2] == kind && are_such(words[3]));
    Ok(found.map(|words| PathBuf::from(words[1])))
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        let remove = || -> Result<()> {
            for inner in self.inner() {
                fs::remove_dir(self.0.join(inner))?;
            }
            Ok(fs::remove_dir(&self.0)?)
        };
        // Processes that were killed leave it in a moment.
        while let Err(error) = remove() {
            if Instant::now() > deadline {
                eprintln!("the control group {} stays: {error:#}", self.0.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
