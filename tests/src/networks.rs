//! Network namespaces for the nodes of one test. A bridge in a separate namespace connects them, so the host's interfaces do not change.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Error, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns};

/// Namespaces, deleted when dropped.
#[derive(Debug)]
pub struct Networks {
    prefix: String,
    count: u8,
}

fn run(program: &str, arguments: &str) -> Result<Vec<u8>> {
    let output = Command::new(program)
        .args(arguments.split(' '))
        .output()
        .with_context(|| format!("could not run {program} (package iproute2)"))?;
    if !output.status.success() {
        bail!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Runs `ip` with these arguments, which are separated by single spaces.
///
/// # Errors
/// With what it said.
pub(crate) fn ip(arguments: &str) -> Result<()> {
    run("ip", arguments).map(drop)
}

/// Whether this machine can make namespaces, limit links and drop packets. It is tried once: if it works once, any later failure is an
/// error.
///
/// # Errors
/// What is missing.
pub fn possible() -> Result<()> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    let ask = || {
        let networks = Networks::new(1)?;
        networks.limit(1, 100)?;
        networks.lose(1, 0.5)
    };
    ANSWER.get_or_init(|| ask().map_err(|error| format!("{error:#}"))).clone().map_err(Error::msg)
}

impl Networks {
    /// Makes `count` namespaces with the addresses 10.77.0.1, 10.77.0.2 and so on.
    ///
    /// # Errors
    /// Without root, or without iproute2.
    pub fn new(count: u8) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("{}{}", prefix_of(std::process::id()), NEXT.fetch_add(1, Ordering::Relaxed));
        let networks = Self { prefix, count };
        let hub = networks.name(0);
        ip(&format!("netns add {hub}"))?;
        ip(&format!("-n {hub} link add br0 type bridge mcast_snooping 0"))?;
        ip(&format!("-n {hub} link set br0 up"))?;
        for number in 1..=count {
            let name = networks.name(number);
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {hub} link add p{number} type veth peer name eth0 netns {name}"))?;
            ip(&format!("-n {hub} link set p{number} master br0 up"))?;
            ip(&format!("-n {name} address add 10.77.0.{number}/24 dev eth0"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
        }
        Ok(networks)
    }

    /// Numbers of the nodes.
    pub fn numbers(&self) -> RangeInclusive<u8> {
        1..=self.count
    }

    /// Name of the namespace of a node (from 1); 0 is the one that connects them.
    #[must_use]
    pub fn name(&self, number: u8) -> String {
        format!("{}-{number}", self.prefix)
    }

    /// The namespace of a node (from 1), as a file.
    #[must_use]
    pub fn path(&self, number: u8) -> PathBuf {
        Path::new("/run/netns").join(self.name(number))
    }

    /// Does something in the namespace of a node (from 1; 0 is the one that connects them): sockets that it makes stay there.
    ///
    /// # Errors
    /// Those of `act`; without root.
    pub fn within<T: Send>(&self, number: u8, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let space = File::open(self.path(number)).context("there is no such network namespace")?;
        // Only this thread is in that namespace.
        let work = || {
            setns(space, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        std::thread::scope(|scope| scope.spawn(work).join())
            .map_err(|_| anyhow!("the thread in the network namespace failed"))?
    }

    /// Listen address of the daemon of a node (from 1).
    #[must_use]
    pub fn address(&self, number: u8) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(10, 77, 0, number), 7420))
    }

    /// Limits the send rate of a node (from 1), in Mbit/s. What waits for its turn is one queue.
    ///
    /// # Errors
    /// Without the kernel's token bucket.
    pub fn limit(&self, number: u8, mbit: u32) -> Result<()> {
        let name = self.name(number);
        let shape =
            format!("-n {name} qdisc replace dev eth0 root tbf rate {mbit}mbit burst 128k latency 200ms");
        run("tc", &shape).map(drop)
    }

    /// The same with a queue for each priority, as interfaces have by default (`pfifo_fast`): packets that ask for a low delay go first.
    ///
    /// # Errors
    /// As [`Networks::limit`].
    pub fn limit_with_priorities(&self, number: u8, mbit: u32) -> Result<()> {
        let name = self.name(number);
        let shape = format!("rate {mbit}mbit burst 128k latency 200ms");
        run("tc", &format!("-n {name} qdisc replace dev eth0 root handle 1: tbf {shape}"))?;
        run("tc", &format!("-n {name} qdisc replace dev eth0 parent 1:1 pfifo_fast")).map(drop)
    }

    /// Takes a node (from 1) off the network, or puts it back.
    ///
    /// # Errors
    /// Without root.
    pub fn cut(&self, number: u8, cut: bool) -> Result<()> {
        let state = if cut { "down" } else { "up" };
        ip(&format!("-n {} link set p{number} {state}", self.name(0)))
    }

    /// Drops this part of the UDP packets that reach a node (from 1). It replaces the part set before.
    ///
    /// # Errors
    /// Without the kernel's packet filter.
    pub fn lose(&self, number: u8, part: f64) -> Result<()> {
        let name = self.name(number);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let below = (part * f64::from(u32::MAX)) as u32;
        // Removes the filter of an earlier call, which would drop packets as well; the first call has none to remove.
        let _ = run("tc", &format!("-n {name} qdisc del dev eth0 ingress"));
        run("tc", &format!("-n {name} qdisc add dev eth0 ingress"))?;
        // Classic BPF: `ldb [23]` is the protocol; `ld rand`; 2 drops, 0 passes.
        let code = format!("6,48 0 0 23,21 0 3 17,32 0 0 4294963256,53 1 0 {below},6 0 0 2,6 0 0 0");
        let output = Command::new("tc")
            .args(["-n", &name])
            .args("filter add dev eth0 ingress bpf da bytecode".split(' '))
            .arg(&code)
            .output()?;
        if !output.status.success() {
            bail!("tc drops nothing: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Bytes that a node (from 1) has sent, including Ethernet headers.
    ///
    /// # Errors
    /// When there is no such interface.
    pub fn sent_bytes(&self, number: u8) -> Result<u64> {
        let json = run("ip", &format!("-n {} -s -j link show eth0", self.name(number)))?;
        let json: serde_json::Value = serde_json::from_slice(&json)?;
        json[0]["stats64"]["tx"]["bytes"].as_u64().context("no statistics of the link")
    }

    /// A script that runs `program` in the network namespace of a node (from 1). Mounts stay shared, unless those of another namespace
    /// are asked for; `ip netns exec` would not share them.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn wrapper(
        &self,
        folder: &Path,
        number: u8,
        program: &Path,
        mounts: Option<&Path>,
    ) -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join(format!("in-{number}"));
        let name = self.name(number);
        let mounts = mounts.map_or_else(String::new, |mounts| format!(" --mount={}", mounts.display()));
        std::fs::write(
            &path,
            format!(
                "#!/bin/sh\nexec nsenter --net=/run/netns/{name}{mounts} '{}' \"$@\"\n",
                program.display()
            ),
        )?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }
}

fn prefix_of(pid: u32) -> String {
    format!("vm{pid}x")
}

/// Deletes the namespaces of process `pid`, which must not use them any more.
pub fn clean_up_of(pid: u32) {
    let Ok(list) = run("ip", "netns list") else { return };
    let list = String::from_utf8_lossy(&list).into_owned();
    let names = list.lines().filter_map(|line| line.split(' ').next());
    for name in names.filter(|name| name.starts_with(&prefix_of(pid))) {
        let _ = ip(&format!("netns delete {name}"));
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for number in 0..=self.count {
            let _ = ip(&format!("netns delete {}", self.name(number)));
        }
    }
}
