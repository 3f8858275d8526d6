//! Many clients, few devices, and bridges that are killed at random: nothing may be given twice, nothing may be lost.
//!
//! Two witnesses, neither of which is the bridge: the clients' own list of who has which device right now, and the history of the
//! store, transaction by transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use crate::http::{Endpoint, HttpClient};
use crate::lab::mortal;
use crate::lease::Lease;
use crate::store::Store;

/// Nodes and their GPUs.
const NODES: u32 = 4;
const GPUS: u32 = 8;
/// Time to live of the leases. What nobody gave back must be gone after it.
const TTL: Duration = Duration::from_secs(30);

/// How large, and how wild.
#[derive(Debug, Clone)]
pub struct Plan {
    /// `vbridged`.
    pub program: PathBuf,
    /// `--store` of each bridge.
    pub stores: Vec<String>,
    /// Clients.
    pub clients: u32,
    /// Requests of each.
    pub requests: u32,
    /// Pause between two kills, at most; none for no kills.
    pub kill_every: Option<Duration>,
}

/// What happened.
#[derive(Debug, Default, Clone)]
pub struct Outcome {
    /// Leases that were given.
    pub granted: u64,
    /// Requests that did not fit.
    pub refused: u64,
    /// Requests that were repeated because a bridge went away or could not answer.
    pub repeated: u64,
    /// Answers from a lease that was there already: its first answer was lost.
    pub again: u64,
    /// Kills.
    pub kills: u64,
    /// Devices that two had at once, by the clients.
    pub twice: u64,
    /// Devices that two had at once, by the store's history; none where it has none.
    pub twice_in_history: Option<u64>,
    /// Leases that were left when their time to live was over.
    pub leaked: u64,
    /// How long it took.
    pub took: Duration,
}

/// A bridge that is killed and started again.
#[derive(Debug)]
struct Victim {
    program: PathBuf,
    folder: PathBuf,
    store: String,
    child: Mutex<Option<Child>>,
}

impl Victim {
    fn socket(&self) -> PathBuf {
        self.folder.join("c.sock")
    }

    fn start(&self) -> anyhow::Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"))?;
        let child = mortal(&self.program)
            .args(["--store", &self.store, "--control"])
            .arg(self.socket())
            .env("VBRIDGE_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("could not start {}", self.program.display()))?;
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        Ok(())
    }

    fn kill(&self) {
        if let Some(mut child) = self.child.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Debug, Default)]
struct Counters {
    granted: AtomicU64,
    refused: AtomicU64,
    repeated: AtomicU64,
    again: AtomicU64,
    twice: AtomicU64,
    owners: Mutex<HashMap<String, String>>,
}

/// Plays it. `history` is the store as a witness sees it, if others may look.
///
/// # Errors
/// A bridge does not start, or answers something else than leases and refusals.
pub async fn storm(plan: &Plan, history: Option<Arc<dyn Store>>) -> anyhow::Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let mut victims = Vec::new();
    for (at, store) in plan.stores.iter().enumerate() {
        let home = folder.path().join(at.to_string());
        std::fs::create_dir(&home)?;
        let victim = Victim {
            program: plan.program.clone(),
            folder: home,
            store: store.clone(),
            child: Mutex::default(),
        };
        victim.start()?;
        victims.push(victim);
    }
    let victims = Arc::new(victims);
    let clients: Arc<[HttpClient]> = victims
        .iter()
        .map(|v| HttpClient::new(Endpoint::Unix(v.socket()), Duration::from_secs(20)))
        .collect();
    let counters = Arc::new(Counters::default());
    publish(&clients, &counters).await?;
    let witness = match &history {
        Some(store) => Some(tokio::spawn(witness(Arc::clone(store), store.snapshot().await?.revision))),
        None => None,
    };
    let start = Instant::now();
    let over = Arc::new(AtomicBool::new(false));
    let killer = tokio::spawn(kill(Arc::clone(&victims), plan.kill_every, Arc::clone(&over)));
    let tasks: Vec<_> = (0..plan.clients)
        .map(|number| {
            tokio::spawn(client(number, plan.requests, Arc::clone(&clients), Arc::clone(&counters)))
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    let took = start.elapsed();
    over.store(true, Ordering::Relaxed);
    let kills = killer.await?;
    let leaked = leaked(&clients, &counters).await?;
    let twice_in_history = match (witness, history) {
        (Some(witness), Some(store)) => {
            store.commit(crate::store::Txn::default().put(END, "")).await?;
            Some(witness.await??)
        }
        _ => None,
    };
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Ok(Outcome {
        granted: get(&counters.granted),
        refused: get(&counters.refused),
        repeated: get(&counters.repeated),
        again: get(&counters.again),
        kills,
        twice: get(&counters.twice),
        twice_in_history,
        leaked,
        took,
    })
}

/// Tells the witness that it has seen all.
const END: &str = "end-of-storm";

async fn publish(clients: &[HttpClient], counters: &Counters) -> anyhow::Result<()> {
    for number in 0..NODES {
        let devices: Vec<Value> = (0..GPUS)
            .map(|gpu| json!({ "address": format!("0000:00:{gpu:02x}.0"), "kind": "gpu", "id": "10de:2330" }))
            .collect();
        let node = json!({ "name": format!("n{number}"), "numa": [{ "id": 0, "socket": 0, "cores": 64, "memory": 65536 }], "devices": devices });
        let (status, body) =
            insist(clients, 0, counters, Method::PUT, &format!("/v1/nodes/n{number}"), &node).await?;
        if !status.is_success() {
            bail!("{status}: {body}");
        }
    }
    let nodes = |range: std::ops::Range<u32>| range.map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
    let text = format!(
        "SwitchName=l0 Nodes={}\nSwitchName=l1 Nodes={}\nSwitchName=s Switches=l0,l1\n",
        nodes(0..NODES / 2),
        nodes(NODES / 2..NODES)
    );
    let topology = json!({ "format": "topology.conf", "text": text });
    // Without it, requests of one VM still fit.
    let _ = insist(clients, 0, counters, Method::PUT, "/v1/topology", &topology).await?;
    Ok(())
}

/// Sends a request until a bridge has decided about it, from the one at `first` on.
async fn insist(
    clients: &[HttpClient],
    first: usize,
    counters: &Counters,
    method: Method,
    path: &str,
    body: &Value,
) -> anyhow::Result<(StatusCode, Value)> {
    let text = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
    let deadline = Instant::now() + Duration::from_secs(120);
    for turn in 0.. {
        if let Ok((status, answer)) =
            clients[(first + turn) % clients.len()].send(method.clone(), path, text.clone()).await
            && status != StatusCode::SERVICE_UNAVAILABLE
        {
            return Ok((status, serde_json::from_slice(&answer).unwrap_or_default()));
        }
        if Instant::now() > deadline {
            break;
        }
        counters.repeated.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bail!("no bridge has answered {path} for two minutes")
}

async fn client(
    number: u32,
    requests: u32,
    clients: Arc<[HttpClient]>,
    counters: Arc<Counters>,
) -> anyhow::Result<()> {
    use rand::{Rng, SeedableRng};
    let mut random = rand::rngs::StdRng::seed_from_u64(u64::from(number));
    let ttl = u64::try_from(TTL.as_millis())?;
    for request in 0..requests {
        let id = format!("c{number}-{request}");
        let (vms, gpus): (u32, u32) = (random.random_range(1..=3), random.random_range(1..=4));
        let ask = json!({ "id": id, "holder": format!("client-{number}"), "ttl_ms": ttl, "request": {
            "name": id, "groups": [{ "name": "vm", "count": vms, "alternatives": [{ "vcpus": 1, "memory": 64,
                "devices": [{ "count": gpus, "filter": { "kind": "gpu" } }] }] }] } });
        let first = random.random_range(0..clients.len());
        let (status, answer) = insist(&clients, first, &counters, Method::POST, "/v1/leases", &ask).await?;
        if status == StatusCode::CONFLICT {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        if !status.is_success() {
            bail!("{id}: {status} {answer}");
        }
        counters.granted.fetch_add(1, Ordering::Relaxed);
        counters.again.fetch_add(u64::from(answer["again"] == true), Ordering::Relaxed);
        let devices = devices(&answer["lease"]["held"]);
        own(&counters, &id, &devices);
        if random.random_bool(0.2) {
            tokio::time::sleep(Duration::from_millis(random.random_range(0..20))).await;
            let path = format!("/v1/leases/{id}/renew");
            let (status, answer) =
                insist(&clients, first, &counters, Method::POST, &path, &Value::Null).await?;
            if !status.is_success() {
                bail!("a heartbeat of a lease that is there, {id}: {status} {answer}");
            }
        }
        disown(&counters, &devices);
        let path = format!("/v1/leases/{id}");
        let (status, answer) =
            insist(&clients, first, &counters, Method::DELETE, &path, &Value::Null).await?;
        // Not there any more: the first answer was lost.
        if !status.is_success() && status != StatusCode::NOT_FOUND {
            bail!("{id}: {status} {answer}");
        }
    }
    Ok(())
}

fn devices(held: &Value) -> Vec<String> {
    let held = held.as_array().map_or(&[][..], |held| held);
    let of = |held: &Value| {
        let node = held["node"].as_str().unwrap_or_default().to_owned();
        let devices = held["devices"].as_array().cloned().unwrap_or_default();
        devices.into_iter().map(move |d| format!("{node} {}", d["address"].as_str().unwrap_or_default()))
    };
    held.iter().flat_map(of).collect()
}

fn own(counters: &Counters, id: &str, devices: &[String]) {
    let mut owners = counters.owners.lock().unwrap_or_else(PoisonError::into_inner);
    for device in devices {
        if let Some(other) = owners.insert(device.clone(), id.to_owned()) {
            eprintln!("{device} was given to {id}, but {other} has it");
            counters.twice.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn disown(counters: &Counters, devices: &[String]) {
    let mut owners = counters.owners.lock().unwrap_or_else(PoisonError::into_inner);
    for device in devices {
        owners.remove(device);
    }
}

async fn kill(victims: Arc<Vec<Victim>>, every: Option<Duration>, over: Arc<AtomicBool>) -> u64 {
    use rand::{Rng, SeedableRng};
    let Some(every) = every else { return 0 };
    let mut random = rand::rngs::StdRng::seed_from_u64(99);
    let mut kills = 0;
    while !over.load(Ordering::Relaxed) {
        tokio::time::sleep(every.mul_f64(random.random_range(0.2..1.0))).await;
        let victim = &victims[random.random_range(0..victims.len())];
        victim.kill();
        kills += 1;
        tokio::time::sleep(Duration::from_millis(random.random_range(0..200))).await;
        if let Err(error) = victim.start() {
            eprintln!("{error:#}");
        }
    }
    kills
}

/// Leases that are left after their time to live and a little.
async fn leaked(clients: &[HttpClient], counters: &Counters) -> anyhow::Result<u64> {
    let deadline = Instant::now() + TTL + Duration::from_secs(5);
    loop {
        let (_, list) = insist(clients, 0, counters, Method::GET, "/v1/leases", &Value::Null).await?;
        let left = list["leases"].as_array().context("a list of leases")?.len();
        if left == 0 || Instant::now() > deadline {
            return Ok(left as u64);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Follows the store and counts devices that two leases have after the same transaction.
async fn witness(store: Arc<dyn Store>, from: crate::store::Revision) -> anyhow::Result<u64> {
    let mut changes = store.watch(from).await?;
    let (mut leases, mut owners): (BTreeMap<String, Vec<String>>, HashMap<String, BTreeSet<String>>) =
        Default::default();
    let mut twice = 0;
    while let Some(news) = changes.recv().await {
        for change in news?.changes {
            if change.key == END {
                return Ok(twice);
            }
            let Some(id) = change.key.strip_prefix(crate::keys::LEASES) else { continue };
            for device in leases.remove(id).unwrap_or_default() {
                owners.entry(device).or_default().remove(id);
            }
            let Some(entry) = change.entry else { continue };
            let lease: Lease = serde_json::from_str(&entry.value)?;
            let held = devices(&serde_json::to_value(&lease.held)?);
            for device in &held {
                let owners = owners.entry(device.clone()).or_default();
                owners.insert(id.to_owned());
                twice += u64::from(owners.len() > 1);
            }
            leases.insert(id.to_owned(), held);
        }
    }
    bail!("the watch of the witness ended")
}
