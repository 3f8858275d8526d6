//! The guest of these tests detects damage to its memory: otherwise the others prove nothing.
#![cfg(test)]

use std::fs::File;
use std::os::unix::fs::FileExt;

use vmove_guest::pattern::{Damage, PAGE_BYTES};
use vmove_skip::{need, skip};
use vmove_tests::fleet::until;
use vmove_tests::guest::{Accel, StockQemu};
use vmove_tests::payload::{self, KvmPages, PAGES_START};
use vmove_tests::sandbox::Sandbox;

/// A page of the working set, and one that is only read.
const WORKING: u64 = 100;
const COLD: u64 = 1024 + 100;

fn damage_is_found(accel: Accel) {
    if let Err(error) = payload::ready(accel) {
        return skip!(part = format_args!("{accel:?}"), "{error:#}");
    }
    for (page, expected) in [(WORKING, Damage::Zeroed), (WORKING, Damage::Stale), (COLD, Damage::Foreign)] {
        let sandbox = Sandbox::new().expect("a sandbox");
        let config = payload::light();
        let guest = payload::guest(sandbox.path(), accel, &config, KvmPages::None).expect("an image");
        let memory = sandbox.mount_thp("memory").expect("a tmpfs");
        let ram = memory.join("ram");
        let qemu = StockQemu::start(&guest, &sandbox.folder("qemu").expect("a folder"), &ram, &[]);
        let beacon = qemu.and_then(|mut qemu| {
            let page = qemu.wait_running()?;
            Ok((qemu, page))
        });
        let (_qemu, beacon) = beacon.expect("the guest runs");
        let file = File::options().read(true).write(true).open(&ram).expect("its memory");
        let at = PAGES_START + page * PAGE_BYTES as u64;
        let mut old = vec![0; PAGE_BYTES];
        match expected {
            Damage::Zeroed => {}
            Damage::Stale => {
                file.read_exact_at(&mut old, at).expect("it reads");
                let mut now = old.clone();
                until("the page is rewritten", || {
                    file.read_exact_at(&mut now, at).expect("it reads");
                    now[PAGE_BYTES - 4..] != old[PAGE_BYTES - 4..]
                });
            }
            _ => old.fill(0x77),
        }
        assert_eq!(beacon.read().expect("a beacon").errors, 0);
        file.write_all_at(&old, at).expect("it writes");
        until("the guest finds it", || beacon.read().is_some_and(|beacon| beacon.first_bad.is_some()));
        let bad = beacon.read().and_then(|beacon| beacon.first_bad).expect("the first error");
        assert_eq!((bad.damage, bad.page), (expected, page), "{accel:?}: {bad:?}");
    }
}

#[test]
fn the_guest_finds_damage_to_its_memory_under_kvm_and_emulated() {
    need!(vmove_tests::places::root());
    damage_is_found(Accel::Tcg);
    damage_is_found(Accel::Kvm);
}
