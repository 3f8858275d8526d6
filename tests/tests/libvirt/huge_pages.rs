//! Guests whose memory is of huge pages from the machine's pool.

use std::time::{Duration, Instant};

use vmove_skip::need;
use vmove_tests::libvirt::{self, Arm, DOMAIN, Pair, Settings};
use vmove_tests::sandbox::Sandbox;

use crate::moves::guest;

const PAGE: u64 = 2 << 20;

/// Pages of the machine's pool that somebody has, or was promised.
fn pages_in_use() -> u64 {
    let file = std::fs::read_to_string("/proc/meminfo").expect("the machine's memory");
    let count = |name: &str| -> u64 {
        let line = file.lines().find_map(|line| line.strip_prefix(name)).expect("a pool");
        line.trim().parse().expect("a number")
    };
    count("HugePages_Total:") - count("HugePages_Free:") + count("HugePages_Rsvd:")
}

#[test]
fn a_guest_on_hugetlbfs_moves_to_and_fro() {
    need!(libvirt::ready());
    let guest = guest();
    let sandbox = Sandbox::new().expect("a sandbox");
    // Alone, since pages are counted. For both hosts: the source keeps its memory until the destination has all of it.
    let bytes = u64::from(guest.memory_mib) << 20;
    need!(sandbox.reserve_huge_pages_alone(PAGE, 2 * bytes));
    let before = pages_in_use();
    let settings = Settings { huge_pages: true, ..Settings::default() };
    let pair = Pair::with(sandbox, &guest, Arm::Enabled, settings).expect("two hosts");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    for from in [0, 1, 0] {
        pair.hosts[from].beacon().expect("it runs");
        pair.migrate(from, &[]).unwrap_or_else(|error| panic!("from {from}: {error}\n{}", pair.logs()));
        pair.sound_at(1 - from).unwrap_or_else(|error| panic!("from {from}: {error:#}"));
        assert_eq!(pages_in_use() - before, bytes / PAGE, "one host has the guest's memory");
    }
    let history = pair.hosts[1].node.ask(&["history"]).expect("a history");
    let all = history["migrations"].as_array().expect("migrations");
    assert_eq!(all.len(), 3, "{history}");
    assert!(all.iter().all(|one| one["outcome"]["state"] == "done"), "{history}");
    let file = pair.path().join("saved");
    let file = file.to_string_lossy();
    pair.hosts[1].virsh(&["save", DOMAIN, &file]).expect("saved");
    pair.hosts[1].virsh(&["restore", &file]).expect("restored");
    pair.sound_at(1).expect("sound after it was saved and restored");
    pair.hosts[1].virsh(&["destroy", DOMAIN]).expect("ended");
    let deadline = Instant::now() + Duration::from_secs(10);
    while pages_in_use() != before {
        assert!(Instant::now() < deadline, "{} pages were not given back", pages_in_use() - before);
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// libvirt gives QEMU a folder for `<hugepages/>`, in which that makes a file and removes its name at once.
#[test]
fn hugepages_of_a_domain_are_refused_with_a_way_out() {
    need!(libvirt::ready());
    let guest = guest();
    let sandbox = Sandbox::new().expect("a sandbox");
    need!(sandbox.reserve_huge_pages(PAGE, 2 * (u64::from(guest.memory_mib) << 20)));
    let pair = Pair::with(sandbox, &guest, Arm::Enabled, Settings::default()).expect("two hosts");
    // Put in since it was enabled.
    pair.define_changed(0, |xml| {
        xml.replace("<access mode='shared'/>", "<hugepages/><access mode='shared'/>")
    })
    .expect("defined");
    for words in [["libvirt", "enable", DOMAIN, "--check"].as_slice(), &["libvirt", "enable", DOMAIN]] {
        let output = pair.hosts[0].vmove(words).expect("vmove");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{words:?}");
        assert!(said.contains("<hugepages/>") && said.contains("memory_backing_dir"), "{said}");
    }
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    let line =
        std::fs::read(format!("/proc/{}/cmdline", pair.hosts[0].qemu().expect("a QEMU"))).expect("a line");
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains("/huge/libvirt/qemu/"), "its memory is elsewhere: {line}");
    let error = pair.migrate(0, &[]).expect_err("refused").to_string();
    assert!(error.contains("<hugepages/>") && error.contains("vmove libvirt enable"), "{error}");
    assert!(pair.hosts[0].runs().expect("a state"));
    assert_eq!(pair.hosts[1].qemu(), None);
    assert_eq!(pair.hosts[0].skips_memory().expect("its settings"), Some(false));
}
