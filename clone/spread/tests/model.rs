//! The model: its outcomes stay what they were, to the last bit, and many hosts take seconds.
#![cfg(test)]

use vmove_spread::plan::{Leaf, Network, Way};
use vmove_spread::simulate::{Outcome, Scenario, simulate};

/// Of each way, under losses, narrow uplinks, more hosts than there are pieces, and for longer than a source may be silent. A scenario, then
/// one line for each way. What speeds the model up changes none of them; what root and hosts do otherwise does:
/// `VMOVE_WRITE_OUTCOMES=1` writes them anew.
const OUTCOMES: &str = include_str!("outcomes.txt");

#[test]
fn outcomes_are_those_of_before() {
    let (mut found, mut compared) = (String::new(), 0);
    for part in OUTCOMES.split("\n\n") {
        let mut lines = part.lines();
        let first = lines.next().expect("a scenario");
        let scenario: Scenario = serde_json::from_str(first).expect("it parses");
        found += &format!("{}{first}\n", if found.is_empty() { "" } else { "\n" });
        for expected in lines {
            let way = serde_json::from_str::<Outcome>(expected).expect("an outcome").way;
            let outcome = simulate(&scenario, way).expect("it is possible");
            found += &serde_json::to_string(&outcome).expect("plain data");
            found.push('\n');
            compared += 1;
        }
    }
    if std::env::var_os("VMOVE_WRITE_OUTCOMES").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/outcomes.txt"), &found)
            .expect("it is written");
    } else {
        assert_eq!(found, OUTCOMES);
    }
    assert_eq!(compared, 16);
}

/// Seconds of a processor that this thread has had.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns: u64 = stat.split(' ').next().and_then(|ns| ns.parse().ok()).expect("a number");
    std::time::Duration::from_nanos(ns).as_secs_f64()
}

/// It did not end when hosts whose sources had been silent for two seconds were looked at every nanosecond.
#[test]
fn ten_thousand_hosts_take_seconds() {
    let (leaves, each) = (250, 40);
    let mut hosts: Vec<usize> = (0..leaves).flat_map(|leaf| vec![leaf; each]).collect();
    // With the root, one more than fits.
    hosts.push(leaves);
    let leaves = vec![Leaf { uplink: 50e9 }; leaves + 1];
    let network = Network { leaves, hosts, loss: 0.001, ..Network::flat(1, 1.25e9) };
    for way in [Way::Multicast, Way::TwoStage] {
        let before = processor_s();
        let outcome = simulate(&Scenario::new(network.clone(), 3 << 29), way).expect("it is possible");
        let took = processor_s() - before;
        eprintln!("{way}: {took:.1} s of a processor for {:?} s", outcome.complete);
        assert!(outcome.complete.1 > 2.0 && took < 60.0, "{way}: {took} s");
    }
}
