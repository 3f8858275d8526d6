//! Facts of real QEMUs.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::path::Path;

use common::{Bench, TIMEOUT, qemus};
use vmove_qmp::{
    CommandLine,
    inspect::{self, BlockerKind, DeviceKind, PageKind, VmFacts},
};

async fn facts_of(bench: &mut Bench, line: &CommandLine) -> VmFacts {
    let layout = bench.layout("a");
    let mut movable = line.clone();
    movable.rewrite_movable(&layout).unwrap();
    let (process, client) = bench.spawn(&movable.to_argv(), &layout).await;
    let facts = inspect::facts(&client, process.pid(), Some(&movable)).await.unwrap();
    process.quit(Some(&client), TIMEOUT).await.unwrap();
    facts
}

#[tokio::test]
async fn a_guest_that_vmove_started_has_no_blockers() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let line =
            bench.guest(&["-smp", "2", "-cpu", "max", "-netdev", "user,id=n0", "-device", "e1000,netdev=n0"]);
        let facts = facts_of(&mut bench, &line).await;
        assert!(facts.blockers().is_empty(), "{:?}", facts.blockers());
        assert!(facts.machine.starts_with("pc-q35-"), "{}", facts.machine);
        assert_eq!((facts.status.as_str(), facts.vcpus, facts.accelerator.as_str()), ("running", 2, "tcg"));
        assert_eq!((facts.cpu.as_deref(), facts.name.as_deref()), (Some("max"), Some("test")));
        assert_eq!(facts.ram.iter().map(|ram| ram.size).sum::<u64>(), 64 << 20);
        let ram = &facts.ram[0];
        assert_eq!((ram.id.as_deref(), ram.share, ram.prealloc), (Some("vmove-ram0"), true, false));
        assert_eq!(
            (ram.kind.as_str(), ram.pages, ram.page_bytes),
            ("memory-backend-file", PageKind::Tmpfs, 4096)
        );
        assert_eq!(facts.netdevs[0].kind, "user");
        let host = inspect::inspect_binary(&qemu).await.unwrap();
        assert_eq!(host.version, facts.version);
        assert!(host.has_machine(&facts.machine) && !host.has_machine("pc-q35-99.9"), "{}", facts.machine);
        let json = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<VmFacts>(&json).unwrap(), facts);
    }
}

#[tokio::test]
async fn every_blocker_is_named_at_once() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let disk = bench.base.join("local.raw");
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        // Not on tmpfs, which has no direct I/O on older kernels.
        let direct = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        direct.as_file().set_len(1 << 20).unwrap();
        let layout = bench.layout("a");
        let shared = bench.base.join("iv");
        let options = [
            format!("-drive file={},if=none,id=d0,format=raw", disk.display()),
            format!(
                "-drive file={},if=none,id=d1,format=raw,cache=none,readonly=on",
                direct.path().display()
            ),
            "-device virtio-blk-pci,drive=d0 -device virtio-blk-pci,drive=d1".to_owned(),
            format!("-object memory-backend-file,id=iv,share=on,size=1M,mem-path={}", shared.display()),
            "-device ivshmem-plain,memdev=iv,id=iv0 -device virtio-balloon-pci,id=b0".to_owned(),
            format!("-qmp unix:{},server=on,wait=off", layout.qmp_socket.display()),
        ];
        let words: Vec<&str> = options.iter().flat_map(|text| text.split(' ')).collect();
        // As someone else would start it: private RAM.
        let line = bench.guest(&words);
        let (process, client) = bench.spawn(&line.to_argv(), &layout).await;
        let facts = inspect::facts(&client, process.pid(), Some(&line)).await.unwrap();
        let found = facts.blockers();
        let about = |kind, subject: &str| {
            let hit = found.iter().find(|one| one.kind == kind && one.subject.contains(subject));
            hit.unwrap_or_else(|| panic!("{kind:?} {subject} is not in {found:#?}"))
        };
        assert!(about(BlockerKind::OutsideWriter, "iv0").fatal);
        assert!(about(BlockerKind::Ram, "").fatal, "{found:?}");
        let disk_blockers: Vec<_> = found.iter().filter(|one| one.kind == BlockerKind::Disk).collect();
        assert!(disk_blockers.iter().any(|one| one.fatal && one.message.contains("local.raw")), "{found:?}");
        assert!(
            disk_blockers.iter().any(|one| !one.fatal && one.message.contains("page cache")),
            "{found:?}"
        );
        assert!(facts.has_direct_io());
        assert!(facts.devices.iter().any(|one| one.kind == DeviceKind::Balloon && one.id == "b0"));
        let read_only = facts.block.iter().find(|block| Path::new(&block.file) == direct.path()).unwrap();
        assert!(read_only.read_only && read_only.direct_io, "{read_only:?}");
        process.quit(Some(&client), TIMEOUT).await.unwrap();
    }
}

#[tokio::test]
async fn private_and_nameless_ram_is_found() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        for (object, words) in [
            ("memory-backend-file,id=m,size=64M,share=on,mem-path=/dev/shm", "without a name"),
            ("memory-backend-memfd,id=m,size=64M,share=on", "memory-backend-memfd"),
            ("memory-backend-ram,id=m,size=64M", "memory-backend-ram"),
            ("memory-backend-file,id=m,size=64M,share=off,mem-path=/dev/shm/vmove-qmp-private", "share=off"),
        ] {
            let layout = bench.layout("a");
            let qmp = format!("unix:{},server=on,wait=off", layout.qmp_socket.display());
            let line = bench.guest(&["-object", object, "-machine", "memory-backend=m", "-qmp", &qmp]);
            let (process, client) = bench.spawn(&line.to_argv(), &layout).await;
            let facts = inspect::facts(&client, process.pid(), None).await.unwrap();
            process.quit(Some(&client), TIMEOUT).await.unwrap();
            let _ = std::fs::remove_file("/dev/shm/vmove-qmp-private");
            let blockers = facts.blockers();
            assert_eq!(blockers.len(), 1, "{blockers:?}");
            assert!(blockers[0].fatal && blockers[0].message.contains(words), "{object}: {blockers:?}");
        }
    }
}

#[tokio::test]
async fn qemus_own_refusal_is_passed_on() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let line = bench.guest(&["-device", "qemu-xhci,id=usb0", "-device", "usb-uas"]);
        let found = facts_of(&mut bench, &line).await.blockers();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].fatal && found[0].kind == BlockerKind::Qemu, "{found:?}");
        assert!(found[0].message.contains("usb-uas"), "{found:?}");
    }
}

#[tokio::test]
async fn the_qemus_of_this_host_are_found() {
    for qemu in qemus() {
        let found = inspect::find_qemus(qemu.parent().map(Path::as_os_str));
        let real = std::fs::canonicalize(&qemu).unwrap();
        assert!(found.iter().any(|path| std::fs::canonicalize(path).unwrap() == real), "{found:?}");
    }
    let wrong = inspect::inspect_binary(Path::new("/bin/true")).await;
    assert!(matches!(wrong, Err(inspect::InspectHostError::NotQemu { .. })), "{wrong:?}");
    let none = inspect::inspect_binary(Path::new("/no/such/qemu")).await;
    assert!(matches!(none, Err(inspect::InspectHostError::Run { .. })), "{none:?}");
}
