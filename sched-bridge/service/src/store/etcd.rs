//! The store of several bridges: etcd, spoken to through the JSON gateway of its v3 interface (`/v3/kv/txn`, `/v3/kv/range`,
//! `/v3/watch`), so that no protocol compiler is needed to build this.
//!
//! All keys are below one prefix. The gateway needs keys and values in base64 and 64-bit numbers as strings
//! (<https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/>).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    Change, Changes, Committed, Entry, Expect, KeyRange, Revision, Snapshot, Store, StoreError, Txn,
    check_size,
};
use vmove_http::client::{Endpoint, HttpClient, HttpError, Lines};

/// etcd's own default of `--max-txn-ops`.
pub const DEFAULT_MAX_TXN_OPS: usize = 128;
/// Keys that one answer carries at most: 10,000 nodes with their devices would be more than a message may hold.
const PAGE: usize = 500;
const HINT: &str = "Start etcd, or name it by --store etcd:http://HOST:PORT[,http://HOST:PORT...]";

/// An etcd cluster.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<HttpClient>,
    /// The member that answered last.
    current: AtomicUsize,
    prefix: String,
    max_txn_ops: usize,
}

impl Etcd {
    /// A cluster whose members are at these addresses. Nothing is connected yet.
    #[must_use]
    pub fn new(members: Vec<Endpoint>, prefix: &str, timeout: Duration) -> Self {
        let members = members.into_iter().map(|endpoint| HttpClient::new(endpoint, timeout)).collect();
        Self {
            members,
            current: AtomicUsize::new(0),
            prefix: prefix.to_owned(),
            max_txn_ops: DEFAULT_MAX_TXN_OPS,
        }
    }

    /// What etcd was started with as `--max-txn-ops`, if it is not the default.
    #[must_use]
    pub fn with_max_txn_ops(mut self, limit: usize) -> Self {
        self.max_txn_ops = limit;
        self
    }

    fn unreachable(&self, reason: String) -> StoreError {
        StoreError::Unreachable { store: self.name(), reason, hint: HINT }
    }

    fn protocol(&self, found: impl Into<String>, expected: &'static str) -> StoreError {
        StoreError::Protocol { store: self.name(), found: found.into(), expected }
    }

    /// Asks members in turn until one takes the request. Only a request that surely was not seen goes to the next; for one that
    /// changes nothing (`read`), any failure does.
    async fn post(&self, path: &str, body: &Value, read: bool) -> Result<Value, StoreError> {
        let text = Bytes::from(body.to_string());
        let first = self.current.load(Ordering::Relaxed);
        let mut reasons = Vec::new();
        for turn in 0..self.members.len() {
            let at = (first + turn) % self.members.len();
            match self.members[at].send(Method::POST, path, text.clone()).await {
                Ok((status, answer)) if status.is_success() => {
                    self.current.store(at, Ordering::Relaxed);
                    return serde_json::from_slice(&answer)
                        .map_err(|e| self.protocol(e.to_string(), "JSON of etcd's gateway"));
                }
                Ok((status, answer)) => {
                    let text = String::from_utf8_lossy(&answer).into_owned();
                    // 503 comes from a member without a leader: what became of a change is not known.
                    if !read && (status.is_server_error() || status.as_u16() == 408) {
                        return Err(StoreError::Unknown {
                            store: self.name(),
                            reason: format!("{status}: {text}"),
                        });
                    }
                    if !status.is_server_error() {
                        return Err(self.protocol(format!("{status}: {text}"), "200 OK"));
                    }
                    reasons.push(text);
                }
                Err(error) if !read && error.may_have_been_seen() => {
                    return Err(StoreError::Unknown { store: self.name(), reason: error.to_string() });
                }
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(self.unreachable(reasons.join("; ")))
    }

    fn key(&self, key: &str) -> String {
        STANDARD.encode(format!("{}{key}", self.prefix))
    }

    /// The end of the range of all keys of the prefix: the prefix with its last byte one higher.
    fn range_end(&self) -> String {
        let mut end = self.prefix.clone().into_bytes();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        STANDARD.encode(end)
    }

    fn decode(&self, pair: &Pair) -> Result<(String, Entry), StoreError> {
        let text = |code: &str| STANDARD.decode(code).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let key = text(&pair.key).ok_or_else(|| self.protocol(pair.key.clone(), "a key in base64"))?;
        let value = text(&pair.value).ok_or_else(|| self.protocol(pair.value.clone(), "a text in base64"))?;
        let key = key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned();
        Ok((key, Entry { value, revision: Revision(number(&pair.mod_revision)) }))
    }

    fn txn_body(&self, txn: &Txn) -> Value {
        let compare: Vec<Value> = txn
            .expect
            .iter()
            .map(|(key, expect)| {
                let revision = match expect {
                    // A key that is not there has been modified at revision 0.
                    Expect::Absent => 0,
                    Expect::At(revision) => revision.0,
                };
                json!({ "key": self.key(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
            })
            .collect();
        let success: Vec<Value> = txn
            .set
            .iter()
            .map(|(key, value)| match value {
                Some(value) => {
                    json!({ "requestPut": { "key": self.key(key), "value": STANDARD.encode(value) } })
                }
                None => json!({ "requestDeleteRange": { "key": self.key(key) } }),
            })
            .collect();
        json!({ "compare": compare, "success": success })
    }

    async fn open_watch(&self, after: Revision) -> Result<Lines, StoreError> {
        let body = json!({ "create_request": {
            "key": STANDARD.encode(&self.prefix), "range_end": self.range_end(),
            "start_revision": (after.0 + 1).to_string(), "fragment": false,
        }});
        let first = self.current.load(Ordering::Relaxed);
        let mut reasons = Vec::new();
        for turn in 0..self.members.len() {
            let at = (first + turn) % self.members.len();
            let body = Bytes::from(body.to_string());
            match self.members[at].stream(Method::POST, "/v3/watch", body).await {
                Ok(response) if response.status().is_success() => return Ok(Lines::new(response)),
                Ok(response) => reasons.push(response.status().to_string()),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(self.unreachable(reasons.join("; ")))
    }
}

#[async_trait]
impl Store for Etcd {
    fn name(&self) -> String {
        let members: Vec<String> = self.members.iter().map(|m| m.endpoint().to_string()).collect();
        format!("etcd {}", members.join(","))
    }

    fn max_keys(&self) -> usize {
        self.max_txn_ops
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn read(&self, range: KeyRange) -> Result<Snapshot, StoreError> {
        let mut snapshot = Snapshot::default();
        for (first, end) in range.ranges() {
            let end = end.map_or_else(|| self.range_end(), |end| self.key(&end));
            self.read_range(self.key(&first), &end, &mut snapshot).await?;
        }
        Ok(snapshot)
    }

    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError> {
        check_size(&txn, self.max_keys())?;
        let answer = self.post("/v3/kv/txn", &self.txn_body(&txn), false).await?;
        let answer: TxnAnswer = serde_json::from_value(answer)
            .map_err(|e| self.protocol(e.to_string(), "an answer of /v3/kv/txn"))?;
        if answer.succeeded {
            Ok(Committed::At(Revision(number(&answer.header.revision))))
        } else {
            Ok(Committed::Conflict)
        }
    }

    async fn watch(
        &self,
        after: Revision,
    ) -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError> {
        let mut lines = self.open_watch(after).await?;
        let (sender, receiver) = mpsc::channel(1024);
        let reader = Self {
            members: self.members.clone(),
            current: AtomicUsize::new(0),
            prefix: self.prefix.clone(),
            max_txn_ops: self.max_txn_ops,
        };
        tokio::spawn(async move {
            loop {
                let changes = tokio::select! {
                    () = sender.closed() => return,
                    line = lines.next() => reader.read_changes(line, after),
                };
                match changes {
                    Ok(None) => {}
                    Ok(Some(changes)) => {
                        if sender.send(Ok(changes)).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        let _ = sender.send(Err(error)).await;
                        return;
                    }
                }
            }
        });
        Ok(receiver)
    }
}

impl Etcd {
    /// Reads a range page by page; all pages, and all ranges, show the same moment.
    async fn read_range(
        &self,
        mut key: String,
        end: &str,
        snapshot: &mut Snapshot,
    ) -> Result<(), StoreError> {
        loop {
            let mut body = json!({ "key": key, "range_end": end, "limit": PAGE.to_string() });
            if snapshot.revision > Revision(0) {
                body["revision"] = json!(snapshot.revision.0.to_string());
            }
            let answer = self.post("/v3/kv/range", &body, true).await?;
            let page: RangeAnswer = serde_json::from_value(answer)
                .map_err(|e| self.protocol(e.to_string(), "an answer of /v3/kv/range"))?;
            if snapshot.revision == Revision(0) {
                snapshot.revision = Revision(number(&page.header.revision));
            }
            for pair in &page.kvs {
                let (key, entry) = self.decode(pair)?;
                snapshot.entries.insert(key, entry);
            }
            let Some(last) = page.kvs.last().filter(|_| page.more) else { return Ok(()) };
            // The next page starts at the smallest key after the last one.
            let mut next = STANDARD.decode(&last.key).unwrap_or_default();
            next.push(0);
            key = STANDARD.encode(next);
        }
    }

    fn read_changes(
        &self,
        line: Result<Option<Vec<u8>>, HttpError>,
        after: Revision,
    ) -> Result<Option<Changes>, StoreError> {
        let line = line
            .map_err(|e| self.unreachable(e.to_string()))?
            .ok_or_else(|| self.unreachable("it ended the watch".to_owned()))?;
        let answer: WatchLine =
            serde_json::from_slice(&line).map_err(|e| self.protocol(e.to_string(), "a line of /v3/watch"))?;
        let Some(result) = answer.result else {
            return Err(self.unreachable(answer.error.to_string()));
        };
        if number(&result.compact_revision) > 0 {
            return Err(StoreError::Compacted { store: self.name(), after });
        }
        if result.canceled {
            return Err(self.unreachable("it cancelled the watch".to_owned()));
        }
        if result.events.is_empty() {
            return Ok(None);
        }
        let mut changes = Vec::with_capacity(result.events.len());
        let mut revision = Revision(0);
        for event in &result.events {
            let (key, entry) = self.decode(&event.kv)?;
            revision = revision.max(entry.revision);
            changes.push(Change { key, entry: (event.kind != "DELETE").then_some(entry) });
        }
        Ok(Some(Changes { revision, changes }))
    }
}

/// The gateway writes 64-bit numbers as strings, and leaves out zeros.
fn number(text: &str) -> u64 {
    text.parse().unwrap_or(0)
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Header {
    revision: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Pair {
    key: String,
    value: String,
    mod_revision: String,
}

#[derive(Deserialize)]
struct RangeAnswer {
    header: Header,
    #[serde(default)]
    kvs: Vec<Pair>,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct TxnAnswer {
    header: Header,
    #[serde(default)]
    succeeded: bool,
}

#[derive(Deserialize)]
struct WatchLine {
    result: Option<WatchResult>,
    #[serde(default)]
    error: Value,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WatchResult {
    canceled: bool,
    compact_revision: String,
    events: Vec<Event>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    kv: Pair,
}
