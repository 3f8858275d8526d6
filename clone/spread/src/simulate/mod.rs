//! A model of a distribution: the real code of root, hosts, pacer and routes over links that are arithmetic.
//!
//! A link carries one thing after the other at its rate; what passes several links is held up by the slowest. Hosts take no time to
//! compute. A template of many chunks for many hosts is modelled by fewer, larger pieces over links that are as many times slower, so
//! that the number of pieces times hosts stays bounded; times and bytes stay the same, but for the time that one piece takes.

mod cli;
mod report;
mod world;

use serde::{Deserialize, Serialize};

pub use cli::{SimulateArguments, SimulateError};

use crate::plan::{Network, PlanError, Way};

/// What is modelled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// The hosts and their links.
    pub network: Network,
    /// Bytes that travel: the memory that is not zero.
    pub bytes: u64,
    /// Bytes of them, the first, without which no child runs: the devices' state.
    pub state: u64,
    /// Bytes per second of datagrams; default: 95 % of the slowest link that they pass.
    pub rate: Option<f64>,
    /// Seconds that anything takes beside the time on the links.
    pub latency: f64,
    /// Seed of the losses.
    pub seed: u64,
}

impl Scenario {
    /// `bytes` over `network`, with 1 MiB of state and 50 µs of latency.
    #[must_use]
    pub fn new(network: Network, bytes: u64) -> Self {
        Self { network, bytes, state: 1 << 20, rate: None, latency: 50e-6, seed: 1 }
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Which way it took.
    pub way: Way,
    /// Seconds until the first and the last host can run a child: its state and the page that it touches first are there.
    pub first_instruction: (f64, f64),
    /// Seconds until the first and the last host have everything.
    pub complete: (f64, f64),
    /// Bytes that left the root, headers included.
    pub root_bytes: f64,
    /// Most bytes that any other host sent.
    pub host_bytes: f64,
    /// Most bytes on the uplink of one leaf, in the busier direction.
    pub uplink_bytes: f64,
    /// Bytes sent by all.
    pub total_bytes: f64,
    /// Bytes of pieces that were read because datagrams were lost.
    pub repaired_bytes: f64,
    /// Bytes of pieces that were sent again by multicast.
    pub resent_bytes: f64,
    /// How many hosts have everything at each of 20 times up to the last: for drawing.
    pub progress: Vec<(f64, f64)>,
}

/// Models one way.
///
/// # Errors
/// [`PlanError`].
pub fn simulate(scenario: &Scenario, way: Way) -> Result<Outcome, PlanError> {
    scenario.network.check()?;
    if way == Way::Multicast && !scenario.network.multicast {
        return Err(PlanError::Network { what: "there is no multicast" });
    }
    if scenario.bytes == 0 || !scenario.latency.is_finite() || scenario.latency < 0.0 {
        return Err(PlanError::Network { what: "there is nothing to send, or the latency is no time" });
    }
    Ok(world::World::new(scenario, way).run())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Leaf;

    fn leaves(count: usize, each: usize, loss: f64) -> Network {
        let hosts = (0..count).flat_map(|leaf| vec![leaf; each]).collect();
        let leaves = vec![Leaf { uplink: 2.5e9 }; count];
        Network { leaves, hosts, loss, ..Network::flat(1, 1.25e9) }
    }

    const BYTES: u64 = 128 << 20;

    fn copies(bytes: f64) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let one = BYTES as f64;
        bytes / one
    }

    #[test]
    fn every_way_brings_everything_and_costs_what_it_should() {
        let scenario = Scenario::new(leaves(4, 8, 0.0), BYTES);
        for way in Way::ALL {
            let outcome = simulate(&scenario, way).unwrap();
            let (root, uplink) = (copies(outcome.root_bytes), copies(outcome.uplink_bytes));
            eprintln!(
                "{way}: {root:.2} copies from the root, {uplink:.2} on an uplink, {:?} s",
                outcome.complete
            );
            let (from, to) = match way {
                Way::Unicast => (31.0, 31.0 * 1.06),
                Way::Multicast | Way::Pipeline => (1.0, 1.15),
                Way::TwoStage => (4.0, 4.3),
            };
            assert!((from..=to).contains(&root), "{way}: {root}");
            assert!(way != Way::TwoStage || uplink < 3.3, "{way}: {uplink}");
            assert!(outcome.first_instruction.1 <= outcome.complete.1, "{outcome:?}");
            assert!(
                outcome.progress.last().is_some_and(|(_, part)| (part - 1.0).abs() < 1e-9),
                "{outcome:?}"
            );
            // The estimate by which a way is chosen is about right.
            let estimate = scenario.network.estimate(way, BYTES).seconds;
            assert!((0.6..1.5).contains(&(outcome.complete.1 / estimate)), "{way}: {estimate} {outcome:?}");
        }
    }

    #[test]
    fn losses_are_repaired_and_cost_more() {
        let mut before = 0.0;
        for loss in [0.0, 0.01, 0.1, 0.3] {
            let outcome = simulate(&Scenario::new(leaves(2, 10, loss), BYTES), Way::Multicast).unwrap();
            let repaired = copies(outcome.repaired_bytes + outcome.resent_bytes);
            eprintln!("loss of {loss}: {:.3} copies, {repaired:.3} repaired", copies(outcome.root_bytes));
            assert!(outcome.root_bytes > before && (repaired > 0.0) == (loss > 0.0), "{outcome:?}");
            before = outcome.root_bytes;
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_and_coarse_pieces_about_the_same() {
        let scenario = Scenario::new(leaves(2, 10, 0.05), BYTES);
        let outcome = simulate(&scenario, Way::Multicast).unwrap();
        assert_eq!(simulate(&scenario, Way::Multicast).unwrap(), outcome);
        // 40 times as many hosts: pieces of many chunks.
        for way in [Way::Multicast, Way::Pipeline] {
            let few = simulate(&Scenario::new(Network::flat(20, 1.25e9), BYTES), way).unwrap();
            let many = simulate(&Scenario::new(Network::flat(800, 1.25e9), BYTES), way).unwrap();
            let ratio = many.complete.1 / few.complete.1;
            eprintln!("{way}: {ratio:.2} times as long for 40 times as many hosts");
            assert!((0.9..1.6).contains(&ratio), "{way}: {few:?} {many:?}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut scenario = Scenario::new(leaves(2, 2, 0.0), 0);
        simulate(&scenario, Way::Unicast).unwrap_err();
        (scenario.bytes, scenario.network.multicast) = (1, false);
        simulate(&scenario, Way::Multicast).unwrap_err();
        simulate(&scenario, Way::Unicast).unwrap();
    }
}
