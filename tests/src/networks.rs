//! Network namespaces for the nodes of one test, joined by a bridge in a namespace of its own: the host's interfaces stay as they are.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Namespaces, deleted when dropped.
#[derive(Debug)]
pub struct Networks {
    prefix: String,
    count: u8,
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .context("could not run ip (package iproute2)")?;
    if !output.status.success() {
        bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

impl Networks {
    /// `count` namespaces, in which 10.77.0.1, 10.77.0.2 and so on are.
    ///
    /// # Errors
    /// Without root, or without iproute2.
    pub fn new(count: u8) -> Result<Self> {
        // Interface names have at most 15 bytes.
        let networks = Self { prefix: format!("vm{}", std::process::id()), count };
        let hub = networks.name(0);
        ip(&format!("netns add {hub}"))?;
        ip(&format!("-n {hub} link add br0 type bridge"))?;
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

    fn name(&self, number: u8) -> String {
        format!("{}-{number}", self.prefix)
    }

    /// Where the daemon of a node (from 1) listens.
    #[must_use]
    pub fn address(&self, number: u8) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(10, 77, 0, number), 7420))
    }

    /// A program that runs `program` in the namespace of a node (from 1). Only its network is another one: mounts stay shared, which
    /// `ip netns exec` would not leave so.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn wrapper(&self, folder: &Path, number: u8, program: &Path) -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join(format!("in-{number}"));
        let name = self.name(number);
        std::fs::write(
            &path,
            format!("#!/bin/sh\nexec nsenter --net=/run/netns/{name} '{}' \"$@\"\n", program.display()),
        )?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for number in 0..=self.count {
            let _ = ip(&format!("netns delete {}", self.name(number)));
        }
    }
}
