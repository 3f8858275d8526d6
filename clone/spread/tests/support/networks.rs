//! Network namespaces joined by a bridge in a namespace of its own.

use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Namespaces, deleted when dropped. The root is 1, host n is n + 1.
#[derive(Debug)]
pub struct Networks {
    prefix: String,
    count: u32,
}

fn run(program: &str, arguments: &str) -> Result<Vec<u8>, String> {
    let output = Command::new(program).args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("{program} (package iproute2): {error}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Whether this machine can make namespaces, limit links and drop packets; or what it lacks. Tests ask once: where one is possible,
/// each that fails later is an error.
pub fn possible() -> Result<(), String> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    let ask = || {
        let networks = Networks::new(1)?;
        networks.limit(1, 100)?;
        networks.lose(1, 0.5, true)
    };
    ANSWER.get_or_init(ask).clone()
}

impl Networks {
    /// A root and `hosts` hosts at 10.78.0.1, 10.78.0.2 and so on.
    pub fn new(hosts: u32) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("sp{}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let networks = Self { prefix, count: hosts + 1 };
        let ip = |arguments: String| run("ip", &arguments);
        let hub = networks.name(0);
        ip(format!("netns add {hub}"))?;
        ip(format!("-n {hub} link add br0 type bridge mcast_snooping 0"))?;
        ip(format!("-n {hub} link set br0 up"))?;
        for number in 1..=networks.count {
            let name = networks.name(number);
            ip(format!("netns add {name}"))?;
            ip(format!("-n {name} link set lo up"))?;
            ip(format!("-n {hub} link add p{number} type veth peer name eth0 netns {name}"))?;
            ip(format!("-n {hub} link set p{number} master br0 up"))?;
            ip(format!("-n {name} address add 10.78.0.{number}/24 dev eth0"))?;
            ip(format!("-n {name} link set eth0 up"))?;
        }
        Ok(networks)
    }

    pub fn name(&self, number: u32) -> String {
        format!("{}-{number}", self.prefix)
    }

    /// Drops this part of the packets that reach a host; of UDP only, if `udp`.
    pub fn lose(&self, number: u32, part: f64, udp: bool) -> Result<(), String> {
        let name = self.name(number);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let below = (part * f64::from(u32::MAX)) as u32;
        run("tc", &format!("-n {name} qdisc add dev eth0 ingress"))?;
        // Classic BPF: `ldb [23]` is the protocol; `ld rand`; 2 drops, 0 passes.
        let protocol = if udp { "48 0 0 23,21 0 3 17" } else { "0 0 0 0,0 0 0 0" };
        let code = format!("6,{protocol},32 0 0 4294963256,53 1 0 {below},6 0 0 2,6 0 0 0");
        let mut arguments: Vec<&str> = vec!["-n", &name];
        arguments.extend("filter add dev eth0 ingress bpf da bytecode".split(' '));
        arguments.push(&code);
        let output = Command::new("tc").args(&arguments).output().map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Limits what a host sends, in Mbit/s.
    pub fn limit(&self, number: u32, mbit: u32) -> Result<(), String> {
        let name = self.name(number);
        run("tc", &format!("-n {name} qdisc add dev eth0 root tbf rate {mbit}mbit burst 128k latency 200ms"))
            .map(drop)
    }

    /// Bytes that a host has sent, with Ethernet headers.
    pub fn sent_bytes(&self, number: u32) -> u64 {
        let name = self.name(number);
        let json = run("ip", &format!("-n {name} -s -j link show eth0")).expect("statistics");
        let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        json[0]["stats64"]["tx"]["bytes"].as_u64().expect("a number")
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for number in 0..=self.count {
            let _ = run("ip", &format!("netns delete {}", self.name(number)));
        }
    }
}
