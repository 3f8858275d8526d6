//! What moving a guest needs: the kernel's requests, rights, QEMU and its user, a place for guest memory.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use vmove_memory::{
    Backing, Collapsed, DirtyTracker, Keep, MemoryDir, MemoryError, Process, QemuMapping, UffdFeatures,
    collapse, create_uffd, drops_locked, find_mappings,
};
use vmove_node::layout::memory_dir;
use vmove_qmp::confine::{Confinement, LockedMemory};
use vmove_qmp::inspect::{find_program, inspect_binary};
use vmove_tuning::advice::{Look, of_host};
use vmove_tuning::cpus::Cpus;
use vmove_types::doctor::{Area, Finding, FindingState};
use vmove_types::problem::chain;
use vmove_types::tuning::AdviceState;

use super::host::Host;
use crate::config::{Config, qemu_user_note};

/// The oldest QEMU that is tested.
const OLDEST_QEMU: (u32, u32) = (7, 2);
/// What is mapped by huge pages to see whether that works. Unit: bytes.
const TRIAL: u64 = 4 << 20;

fn ok(topic: &str, found: impl Into<String>) -> Finding {
    Finding::ok(Area::Moving, topic, found)
}

fn limited(topic: &str, found: impl Into<String>, expected: &str, mend: impl Into<String>) -> Finding {
    Finding::wrong(Area::Moving, topic, FindingState::Limited, found, expected, mend)
}

fn missing(topic: &str, found: impl Into<String>, expected: &str, mend: impl Into<String>) -> Finding {
    Finding::wrong(Area::Moving, topic, FindingState::Missing, found, expected, mend)
}

/// All but QEMUs. `no_user`: why there is no user as whom they could run.
pub fn look(host: &Host, config: &Config, no_user: Option<String>) -> Vec<Finding> {
    let mut found = vec![rights(), kernel(), page_faults()];
    found.push(attach(host, &config.qemu));
    found.extend(memory_folder(&memory_dir(&config.memory_dir, Backing::Thp)));
    found.extend(clock(host));
    found.extend([
        overcommit(host),
        locked_memory(),
        user(&config.qemu, no_user),
        kvm(&config.qemu),
        programs(),
    ]);
    found
}

fn rights() -> Finding {
    if rustix::process::geteuid().is_root() {
        return ok("root", "root");
    }
    missing(
        "root",
        format!("user {}", rustix::process::geteuid().as_raw()),
        "root: vmoved attaches to QEMUs of another user, and mounts guest memory",
        "sudo vmove doctor",
    )
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match DirtyTracker::supported() {
        Ok(()) => ok("kernel", format!("Linux {release} can track what guests write (PAGEMAP_SCAN)")),
        Err(why) => limited(
            "kernel",
            format!("Linux {release}: {why}"),
            "Linux 6.7, for pre-copy and hybrid; without it only post-copy is possible",
            "boot a newer kernel",
        ),
    }
}

fn page_faults() -> Finding {
    match UffdFeatures::Faults.check() {
        Ok(()) => ok(
            "page-faults",
            "the kernel hands over page faults on shared memory and huge pages (userfaultfd)",
        ),
        Err(why) => missing(
            "page-faults",
            chain(&why),
            "userfaultfd with minor faults on shared memory (Linux 5.14, CONFIG_USERFAULTFD)",
            "boot a newer kernel; in a container, permit userfaultfd(2) in its seccomp profile",
        ),
    }
}

/// Makes a userfaultfd inside a process that runs as QEMUs do, as for each guest.
fn attach(host: &Host, qemu: &Confinement) -> Finding {
    let made =
        with_sleeper(qemu, |process| create_uffd(process, UffdFeatures::Faults, Keep::OursOnly).map(drop));
    let why = match made {
        Ok(Ok(())) => {
            return ok("attach", format!("a userfaultfd can be made inside a process of {}", qemu.whose()));
        }
        Ok(Err(why)) => chain(&why),
        Err(why) => {
            return missing(
                "attach",
                chain(&why),
                "a process with the rights of a QEMU",
                "install coreutils and util-linux, in the PATH of vmoved",
            );
        }
    };
    let mend = match host.number("proc/sys/kernel/yama/ptrace_scope") {
        Some(3) => {
            "kernel.yama.ptrace_scope is 3 until the host is started again: take it out of /etc/sysctl.d, and start it again"
        }
        _ if !host.exists("dev/userfaultfd")
            && host.number("proc/sys/vm/unprivileged_userfaultfd") == Some(0) =>
        {
            "sysctl vm.unprivileged_userfaultfd=1, if the kernel has no /dev/userfaultfd (before 6.1, or hidden by a container)"
        }
        _ => {
            "run vmoved as root with CAP_SYS_PTRACE, outside of containers that forbid ptrace(2) (the unit vmoved.service has all)"
        }
    };
    let expected = format!(
        "to stop a process of {} for a moment (ptrace), and make a userfaultfd inside it",
        qemu.whose()
    );
    missing("attach", why, &expected, mend)
}

/// How long it may take until it runs.
const SLEEPER_TIMEOUT: Duration = Duration::from_secs(5);

/// A process with the rights of a QEMU, which does nothing.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
enum NoSleeper {
    #[error("could not start a program as {whose}: {source}")]
    Start {
        whose: String,
        #[source]
        source: io::Error,
    },
    #[error("a process of {whose} could not be started ({status})")]
    Ended { whose: String, status: ExitStatus },
    #[error("a process of {whose} did not start within {} s", SLEEPER_TIMEOUT.as_secs())]
    Late { whose: String },
    #[error(transparent)]
    Open(#[from] MemoryError),
}

/// Something with such a process.
fn with_sleeper<T>(qemu: &Confinement, work: impl FnOnce(&Process) -> T) -> Result<T, NoSleeper> {
    let whose = || qemu.whose().to_string();
    let mut command = qemu.command("sleep".as_ref(), LockedMemory::Usual, None);
    let child = command.arg("30").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = Sleeper(child.map_err(|source| NoSleeper::Start { whose: whose(), source })?);
    // The programs that give it its rights come first, under the same number.
    let is = format!("/proc/{}/comm", child.0.id());
    let end = Instant::now() + SLEEPER_TIMEOUT;
    while std::fs::read_to_string(&is).is_ok_and(|name| name.trim() != "sleep") {
        if let Ok(Some(status)) = child.0.try_wait() {
            return Err(NoSleeper::Ended { whose: whose(), status });
        }
        if Instant::now() > end {
            return Err(NoSleeper::Late { whose: whose() });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(work(&Process::open(child.0.id())?))
}

/// Mounts guest memory where nobody else sees it, and maps it by huge pages.
fn memory_folder(own: &Path) -> Vec<Finding> {
    let expected = "guest memory on a tmpfs with huge=advise";
    let tried = std::thread::Builder::new().name("vmove-doctor".to_owned()).spawn(|| {
        private_tmp().map(|()| try_memory(Path::new("/tmp/vmove-doctor")).map_err(|why| chain(&why)))
    });
    let tried = tried
        .and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("it could not be tried"))));
    match tried {
        Ok(Ok(huge)) => {
            vec![ok("memory-folder", "guest memory can be mounted (tmpfs, huge=advise)"), huge_pages(huge)]
        }
        Ok(Err(why)) => vec![missing(
            "memory-folder",
            why,
            expected,
            "free some memory; mount says what the kernel refuses",
        )],
        // Who may not mount changes nothing by asking whether the operator has.
        Err(_) if own.exists() && MemoryDir::prepare(own, Backing::Thp).is_ok() => {
            vec![ok("memory-folder", format!("guest memory is mounted at {}", own.display()))]
        }
        Err(why) => {
            let mend = format!(
                "give vmoved CAP_SYS_ADMIN (root, outside of containers), or mount it beforehand: mkdir -p {folder} && mount -t tmpfs -o huge=advise,size=100%,mode=0711 vmove {folder}",
                folder = own.display()
            );
            vec![missing("memory-folder", format!("guest memory cannot be mounted: {why}"), expected, mend)]
        }
    }
}

/// Gives this thread a `/tmp` that nobody else sees, and that goes with it.
fn private_tmp() -> io::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("vmove", "/tmp", "tmpfs", flags, c"mode=0700")?)
}

fn huge_pages(tried: Collapsed) -> Finding {
    if tried == Collapsed::Done {
        let found = "the kernel puts guest memory on tmpfs into pages of 2 MiB (MADV_COLLAPSE)";
        return Finding::ok(Area::HugePages, "thp", found);
    }
    Finding::wrong(
        Area::HugePages,
        "thp",
        FindingState::Limited,
        format!("guest memory on tmpfs stays in pages of 4 KiB ({tried:?})"),
        "2 MiB pages on request (MADV_COLLAPSE, Linux 6.1), which make guests faster",
        "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled; if memory is fragmented: echo 1 >/proc/sys/vm/compact_memory",
    )
}

fn try_memory(folder: &Path) -> Result<Collapsed, MemoryError> {
    let memory = MemoryDir::prepare(folder, Backing::Thp)?;
    let file = memory.create_ram_file("trial", vmove_memory::ByteLen(TRIAL))?;
    let mapping = file.map()?;
    let us = Process::open(std::process::id())?;
    let found: Vec<QemuMapping> = find_mappings(&us, &[&file])?;
    let huge = vmove_memory::PageSize::Huge2M.bytes();
    let hva = found.first().filter(|mapping| mapping.fits_huge_pages()).map(|mapping| mapping.hva);
    mapping.populate(vmove_memory::PageRun::new(vmove_memory::PageIndex(0), file.pages()))?;
    hva.map_or(Ok(Collapsed::Unfit), |hva| collapse(&us, hva, vmove_memory::ByteLen(huge)))
}

/// The clock, as `vmove tune` judges it.
fn clock(host: &Host) -> Option<Finding> {
    let root = host.root().to_owned();
    let nobody = vmove_tuning::host::Host::read(&root, &Cpus::none()).ok()?;
    let look = Look { root, host: &nobody, dedicated: Cpus::none(), passthrough: false };
    let advice =
        of_host(&look).into_iter().map(|found| found.advice).find(|advice| advice.topic == "clock")?;
    match advice.state {
        AdviceState::Unknown => None,
        AdviceState::Good | AdviceState::Applied => Some(ok("clock", advice.found)),
        AdviceState::Better | AdviceState::CanApply => {
            let (better, mend) = (advice.better.unwrap_or_default(), advice.command.unwrap_or_default());
            Some(limited(
                "clock",
                advice.found,
                &format!("tsc, or kvm-clock in a virtual machine: {better}"),
                mend,
            ))
        }
    }
}

fn overcommit(host: &Host) -> Finding {
    match host.number("proc/sys/vm/overcommit_memory") {
        Some(2) => limited(
            "overcommit",
            "vm.overcommit_memory is 2: the kernel refuses memory beyond a share of RAM and swap",
            "0 or 1: guests and forks then take what is free",
            "sysctl vm.overcommit_memory=0",
        ),
        mode => ok("overcommit", format!("vm.overcommit_memory is {}", mode.unwrap_or(0))),
    }
}

fn locked_memory() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit
        .map_or("unlimited".to_owned(), |bytes| format!("{} KiB, which does not bind root", bytes >> 10));
    match drops_locked() {
        Ok(()) => ok(
            "locked-memory",
            format!("guests with mem-lock=on can come here; limit of locked memory: {limit}"),
        ),
        Err(why) => limited(
            "locked-memory",
            chain(&why),
            "Linux 5.18, for guests with -overcommit mem-lock=on",
            "boot a newer kernel, or run such guests elsewhere",
        ),
    }
}

fn user(qemu: &Confinement, no_user: Option<String>) -> Finding {
    if let Some(why) = no_user {
        let mend = "install util-linux and vmove.sysusers, or name another user in [qemu]";
        return missing("qemu-user", why, "a user as whom QEMUs can be started", mend);
    }
    match qemu_user_note(qemu) {
        None => ok("qemu-user", format!("QEMUs run as {}", qemu.whose())),
        Some(note) => limited(
            "qemu-user",
            note,
            "a user vmove-qemu",
            "install -m 0644 daemon/dist/vmove.sysusers /usr/lib/sysusers.d/vmove.conf && systemd-sysusers",
        ),
    }
}

fn kvm(qemu: &Confinement) -> Finding {
    let expected =
        "/dev/kvm, which QEMU's user may open; guests are emulated otherwise, tens of times slower";
    if !Path::new("/dev/kvm").exists() {
        return limited(
            "kvm",
            "no /dev/kvm",
            expected,
            "modprobe kvm_intel (AMD: kvm_amd); switch virtualization on in the firmware",
        );
    }
    let mut command = qemu.command("/bin/sh".as_ref(), LockedMemory::Usual, None);
    let command = command.args(["-c", "exec 3<>/dev/kvm"]).stdin(Stdio::null()).stderr(Stdio::null());
    if command.status().is_ok_and(|status| status.success()) {
        return ok("kvm", format!("{} can open /dev/kvm", qemu.whose()));
    }
    let mend = format!(
        "chgrp kvm /dev/kvm && chmod 0660 /dev/kvm (udev does so where systemd is installed), or setfacl -m u:{}:rw /dev/kvm",
        qemu.user.as_ref().map_or("root", |user| user.name.as_str())
    );
    limited("kvm", format!("{} cannot open /dev/kvm", qemu.whose()), expected, mend)
}

fn programs() -> Finding {
    let lacking: Vec<&str> =
        ["setsid", "setpriv"].into_iter().filter(|name| find_program(name).is_none()).collect();
    if lacking.is_empty() {
        return ok("programs", "setsid and setpriv are there");
    }
    missing(
        "programs",
        format!("no {} in PATH", lacking.join(" and no ")),
        "setsid and setpriv, by which QEMU is started",
        "apt-get install util-linux",
    )
}

/// The QEMUs of this host, as vmoved finds them.
pub async fn qemus(found: &[PathBuf]) -> Finding {
    let (mut usable, mut others) = (Vec::new(), Vec::new());
    for path in found {
        match inspect_binary(path).await {
            Ok(qemu) if is_new_enough(&qemu.version) => {
                usable.push(format!("{} {}", path.display(), qemu.version));
            }
            Ok(qemu) => others.push(format!("{} {}", path.display(), qemu.version)),
            Err(why) => others.push(chain(&why)),
        }
    }
    let expected = "QEMU 7.2 or newer, the same release as the source of a guest or a newer one";
    let mend = "apt-get install qemu-system-x86 (or your distribution's package), or put its folder into the PATH of vmoved";
    match (usable.is_empty(), others.is_empty()) {
        (false, true) => ok("qemu", usable.join(", ")),
        (false, false) => limited(
            "qemu",
            format!("{}; of no use: {}", usable.join(", "), others.join(", ")),
            expected,
            mend,
        ),
        (true, true) => missing("qemu", "none in PATH, /usr and /opt", expected, mend),
        (true, false) => missing("qemu", others.join(", "), expected, mend),
    }
}

fn is_new_enough(version: &str) -> bool {
    let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= OLDEST_QEMU
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (version, enough) in
            [("7.2.0", true), ("10.0.2", true), ("7.1.9", false), ("6.10", false), ("", false)]
        {
            assert_eq!(is_new_enough(version), enough, "{version}");
        }
    }

    #[test]
    fn strict_accounting_of_memory_is_told() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/sys/vm")).unwrap();
        for (mode, state) in [("0", FindingState::Ok), ("2", FindingState::Limited)] {
            std::fs::write(root.path().join("proc/sys/vm/overcommit_memory"), mode).unwrap();
            assert_eq!(overcommit(&Host::at(root.path())).state, state);
        }
    }

    #[test]
    fn a_clock_that_the_kernel_had_to_fall_back_to_is_told() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/clocksource/clocksource0");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/meminfo"), "MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
            .unwrap();
        for (source, state) in [("tsc", FindingState::Ok), ("hpet", FindingState::Limited)] {
            std::fs::write(folder.join("current_clocksource"), source).unwrap();
            assert_eq!(clock(&Host::at(root.path())).map(|found| found.state), Some(state), "{source}");
        }
    }

    #[tokio::test]
    async fn a_host_without_a_usable_qemu_cannot_move() {
        assert_eq!(qemus(&[]).await.state, FindingState::Missing);
        let dir = tempfile::tempdir().unwrap();
        let old = dir.path().join("qemu-system-x86_64");
        std::fs::write(&old, "#!/bin/sh\necho QEMU emulator version 6.2.0\n").unwrap();
        std::fs::set_permissions(&old, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let found = qemus(&[old]).await;
        assert!(found.state == FindingState::Missing && found.found.contains("6.2.0"), "{found:?}");
    }
}
