//! What 1,000 events of QEMU in a second cost the page faults of a guest that moves meanwhile. The bounds are wide, since other programs run
//! beside it; the figures are printed.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene};

/// A boot sector that writes a byte to the port of pvpanic 1,000 times a second, woken by its timer:
///
/// ```text
///     cli; xor ax, ax; mov ds, ax; mov word [0x20], 0x7c25; mov [0x22], ax    ; the timer's interrupt is `end`
///     mov al, 0x34; out 0x43, al; mov ax, 1193; out 0x40, al; mov al, ah; out 0x40, al; sti
/// again:
///     hlt; mov dx, 0x505; mov al, BYTE; out dx, al; jmp again
/// end:
///     mov al, 0x20; out 0x20, al; iret
/// ```
const TELLS: [u8; 42] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0xc7, 0x06, 0x20, 0x00, 0x25, 0x7c, 0xa3, 0x22, 0x00, 0xb0, 0x34, 0xe6,
    0x43, 0xb8, 0xa9, 0x04, 0xe6, 0x40, 0x88, 0xe0, 0xe6, 0x40, 0xfb, 0xf4, 0xba, 0x05, 0x05, 0xb0, 0x00,
    0xee, 0xeb, 0xf7, 0xb0, 0x20, 0xe6, 0x20, 0xcf,
];
/// Where BYTE is.
const BYTE: usize = 33;

/// What the other guest says 1,000 times a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// Nothing of which QEMU tells. It wakes up as often.
    Nothing = 0,
    /// That its kernel has crashed and another has been loaded: `GUEST_CRASHLOADED`, after which it goes on.
    Events = 2,
}

fn boot_disk(folder: &Path, says: Says) -> PathBuf {
    let mut image = vec![0; 1 << 20];
    image[..TELLS.len()].copy_from_slice(&TELLS);
    image[BYTE] = says as u8;
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = folder.join(format!("{says:?}.img"));
    std::fs::write(&path, image).expect("an image");
    path
}

fn start(node: &Node, folder: &Path, says: Says) {
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    let drive = format!("file={},format=raw,if=virtio,readonly=on", boot_disk(folder, says).display());
    // There are KVMs that take too long for the few instructions of such a guest.
    let machine = ["-machine", "pc", "-accel", "tcg", "-m", "64M", "-nodefaults", "-display", "none"];
    let mut words = vec!["run", "--name", "other", "--", &qemu];
    words.extend(machine);
    words.extend(["-drive", &drive, "-device", "pvpanic"]);
    node.ask(&words).expect("it runs");
}

/// Events that a hook was asked about.
fn heard(node: &Node) -> f64 {
    let metrics = node.metrics().expect("metrics");
    let is_ours = |line: &&str| {
        line.starts_with("vmove_hook_held_back_total{") || line.starts_with("vmove_hook_runs_total{")
    };
    let value =
        |line: &str| line.rsplit(' ').next().and_then(|word| word.parse::<f64>().ok()).unwrap_or_default();
    metrics.lines().filter(is_ours).map(value).sum()
}

/// One move by post-copy, with bulk reads slow enough that the guest faults: the median of its faults and their 99th percentile, in microseconds,
/// and events per second.
fn faults(scene: &Scene, says: Says) -> [f64; 3] {
    start(&scene.b, scene.b.folder(), says);
    std::thread::sleep(std::time::Duration::from_secs(2));
    let (before, begun) = (heard(&scene.b), Instant::now());
    let report = scene
        .a
        .migrate(NAME, scene.b.name(), &["--mode", "postcopy", "--bandwidth", "200Mbit"])
        .expect("it moves");
    let rate = (heard(&scene.b) - before) / begun.elapsed().as_secs_f64();
    scene.b.ask(&["stop", "other"]).expect("it ends");
    assert!(report.faults.count > 300, "expected faults, found {:?}", report.faults);
    scene.b.migrate(NAME, scene.a.name(), &["--mode", "hybrid"]).expect("it moves back");
    let figures = [report.faults.p50_us, report.faults.p99_us, rate];
    println!("{says:?}: {} faults, {figures:.0?}", report.faults.count);
    figures
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

#[test]
#[ignore = "measures: ./run bench events"]
fn events_do_not_hold_up_page_faults() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let config =
        "[[hook]]\nname = 'heard'\non = 'GUEST_CRASHLOADED'\ndo = { run = ['/bin/true'] }\n".to_owned();
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::measured(), KvmPages::None).expect("an image");
    let options = NodeOptions { config, ..NodeOptions::default() };
    let scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest");
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        without.push(faults(&scene, Says::Nothing));
        with.push(faults(&scene, Says::Events));
    }
    let of = |rounds: &[[f64; 3]], which: usize| median(rounds.iter().map(|round| round[which]).collect());
    let (quiet, loud, rate) = (of(&without, 1), of(&with, 1), of(&with, 2));
    println!(
        "99 % of faults within {loud:.0} us with {rate:.0} events/s, {quiet:.0} us without: {:.2} x; medians {:.0} and {:.0} us",
        loud / quiet,
        of(&with, 0),
        of(&without, 0)
    );
    assert!(rate > 800.0, "expected some 1,000 events a second, found {rate:.0}");
    assert!(loud < quiet * 2.0, "expected 1.1 x at most, found {:.2} x", loud / quiet);
}
