//! Migrations that cannot be carried, and are refused with the reason.

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
    pair.migrate(1, &["--p2p", "--timeout", "60"]).expect("carried");
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
    let xml = pair.hosts[0].virsh(&["dumpxml", "--inactive", DOMAIN]).expect("its XML");
    let file = pair.path().join("memfd.xml");
    std::fs::write(&file, xml.replace("<source type='file'/>", "<source type='memfd'/>")).expect("written");
    pair.hosts[0].virsh(&["define", &file.to_string_lossy()]).expect("defined");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("It has no RAM in named files"), "{error}");
    assert!(pair.hosts[0].runs().expect("a state"));
    assert_eq!(pair.hosts[1].qemu(), None);
}
