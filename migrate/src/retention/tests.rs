use vmove_node::disk::KernelDisk;

use super::*;

use crate::proto::message::Prepare;
use crate::records::Detached;
use vmove_node::peer::PeerTarget;
use vmove_node::peer::Token;
use vmove_node::record::VmRecord;
use vmove_types::report::Report;
use vmove_types::spec::MigrationSpec;

pub(crate) fn vm() -> VmRecord {
    VmRecord {
        name: "web".to_owned(),
        pid: 0,
        pid_start: 0,
        qmp_socket: "/run/web/qmp.sock".into(),
        vm_dir: "/run/web".into(),
        backing: vmove_types::Backing::Thp,
        command_line: Vec::new(),
        environment: Vec::new(),
        ram: Vec::new(),
        overlays: Vec::new(),
        devices: Vec::new(),
        adopted: false,
        libvirt: None,
        session: None,
    }
}

pub(crate) fn at_source(dir: &Path, state: SourceState, freed: bool, untold: bool) {
    let record = SourceRecord {
        called_off: None,
        id: SessionId::random(),
        vm: vm(),
        to: PeerTarget { name: "b".to_owned(), address: "192.0.2.2:7420".to_owned() },
        spec: MigrationSpec::default(),
        token: Token::default(),
        state,
        was_running: true,
        fabric: None,
        fabric_address: String::new(),
        bulk_connections: 2,
        may_fall_back: false,
        freed,
        untold,
        to_resume: false,
        detached: Detached::default(),
        missing: Vec::new(),
        disks: Vec::new(),
        after: Vec::new(),
        memory_is_there: false,
        home: None,
        group: None,
        report: Report::default(),
    };
    Journal::create(&dir.join("source.jsonl"), record).unwrap();
}

/// Of a guest without memory.
pub(crate) fn prepare() -> Prepare {
    Prepare {
        vm: "web".to_owned(),
        source: "a".to_owned(),
        boot_id: String::new(),
        token: Token::default(),
        spec: MigrationSpec::default(),
        check_only: false,
        command_line: Vec::new(),
        environment: Vec::new(),
        backing: vmove_types::Backing::Thp,
        blocks: Vec::new(),
        qemu_version: String::new(),
        machine: String::new(),
        was_running: true,
        disks: Vec::new(),
        moved: Vec::new(),
        fabrics: Vec::new(),
        devices: Vec::new(),
        taps: Vec::new(),
        in_group: false,
        libvirt: None,
        home: None,
        home_port: None,
    }
}

pub(crate) fn at_destination(dir: &Path, state: DestinationState, released: bool) {
    let record = DestinationRecord {
        called_off: None,
        whole_report: None,
        id: SessionId::random(),
        began_at: None,
        prepare: prepare(),
        state,
        vm: Some(vm()),
        fault_fd: None,
        mode: None,
        let_go: false,
        ran: false,
        final_applied: false,
        fabric: vmove_fabric::FabricKind::Tcp,
        released,
        abandoned: false,
        complete: None,
        to_remove: false,
        folder_is_ours: false,
        missing: Vec::new(),
        images: Vec::new(),
        stays: false,
        home_address: None,
    };
    Journal::create(&dir.join("destination.jsonl"), record).unwrap();
}

#[test]
fn a_source_is_asked_nothing_once_its_side_is_free_or_the_destination_knows() {
    use SourceState as S;
    for (state, freed, untold, over) in [
        (S::Released, true, false, true),
        (S::Released, false, false, false),
        (S::Aborted, false, false, true),
        (S::Aborted, false, true, false),
        (S::Warm, false, false, false),
        (S::Stopped, false, false, false),
        (S::Committed, false, false, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        at_source(dir.path(), state, freed, untold);
        assert_eq!(nobody_asks(&KernelDisk, dir.path()), over, "{state:?}, freed {freed}, untold {untold}");
    }
}

/// A source that is told "no such session" takes the guest back: with the guest here, it would run twice.
#[test]
fn a_destination_with_the_guest_may_be_asked_until_the_source_has_freed_its_side() {
    use DestinationState as D;
    for (state, released, over) in [
        (D::Complete, true, true),
        (D::Complete, false, false),
        (D::Gone, false, true),
        (D::Filling, false, false),
        (D::Loaded, false, false),
        (D::Owner, false, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        at_destination(dir.path(), state, released);
        assert_eq!(nobody_asks(&KernelDisk, dir.path()), over, "{state:?}, released {released}");
    }
}

/// What it says may be that the guest is here: forgotten, it would be answered by "no such session".
#[test]
fn a_journal_that_cannot_be_read_is_kept_and_one_that_never_began_is_not() {
    for side in ["source.jsonl", "destination.jsonl"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(side), "{\"cut").unwrap();
        assert!(nobody_asks(&KernelDisk, dir.path()), "{side}: its first line was never whole");
        std::fs::write(dir.path().join(side), "{damaged\n").unwrap();
        assert!(!nobody_asks(&KernelDisk, dir.path()), "{side}");
    }
}

/// Both ends of a move may be on one node.
#[test]
fn both_sides_count_and_a_folder_without_a_journal_answers_nothing() {
    let dir = tempfile::tempdir().unwrap();
    assert!(nobody_asks(&KernelDisk, dir.path()));
    at_source(dir.path(), SourceState::Released, true, false);
    at_destination(dir.path(), DestinationState::Complete, false);
    assert!(!nobody_asks(&KernelDisk, dir.path()));
}
