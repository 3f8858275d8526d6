//! The QEMUs of a host.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// Directories searched beside `PATH`.
const FOLDERS: &[&str] = &["/usr/bin", "/usr/local/bin", "/usr/libexec", "/usr/lib/qemu"];

/// Folders that, with all below them, hold what was installed on this node.
const INSTALLED: &[&str] = &["/opt", "/usr"];

/// Time for `-version`, and again for `-machine help`: on a host that is itself emulated, or has to read the binary over a slow
/// network first, either may take more than 10 s.
const VERSION_TIMEOUT: Duration = Duration::from_secs(25);

/// One QEMU binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostQemu {
    /// The binary.
    pub path: PathBuf,
    /// Version, such as `10.0.2`.
    pub version: String,
    /// Machine types that it knows.
    pub machines: Vec<MachineFact>,
}

/// One machine type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MachineFact {
    /// Name, such as `pc-q35-10.0` or `q35`.
    pub name: String,
    /// What it stands for, of an alias.
    pub alias_of: Option<String>,
}

impl HostQemu {
    /// Whether a guest with this machine type (aliases resolved, as [`super::VmFacts::machine`]) can start here.
    #[must_use]
    pub fn has_machine(&self, name: &str) -> bool {
        self.machines.iter().any(|machine| machine.name == name)
    }
}

/// Why a binary could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectHostError {
    /// It could not be run.
    #[error("Could not run {path} {argument}: check that it is a QEMU for this machine")]
    Run {
        /// The binary.
        path: PathBuf,
        /// What was asked.
        argument: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It said something else.
    #[error("Expected a QEMU version from {path} -version, found {found:?}")]
    NotQemu {
        /// The binary.
        path: PathBuf,
        /// Start of what it printed.
        found: String,
    },
}

/// All `qemu-system-*` and `qemu-kvm` in `PATH` and the usual places, each file once.
#[must_use]
pub fn find_qemus(path: Option<&OsStr>) -> Vec<PathBuf> {
    let folders = path.map(std::env::split_paths).into_iter().flatten();
    let folders = folders.chain(FOLDERS.iter().map(PathBuf::from));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for folder in folders {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut names: Vec<PathBuf> =
            entries.map(|entry| entry.path()).filter(|path| is_qemu(path)).collect();
        // A file by its own name, not by that of a link to it.
        names.sort_by_cached_key(|path| (path.is_symlink(), path.clone()));
        for path in names {
            if std::fs::canonicalize(&path).is_ok_and(|real| seen.insert(real)) {
                found.push(path);
            }
        }
    }
    found
}

/// The file of a program: the first of this name in `PATH`, or the path itself; none if there is no such file.
#[must_use]
pub fn find_program(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Path::new(program).is_file().then(|| program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|p| p.is_file())
}

/// Whether this is a `qemu-system-*` or `qemu-kvm` in a folder of `path`, or below `/usr` or `/opt`, or a link to such a file.
#[must_use]
pub fn is_installed_qemu(program: &Path, path: Option<&OsStr>) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let folders = path.map(std::env::split_paths).into_iter().flatten().filter(|folder| folder.is_absolute());
    let folders: BTreeSet<PathBuf> = folders.filter_map(|folder| real(&folder)).collect();
    let here = |folder: &Path| {
        folders.contains(folder) || INSTALLED.iter().any(|installed| folder.starts_with(installed))
    };
    let installed =
        |file: &Path| is_qemu(file) && file.parent().and_then(real).is_some_and(|folder| here(&folder));
    installed(program) || real(program).is_some_and(|file| installed(&file))
}

fn is_qemu(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name == "qemu-kvm" || name.starts_with("qemu-system-")
}

/// Asks a binary for its version and machine types. Takes about 0.1 s.
///
/// # Errors
/// [`InspectHostError`].
pub async fn inspect_binary(path: &Path) -> Result<HostQemu, InspectHostError> {
    let version = run(path, &["-version"], "-version").await?;
    let version = parse_version(&version).ok_or_else(|| InspectHostError::NotQemu {
        path: path.to_owned(),
        found: version.chars().take(80).collect(),
    })?;
    let machines = run(path, &["-machine", "help"], "-machine help").await?;
    Ok(HostQemu { path: path.to_owned(), version, machines: parse_machines(&machines) })
}

async fn run(path: &Path, arguments: &[&str], argument: &'static str) -> Result<String, InspectHostError> {
    let failed = |source| InspectHostError::Run { path: path.to_owned(), argument, source };
    let mut command = crate::oom::command(path);
    command.args(arguments).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = tokio::time::timeout(VERSION_TIMEOUT, output).await;
    let output = output.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?;
    let output = output.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn parse_version(text: &str) -> Option<String> {
    let rest = text.split_once("emulator version ")?.1;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(rest[..end].to_owned()).filter(|version| !version.is_empty())
}

fn parse_machines(text: &str) -> Vec<MachineFact> {
    let parse = |line: &str| {
        let (name, rest) = line.split_once(' ')?;
        let alias = rest.split_once("(alias of ").and_then(|(_, rest)| rest.split_once(')'));
        Some(MachineFact { name: name.to_owned(), alias_of: alias.map(|(real, _)| real.to_owned()) })
    };
    // The first line is a heading.
    text.lines().skip(1).filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_goes_by_its_own_name() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("qemu-system-x86_64");
        std::fs::write(&own, "").unwrap();
        // As Debian does.
        std::os::unix::fs::symlink("qemu-system-x86_64", folder.path().join("qemu-system-amd64")).unwrap();
        let found = find_qemus(Some(folder.path().as_os_str()));
        let here: Vec<_> = found.iter().filter(|path| path.starts_with(folder.path())).collect();
        assert_eq!(here, [&own]);
    }

    #[test]
    fn what_is_installed_is_told_from_a_file_of_that_name() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, path) = (folder.path().join("sub"), Some(folder.path().as_os_str()));
        std::fs::create_dir(&inside).unwrap();
        for file in ["qemu-system-x86_64", "sh", "sub/qemu-system-x86_64"] {
            std::fs::write(folder.path().join(file), "").unwrap();
        }
        assert!(is_installed_qemu(&folder.path().join("qemu-system-x86_64"), path));
        assert!(is_installed_qemu(&inside.join("../qemu-system-x86_64"), path));
        assert!(!is_installed_qemu(&folder.path().join("sh"), path));
        let link = inside.join("link");
        std::os::unix::fs::symlink("../qemu-system-x86_64", &link).unwrap();
        assert!(is_installed_qemu(&link, path), "the same file");
        assert!(!is_installed_qemu(&inside.join("qemu-system-x86_64"), path));
        assert!(!is_installed_qemu(&folder.path().join("qemu-system-x86_64"), None));
    }

    #[test]
    fn versions_and_machines_are_read() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright";
        assert_eq!(parse_version(debian).as_deref(), Some("7.2.22"));
        assert_eq!(parse_version("bash: no"), None);
        let machines = parse_machines(
            "Supported machines are:\n\
             pc                   Standard PC (i440FX + PIIX, 1996) (alias of pc-i440fx-10.0)\n\
             pc-i440fx-10.0       Standard PC (i440FX + PIIX, 1996) (default)\n",
        );
        assert_eq!(machines[0].alias_of.as_deref(), Some("pc-i440fx-10.0"));
        assert_eq!((machines[1].name.as_str(), &machines[1].alias_of), ("pc-i440fx-10.0", &None));
    }
}
