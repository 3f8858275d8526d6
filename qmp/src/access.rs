//! What the QEMU of a command line opens by its path, and whether its user may.
//!
//! The kernel is asked, by a program that runs with the rights that QEMU will have: so access lists, folders on the way and what a file
//! server thinks of the user count as they will. Files that are not there at all are for others to refuse.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cmdline::Opened;
use crate::confine::{Confinement, KVM, LockedMemory, QemuUser};
use crate::inspect::find_program;
use crate::{CommandLine, RunLayout};

/// Prints a line for each pair of arguments, a test (`-r`) and a path: whether it holds.
const PROBE: &str =
    r#"while [ $# -gt 1 ]; do if [ "$1" "$2" ]; then echo yes; else echo no; fi; shift 2; done"#;

/// Something that QEMU's user may not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    /// What it is about: a file, or an option.
    pub subject: String,
    /// What was expected, what was found, and what to do.
    pub message: String,
}

/// Files that a QEMU opens beside those of its command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct More {
    /// It reads these.
    pub read: Vec<PathBuf>,
    /// It writes these, which are made for it where it could make them itself.
    pub made: Vec<PathBuf>,
}

/// Everything of a command line, as it will be started with `layout`, that its QEMU would be denied; also of `more` files.
/// Runs a program, which takes milliseconds.
///
/// # Errors
/// That program cannot be run.
pub fn denied(argv: &[OsString], layout: &RunLayout, more: &More) -> io::Result<Vec<Denied>> {
    // What cannot be read is refused elsewhere.
    let Ok(line) = CommandLine::parse(argv.to_vec()) else { return Ok(Vec::new()) };
    let confinement = line.confined(&layout.confinement);
    let Some(user) = &confinement.user else { return Ok(Vec::new()) };
    let mut found = networks(&line, user);
    let folder = layout.vm_dir.as_path();
    let program = argv.first().and_then(|name| find_program(&name.to_string_lossy()));
    let program =
        program.map(|path| Opened { option: "QEMU".to_owned(), path, runs: true, ..Opened::default() });
    let opened = program.into_iter().chain(line.opened()).map(|opened| opened.below(folder));
    // What is in these is given to QEMU.
    let own = [folder, &layout.memory_dir];
    let outside =
        opened.filter(|opened| !own.iter().any(|own| opened.path.starts_with(own))).filter_map(there);
    let read =
        |path: &PathBuf| Opened { option: "image".to_owned(), path: path.clone(), ..Opened::default() };
    let make = |path: &PathBuf| Opened { writes: true, makes: true, ..read(path) };
    let mut outside: Vec<Opened> = outside.collect();
    let made: Vec<Opened> = more.made.iter().map(make).map(|opened| opened.below(folder)).collect();
    let made = made.into_iter().filter(|opened| !own.iter().any(|own| opened.path.starts_with(own)));
    let made: Vec<Opened> = made.filter(|opened| !opened.path.exists()).filter_map(there).collect();
    let more = more.read.iter().filter(|path| !outside.iter().any(|opened| opened.path == **path));
    let more: Vec<Opened> = more.map(read).filter_map(there).collect();
    outside.extend(more);
    outside.extend(made);
    found.extend(folders(&confinement, user, layout)?);
    let tests: Vec<(&str, &Path)> = outside.iter().flat_map(Opened::tests).collect();
    let mut answers = ask(&confinement, &tests)?.into_iter();
    for opened in &outside {
        let tests = opened.tests().len();
        let held: Vec<bool> = answers.by_ref().take(tests).collect();
        if held.contains(&false) {
            found.push(explain(&confinement, user, opened)?);
        }
    }
    Ok(found)
}

/// Folders of the daemon's own through which QEMU cannot pass: what they are in is closed to it.
fn folders(confinement: &Confinement, user: &QemuUser, layout: &RunLayout) -> io::Result<Vec<Denied>> {
    let existing = |folder: &Path| folder.ancestors().find(|folder| folder.exists()).map(Path::to_owned);
    let own: Vec<PathBuf> =
        layout.vm_dir.parent().into_iter().chain([&*layout.memory_dir]).filter_map(existing).collect();
    let may = ask(confinement, &own.iter().map(|folder| ("-x", folder.as_path())).collect::<Vec<_>>())?;
    let closed = own.into_iter().zip(may).filter(|(_, may)| !may);
    let opened =
        closed.map(|(path, _)| Opened { option: "a folder of vmoved".to_owned(), path, ..Opened::default() });
    opened.map(|opened| explain(confinement, user, &opened)).collect()
}

/// What is opened, if it is there; the folder in its place, if QEMU is to make it.
fn there(opened: Opened) -> Option<Opened> {
    if opened.path.exists() {
        return Some(opened);
    }
    let folder = opened.path.parent().filter(|folder| opened.makes && folder.exists())?;
    Some(Opened { path: folder.to_owned(), ..opened })
}

impl Opened {
    /// A relative path is one in QEMU's working folder.
    fn below(mut self, folder: &Path) -> Self {
        self.path = folder.join(self.path);
        self
    }

    fn tests(&self) -> Vec<(&str, &Path)> {
        if self.runs {
            return vec![("-x", &self.path)];
        }
        let mut tests = vec![("-r", self.path.as_path())];
        if self.writes {
            tests.push(("-w", &self.path));
        }
        tests
    }
}

/// Which of these tests hold for QEMU.
fn ask(confinement: &Confinement, tests: &[(&str, &Path)]) -> io::Result<Vec<bool>> {
    if tests.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = confinement.command("/bin/sh".as_ref(), LockedMemory::Usual, None);
    command.args(["-c", PROBE, "sh"]).current_dir("/");
    for (test, path) in tests {
        command.arg(test).arg(path);
    }
    let output = command.output()?;
    let answers: Vec<bool> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| line == "yes").collect();
    if answers.len() == tests.len() {
        return Ok(answers);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("expected an answer for each of {} files, found {said:?}", tests.len())))
}

fn explain(confinement: &Confinement, user: &QemuUser, opened: &Opened) -> io::Result<Denied> {
    let path = &opened.path;
    let ways: Vec<&Path> = path.ancestors().skip(usize::from(!path.is_dir())).collect();
    let enters = ask(confinement, &ways.iter().map(|folder| ("-x", *folder)).collect::<Vec<_>>())?;
    // The outermost one counts: behind it nothing can be seen.
    let closed = ways.iter().zip(enters).filter(|(_, may)| !may).map(|(folder, _)| *folder).next_back();
    let doing = match opened {
        Opened { runs: true, .. } => "can run",
        Opened { writes: true, .. } => "can read and write",
        _ => "can read",
    };
    let (found, remedy) = match closed {
        Some(folder) => (folder, format!("chmod o+x {}", folder.display())),
        None if opened.runs => (path.as_path(), format!("chmod o+rx {}", path.display())),
        None => (path.as_path(), remedy(path, user, opened.writes)),
    };
    let mut message = format!(
        "Expected that QEMU's {user} {doing} {} ({}), found {}: {remedy}; or name another user in [qemu] of this node's configuration",
        path.display(),
        opened.option,
        rights(found)?
    );
    if let Some(instead) = opened.instead {
        message.push_str(". As it is, ");
        message.push_str(instead);
    }
    Ok(Denied { subject: path.to_string_lossy().into_owned(), message })
}

/// The command that gives access. A device keeps its owner, since others use it too.
fn remedy(path: &Path, user: &QemuUser, writes: bool) -> String {
    if path == Path::new(KVM) {
        // As the rules of systemd have it. Whoever has a guest may use KVM.
        return format!("chmod 0666 {KVM}");
    }
    let is_file = path.is_file();
    let modes = if path.is_dir() {
        "rwx"
    } else if writes {
        "rw"
    } else {
        "r"
    };
    if is_file && writes {
        format!("chown {} {}", user.name, path.display())
    } else {
        format!("setfacl -m u:{}:{modes} {}", user.name, path.display())
    }
}

fn rights(path: &Path) -> io::Result<String> {
    let meta = std::fs::metadata(path)?;
    let kind = if meta.is_dir() { "folder " } else { "" };
    Ok(format!(
        "{kind}{} of user {} and group {} with mode {:04o}",
        path.display(),
        meta.uid(),
        meta.gid(),
        meta.mode() & 0o7777
    ))
}

/// Networks for which QEMU would need the rights of root.
fn networks(line: &CommandLine, user: &QemuUser) -> Vec<Denied> {
    let mut found = Vec::new();
    for tap in line.taps() {
        let tap_exists = tap.name.as_ref().map(|name| PathBuf::from(format!("/sys/class/net/{name}")));
        let owner = tap_exists.and_then(|folder| std::fs::read_to_string(folder.join("owner")).ok());
        let own = owner.as_deref().map(str::trim).and_then(|owner| owner.parse().ok()) == Some(user.uid);
        if own && !tap.runs_programs {
            continue;
        }
        let name = tap.name.as_deref().unwrap_or("tap0");
        let why = if tap.runs_programs {
            "a program of this node that it runs as root"
        } else {
            "a tap that root makes"
        };
        let message = format!(
            "Expected a tap that belongs to QEMU's {user}, found {why} ({}): ip tuntap add dev {name} mode tap user {}, then say \
             ifname={name},script=no,downscript=no; or name root as user in [qemu] of this node's configuration",
            tap.option, user.name
        );
        found.push(Denied { subject: tap.option, message });
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use vmove_types::Backing;

    use super::*;

    #[test]
    fn what_the_user_may_not_open_is_told_with_the_command_that_mends_it() {
        if !rustix::process::geteuid().is_root() {
            return vmove_skip::skip!("not root: QEMU runs as whoever runs this");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mode =
            |name: &str, mode| std::fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
        mode("", 0o755);
        for (name, contents) in [("disk", ""), ("kernel", ""), ("qemu", "#!/bin/sh\n")] {
            std::fs::write(path(name), contents).unwrap();
        }
        std::fs::create_dir(path("run")).unwrap();
        let layout = RunLayout {
            vm_dir: path("run/vm"),
            qmp_socket: path("run/vm/qmp.sock"),
            memory_dir: path("memory"),
            backing: Backing::Thp,
            name: "vm".to_owned(),
            confinement: Confinement { user: QemuUser::find("60742").unwrap(), sandbox: true },
        };
        let drive = format!("file={},format=raw", path("disk").display());
        let line = [
            path("qemu").into_os_string(),
            "-drive".into(),
            drive.into(),
            "-kernel".into(),
            path("kernel").into(),
        ];
        let told = || -> Vec<String> {
            denied(&line, &layout, &More::default())
                .unwrap()
                .into_iter()
                .map(|denied| denied.message)
                .collect()
        };
        for (name, closed) in [("qemu", 0o700), ("disk", 0o600), ("kernel", 0o600)] {
            mode(name, closed);
        }
        let (disk, qemu) = (path("disk"), path("qemu"));
        let all = told();
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(
            all[0].contains(&format!("can run {}", qemu.display())) && all[0].contains("chmod o+rx"),
            "{all:?}"
        );
        assert!(all[1].contains(&format!("found {} of user 0", disk.display())), "{all:?}");
        assert!(all[1].contains(&format!("chown 60742 {}", disk.display())), "{all:?}");
        assert!(all[2].contains("setfacl -m u:60742:r "), "{all:?}");
        mode("qemu", 0o755);
        mode("kernel", 0o644);
        chown(&disk, Some(60742), None).unwrap();
        assert!(told().is_empty(), "{:?}", told());
        mode("run", 0o700);
        let closed = told();
        assert!(
            closed.len() == 1 && closed[0].contains(&format!("chmod o+x {}", path("run").display())),
            "{closed:?}"
        );
        mode("run", 0o711);
        // Whatever is in it.
        mode("", 0o700);
        let closed = told();
        assert!(
            closed.iter().all(|told| told.contains(&format!("chmod o+x {}", dir.path().display()))),
            "{closed:?}"
        );
        // With a user of its own QEMU opens everything as root.
        let own: Vec<OsString> = line.iter().cloned().chain(["-runas".into(), "nobody".into()]).collect();
        assert!(denied(&own, &layout, &More::default()).unwrap().is_empty());
    }
}
