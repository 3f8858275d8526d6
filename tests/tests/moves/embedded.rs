//! The engine of migrations inside a program: `migrate/examples/two_qemus.rs` moves a guest between two QEMUs, there and back, without a daemon.
#![cfg(test)]

use std::process::Command;

use vmove_skip::need;
use vmove_tests::guest::{Accel, failures};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

fn moves_there_and_back(accel: Accel) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = payload::guest(sandbox.path(), accel, &payload::light(), KvmPages::None).expect("a guest");
    let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
    let program = places::product("examples/two_qemus").expect("the example");
    let output = Command::new(program).arg(sandbox.path()).arg("2").args(line).output().expect("it runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    let moves: Vec<&str> = said.lines().filter(|line| line.contains("paused for")).collect();
    assert_eq!(moves.len(), 2, "{said}");
    assert!(moves.iter().all(|line| line.ends_with("every page verified")), "{said}");
    // The guest goes over its memory, and tells of what it finds.
    for node in ["a", "b"] {
        let serial = sandbox.path().join(node).join("run/vms/guest/serial.log");
        let console = std::fs::read_to_string(&serial).unwrap_or_default();
        assert_eq!(failures(&console), Vec::<String>::new(), "{node}");
    }
}

#[test]
fn a_program_moves_a_guest_between_two_qemus_of_its_own() {
    need!(places::root());
    need!(payload::ready(Accel::Tcg));
    moves_there_and_back(Accel::Tcg);
}

#[test]
fn a_program_moves_a_guest_between_two_qemus_of_its_own_kvm() {
    need!(places::root());
    need!(payload::ready(Accel::Kvm));
    moves_there_and_back(Accel::Kvm);
}
