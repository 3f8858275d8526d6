//! Each target, fed for about two seconds. `VMOVE_FUZZ_SEED` sets the seed, `VMOVE_FUZZ_TIMES` multiplies the number of inputs.

use std::collections::BTreeSet;

use crate::targets::{ALL, find};
use crate::{corpus, engine};

fn number(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number")))
}

fn fed(name: &str) {
    let target = find(name).expect("a target");
    let seed = number("VMOVE_FUZZ_SEED", 1);
    let times = number("VMOVE_FUZZ_TIMES", 1);
    println!("VMOVE_FUZZ_SEED={seed}");
    match engine::run(target, seed, target.mutations * times) {
        Ok(inputs) => println!("{name}: {inputs} inputs"),
        Err(failed) => panic!("{}\nVMOVE_FUZZ_SEED={seed}", failed.report),
    }
}

/// A test for each target.
macro_rules! fed {
    ($($test:ident: $target:literal,)*) => {
        $(#[test]
        fn $test() {
            fed($target);
        })*

        #[test]
        fn every_target_has_a_test_and_a_folder() {
            let names: BTreeSet<&str> = ALL.iter().map(|target| target.name).collect();
            assert_eq!(names, BTreeSet::from([$($target),*]));
            for name in names {
                assert!(corpus::folder(name).is_dir(), "{name} has no folder");
            }
        }
    };
}

fed! {
    greeting: "greeting",
    greeting_answer: "greeting-answer",
    negotiation: "negotiation",
    control_frames: "control-frames",
    frames: "frames",
    frame_headers: "frame-headers",
    fabric_hellos: "fabric-hellos",
    datagrams: "datagrams",
    to_destination: "to-destination",
    to_source: "to-source",
    page_sets: "page-sets",
    to_host: "to-host",
    to_parent: "to-parent",
    fork_opening: "fork-opening",
    spread_messages: "spread-messages",
    spread_engines: "spread-engines",
    guest_lines: "guest-lines",
    qmp: "qmp",
    command_lines: "command-lines",
    image_headers: "image-headers",
    topologies: "topologies",
    requests: "requests",
    units: "units",
}

#[test]
fn every_folder_is_of_a_target() {
    for entry in std::fs::read_dir(corpus::folder("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(find(&name).is_some(), "{name} is no target");
    }
}
