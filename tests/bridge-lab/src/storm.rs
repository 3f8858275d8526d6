//! Many clients, few GPUs, and bridges that are killed at random: no GPU may be leased twice, and no lease may be left behind.
//!
//! Two witnesses, neither of which is the bridge, look for GPUs that are leased twice: the clients' own list of who has which GPU
//! right now, and the history of the store, transaction by transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::{Method, StatusCode};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use test_servers::killed_with_this_thread;
use vmove_bridge::keys;
use vmove_bridge::lease::Lease;
use vmove_bridge::store::{Revision, Store, Txn};
use vmove_http::client::{Endpoint, HttpClient};

/// Nodes of the fleet, and GPUs of each.
const NODES: u32 = 4;
const GPUS: u32 = 8;
/// Time to live of the leases. A lease that its client could not give back must be gone after it.
const TTL: Duration = Duration::from_secs(30);
/// Time that bridges get to end such a lease once its time to live is over.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// A request is repeated for so long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// A single attempt, and the pause after it.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(20);
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(20);
/// Written to the store when all is over: up to it the witness has seen everything.
const END_KEY: &str = "end-of-storm";

/// How large the storm is.
#[derive(Debug, Clone)]
pub struct StormSpec {
    /// The program `vbridged`.
    pub vbridged: PathBuf,
    /// `--store` of each bridge.
    pub stores: Vec<String>,
    /// Clients.
    pub clients: u32,
    /// Requests of each client.
    pub requests: u32,
    /// Longest pause between two kills; zero: no bridge is killed.
    pub kill_interval: Duration,
}

/// What happened.
#[derive(Debug, Default, Clone)]
pub struct Outcome {
    /// Leases that were granted.
    pub granted: u64,
    /// Requests that did not fit.
    pub refused: u64,
    /// Attempts that were repeated because a bridge went away or could not answer.
    pub repeated: u64,
    /// Requests whose lease existed already: the first answer was lost.
    pub answers_lost: u64,
    /// Bridges killed.
    pub kills: u64,
    /// GPUs that two leases had at once, by the clients' list.
    pub leased_twice: u64,
    /// The same by the store's history; none if the store keeps none.
    pub leased_twice_in_history: Option<u64>,
    /// Leases that were left when their time to live was over.
    pub leaked: u64,
    /// Duration of all requests.
    pub elapsed: Duration,
}

/// Plays a storm. `history` is the store, if somebody else can watch it.
///
/// # Errors
/// A bridge does not start, or answers something else than leases and refusals.
pub async fn storm(spec: &StormSpec, history: Option<Arc<dyn Store>>) -> anyhow::Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let bridges = Arc::new(start_bridges(spec, folder.path())?);
    let clients: Arc<[HttpClient]> = bridges
        .iter()
        .map(|bridge| HttpClient::new(Endpoint::Unix(bridge.socket()), ATTEMPT_TIMEOUT))
        .collect();
    let counters = Arc::new(Counters::default());
    publish_fleet(&clients, &counters).await?;
    let witness = match &history {
        Some(store) => Some(tokio::spawn(witness(Arc::clone(store), store.snapshot().await?.revision))),
        None => None,
    };
    let start = Instant::now();
    let over = Arc::new(AtomicBool::new(false));
    let killer = tokio::spawn(kill_bridges(Arc::clone(&bridges), spec.kill_interval, Arc::clone(&over)));
    let client = |number| client(number, spec.requests, Arc::clone(&clients), Arc::clone(&counters));
    let tasks: Vec<_> = (0..spec.clients).map(|number| tokio::spawn(client(number))).collect();
    for task in tasks {
        task.await??;
    }
    let elapsed = start.elapsed();
    over.store(true, Ordering::Relaxed);
    let kills = killer.await?;
    let leaked = leases_left(&clients, &counters).await?;
    let leased_twice_in_history = match (witness, history) {
        (Some(witness), Some(store)) => {
            store.commit(Txn::default().put(END_KEY, "")).await?;
            Some(witness.await??)
        }
        _ => None,
    };
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Ok(Outcome {
        granted: count(&counters.granted),
        refused: count(&counters.refused),
        repeated: count(&counters.repeated),
        answers_lost: count(&counters.answers_lost),
        kills,
        leased_twice: count(&counters.leased_twice),
        leased_twice_in_history,
        leaked,
        elapsed,
    })
}

/// A bridge that is killed and started again.
#[derive(Debug)]
struct Bridge {
    program: PathBuf,
    folder: PathBuf,
    store: String,
    process: Mutex<Option<Child>>,
}

impl Bridge {
    fn socket(&self) -> PathBuf {
        self.folder.join("c.sock")
    }

    fn start(&self) -> anyhow::Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"))?;
        let process = killed_with_this_thread(&self.program)
            .args(["--store", &self.store, "--control"])
            .arg(self.socket())
            .env("VBRIDGE_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("could not start {}", self.program.display()))?;
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        Ok(())
    }

    fn kill(&self) {
        if let Some(mut process) = self.process.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start_bridges(spec: &StormSpec, folder: &Path) -> anyhow::Result<Vec<Bridge>> {
    let mut bridges = Vec::new();
    for (number, store) in spec.stores.iter().enumerate() {
        let folder = folder.join(number.to_string());
        std::fs::create_dir(&folder)?;
        let bridge = Bridge {
            program: spec.vbridged.clone(),
            folder,
            store: store.clone(),
            process: Mutex::default(),
        };
        bridge.start()?;
        bridges.push(bridge);
    }
    Ok(bridges)
}

#[derive(Debug, Default)]
struct Counters {
    granted: AtomicU64,
    refused: AtomicU64,
    repeated: AtomicU64,
    answers_lost: AtomicU64,
    leased_twice: AtomicU64,
    /// Lease by GPU, as the clients know it.
    owners: Mutex<HashMap<String, String>>,
}

impl Counters {
    fn took(&self, lease: &str, gpus: &[String]) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        for gpu in gpus {
            if let Some(other) = owners.insert(gpu.clone(), lease.to_owned()) {
                eprintln!("{gpu} was leased to {lease}, but {other} has it");
                self.leased_twice.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn gives_back(&self, gpus: &[String]) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        for gpu in gpus {
            owners.remove(gpu);
        }
    }
}

async fn publish_fleet(clients: &[HttpClient], counters: &Counters) -> anyhow::Result<()> {
    for number in 0..NODES {
        let devices: Vec<Value> = (0..GPUS)
            .map(|gpu| json!({ "address": format!("0000:00:{gpu:02x}.0"), "kind": "gpu", "id": "10de:2330" }))
            .collect();
        let numa = json!([{ "id": 0, "socket": 0, "cores": 64, "memory": 65536 }]);
        let node = json!({ "name": format!("n{number}"), "numa": numa, "devices": devices });
        let path = format!("/v1/nodes/n{number}");
        let (status, body) = request(clients, 0, counters, Method::PUT, &path, &node).await?;
        if !status.is_success() {
            bail!("{path}: {status} {body}");
        }
    }
    let nodes = |range: std::ops::Range<u32>| range.map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
    let text = format!(
        "SwitchName=l0 Nodes={}\nSwitchName=l1 Nodes={}\nSwitchName=s Switches=l0,l1\n",
        nodes(0..NODES / 2),
        nodes(NODES / 2..NODES)
    );
    let topology = json!({ "format": "topology.conf", "text": text });
    let (status, body) = request(clients, 0, counters, Method::PUT, "/v1/topology", &topology).await?;
    if !status.is_success() {
        bail!("/v1/topology: {status} {body}");
    }
    Ok(())
}

/// Sends a request until a bridge has decided about it; the bridge at `first` is asked first.
async fn request(
    clients: &[HttpClient],
    first: usize,
    counters: &Counters,
    method: Method,
    path: &str,
    body: &Value,
) -> anyhow::Result<(StatusCode, Value)> {
    let text = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    for attempt in 0.. {
        if let Ok((status, answer)) =
            clients[(first + attempt) % clients.len()].send(method.clone(), path, text.clone()).await
            && status != StatusCode::SERVICE_UNAVAILABLE
        {
            return Ok((status, serde_json::from_slice(&answer).unwrap_or_default()));
        }
        if Instant::now() > deadline {
            break;
        }
        counters.repeated.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(ATTEMPT_INTERVAL).await;
    }
    bail!("no bridge has answered {path} for {REQUEST_TIMEOUT:?}")
}

/// Asks for leases, renews some of them, and gives all back.
async fn client(
    number: u32,
    requests: u32,
    clients: Arc<[HttpClient]>,
    counters: Arc<Counters>,
) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(u64::from(number));
    let ttl_ms = u64::try_from(TTL.as_millis())?;
    for turn in 0..requests {
        let id = format!("c{number}-{turn}");
        let (vms, gpus): (u32, u32) = (rng.random_range(1..=3), rng.random_range(1..=4));
        let needs = json!({ "vcpus": 1, "memory": 64,
            "devices": [{ "count": gpus, "filter": { "kind": "gpu" } }] });
        let cluster =
            json!({ "name": id, "groups": [{ "name": "vm", "count": vms, "alternatives": [needs] }] });
        let body =
            json!({ "id": id, "holder": format!("client-{number}"), "ttl_ms": ttl_ms, "request": cluster });
        let first = rng.random_range(0..clients.len());
        let ask = async |method, path: &str, body: &Value| {
            request(&clients, first, &counters, method, path, body).await
        };
        let (status, answer) = ask(Method::POST, "/v1/leases", &body).await?;
        if status == StatusCode::CONFLICT {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        if !status.is_success() {
            bail!("{id}: {status} {answer}");
        }
        counters.granted.fetch_add(1, Ordering::Relaxed);
        counters.answers_lost.fetch_add(u64::from(answer["again"] == true), Ordering::Relaxed);
        let gpus = devices(&answer["lease"]["held"]);
        counters.took(&id, &gpus);
        if rng.random_bool(0.2) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..20))).await;
            let (status, answer) = ask(Method::POST, &format!("/v1/leases/{id}/renew"), &Value::Null).await?;
            if !status.is_success() {
                bail!("the heartbeat of lease {id}, which exists, was refused: {status} {answer}");
            }
        }
        counters.gives_back(&gpus);
        let (status, answer) = ask(Method::DELETE, &format!("/v1/leases/{id}"), &Value::Null).await?;
        // 404: the first answer was lost.
        if !status.is_success() && status != StatusCode::NOT_FOUND {
            bail!("{id}: {status} {answer}");
        }
    }
    Ok(())
}

/// `NODE ADDRESS` of each device that is held.
fn devices(held: &Value) -> Vec<String> {
    let of = |held: &Value| {
        let node = held["node"].as_str().unwrap_or_default().to_owned();
        let devices = held["devices"].as_array().cloned().unwrap_or_default();
        devices
            .into_iter()
            .map(move |device| format!("{node} {}", device["address"].as_str().unwrap_or_default()))
    };
    held.as_array().into_iter().flatten().flat_map(of).collect()
}

/// Kills a bridge now and then, and starts it again a moment later. Gives the number of kills.
async fn kill_bridges(bridges: Arc<Vec<Bridge>>, interval: Duration, over: Arc<AtomicBool>) -> u64 {
    let mut rng = StdRng::seed_from_u64(99);
    let mut kills = 0;
    if interval.is_zero() {
        return kills;
    }
    while !over.load(Ordering::Relaxed) {
        tokio::time::sleep(interval.mul_f64(rng.random_range(0.2..1.0))).await;
        let bridge = &bridges[rng.random_range(0..bridges.len())];
        bridge.kill();
        kills += 1;
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
        if let Err(error) = bridge.start() {
            eprintln!("{error:#}");
        }
    }
    kills
}

/// Leases that are left when their time to live is over.
async fn leases_left(clients: &[HttpClient], counters: &Counters) -> anyhow::Result<u64> {
    let deadline = Instant::now() + TTL + SWEEP_TIMEOUT;
    loop {
        let (_, list) = request(clients, 0, counters, Method::GET, "/v1/leases", &Value::Null).await?;
        let left = list["leases"].as_array().context("a list of leases")?.len();
        if left == 0 || Instant::now() > deadline {
            return Ok(left as u64);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Follows the store, and counts devices that two leases have after the same transaction.
async fn witness(store: Arc<dyn Store>, from: Revision) -> anyhow::Result<u64> {
    let mut changes = store.watch(from).await?;
    let mut devices_of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut leases_of: HashMap<String, BTreeSet<String>> = HashMap::new();
    let mut twice = 0;
    while let Some(news) = changes.recv().await {
        for change in news?.changes {
            if change.key == END_KEY {
                return Ok(twice);
            }
            let Some(id) = change.key.strip_prefix(keys::LEASES) else { continue };
            for device in devices_of.remove(id).unwrap_or_default() {
                leases_of.entry(device).or_default().remove(id);
            }
            let Some(entry) = change.entry else { continue };
            let lease: Lease = serde_json::from_str(&entry.value)?;
            let held = devices(&serde_json::to_value(&lease.held)?);
            for device in &held {
                let leases = leases_of.entry(device.clone()).or_default();
                leases.insert(id.to_owned());
                twice += u64::from(leases.len() > 1);
            }
            devices_of.insert(id.to_owned(), held);
        }
    }
    bail!("the store ended the watch of the witness")
}
