//! Limits of distance.

use super::{Change, Trials};
use crate::place::request::{Compactness, Domain, Mode};

/// No path is longer in a network that anybody builds.
const LONGEST_PATH: u32 = 32;

impl Trials<'_> {
    pub(super) fn limits(&mut self) {
        self.hops();
        let asked = &self.request.compactness;
        if let Some(from) = asked.max_leaf_switches {
            let most = u32::try_from(self.fleet.nodes().len()).unwrap_or(u32::MAX);
            let most = most.min(self.request.count());
            let fits = self.smallest(from, most, |request, leaves| {
                request.compactness.max_leaf_switches = Some(leaves);
            });
            if let Some((to, placement)) = fits {
                self.add(Change::LeafSwitches { from, to }, &placement);
            }
        }
        if let Some(anti) = self.request.anti_affinity {
            let from = anti.at_most;
            let fits = self.smallest(from, self.request.count(), |request, most| {
                request.anti_affinity.iter_mut().for_each(|anti| anti.at_most = most);
            });
            if let Some((to, placement)) = fits {
                self.add(Change::AntiAffinity { from, to }, &placement);
            }
        }
        if let Some(from) = self.request.near.as_ref().and_then(|near| near.max_hops) {
            let fits = self.smallest(from, LONGEST_PATH, |request, most| {
                request.near.iter_mut().for_each(|near| near.max_hops = Some(most));
            });
            if let Some((to, placement)) = fits {
                self.add(Change::NearHops { from, to }, &placement);
            }
        }
    }

    /// Without these limits, the search finds the placement with the fewest hops.
    fn hops(&mut self) {
        let asked = &self.request.compactness;
        let level = asked.level.filter(|_| asked.mode == Mode::Required);
        if level.is_none() && asked.max_hops.is_none() {
            return;
        }
        let from = [
            level.map(|level| format!("level {}", name(level))),
            asked.max_hops.map(|hops| format!("max_hops {hops}")),
        ];
        let from = from.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        let relaxed = Compactness {
            mode: Mode::Preferred,
            level: None,
            max_hops: None,
            max_leaf_switches: asked.max_leaf_switches,
        };
        if let Some(placement) = self.place(|request| request.compactness = relaxed) {
            self.add(Change::MaxHops { from, to: placement.score.max_hops }, &placement);
        }
    }
}

fn name(level: Domain) -> String {
    match level {
        Domain::Node => "node".to_owned(),
        Domain::LEAF => "leaf".to_owned(),
        Domain::SPINE => "spine".to_owned(),
        Domain::CORE => "core".to_owned(),
        Domain::Switch(height) => height.to_string(),
    }
}
