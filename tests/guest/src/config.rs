//! What the guest is to do, from the kernel's command line.

use std::fmt;
use std::net::Ipv4Addr;

use crate::order::Order;
use crate::pattern::PAGE_BYTES;

/// The network of guests that have an address.
const PREFIX: &str = "/24";
/// Stands for an address that the guest asks for.
const DHCP: &str = "dhcp";

/// Most threads a guest may run; the beacon has room for no more.
pub const MAX_THREADS: u32 = 32;

/// How fast the working set is rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// As fast as the machine can.
    Max,
    /// Pages in a second, over all threads; 0 rewrites nothing.
    PagesPerSecond(u32),
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max => f.write_str("max"),
            Self::PagesPerSecond(rate) => write!(f, "{rate}"),
        }
    }
}

/// Where the guest has its IPv4 address from. It is that of its first network card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// It is told.
    Fixed(Ipv4Addr),
    /// It asks for one by DHCP, and for a name server.
    Dhcp,
}

impl Address {
    /// Where it answers clients.
    #[must_use]
    pub const fn listen(self) -> Ipv4Addr {
        match self {
            Self::Fixed(address) => address,
            Self::Dhcp => Ipv4Addr::UNSPECIFIED,
        }
    }

    fn parse(value: &str) -> Option<Self> {
        if value == DHCP {
            return Some(Self::Dhcp);
        }
        value.strip_suffix(PREFIX)?.parse().ok().map(Self::Fixed)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(address) => write!(f, "{address}{PREFIX}"),
            Self::Dhcp => f.write_str(DHCP),
        }
    }
}

/// The guest's task. [`fmt::Display`] gives the kernel parameters that [`Config::parse`] reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// MiB that are rewritten. Default 64.
    pub working_set_mib: u32,
    /// MiB that are filled once and then only read. Default 0.
    pub cold_mib: u32,
    /// Rewrites. Default 0.
    pub rate: Rate,
    /// Pages that are checked in full, without being written, in a second, in rotation over working set and cold
    /// pages. Default 1000.
    pub verify: u32,
    /// Threads that share the pages; as many virtual CPUs should be there. Default 1.
    pub threads: u32,
    /// Order of the rewrites. Default random.
    pub order: Order,
    /// Length of a period of work, in microseconds. Default 2000: waking up costs an emulated guest 50 to 100 us.
    pub period_us: u32,
    /// MiB of the first disk (`/dev/vda`) that are written and checked. Default 0.
    pub disk_mib: u32,
    /// Children that share a job with this machine, which forks itself for that. Default 0: no job.
    pub fork: u32,
    /// Seconds for which such children wait before they end with their results, in one round. Default 0.
    pub hold_s: u32,
    /// Children of each such child, which share its part of the job. Default 0: none.
    pub nest: u32,
    /// Say what must be refused on the port for forks, before any job. Default false.
    pub misbehave: bool,
    /// Its address, where it answers clients. Default: none, and no service.
    pub address: Option<Address>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            working_set_mib: 64,
            cold_mib: 0,
            rate: Rate::PagesPerSecond(0),
            verify: 1000,
            threads: 1,
            order: Order::Random,
            period_us: 2000,
            disk_mib: 0,
            fork: 0,
            hold_s: 0,
            nest: 0,
            misbehave: false,
            address: None,
        }
    }
}

impl Config {
    /// Reads the `vmove.NAME=VALUE` words of a kernel command line; other words are not ours.
    ///
    /// # Errors
    /// A name that is not known or a value out of range, as a sentence.
    pub fn parse(command_line: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for word in command_line.split_ascii_whitespace() {
            let Some((name, value)) = word.strip_prefix("vmove.").and_then(|w| w.split_once('=')) else {
                continue;
            };
            let number = |range: std::ops::RangeInclusive<u32>| match value.parse() {
                Ok(n) if range.contains(&n) => Ok(n),
                _ => Err(format!("{word}: expected a number in {range:?}")),
            };
            match name {
                "ws_mib" => config.working_set_mib = number(1..=1 << 20)?,
                "cold_mib" => config.cold_mib = number(0..=1 << 20)?,
                "rate" if value == "max" => config.rate = Rate::Max,
                "rate" => config.rate = Rate::PagesPerSecond(number(0..=100_000_000)?),
                "verify" => config.verify = number(0..=10_000_000)?,
                "threads" => config.threads = number(1..=MAX_THREADS)?,
                "period_us" => config.period_us = number(100..=1_000_000)?,
                "fork" => config.fork = number(0..=1000)?,
                "hold_s" => config.hold_s = number(0..=3600)?,
                "nest" => config.nest = number(0..=100)?,
                "misbehave" => config.misbehave = number(0..=1)? == 1,
                "address" => {
                    let expected = || format!("{word}: expected {DHCP}, or an IPv4 address and {PREFIX}");
                    config.address = Some(Address::parse(value).ok_or_else(expected)?);
                }
                "disk_mib" => config.disk_mib = number(0..=1 << 20)?,
                "order" => {
                    config.order = match value {
                        "random" => Order::Random,
                        "seq" => Order::Sequential,
                        _ => return Err(format!("{word}: expected random or seq")),
                    }
                }
                // Read by the initramfs's own script.
                "modules" | "used_mib" | "neighbour" | "scan_mib" | "worker" => {}
                _ => return Err(format!("{word}: no such parameter")),
            }
        }
        Ok(config)
    }

    /// Pages that are rewritten.
    #[must_use]
    pub const fn working_pages(&self) -> u32 {
        self.working_set_mib * PAGES_PER_MIB
    }

    /// Pages that are only read.
    #[must_use]
    pub const fn cold_pages(&self) -> u32 {
        self.cold_mib * PAGES_PER_MIB
    }
}

const PAGES_PER_MIB: u32 = 256;
const _: () = assert!(PAGES_PER_MIB as usize * PAGE_BYTES == 1 << 20);

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "seq",
        };
        write!(
            f,
            "vmove.ws_mib={} vmove.cold_mib={} vmove.rate={} vmove.verify={} vmove.threads={} vmove.order={order} \
             vmove.period_us={}",
            self.working_set_mib, self.cold_mib, self.rate, self.verify, self.threads, self.period_us
        )?;
        if self.disk_mib > 0 {
            write!(f, " vmove.disk_mib={}", self.disk_mib)?;
        }
        if self.fork > 0 {
            write!(f, " vmove.fork={}", self.fork)?;
        }
        if self.hold_s > 0 {
            write!(f, " vmove.hold_s={}", self.hold_s)?;
        }
        if self.nest > 0 {
            write!(f, " vmove.nest={}", self.nest)?;
        }
        if self.misbehave {
            f.write_str(" vmove.misbehave=1")?;
        }
        if let Some(address) = self.address {
            write!(f, " vmove.address={address}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_displayed_is_parsed() {
        let config = Config {
            working_set_mib: 512,
            cold_mib: 3,
            rate: Rate::Max,
            verify: 7,
            threads: 2,
            order: Order::Sequential,
            period_us: 500,
            disk_mib: 8,
            fork: 3,
            hold_s: 20,
            nest: 2,
            misbehave: true,
            address: Some(Address::Fixed(Ipv4Addr::new(10, 9, 0, 2))),
        };
        assert_eq!(Config::parse(&format!("console=ttyS0 {config} quiet")), Ok(config));
        let config = Config { address: Some(Address::Dhcp), ..Config::default() };
        assert_eq!(Config::parse(&format!("{config} vmove.neighbour=db")), Ok(config));
    }

    #[test]
    fn other_parameters_are_ignored_and_wrong_ones_named() {
        assert_eq!(Config::parse("console=ttyS0 quiet"), Ok(Config::default()));
        for wrong in [
            "vmove.rate=fast",
            "vmove.threads=0",
            "vmove.order=up",
            "vmove.speed=1",
            "vmove.ws_mib=",
            "vmove.address=a/24",
        ] {
            let error = Config::parse(wrong).expect_err(wrong);
            assert!(error.contains(wrong), "{error}");
        }
    }
}
