//! Guests of a real QEMU, under TCG and, where there is one, under KVM, whose memory is moved while they write to it.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Mover, OwnFile, PrivatePart, Standing};
use crate::testing::qemu::{Accel, Qemu, Start, with_each};
use crate::testing::ram::{Dir, on_both, peek};
use crate::{
    MappingHints, Process, QemuMapping, RamFile, Replacement, Sharing, descriptors_of, replace_in_qemu,
};

const MIB: u64 = 1 << 20;
/// The guest's answer in its mailbox.
const ANSWER: u64 = 8 * 4096 + 16;
/// Pages that it writes.
const PAGES: u64 = 8000;

fn moved_while_it_writes(binary: &PathBuf, accel: Accel, dir: &Dir) {
    // The second back end's file takes the place of the first one's: QEMU has a descriptor of it.
    let paths = ["ram", "home"].map(|name| dir.file(name, 64));
    let started = Qemu::start(binary, accel, Start::Running, "", paths.into());
    let mut qemu = match started {
        Ok(qemu) => qemu,
        Err(why) => {
            vmove_skip::skip!(part = format_args!("with {} under {accel:?}", binary.display()), "{why}");
            return;
        }
    };
    let first = qemu.guest_writes(16 * MIB, PAGES, 4096);
    assert!(qemu.qmp("stop").contains("return"));
    let process = Arc::new(Process::open(qemu.process.pid()).expect("it runs"));
    let of = |index: usize| qemu.mappings.iter().filter(move |m| m.file_index == index).copied();
    let private: Vec<QemuMapping> = of(0).map(|at| QemuMapping { shared: false, ..at }).collect();
    let fds = |file: &RamFile| descriptors_of(&process, file.identity()).expect("descriptors")[0];
    let hints = |at: &QemuMapping| MappingHints::read(&process, at.hva).expect("hints");
    let (frozen, fd_in_qemu) = (&qemu.files[0], fds(&qemu.files[1]));
    let freeze = |at: &QemuMapping| Replacement {
        at: *at,
        fd_in_qemu: fds(frozen),
        sharing: Sharing::Private,
        hints: hints(at),
    };
    replace_in_qemu(&process, &private.iter().map(freeze).collect::<Vec<_>>(), &[]).expect("private");
    // It writes all over its memory from now on.
    qemu.order(16 * MIB, PAGES, 4096);
    let home = RamFile::open(qemu.files[1].path()).expect("home");
    let target = home.map().expect("map");
    for extent in qemu.files[0].data_extents().expect("extents") {
        target.copy_from(&qemu.map, extent).expect("copied");
    }
    assert!(qemu.qmp("cont").contains("return"));
    let part = |at: &QemuMapping| PrivatePart { at: *at, hints: hints(at), filled: true };
    let parts: Vec<_> = private.iter().map(part).collect();
    let own = OwnFile { file: home, mapping: Arc::clone(&target), fd_in_qemu };
    let mut mover = Mover::new(Arc::clone(&process), &parts, vec![own], &[]).expect("this kernel can");
    while mover.step().expect("moved") {}
    eprintln!("{accel:?}: {:?}", mover.moved());
    let home = RamFile::open(qemu.files[1].path()).expect("home");
    assert!(Standing::read(&process, &private, &[home]).expect("mapped").is_shared());
    let deadline = Instant::now() + Duration::from_secs(20);
    while peek(&target, ANSWER) & 0xffff_ffff == u64::from(first) {
        assert!(Instant::now() < deadline, "the guest does not answer");
        std::thread::sleep(Duration::from_millis(1));
    }
    for page in 0..PAGES {
        let at = 16 * MIB + page * 4096;
        assert_eq!(peek(&target, at) & 0xffff_ffff, u64::from(first) + 1, "page {page}");
        assert_eq!(peek(&qemu.map, at) & 0xffff_ffff, u64::from(first), "page {page} of the frozen file");
    }
    let memory = std::fs::File::open(format!("/proc/{}/mem", process.pid())).expect("its memory");
    let mut word = [0; 8];
    memory.read_exact_at(&mut word, private[0].hva.0 + 16 * MIB).expect("read");
    assert_eq!(u64::from_ne_bytes(word) & 0xffff_ffff, u64::from(first) + 1);
    assert!(qemu.qmp("query-status").contains("running"));
    for file in &qemu.files {
        let _ = std::fs::remove_file(file.path());
    }
}

#[test]
fn memory_of_a_guest_under_kvm_is_moved_while_it_writes() {
    with_each(Accel::Kvm, |binary| on_both(256, |dir| moved_while_it_writes(binary, Accel::Kvm, dir)));
}

#[test]
fn memory_of_an_emulated_guest_is_moved_while_it_writes() {
    with_each(Accel::Tcg, |binary| on_both(256, |dir| moved_while_it_writes(binary, Accel::Tcg, dir)));
}
