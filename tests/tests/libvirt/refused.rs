//! Migrations that cannot be carried, and are refused with the reason.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use vmove_skip::need;
use vmove_tests::libvirt::{self, Arm, DOMAIN, Pair};

use crate::moves::guest;

#[test]
fn without_a_vmoved_on_both_hosts_an_enabled_domain_stays() {
    need!(libvirt::ready());
    let mut pair = Pair::running(&guest()).expect("two hosts");
    for host in [1, 0] {
        pair.hosts[host].node.crash();
        let error = pair.migrate(0, &[]).expect_err("refused").to_string();
        let why = if host == 1 { "vmoved does not answer" } else { "no node that b knows has it running" };
        assert!(error.contains(why), "{error}");
        pair.sound_at(0).expect("it goes on");
        pair.hosts[host].node.run().expect("vmoved");
    }
    pair.migrate(0, &[]).expect("with both it moves");
    pair.sound_at(1).expect("sound");
    // A start needs no vmoved.
    pair.hosts[1].virsh(&["destroy", DOMAIN]).expect("ended");
    pair.hosts[0].node.crash();
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started without vmoved");
}

#[test]
fn options_that_vmove_cannot_carry_leave_the_guest_where_it_was() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    for options in [["--postcopy", "--postcopy-after-precopy"].as_slice(), &["--tunnelled", "--p2p"]] {
        let error = pair.migrate(0, options).expect_err("refused").to_string();
        assert!(!error.is_empty());
        pair.sound_at(0).unwrap_or_else(|error| panic!("after {options:?}: {error:#}"));
    }
    pair.migrate(0, &["--persistent", "--undefinesource", "--auto-converge"]).expect("carried");
    pair.sound_at(1).expect("sound");
    assert_eq!(pair.hosts[0].state().expect("a state"), None, "undefined at the source");
    let persistent = pair.hosts[1].virsh(&["dominfo", DOMAIN]).expect("what it is");
    assert!(
        persistent.lines().any(|line| line.starts_with("Persistent:") && line.ends_with("yes")),
        "{persistent}"
    );
    pair.migrate(1, &["--p2p"]).expect("carried");
    pair.sound_at(0).expect("sound");
    // libvirt would pause the guest after a minute.
    pair.migrate(0, &["--timeout", "60", "--timeout-suspend"]).expect("carried");
    pair.sound_at(1).expect("sound");
    pair.migrate(1, &["--p2p"]).expect("carried");
    pair.sound_at(0).expect("sound");
    pair.migrate(0, &["--suspend"]).expect("carried");
    assert_eq!(pair.hosts[1].state().expect("a state").as_deref(), Some("paused"));
    pair.hosts[1].virsh(&["resume", DOMAIN]).expect("resumed");
    pair.sound_at(1).expect("sound");
}

#[test]
fn a_domain_whose_memory_is_in_no_file_is_refused() {
    need!(libvirt::ready());
    let pair = Pair::new(&guest(), Arm::Enabled).expect("two hosts");
    // Somebody has edited it since it was enabled.
    let (memfd, anonymous) = ("<source type='memfd'/>", "<source type='anonymous'/>");
    let shared = "<access mode='shared'/>";
    let start = |change: &dyn Fn(&str) -> String| {
        pair.define_changed(0, change).expect("defined");
        pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    };
    let refused = |kind: &str| {
        let error = pair.migrate(0, &[]).expect_err("refused").to_string();
        assert!(error.contains("It has no RAM in named files"), "{kind}: {error}");
        assert!(pair.hosts[0].runs().expect("a state"), "{kind}");
        assert_eq!(pair.hosts[1].qemu(), None, "{kind}");
        pair.hosts[0].virsh(&["destroy", DOMAIN]).expect("ended");
    };
    start(&|xml| xml.replace("<source type='file'/>", memfd));
    refused("memfd");
    start(&|xml| xml.replace(memfd, anonymous).replace(shared, ""));
    refused("anonymous");
    // Shared memory that is anonymous is in a file, too: libvirt makes one.
    start(&|xml| xml.replace(anonymous, &format!("{anonymous}{shared}")));
    pair.migrate(0, &[]).expect("carried");
    pair.sound_at(1).expect("sound");
}

/// `virt-clone`, or `virsh dumpxml` and `define`, keep the monitor's name: QEMU of the copy would take the socket of the one that runs.
#[test]
fn a_copied_domain_is_not_started_until_it_is_enabled_itself() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    let copy = "00000000-0000-4000-8000-000000000001";
    let renamed = |xml: &str| {
        xml.replacen(libvirt::UUID, copy, 1).replace(&format!("<name>{DOMAIN}</name>"), "<name>copy</name>")
    };
    pair.define_changed(0, renamed).expect("defined");
    let error = pair.hosts[0].virsh(&["start", "copy"]).expect_err("refused").to_string();
    assert!(error.contains("vmove libvirt enable copy"), "{error}");
    pair.sound_at(0).expect("the other one goes on");
    let output = pair.hosts[0].vmove(&["libvirt", "enable", "copy"]).expect("vmove");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let xml = pair.hosts[0].virsh(&["dumpxml", "--inactive", "copy"]).expect("its XML");
    assert!(xml.contains(&format!("libvirt-{copy}.qmp")) && !xml.contains(libvirt::UUID), "{xml}");
    pair.hosts[0].virsh(&["start", "copy"]).expect("started");
    pair.hosts[0].virsh(&["destroy", "copy"]).expect("ended");
    pair.hosts[0].virsh(&["undefine", "copy"]).expect("undefined");
    pair.migrate(0, &[]).expect("the other one moves");
    pair.sound_at(1).expect("sound");
}

/// As the first release named the monitor: the reason is told as well.
#[test]
fn a_domain_with_the_older_name_of_the_monitor_moves_and_its_refusal_has_a_reason() {
    need!(libvirt::ready());
    let mut pair = Pair::new(&guest(), Arm::Enabled).expect("two hosts");
    let newer = format!("libvirt-{}.qmp", libvirt::UUID);
    let older = format!("{}.qmp", libvirt::UUID);
    pair.define_changed(0, |xml| xml.replace(&newer, &older)).expect("defined");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    pair.hosts[0].beacon().expect("it runs");
    pair.hosts[0].node.crash();
    let monitor = Path::new("/run/libvirt/vmove").join(&older);
    let client = UnixStream::connect(pair.hosts[0].file(&monitor)).expect("a client");
    pair.hosts[0].node.run().expect("vmoved");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("another client"), "{error}");
    drop(client);
    pair.migrate(0, &[]).expect("it moves");
    pair.sound_at(1).expect("sound");
}

#[test]
fn a_domain_with_a_device_of_the_host_is_not_enabled() {
    need!(libvirt::ready());
    let pair = Pair::new(&guest(), Arm::Plain).expect("two hosts");
    let device = "<hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0' bus='0' slot='3' function='0'/></source></hostdev></devices>";
    pair.define_changed(0, |xml| xml.replace("</devices>", device)).expect("defined");
    let before = pair.hosts[0].virsh(&["dumpxml", "--inactive", DOMAIN]).expect("its XML");
    let output = pair.hosts[0].vmove(&["libvirt", "enable", DOMAIN]).expect("vmove");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("<hostdev>"), "{said}");
    let after = pair.hosts[0].virsh(&["dumpxml", "--inactive", DOMAIN]).expect("its XML");
    assert_eq!(after, before);
}

/// Nothing of vmove is there: QEMU cannot make its monitor. Where it can, libvirt sends the guest with all of its memory.
#[test]
fn a_host_without_the_hook_takes_a_guest_with_its_memory_or_not_at_all() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    std::fs::remove_file(pair.hosts[1].folder().join("etc/hooks/qemu.d/vmove")).expect("the hook");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("/run/libvirt/vmove"), "{error}");
    pair.sound_at(0).expect("it goes on");
    let folder = pair.hosts[1].folder().join("run/vmove");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).expect("for any user");
    pair.migrate(0, &[]).unwrap_or_else(|error| panic!("libvirt migrates it: {error}\n{}", pair.logs()));
    pair.sound_at(1).expect("sound");
    let history = pair.hosts[1].node.ask(&["history"]).expect("a history");
    assert!(history["migrations"].as_array().is_some_and(Vec::is_empty), "{history}");
}

#[test]
fn a_domain_whose_monitor_has_another_client_is_refused() {
    need!(libvirt::ready());
    let mut pair = Pair::running(&guest()).expect("two hosts");
    let monitor = Path::new("/run/libvirt/vmove").join(format!("libvirt-{}.qmp", libvirt::UUID));
    // One that comes while vmoved is away: QEMU has one client at a time.
    pair.hosts[0].node.crash();
    let client = UnixStream::connect(pair.hosts[0].file(&monitor)).expect("a client");
    pair.hosts[0].node.run().expect("vmoved");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("another client"), "{error}");
    drop(client);
    pair.sound_at(0).expect("it goes on");
    pair.migrate(0, &[]).expect("without that client it moves");
    pair.sound_at(1).expect("sound");
}

/// Somebody has taken the monitor away since it was enabled: it is a domain as any other.
#[test]
fn a_domain_without_the_second_monitor_migrates_as_before() {
    need!(libvirt::ready());
    let pair = Pair::new(&guest(), Arm::Enabled).expect("two hosts");
    let without_arguments = |xml: &str| {
        let (before, rest) = xml.split_once("<qemu:commandline>").expect("arguments");
        let (_, after) = rest.split_once("</qemu:commandline>").expect("their end");
        format!("{before}{after}")
    };
    pair.define_changed(0, without_arguments).expect("defined");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    pair.hosts[0].beacon().expect("it runs");
    pair.migrate(0, &[]).expect("libvirt migrates it");
    pair.sound_at(1).expect("sound");
    let history = pair.hosts[1].node.ask(&["history"]).expect("a history");
    assert!(history["migrations"].as_array().is_some_and(Vec::is_empty), "{history}");
}

#[test]
fn a_domain_whose_name_another_one_has_there_stays() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    pair.define_changed(1, |xml| xml.replace(libvirt::UUID, "00000000-0000-4000-8000-000000000001"))
        .expect("defined");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("already exists with uuid"), "{error}");
    pair.hosts[1].virsh(&["undefine", DOMAIN]).expect("undefined");
    pair.sound_at(0).expect("it goes on");
    pair.migrate(0, &[]).expect("then it moves");
    pair.sound_at(1).expect("sound");
}

/// The operator calls the migration off, at moments from its begin to after its end.
#[test]
fn a_migration_that_is_called_off_leaves_one_guest() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    let (mut at, mut stayed) = (0, 0);
    for after in [0, 100, 300, 600, 1000, 1500, 2000, 3000] {
        let migration = pair.migration(at, &[]).stderr(Stdio::null()).spawn().expect("virsh");
        std::thread::sleep(Duration::from_millis(after));
        // There may be no job yet, or none any more.
        let _ = pair.hosts[at].virsh(&["domjobabort", DOMAIN]);
        let ended = migration.wait_with_output().expect("virsh ends");
        let stays = !ended.status.success();
        stayed += u32::from(stays);
        at = if stays { at } else { 1 - at };
        pair.sound_at(at).unwrap_or_else(|error| panic!("called off after {after} ms: {error:#}"));
    }
    println!("{stayed} of 8 migrations were called off in time");
    assert!(stayed > 0, "none was called off in time");
    pair.migrate(at, &[]).expect("it moves afterwards");
    pair.sound_at(1 - at).expect("sound");
}
