//! With which rights QEMUs run: as a user without privileges, behind QEMU's own filter of system calls.
//!
//! A guest that breaks out of QEMU, or a node that sends a guest, has the rights of QEMU and no others. The user is changed before QEMU's
//! first instruction (`setpriv(1)`, which `exec`s in place and keeps the process id), not by QEMU's `-runas`: that opens every file of the
//! command line as root first. So QEMU reads and writes what its user may; [`access`](crate::access) finds out beforehand what it may not.
//!
//! | Right | With a user |
//! |---|---|
//! | user, group | those of the user |
//! | further groups | those of the user, and the group that may use `/dev/kvm` |
//! | capabilities | none; `CAP_IPC_LOCK` for a guest that locks its memory (`-overcommit mem-lock=on`) |
//! | locked memory | the daemon's limit; the guest's memory and some more for a guest that has devices of the host |
//! | programs with more rights (setuid) | none (`no_new_privs`) |
//!
//! A command line that says itself what it wants keeps that: with `-runas` or `-run-with user=` QEMU starts as root and changes its user,
//! and with `-sandbox` nothing is added.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use nix::unistd::{Gid, Uid, User};
use serde::{Deserialize, Serialize};

/// As whom QEMUs run unless the operator says otherwise.
pub const DEFAULT_USER: &str = "vmove-qemu";
/// The number of that user where the host has no user of that name: one that neither distributions nor systemd give to anybody, and the
/// same on all nodes.
pub const DEFAULT_ID: u32 = 60742;
/// Bits of a mode by which everybody may pass through a folder, but not list it.
const PASSAGE: u32 = 0o011;
/// Bits of a mode by which a group may read and write.
const GROUP_USES: u32 = 0o060;
/// By which QEMU has KVM.
pub(crate) const KVM: &str = "/dev/kvm";

/// Why no QEMU can run as a user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// There is none.
    #[error(
        "Expected a user of this host as whom QEMU runs, found none named {name:?}: make it (useradd --system --no-create-home \
         --shell /usr/sbin/nologin {name}), or name another user, its number, or root"
    )]
    Unknown {
        /// As given.
        name: String,
    },
    /// The number that the default has where there is no user of its name belongs to another user.
    #[error(
        "QEMUs would run as user {DEFAULT_ID}, since there is no user {DEFAULT_USER:?}; but that number is the one of {found:?}: make \
         the user (useradd --system --no-create-home --shell /usr/sbin/nologin {DEFAULT_USER}), or name another in [qemu]"
    )]
    Taken {
        /// The user with that number.
        found: String,
    },
    /// The users of the host cannot be looked up.
    #[error("Could not look up the user {name:?}")]
    LookUp {
        /// As given.
        name: String,
        /// The answer.
        #[source]
        source: std::io::Error,
    },
}

/// A user without privileges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuUser {
    /// Its name, or its number where it has none.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// All groups, its own included.
    pub groups: Vec<u32>,
}

impl fmt::Display for QemuUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.parse() == Ok(self.uid) {
            write!(f, "user {}", self.uid)
        } else {
            write!(f, "user {} ({})", self.name, self.uid)
        }
    }
}

impl QemuUser {
    /// The user with this name or number; `None` for root. A number need not be known to the host.
    ///
    /// # Errors
    /// [`UserError`].
    pub fn find(name: &str) -> Result<Option<Self>, UserError> {
        let failed = |source: nix::Error| UserError::LookUp { name: name.to_owned(), source: source.into() };
        let number = name.parse().ok().map(Uid::from_raw);
        let user = match number {
            Some(uid) => User::from_uid(uid),
            None => User::from_name(name),
        };
        match (user.map_err(failed)?, number) {
            (Some(user), _) if user.uid.is_root() => Ok(None),
            (None, Some(uid)) if uid.is_root() => Ok(None),
            (Some(user), _) => Ok(Some(Self::of(&user))),
            (None, Some(uid)) => Ok(Some(Self::nameless(uid.as_raw()))),
            (None, None) => Err(UserError::Unknown { name: name.to_owned() }),
        }
    }

    /// [`DEFAULT_USER`], or [`DEFAULT_ID`] where there is no user of that name.
    ///
    /// # Errors
    /// [`UserError`].
    pub fn usual() -> Result<Self, UserError> {
        match Self::find(DEFAULT_USER) {
            Ok(Some(user)) => return Ok(user),
            Ok(None) | Err(UserError::Unknown { .. }) => {}
            Err(error) => return Err(error),
        }
        match Self::find(&DEFAULT_ID.to_string())? {
            Some(user) if user.name == DEFAULT_ID.to_string() => Ok(user),
            other => Err(UserError::Taken { found: other.map_or("root".to_owned(), |user| user.name) }),
        }
    }

    fn of(user: &User) -> Self {
        let name = std::ffi::CString::new(user.name.as_str()).unwrap_or_default();
        let groups = nix::unistd::getgrouplist(&name, user.gid).unwrap_or_else(|_| vec![user.gid]);
        let groups = groups.into_iter().map(Gid::as_raw).collect();
        Self { name: user.name.clone(), uid: user.uid.as_raw(), gid: user.gid.as_raw(), groups }.with_kvm()
    }

    fn nameless(id: u32) -> Self {
        Self { name: id.to_string(), uid: id, gid: id, groups: vec![id] }.with_kvm()
    }

    /// Adds the group that may use KVM, if there is one beside root's: who runs guests may.
    fn with_kvm(mut self) -> Self {
        let group = std::fs::metadata(KVM).ok().filter(|meta| meta.mode() & GROUP_USES == GROUP_USES);
        let group = group.map(|meta| meta.gid()).filter(|gid| *gid != 0);
        self.groups.extend(group);
        self.groups.sort_unstable();
        self.groups.dedup();
        self
    }

    /// The user in `/proc/PID/status`: `Some(None)` for root, `None` if it is not said.
    fn of_status(status: &str) -> Option<Option<Self>> {
        let numbers = |field: &str| -> Option<Vec<u32>> {
            let line = status.lines().find_map(|line| line.strip_prefix(field))?;
            line.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
        };
        // The effective one.
        let (uid, gid) = (*numbers("Uid:")?.get(1)?, *numbers("Gid:")?.get(1)?);
        let mut groups = numbers("Groups:")?;
        groups.push(gid);
        groups.sort_unstable();
        groups.dedup();
        let name =
            User::from_uid(Uid::from_raw(uid)).ok().flatten().map_or(uid.to_string(), |user| user.name);
        Some((uid != 0).then_some(Self { name, uid, gid, groups }))
    }

    /// Words of `setpriv` for this user.
    fn setpriv(&self, locked: LockedMemory) -> Vec<String> {
        let groups: Vec<String> = self.groups.iter().map(u32::to_string).collect();
        let kept = if locked == LockedMemory::All { "-all,+ipc_lock" } else { "-all" };
        // While we may still raise it.
        let mut words = match locked {
            LockedMemory::UpTo(bytes) => {
                vec!["prlimit".to_owned(), format!("--memlock={bytes}:{bytes}"), "--".to_owned()]
            }
            LockedMemory::Usual | LockedMemory::All => Vec::new(),
        };
        words.extend([
            "setpriv".to_owned(),
            format!("--reuid={}", self.uid),
            format!("--regid={}", self.gid),
            format!("--groups={}", groups.join(",")),
            "--no-new-privs".to_owned(),
            format!("--inh-caps={kept}"),
            format!("--ambient-caps={kept}"),
            format!("--bounding-set={kept}"),
            "--".to_owned(),
        ]);
        words
    }
}

/// How much memory a QEMU may lock. Devices of the host need all guest memory locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockedMemory {
    /// What the daemon may.
    Usual,
    /// So many bytes.
    UpTo(u64),
    /// All.
    All,
}

/// `CAP_IPC_LOCK`, whose owner no limit of locked memory holds for.
const IPC_LOCK: u64 = 1 << 14;

/// Raises the limit of locked memory of a QEMU that runs, if it is lower: before a device of the host is plugged in.
///
/// # Errors
/// The kernel's answer.
pub fn allow_locked_memory(pid: u32, bytes: u64) -> std::io::Result<()> {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(rustix::io::Errno::SRCH)?;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero()))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_ascii_whitespace().next()).unwrap_or_default();
    if soft == "unlimited" || soft.parse::<u64>().is_ok_and(|soft| soft >= bytes) {
        return Ok(());
    }
    let raised = prlimit(Some(pid), Resource::Memlock, Rlimit { current: Some(bytes), maximum: Some(bytes) });
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    if capabilities & IPC_LOCK == 0 {
        raised?;
    }
    Ok(())
}

/// What a QEMU is started with. The default confines nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// As whom it runs; `None` for the user of the daemon, root.
    pub user: Option<QemuUser>,
    /// Behind QEMU's filter of system calls.
    pub sandbox: bool,
}

impl Confinement {
    /// That of a running QEMU, whoever started it: its children run as it does, and so reach what it reaches. `None` if it has ended.
    #[must_use]
    pub fn of_process(pid: u32) -> Option<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let own = std::fs::read_to_string("/proc/self/status").ok()?;
        // More filters than we have ourselves, perhaps by a container.
        Some(Self { user: QemuUser::of_status(&status)?, sandbox: filters(&status) > filters(&own) })
    }

    /// As whom it runs, for people.
    #[must_use]
    pub fn whose(&self) -> String {
        match &self.user {
            Some(user) => user.to_string(),
            None if rustix::process::geteuid().is_root() => "root".to_owned(),
            None => format!("user {}", rustix::process::geteuid().as_raw()),
        }
    }

    /// User and group to whom files belong that QEMU opens by their path.
    #[must_use]
    pub fn owner(&self) -> Option<(u32, u32)> {
        self.user.as_ref().map(|user| (user.uid, user.gid))
    }

    /// A command that becomes `program` with these rights, in this control group, without our right to be spared when memory runs out
    /// ([`oom`](crate::oom)).
    #[must_use]
    pub fn command(&self, program: &std::ffi::OsStr, locked: LockedMemory, group: Option<&Path>) -> Command {
        let Some(user) = &self.user else { return crate::oom::command_in(program, group) };
        let words = user.setpriv(locked);
        let mut command = crate::oom::command_in(&words[0], group);
        command.args(&words[1..]).arg(program);
        command
    }

    /// Lets QEMU make files in the folder of its VM, but neither remove nor replace what the daemon makes there (sticky bit).
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn open_folder(&self, folder: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let Some((_, gid)) = self.owner() else { return Ok(()) };
        std::os::unix::fs::chown(folder, None, Some(gid))?;
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1770))
    }

    /// Lets QEMU pass through a folder of the daemon's to what it was given in it. Others may pass too; nobody else may list it.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn let_pass(&self, folder: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(folder)?.mode() & 0o7777;
        if self.user.is_none() || mode & PASSAGE == PASSAGE {
            return Ok(());
        }
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode | PASSAGE))
    }

    /// Gives QEMU a file or a socket that we have made and that it opens by its path.
    ///
    /// The folder may be one in which QEMU's user can write: a guest that has broken out of another QEMU could have put a link to a file of
    /// root in its place since. So what is there is looked at first, and what was looked at is given.
    ///
    /// # Errors
    /// The kernel's answer; `EPERM` if what is there has another name too, or belongs to somebody else.
    pub fn give(&self, file: &Path) -> std::io::Result<()> {
        use rustix::fs::{AtFlags, Mode, OFlags, chownat, fstat, open};
        let Some((uid, gid)) = self.owner() else { return Ok(()) };
        let found = open(file, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let meta = fstat(&found)?;
        let whose = [rustix::process::geteuid().as_raw(), uid].contains(&meta.st_uid);
        if meta.st_nlink != 1 || !whose {
            return Err(rustix::io::Errno::PERM.into());
        }
        let (owner, group) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        Ok(chownat(&found, "", Some(owner), Some(group), AtFlags::EMPTY_PATH)?)
    }
}

/// How many filters of system calls a process has, by its `/proc/PID/status`.
fn filters(status: &str) -> u32 {
    let number = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|number| number.trim().parse().ok())
    };
    // Older kernels do not count them.
    number("Seccomp_filters:").or_else(|| number("Seccomp:")).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_given_by_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let user = QemuUser::find("60742").unwrap();
        let confinement = Confinement { user, sandbox: true };
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let owner = || std::fs::metadata(&file).unwrap().uid();
        let before = owner();
        let linked = dir.path().join("linked");
        std::os::unix::fs::symlink(&file, &linked).unwrap();
        let _ = confinement.give(&linked);
        assert_eq!(owner(), before, "the link at most");
        std::fs::remove_file(&linked).unwrap();
        std::fs::hard_link(&file, &linked).unwrap();
        assert!(confinement.give(&linked).is_err());
        assert_eq!(owner(), before);
        std::fs::remove_file(&linked).unwrap();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        confinement.give(&file).unwrap();
        assert_eq!(owner(), 60742);
        confinement.give(&file).unwrap();
    }

    #[test]
    fn a_guest_with_devices_may_lock_its_memory() {
        let Some(user) = QemuUser::find("60742").unwrap().filter(|_| rustix::process::geteuid().is_root())
        else {
            return vmove_skip::skip!("not root: no limit can be raised");
        };
        let raised =
            Command::new("prlimit").args(["--memlock=6442450944:6442450944", "--", "true"]).output().unwrap();
        if !raised.status.success() {
            return vmove_skip::skip!(
                "no limit can be raised here: {}",
                String::from_utf8_lossy(&raised.stderr).trim()
            );
        }
        let confinement = Confinement { user: Some(user), sandbox: true };
        let limit = |locked| {
            let mut command = confinement.command("/bin/sh".as_ref(), locked, None);
            let said = command.args(["-c", "ulimit -l; ulimit -H -l"]).output().unwrap();
            String::from_utf8(said.stdout).unwrap()
        };
        assert_eq!(limit(LockedMemory::UpTo(3 << 30)), "3145728\n3145728\n");
        let mut running = confinement.command("/bin/sleep".as_ref(), LockedMemory::UpTo(1 << 20), None);
        let mut running = running.arg("60").spawn().unwrap();
        let now = || {
            let limits = std::fs::read_to_string(format!("/proc/{}/limits", running.id())).unwrap();
            let line =
                limits.lines().find_map(|line| line.strip_prefix("Max locked memory")).unwrap().to_owned();
            line.split_ascii_whitespace().next().unwrap().to_owned()
        };
        // `prlimit` comes before the program.
        while now() != (1 << 20).to_string() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        allow_locked_memory(running.id(), 5 << 30).unwrap();
        assert_eq!(now(), (5_u64 << 30).to_string());
        allow_locked_memory(running.id(), 1 << 30).unwrap();
        assert_eq!(now(), (5_u64 << 30).to_string(), "it is never lowered");
        running.kill().unwrap();
        running.wait().unwrap();
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        assert_eq!(QemuUser::find("root").unwrap(), None);
        assert_eq!(QemuUser::find("0").unwrap(), None);
        let daemon = QemuUser::find("daemon").unwrap().unwrap();
        assert_eq!(QemuUser::find(&daemon.uid.to_string()).unwrap(), Some(daemon.clone()));
        assert!(daemon.groups.contains(&daemon.gid));
        let nameless = QemuUser::find("60742").unwrap().unwrap();
        assert_eq!((nameless.uid, nameless.gid, nameless.to_string().as_str()), (60742, 60742, "user 60742"));
        let error = QemuUser::find("no-such-user").unwrap_err().to_string();
        assert!(error.contains("useradd --system") && error.contains("no-such-user"), "{error}");
    }
}
