//! Tests of the guest program itself: it boots, keeps its rate, and finds damage to its memory.
#![cfg(test)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use vmove_guest::beacon::Beacon;
use vmove_guest::config::{Config, Rate};
use vmove_guest::pattern::{Damage, FILLED, PAGE_BYTES, expected};
use vmove_skip::need;
use vmove_tests::beacon::BeaconPage;
use vmove_tests::guest::{Guest, StockQemu, failures};
use vmove_tests::places;
use vmove_tests::sampler::{Measure, Sampler, now};
use vmove_tests::sandbox::Sandbox;

fn boot(sandbox: &Sandbox, config: Config) -> anyhow::Result<(StockQemu, BeaconPage)> {
    places::guest_initrd()?;
    let guest = Guest::new(256, config)?;
    let ram = sandbox.folder("ram")?.join("ram");
    let mut qemu = StockQemu::start(&guest, &sandbox.folder("vm")?, &ram, &[])?;
    let page = qemu.wait_running()?;
    Ok((qemu, page))
}

/// Offset of the guest's page `page` in the RAM file. The guest must not have rewritten the page yet.
fn find_page(ram: &Path, page: u32) -> u64 {
    let bytes = std::fs::read(ram).expect("the RAM file");
    let wanted: Vec<u8> = (0..4).flat_map(|i| expected(page, FILLED, i).to_le_bytes()).collect();
    let at =
        bytes.chunks(PAGE_BYTES).position(|chunk| chunk.starts_with(&wanted)).expect("the page is in RAM");
    (at * PAGE_BYTES) as u64
}

fn wait_for(page: &BeaconPage, mut wanted: impl FnMut(&Beacon) -> bool) -> Beacon {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let beacon = page.read().expect("the beacon stays");
        if wanted(&beacon) {
            return beacon;
        }
        assert!(Instant::now() < deadline, "not seen in 20 s: {beacon:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Applies `damage` to the bytes of one page of an idle guest. Returns what the guest reports.
fn damaged(damage: impl FnOnce(&mut [u8])) -> (Beacon, String) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let config = Config { working_set_mib: 8, verify: 10_000, ..Config::default() };
    let (qemu, page) = boot(&sandbox, config).expect("the guest boots");
    wait_for(&page, |b| b.verified > 5000);
    assert_eq!(page.read().expect("a beacon").errors, 0, "{}", qemu.console());

    let at = find_page(qemu.ram(), 1234);
    let ram = OpenOptions::new().read(true).write(true).open(qemu.ram()).expect("the RAM file");
    let mut bytes = [0; PAGE_BYTES];
    ram.read_exact_at(&mut bytes, at).expect("reads");
    damage(&mut bytes);
    ram.write_all_at(&bytes, at).expect("writes");

    let beacon = wait_for(&page, |b| b.errors > 0 && b.first_bad.is_some());
    let seen = beacon.verified;
    // The guest repairs the page, so it counts one error.
    let beacon = wait_for(&page, |b| b.verified > seen + 5000);
    assert_eq!(beacon.errors, 1, "{}", qemu.console());
    (beacon, qemu.console())
}

#[test]
fn a_zeroed_page_is_caught_by_the_guest() {
    need!(places::guest_initrd());
    let (beacon, console) = damaged(|bytes| bytes.fill(0));
    let bad = beacon.first_bad.clone().expect("a first error");
    assert_eq!((bad.damage, bad.page), (Damage::Zeroed, 1234), "{}", beacon.verdict());
    assert_eq!(failures(&console).len(), 1, "{console}");
}

#[test]
fn a_single_wrong_bit_is_caught_by_the_guest() {
    need!(places::guest_initrd());
    let (beacon, console) = damaged(|bytes| bytes[3000] ^= 16);
    let bad = beacon.first_bad.clone().expect("a first error");
    assert_eq!((bad.page, bad.index), (1234, 375), "{}", beacon.verdict());
    assert!(console.contains("VMOVE-GUEST FAIL"), "{console}");
}

#[test]
fn a_stale_page_is_caught_by_a_guest_that_rewrites_it() {
    need!(places::guest_initrd());
    let sandbox = Sandbox::new().expect("a sandbox");
    // A pass takes half a second: enough to find a page, save its bytes, and restore them one pass later.
    let config =
        Config { working_set_mib: 8, rate: Rate::PagesPerSecond(4096), verify: 0, ..Config::default() };
    let (qemu, page) = boot(&sandbox, config).expect("the guest boots");
    let ram = OpenOptions::new().read(true).write(true).open(qemu.ram()).expect("the RAM file");
    // A page of the working set that is consistent, at any version.
    let passes = || u32::try_from(page.read().expect("a beacon").passes).expect("few passes");
    let first_pass = FILLED + passes();
    let bytes = std::fs::read(qemu.ram()).expect("the RAM file");
    // The guest goes on while we read, and while we search.
    let versions = first_pass..=FILLED + passes() + 1;
    let (at, number, version) = bytes
        .chunks(PAGE_BYTES)
        .enumerate()
        .find_map(|(at, chunk)| {
            let first = u64::from_le_bytes(chunk[..8].try_into().ok()?);
            (0..2048).find_map(|p| {
                versions
                    .clone()
                    .find(|v| first != 0 && expected(p, *v, 0) == first)
                    .map(|v| ((at * PAGE_BYTES) as u64, p, v))
            })
        })
        .expect("a page of the working set");
    let old = &bytes[usize::try_from(at).expect("an offset")..][..PAGE_BYTES];
    wait_for(&page, |b| FILLED + u32::try_from(b.passes).expect("few passes") > version + 1);
    assert_eq!(page.read().expect("a beacon").errors, 0, "{}", qemu.console());
    ram.write_all_at(old, at).expect("writes");
    let beacon = wait_for(&page, |b| b.first_bad.is_some());
    let bad = beacon.first_bad.clone().expect("a first error");
    assert_eq!((bad.damage, bad.page), (Damage::Stale, u64::from(number)), "{}", beacon.verdict());
    assert_eq!(bad.seems, u64::from(version), "{}", beacon.verdict());
}

#[test]
fn the_guest_keeps_its_rate_on_every_thread() {
    need!(places::guest_initrd());
    let sandbox = Sandbox::new().expect("a sandbox");
    let config =
        Config { working_set_mib: 64, rate: Rate::PagesPerSecond(20_000), threads: 2, ..Config::default() };
    let (qemu, page) = boot(&sandbox, config).expect("the guest boots");
    let sampler = Sampler::start(page, Duration::from_millis(1)).expect("a sampler");
    let begun = now();
    std::thread::sleep(Duration::from_secs(3));
    let rate = sampler.series().rate(Measure::Work, begun, now()).expect("samples");
    // The guest never catches up, so a busy machine may lower the rate, but nothing may raise it.
    assert!((10_000.0..20_400.0).contains(&rate), "{rate} pages/s; {}", qemu.console());
    let beacon = sampler.last().expect("a beacon");
    assert!(beacon.errors == 0 && beacon.verdict().contains("intact"), "{}", beacon.verdict());
    assert_eq!(failures(&qemu.console()), Vec::<String>::new());
}
