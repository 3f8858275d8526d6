//! Which way a template takes, by arithmetic.
//!
//! Each way is estimated as the time that the busiest link needs for what crosses it, plus the time that the first block needs to get
//! through; the shortest is chosen. It is a model: links are full duplex, hosts of one leaf share nothing but the leaf's uplink, and
//! whatever the switches above the leaves do has room.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::host_id::HostId;
use crate::layout::{BLOCK_CHUNKS, CHUNK};
use crate::root::OVERHEAD;
use crate::route::{Route, Scheme};
use crate::words;

/// A leaf switch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Leaf {
    /// Bytes per second up to the other leaves, and as many down.
    pub uplink: f64,
}

/// Hosts and what joins them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Leaf switches.
    pub leaves: Vec<Leaf>,
    /// The leaf of each host, by its number; the first is the root's.
    pub hosts: Vec<usize>,
    /// Bytes per second of a host's link, each way.
    pub link: f64,
    /// Whether datagrams reach all hosts by multicast.
    pub multicast: bool,
    /// The part of datagrams that a host loses, 0 to below 1.
    pub loss: f64,
    /// Most bytes of payload in a datagram.
    pub payload: u32,
}

/// A way to spread a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Each host reads from the root.
    Unicast,
    /// Datagrams to all, repaired by READs.
    Multicast,
    /// A binomial pipeline through all hosts.
    Pipeline,
    /// The first host of each leaf reads from the root; the others of the leaf form a pipeline behind it.
    TwoStage,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Unicast, Self::Multicast, Self::Pipeline, Self::TwoStage];
}

/// A word that is no [`Way`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected unicast, multicast, pipeline or two-stage, found \"{0}\"")]
pub struct UnknownWay(String);

impl std::str::FromStr for Way {
    type Err = UnknownWay;
    fn from_str(name: &str) -> Result<Self, UnknownWay> {
        let found = Self::ALL.into_iter().find(|way| way.to_string() == name);
        found.ok_or_else(|| UnknownWay(name.to_owned()))
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unicast => "unicast",
            Self::Multicast => "multicast",
            Self::Pipeline => "pipeline",
            Self::TwoStage => "two-stage",
        })
    }
}

/// What a way would cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The way.
    pub way: Way,
    /// Seconds until all hosts have everything.
    pub seconds: f64,
    /// Bytes that leave the root.
    pub root_bytes: f64,
    /// Most bytes over one leaf's uplink, in the busier direction.
    pub uplink_bytes: f64,
    /// How the seconds come about.
    pub arithmetic: String,
}

/// The way that was chosen, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The way with the fewest seconds.
    pub way: Way,
    /// All that are possible, the shortest first.
    pub estimates: Vec<Estimate>,
}

/// Why a network cannot be planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Rates, losses or leaves make no sense.
    #[error(
        "{what}; describe the network in positive bytes per second, with a root, a host and their leaves"
    )]
    Network {
        /// What is wrong.
        what: &'static str,
    },
}

impl Network {
    /// `hosts` hosts and the root on one switch.
    #[must_use]
    pub fn flat(hosts: u32, link: f64) -> Self {
        let leaf = Leaf { uplink: f64::MAX };
        let hosts = vec![0; hosts as usize + 1];
        Self { leaves: vec![leaf], hosts, link, multicast: true, loss: 0.0, payload: 1440 }
    }

    /// # Errors
    /// [`PlanError`].
    pub fn check(&self) -> Result<(), PlanError> {
        let positive = |rate: f64| rate.is_finite() && rate > 0.0;
        let wrong = if self.hosts.len() < 2 {
            "there is no host beside the root"
        } else if self.hosts.iter().any(|leaf| *leaf >= self.leaves.len()) {
            "a host hangs on a leaf that does not exist"
        } else if !positive(self.link) || self.leaves.iter().any(|leaf| !positive(leaf.uplink)) {
            "a link has no rate"
        } else if !(0.0..1.0).contains(&self.loss) || self.payload < 256 {
            "losses are not below 1, or datagrams carry less than 256 bytes"
        } else {
            return Ok(());
        };
        Err(PlanError::Network { what: wrong })
    }

    /// Hosts without the root, leaf by leaf.
    fn by_leaf(&self) -> BTreeMap<usize, Vec<HostId>> {
        let mut leaves: BTreeMap<usize, Vec<HostId>> = BTreeMap::new();
        for (id, leaf) in (0_u32..).zip(&self.hosts).skip(1) {
            leaves.entry(*leaf).or_default().push(HostId(id));
        }
        leaves
    }

    /// Hosts without the root in an order in which those of a leaf are neighbours, the root's leaf first.
    fn in_order(&self) -> Vec<HostId> {
        let mut leaves = self.by_leaf();
        let own = leaves.remove(&self.hosts[0]).unwrap_or_default();
        own.into_iter().chain(leaves.into_values().flatten()).collect()
    }

    /// From where each host reads, going this way; empty for [`Way::Multicast`] and [`Way::Unicast`]: from the root.
    #[must_use]
    pub fn routes(&self, way: Way) -> BTreeMap<HostId, Route> {
        let group = |members: Vec<HostId>, scheme| {
            let members: Arc<[HostId]> = members.into();
            (1..u32::try_from(members.len()).unwrap_or(0))
                .map(move |me| (members[me as usize], Route { scheme, members: Arc::clone(&members), me }))
        };
        let from_root = |hosts: Vec<HostId>| [HostId::ROOT].into_iter().chain(hosts).collect::<Vec<_>>();
        match way {
            Way::Unicast | Way::Multicast => BTreeMap::new(),
            Way::Pipeline => group(from_root(self.in_order()), Scheme::Pipeline).collect(),
            Way::TwoStage => {
                let leaves = self.by_leaf();
                let mut routes = BTreeMap::new();
                for (leaf, hosts) in leaves {
                    // The root itself is first on its own leaf.
                    if leaf == self.hosts[0] {
                        routes.extend(group(from_root(hosts), Scheme::Pipeline));
                    } else {
                        routes.insert(hosts[0], Route::from_root(hosts[0]));
                        routes.extend(group(hosts, Scheme::Pipeline));
                    }
                }
                routes
            }
        }
    }

    /// Chooses the way on which `bytes` (what travels) are everywhere first.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn choose(&self, bytes: u64) -> Result<Choice, PlanError> {
        self.check()?;
        let possible = Way::ALL.into_iter().filter(|way| *way != Way::Multicast || self.multicast);
        let mut estimates: Vec<Estimate> = possible.map(|way| self.estimate(way, bytes)).collect();
        estimates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(Choice { way: estimates[0].way, estimates })
    }

    /// What going this way costs.
    #[must_use]
    pub fn estimate(&self, way: Way, bytes: u64) -> Estimate {
        #[allow(clippy::cast_precision_loss)]
        let (bytes, hosts) = (bytes as f64, (self.hosts.len() - 1) as f64);
        let block = f64::from(BLOCK_CHUNKS * CHUNK);
        let leaves = self.by_leaf();
        #[allow(clippy::cast_precision_loss)]
        let on = |leaf: &usize| leaves.get(leaf).map_or(0, Vec::len) as f64;
        let own = on(&self.hosts[0]);
        #[allow(clippy::cast_precision_loss)]
        let away = leaves.keys().filter(|leaf| **leaf != self.hosts[0]).count() as f64;
        let others = || leaves.keys().filter(|leaf| **leaf != self.hosts[0]);
        // Copies that leave the root; copies over each uplink, own leaf first; blocks until the first is through; copies over a host's link.
        let (copies, uplinks, steps, through): (f64, Vec<(usize, f64)>, f64, f64) = match way {
            Way::Unicast => {
                let down = others().map(|leaf| (*leaf, on(leaf)));
                (hosts, [(self.hosts[0], hosts - own)].into_iter().chain(down).collect(), 1.0, 1.0)
            }
            Way::Multicast => {
                let header = 1.0 + f64::from(OVERHEAD) / f64::from(self.payload);
                // Sent again as long as several miss it; read by the one that does.
                let (mut copies, mut missed, mut several) = (0.0, 1.0_f64, 1.0);
                while several > 0.01 {
                    copies += header * several;
                    missed *= self.loss;
                    let one = hosts * missed * (1.0 - missed).powf(hosts - 1.0);
                    let before = several;
                    several = (1.0 - (1.0 - missed).powf(hosts) - one).clamp(0.0, before);
                    copies += one.min(before);
                }
                let up = if away > 0.0 { copies } else { 0.0 };
                let down = others().map(|leaf| (*leaf, copies));
                (copies, [(self.hosts[0], up)].into_iter().chain(down).collect(), 1.0, header + self.loss)
            }
            Way::Pipeline => {
                let dimensions = (hosts + 1.0).log2().floor().max(1.0);
                // With leaves as neighbours, the upper dimensions cross between leaves.
                let crossing = |leaf: &usize| {
                    let inner =
                        (on(leaf) + f64::from(u8::from(*leaf == self.hosts[0]))).max(1.0).log2().floor();
                    (*leaf, if away > 0.0 { on(leaf) * (1.0 - inner / dimensions).max(0.0) } else { 0.0 })
                };
                (1.0, leaves.keys().map(crossing).collect(), dimensions + 1.0, 1.0)
            }
            Way::TwoStage => {
                let copies = away + f64::from(u8::from(own > 0.0));
                let down = others().map(|leaf| (*leaf, 1.0));
                let most = leaves.values().map(Vec::len).max().unwrap_or(1);
                #[allow(clippy::cast_precision_loss)]
                let steps = 2.0 + (most as f64).log2().floor();
                (copies, [(self.hosts[0], away)].into_iter().chain(down).collect(), steps, 1.0)
            }
        };
        let root_bytes = copies * bytes;
        let (mut busiest, mut name) = (root_bytes / self.link, format!("{copies:.2} copies leave the root"));
        if through * bytes / self.link > busiest {
            (busiest, name) = (through * bytes / self.link, format!("{through:.2} copies reach each host"));
        }
        let mut uplink_bytes = 0.0_f64;
        for (leaf, copies) in uplinks {
            uplink_bytes = uplink_bytes.max(copies * bytes);
            let seconds = copies * bytes / self.leaves[leaf].uplink;
            if seconds > busiest {
                (busiest, name) = (seconds, format!("{copies:.2} copies cross the uplink of leaf {leaf}"));
            }
        }
        let first = steps * block / self.link;
        let seconds = busiest + first;
        let arithmetic = format!(
            "{name}: {copied} in {busiest:.3} s, and {steps:.0} blocks of 256 KiB in {first:.3} s until the last host has the first",
            copied = words::bytes(bytes),
        );
        Estimate { way, seconds, root_bytes, uplink_bytes, arithmetic }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn leaves(count: usize, each: usize, link: f64, uplink: f64) -> Network {
        let hosts = (0..count).flat_map(|leaf| vec![leaf; each]).collect();
        Network { leaves: vec![Leaf { uplink }; count], hosts, ..Network::flat(1, link) }
    }

    fn best(network: &Network) -> Way {
        let choice = network.choose(1 << 30).unwrap();
        assert!(choice.estimates.iter().all(|estimate| estimate.seconds >= choice.estimates[0].seconds));
        choice.way
    }

    #[test]
    fn the_choice_follows_the_network() {
        assert_eq!(best(&Network::flat(1, 1e9)), Way::Unicast);
        assert_eq!(best(&Network::flat(8, 1e9)), Way::Pipeline, "multicast has 4 % more headers");
        let jumbo = Network { payload: 8192, ..Network::flat(500, 1e10) };
        assert_eq!(best(&Network { multicast: false, ..jumbo.clone() }), Way::Pipeline);
        // Thin uplinks: one copy to each leaf, or one for all.
        let thin = leaves(4, 20, 1e10, 1e9);
        assert_eq!(best(&thin), Way::Multicast);
        assert_eq!(best(&Network { multicast: false, ..thin.clone() }), Way::TwoStage);
        assert_ne!(best(&Network { loss: 0.6, ..thin }), Way::Multicast);
    }

    #[test]
    fn everybody_has_a_route_to_the_root() {
        for way in [Way::Pipeline, Way::TwoStage] {
            for network in [leaves(3, 5, 1e9, 1e9), leaves(4, 1, 1e9, 1e9), Network::flat(7, 1e9)] {
                let routes = network.routes(way);
                assert_eq!(routes.len(), network.hosts.len() - 1, "{way}");
                for (id, route) in &routes {
                    for block in 0..7 {
                        let (mut at, mut passed) = (*id, BTreeSet::new());
                        while at != HostId::ROOT {
                            assert!(passed.insert(at), "{way}: block {block} goes in a circle before {id}");
                            at = routes[&at].source(block);
                        }
                    }
                    assert_eq!(route.members[route.me as usize], *id);
                }
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let network = Network::flat(3, 1e9);
        for wrong in [
            Network { hosts: vec![0], ..network.clone() },
            Network { hosts: vec![0, 1], ..network.clone() },
            Network { link: f64::NAN, ..network.clone() },
            Network { link: 0.0, ..network.clone() },
            Network { loss: 1.0, ..network },
        ] {
            wrong.choose(1).unwrap_err();
        }
    }
}
