//! Processes in network namespaces, each a root or a host.
#![allow(dead_code)]

pub mod memory;
pub mod networks;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::udp::{UdpMulticast, UdpOptions};
use vmove_fabric::{Fabric, Group, GroupAddress, Multicast, PeerAddress, Session};
use vmove_spread::{Host, HostId, HostOptions, HostState, Root, RootOptions, Route, Template, non_zero};

use memory::Into;
use networks::Networks;

pub const MIB: u64 = 1 << 20;
const VARIABLE: &str = "VMOVE_SPREAD_NODE";

/// What a process is to be.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Node {
    /// 0: the root.
    pub host: u32,
    pub mib: u64,
    /// Bytes per second.
    pub rate: f64,
    pub multicast: bool,
    pub segmentation: bool,
    /// From where hosts read, by host, from 1; empty: from the root.
    pub routes: Vec<Route>,
    /// Hosts that the root waits for.
    pub expected: usize,
    /// Whether the root's memory changes after its checksums were taken.
    pub spoilt: bool,
    /// What a host waits for, in bytes from the begin.
    pub want: Option<u64>,
    /// Over RDMA, between the hosts of tests/lab.
    #[serde(default)]
    pub verbs: bool,
}

impl Node {
    pub fn root(mib: u64, rate: f64) -> Self {
        Self {
            host: 0,
            mib,
            rate,
            multicast: true,
            segmentation: false,
            routes: vec![],
            expected: 1,
            spoilt: false,
            want: None,
            verbs: false,
        }
    }

    pub fn host(&self, host: u32) -> Self {
        Self { host, ..self.clone() }
    }

    pub fn live_bytes(&self) -> u64 {
        self.mib * MIB / 4 * 3
    }

    fn address(&self, host: u32) -> SocketAddrV4 {
        let net = if self.verbs { 77 } else { 78 };
        SocketAddrV4::new(Ipv4Addr::new(10, net, 0, u8::try_from(host + 1).unwrap()), 7500)
    }

    fn listens(&self, host: u32) -> PeerAddress {
        PeerAddress::Tcp(self.address(host).into())
    }
}

/// What a node uses: it knows nothing of which they are.
struct Ways {
    fabric: Arc<dyn Fabric>,
    multicast: Arc<dyn Multicast>,
    group: GroupAddress,
}

fn ways(node: &Node) -> Ways {
    let at = node.address(node.host);
    let ip = Ipv4Addr::new(239, 78, 0, 1);
    #[cfg(feature = "verbs")]
    if node.verbs {
        use vmove_fabric::verbs::{VerbsFabric, VerbsMulticast, VerbsMulticastOptions, VerbsOptions};
        let fabric = Arc::new(VerbsFabric::bind(at.into(), VerbsOptions::default()).unwrap());
        let multicast = Arc::new(VerbsMulticast::new(&fabric, VerbsMulticastOptions::default()));
        return Ways { fabric, multicast, group: GroupAddress::Rdma(ip) };
    }
    assert!(!node.verbs, "built without the feature");
    let fabric = Arc::new(TcpFabric::bind(at.into(), TcpOptions::default()).unwrap());
    let mut options = UdpOptions::on(*at.ip());
    options.segmentation = node.segmentation;
    let multicast = Arc::new(UdpMulticast::new(&fabric, options));
    Ways { fabric, multicast, group: GroupAddress::Udp(SocketAddrV4::new(ip, 7501)) }
}

/// What the process of a node does. It ends when its standard input does.
pub fn node() {
    let Ok(node) = std::env::var(VARIABLE) else {
        return vmove_skip::skip!("it is the process of another test");
    };
    let node: Node = serde_json::from_str(&node).unwrap();
    let ways = ways(&node);
    if node.host == 0 { root(&node, ways) } else { host(&node, ways) }
}

fn say(value: &Value) {
    println!("\n{value}");
}

fn until_stdin_ends() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn root(node: &Node, Ways { fabric, multicast, group: address }: Ways) {
    let region = memory::patterned(&*fabric, node.mib * MIB);
    let order = non_zero(0, &region, 0..region.len());
    let group = Group { address, session: Session::draw().unwrap() };
    let payload = node.multicast.then(|| multicast.sender(&group).unwrap().max_payload());
    let template = Template::new(&*fabric, vec![region.clone()], order, payload).unwrap();
    if node.spoilt {
        assert!(region.write_at(40 * 4096 + 77, b"written to"));
    }
    let hosts = || (1..).map(HostId);
    let options = RootOptions {
        rate: node.rate,
        routes: hosts().zip(node.routes.iter().cloned()).collect(),
        addresses: hosts().zip(1..=8).map(|(id, host)| (id, node.listens(host))).collect(),
        expected: node.expected,
        gather: Duration::from_secs(20),
    };
    let group = node.multicast.then_some((&*multicast, group));
    let root = Root::start(fabric, group, template, options).unwrap();
    say(&json!({ "is": "ready" }));
    until_stdin_ends();
    let status = root.status();
    let count = |state| status.hosts.values().filter(|found| **found == state).count();
    say(&json!({
        "is": "ended", "sent": status.totals.sent, "resent": status.totals.resent, "lost": status.totals.lost,
        "left_to_read": status.totals.left_to_read, "slow": status.totals.slow, "rate": status.rate,
        "complete": count(HostState::Complete), "gone": count(HostState::Gone), "failed": status.failed,
    }));
}

fn host(node: &Node, Ways { fabric, multicast, .. }: Ways) {
    let into = Into::new(Arc::clone(&fabric));
    let options = HostOptions { me: HostId(node.host), root: node.listens(0), listens: true, second: None };
    let begin = Instant::now();
    let host = Host::join(fabric, Some(multicast), Box::new(into.clone()), options).unwrap();
    say(&json!({ "is": "joined" }));
    if let Some(offset) = node.want {
        while host.status().chunks == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let asked = Instant::now();
        assert!(host.wants().ask(0, offset));
        while !into.has(offset / 4096) {
            std::thread::sleep(Duration::from_micros(200));
            assert!(asked.elapsed() < Duration::from_secs(30), "never came");
        }
        let missing = host.status().missing;
        say(&json!({ "is": "wanted", "ms": asked.elapsed().as_secs_f64() * 1e3, "missing": missing }));
    }
    let result = host.wait(Duration::from_secs(120));
    let status = host.status();
    let totals = status.totals;
    let took = status.took.unwrap_or_else(|| begin.elapsed());
    let first = took.saturating_sub(into.after_the_first_quarter());
    let (wrong, landed, all) = into.verdict();
    say(&json!({
        "is": if result.is_ok() { "complete" } else { "failed" },
        "error": result.err().map(|error| error.to_string()),
        "ms": took.as_secs_f64() * 1e3, "first_quarter_ms": first.as_secs_f64() * 1e3,
        "chunks": status.chunks, "missing": status.missing, "wrong": wrong, "landed": landed, "all_right": all,
        "by_multicast": totals.by_multicast, "from_root": totals.from_root, "from_peers": totals.from_peers,
        "repaired": totals.repaired, "given_up": totals.given_up, "wrong_sums": totals.wrong,
        "unwanted": status.multicast.unwanted, "ring_full": status.multicast.ring_full, "refused": status.multicast.refused,
    }));
    until_stdin_ends();
}

/// A node's process. Killed when dropped.
pub struct Process {
    child: Child,
    said: Receiver<Value>,
}

impl Process {
    pub fn start(networks: &Networks, node: &Node) -> Self {
        let mut child = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", networks.name(node.host + 1)))
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "node", "--ignored", "--nocapture"])
            .env(VARIABLE, serde_json::to_string(node).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter (package util-linux) runs");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (say, said) = channel();
        std::thread::spawn(move || {
            for value in lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()) {
                let value: Value = value;
                if value.is_object() && say.send(value).is_err() {
                    return;
                }
            }
        });
        Self { child, said }
    }

    /// The next thing it says.
    pub fn says(&self, is: &str) -> Value {
        let value = self.said.recv_timeout(Duration::from_secs(100)).expect("the node says something");
        assert_eq!(value["is"], is, "{value}");
        value
    }

    /// Tells it to end; what it says then.
    pub fn end(&mut self) -> Value {
        drop(self.child.stdin.take());
        self.says("ended")
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, signal: i32) {
        let done = Command::new("kill").args([format!("-{signal}"), self.child.id().to_string()]).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
