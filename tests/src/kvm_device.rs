//! Who may open `/dev/kvm` while tests run. Daemons start QEMUs as a user without privileges, and on a minimal machine udev has left the
//! device to root. It is opened as long as a test program needs it and has its mode again after the last one has ended, however that ended.

use std::fs::{File, Permissions, set_permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::{Flock, FlockArg};

const KVM: &str = "/dev/kvm";
/// Bits of a mode by which everybody may read and write.
const FOR_ALL: u32 = 0o666;
/// For other test programs to be done with the device.
const TURN: Duration = Duration::from_secs(180);

/// Whoever uses the device holds it shared; whoever changes its mode back holds it alone.
fn lock_file() -> PathBuf {
    std::env::temp_dir().join("vmove-tests-kvm.lock")
}

fn take(how: FlockArg) -> Result<Option<Flock<File>>> {
    let file = File::options().create(true).append(true).open(lock_file()).context("the lock of /dev/kvm")?;
    match Flock::lock(file, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error).context("the lock of /dev/kvm"),
    }
}

/// Lets QEMU's user open the device until this program has ended.
///
/// # Errors
/// It cannot be opened to them.
pub fn open_to_qemu() -> Result<()> {
    static OPENED: OnceLock<Result<Flock<File>, String>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| open().map_err(|error| format!("{error:#}")));
    opened.as_ref().map(drop).map_err(|why| anyhow!("{why}"))
}

fn open() -> Result<Flock<File>> {
    let lock = take(FlockArg::LockShared)?.context("a lock that waits")?;
    let meta = std::fs::metadata(KVM)?;
    let by_group = meta.gid() != 0 && meta.mode() & 0o060 == 0o060;
    if !by_group && meta.mode() & 0o006 != 0o006 {
        // First: what is opened is closed again though this program were killed now.
        close_at_the_end(meta.mode() & 0o7777)?;
        // The mode that systemd's rules give it.
        set_permissions(KVM, Permissions::from_mode(FOR_ALL))
            .context("QEMU's user cannot be given /dev/kvm")?;
    }
    Ok(lock)
}

/// Starts a program that waits until nobody holds the lock any more, and then gives the device its mode. It outlives this one.
fn close_at_the_end(mode: u32) -> Result<()> {
    let mut closer = Command::new("flock");
    closer.arg("--exclusive").arg(lock_file()).args(["chmod", &format!("{mode:04o}"), KVM]);
    closer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    closer.current_dir("/").spawn().map(drop).context("flock (util-linux)")
}

/// The device while only root may open it. It has its mode again when this is dropped.
#[derive(Debug)]
pub struct Closed {
    mode: u32,
    _alone: Flock<File>,
}

impl Closed {
    /// Waits until no test program needs the device. Not in a program that has called [`open_to_qemu`].
    ///
    /// # Errors
    /// There is none, or others need it for too long.
    pub fn take() -> Result<Self> {
        let deadline = Instant::now() + TURN;
        let alone = loop {
            match take(FlockArg::LockExclusiveNonblock)? {
                Some(lock) => break lock,
                None if Instant::now() > deadline => bail!("other tests use /dev/kvm for more than {TURN:?}"),
                None => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let mode = std::fs::metadata(KVM).context("no /dev/kvm here")?.mode() & 0o7777;
        set_permissions(KVM, Permissions::from_mode(0o600)).context("only root may close /dev/kvm")?;
        Ok(Self { mode, _alone: alone })
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let _ = set_permissions(KVM, Permissions::from_mode(self.mode));
    }
}
