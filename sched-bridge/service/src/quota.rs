//! Quotas: what a holder may have leased at once.

use std::collections::BTreeMap;
use std::fmt;

use sched_bridge::model::{Assignment, DeviceKind};
use serde::{Deserialize, Serialize};

use crate::lease::{Lease, LeaseId};

/// Stands for every holder without a quota of its own.
pub const OTHERS: &str = "*";
/// So many leases are named as what could be released.
const MOST_NAMED: usize = 16;

/// A quota. What is absent is not limited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Quota {
    /// Leases.
    pub leases: Option<u64>,
    /// GPUs.
    pub gpus: Option<u64>,
    /// vGPUs and MIG slices.
    #[serde(alias = "gpu_shares")]
    pub gpu_shares: Option<u64>,
    /// Remote GPUs.
    #[serde(alias = "remote_gpus")]
    pub remote_gpus: Option<u64>,
    /// Adapters and virtual functions.
    pub adapters: Option<u64>,
    /// Hardware threads.
    pub cores: Option<u64>,
    /// Memory in and outside huge pages, MiB.
    #[serde(alias = "memory_mib")]
    pub memory_mib: Option<u64>,
}

/// What quotas limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Leases.
    Leases,
    /// GPUs.
    Gpus,
    /// vGPUs and MIG slices.
    GpuShares,
    /// Remote GPUs.
    RemoteGpus,
    /// Adapters and virtual functions.
    Adapters,
    /// Hardware threads.
    Cores,
    /// Memory, MiB.
    MemoryMib,
}

const RESOURCES: [Resource; 7] = [
    Resource::Leases,
    Resource::Gpus,
    Resource::GpuShares,
    Resource::RemoteGpus,
    Resource::Adapters,
    Resource::Cores,
    Resource::MemoryMib,
];

/// A resource of which a holder would have more than its quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exceeded {
    /// The resource.
    pub resource: Resource,
    /// The quota.
    pub limit: u64,
    /// What the holder has leased.
    pub used: u64,
    /// What it asks for.
    pub asked: u64,
    /// Leases whose release would suffice; empty if none would, as more is asked for than the quota.
    pub release: Vec<LeaseId>,
}

/// A request for more than the holder's quota.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{holder} would exceed its quota: {}; nothing was leased", list(.exceeded))]
pub struct OverQuota {
    /// The holder.
    pub holder: String,
    /// Every resource of which it would be too much.
    pub exceeded: Vec<Exceeded>,
}

fn list(exceeded: &[Exceeded]) -> String {
    exceeded.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resource, limit, used, asked, release } = self;
        write!(f, "limit {limit} {resource}, used {used}, asked {asked}: ")?;
        match release.as_slice() {
            [] => write!(f, "ask for at most {limit}"),
            [one] => write!(f, "release lease {one}"),
            several => {
                let names: Vec<&str> = several.iter().map(LeaseId::as_str).collect();
                write!(f, "release leases {}", names.join(", "))
            }
        }?;
        match limit.saturating_sub(*used) {
            0 => Ok(()),
            left if left < *asked && !release.is_empty() => write!(f, ", or ask for at most {left}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leases => "leases",
            Self::Gpus => "GPUs",
            Self::GpuShares => "vGPUs and MIG slices",
            Self::RemoteGpus => "remote GPUs",
            Self::Adapters => "adapters",
            Self::Cores => "cores",
            Self::MemoryMib => "MiB of memory",
        })
    }
}

impl Resource {
    /// How much of it these are.
    fn amount<'a>(self, assignments: impl Iterator<Item = &'a Assignment>) -> u64 {
        let of = |assignment: &Assignment| -> u64 {
            let count = |kind| assignment.count(kind) as u64;
            match self {
                Self::Leases => 0,
                Self::Gpus => count(DeviceKind::Gpu),
                Self::GpuShares => count(DeviceKind::Vgpu) + count(DeviceKind::MigSlice),
                Self::RemoteGpus => count(DeviceKind::RemoteGpu),
                Self::Adapters => count(DeviceKind::Hca) + count(DeviceKind::Vf),
                Self::Cores => assignment.cores().into(),
                Self::MemoryMib => assignment.memory().0,
            }
        };
        match self {
            Self::Leases => 1,
            _ => assignments.fold(0, |sum: u64, own| sum.saturating_add(of(own))),
        }
    }
}

impl Quota {
    fn limit(&self, resource: Resource) -> Option<u64> {
        match resource {
            Resource::Leases => self.leases,
            Resource::Gpus => self.gpus,
            Resource::GpuShares => self.gpu_shares,
            Resource::RemoteGpus => self.remote_gpus,
            Resource::Adapters => self.adapters,
            Resource::Cores => self.cores,
            Resource::MemoryMib => self.memory_mib,
        }
    }

    /// Whether a holder may have this as well, beside these leases. A VM that moves counts once.
    ///
    /// # Errors
    /// Every resource of which it would be too much.
    pub fn check<'a>(
        &self,
        leases: impl Iterator<Item = &'a Lease>,
        holder: &str,
        asked: &[Assignment],
    ) -> Result<(), OverQuota> {
        let own: Vec<&Lease> = leases.filter(|lease| lease.holder == holder).collect();
        let exceeded = RESOURCES.into_iter().filter_map(|resource| {
            let limit = self.limit(resource)?;
            let asked = resource.amount(asked.iter());
            let amount = |lease: &Lease| {
                let home = lease.at_home();
                resource.amount(home.map(|held| &held.assignment))
            };
            let mut amounts: Vec<(u64, &LeaseId)> =
                own.iter().map(|lease| (amount(lease), &lease.id)).collect();
            let used = amounts.iter().fold(0, |sum: u64, (amount, _)| sum.saturating_add(*amount));
            let too_much = used.saturating_add(asked).saturating_sub(limit);
            // Who asks for nothing of it is not held up by a quota that was lowered.
            (asked > 0 && too_much > 0).then(|| Exceeded {
                resource,
                limit,
                used,
                asked,
                release: if asked > limit { Vec::new() } else { fewest(&mut amounts, too_much) },
            })
        });
        let exceeded: Vec<Exceeded> = exceeded.collect();
        if exceeded.is_empty() { Ok(()) } else { Err(OverQuota { holder: holder.to_owned(), exceeded }) }
    }
}

/// The smallest lease that is enough, else the largest ones that are together.
fn fewest(amounts: &mut [(u64, &LeaseId)], enough: u64) -> Vec<LeaseId> {
    amounts.sort_unstable();
    if let Some((_, one)) = amounts.iter().find(|(amount, _)| *amount >= enough) {
        return vec![(*one).clone()];
    }
    let mut left = enough;
    let mut chosen = Vec::new();
    for (amount, id) in amounts.iter().rev().take(MOST_NAMED) {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(*amount);
        chosen.push((*id).clone());
    }
    chosen
}

/// The quotas of all holders.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Quotas(BTreeMap<String, Quota>);

impl Quotas {
    /// The quota of a holder, if it has one.
    #[must_use]
    pub fn of(&self, holder: &str) -> Option<&Quota> {
        self.0.get(holder).or_else(|| self.0.get(OTHERS))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bridge::{BridgeError, GrantRequest};
    use crate::testing::{TestBridge, exactly, id, one_gpu};

    fn gpus(limit: u64) -> Option<Quota> {
        Some(Quota { gpus: Some(limit), ..Quota::default() })
    }

    fn of_alice(id: &str, gpus: std::ops::Range<u8>, node: &str, quota: Option<Quota>) -> GrantRequest {
        let assignments = gpus.map(|gpu| one_gpu(&format!("{id}-{gpu}"), node, gpu)).collect();
        GrantRequest { holder: "alice".to_owned(), quota, ..exactly(id, assignments) }
    }

    #[tokio::test]
    async fn a_holder_has_no_more_than_its_quota() {
        let bridge = TestBridge::empty().await;
        bridge.put_nodes(&["n0", "n1"], 8).await;
        bridge.grant(of_alice("three", 0..3, "n0", gpus(4))).await.unwrap();
        bridge.grant(of_alice("one", 3..4, "n0", gpus(4))).await.unwrap();
        let refused = async |request| match bridge.grant(request).await.unwrap_err() {
            BridgeError::OverQuota(over) => over,
            error => panic!("{error}"),
        };
        let over = refused(of_alice("two", 0..2, "n1", gpus(4))).await;
        assert_eq!(
            over.to_string(),
            "alice would exceed its quota: limit 4 GPUs, used 4, asked 2: release lease three; nothing was leased"
        );
        let over = refused(of_alice("one-more", 0..1, "n1", gpus(4))).await;
        assert_eq!(over.exceeded[0].release, [id("one")], "the smallest that is enough");
        let over = refused(of_alice("four", 0..4, "n1", gpus(4))).await;
        assert_eq!(over.exceeded[0].release, [id("three"), id("one")]);
        let over = refused(of_alice("five", 0..5, "n1", gpus(4))).await;
        assert!(over.to_string().ends_with("asked 5: ask for at most 4; nothing was leased"), "{over}");
        let over = refused(of_alice("three-more", 0..3, "n1", gpus(6))).await;
        assert!(over.to_string().contains("release lease one, or ask for at most 2"), "{over}");
        let leases = Some(Quota { leases: Some(2), cores: Some(1), ..Quota::default() });
        let over = refused(of_alice("third", 0..1, "n1", leases)).await;
        assert_eq!(over.exceeded.len(), 2, "{over}");
        // Of another one nothing is counted, and what is released is free at once.
        let bobs = GrantRequest { holder: "bob".to_owned(), ..of_alice("bobs", 0..4, "n1", gpus(4)) };
        bridge.grant(bobs).await.unwrap();
        bridge.release(&id("three")).await.unwrap();
        bridge.grant(of_alice("two", 4..6, "n1", gpus(4))).await.unwrap();
        // A repeated request is no new one.
        assert!(bridge.grant(of_alice("two", 4..6, "n1", gpus(0))).await.unwrap().again);
    }

    /// Two requests at once on different nodes: one of them sees the other.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn requests_at_once_do_not_exceed_it_together() {
        let bridge = TestBridge::empty().await;
        let names: Vec<String> = (0..8).map(|n| format!("n{n}")).collect();
        bridge.put_nodes(&names.iter().map(String::as_str).collect::<Vec<_>>(), 2).await;
        let tasks: Vec<_> = names
            .iter()
            .map(|node| {
                let (bridge, node) = (Arc::clone(&bridge), node.clone());
                tokio::spawn(async move { bridge.grant(of_alice(&node, 0..1, &node, gpus(3))).await.is_ok() })
            })
            .collect();
        let mut granted = 0;
        for task in tasks {
            granted += u32::from(task.await.unwrap());
        }
        assert_eq!((granted, bridge.view().unwrap().leases().len()), (3, 3));
    }
}
