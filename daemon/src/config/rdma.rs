//! How the RDMA device is chosen and used.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::{ConfigError, value};
use vmove_types::units;

/// Flags, each over its key in `[rdma]`.
#[derive(Debug, Default, Args)]
pub struct RdmaFlags {
    /// RDMA device (`mlx5_0`) [default: the first with an active port, RoCE before InfiniBand]
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Option<String>,
    /// Port of the RDMA device, from 1 [default: its first active one]
    #[arg(long, value_name = "N")]
    pub rdma_port: Option<u8>,
    /// Index of the port's address [default: on Ethernet the first RoCE v2 address, of IPv4 if there is one; else 0]
    #[arg(long, value_name = "N")]
    pub rdma_gid_index: Option<u8>,
    /// Index of the partition key (P_Key) in the port's table, for InfiniBand [default: 0]
    #[arg(long, value_name = "N")]
    pub rdma_pkey_index: Option<u16>,
    /// Service level (0 to 15) of RDMA connections: of urgent ones, then of bulk ones [default: 0,0]
    #[arg(long, value_name = "URGENT,BULK")]
    pub rdma_service_level: Option<Levels>,
    /// Traffic class (0 to 255; on RoCE its upper six bits are the DSCP) of RDMA connections [default: 0,0]
    #[arg(long, value_name = "URGENT,BULK")]
    pub rdma_traffic_class: Option<Levels>,
    /// Guest memory that may be registered (pinned) for RDMA at once, such as 64GiB [default: all that the kernel allows]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_rate)]
    pub max_registered: Option<u64>,
    /// Register memory for on-demand paging, without pinning it, on devices that can [default: if-needed, where it cannot be pinned]
    #[arg(long, value_name = "WHEN")]
    pub rdma_on_demand: Option<OnDemand>,
}

/// `[rdma]` in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RdmaConfig {
    /// Device; `None`: the first with an active port.
    pub device: Option<String>,
    /// Its port; `None`: its first active one.
    pub port: Option<u8>,
    /// Index of the port's address; `None`: RoCE v2, of IPv4 if there is one.
    pub gid_index: Option<u8>,
    /// Index of the partition key in the port's table.
    pub pkey_index: u16,
    /// Service level, 0 to 15.
    pub service_level: Levels,
    /// Traffic class.
    pub traffic_class: Levels,
    /// Bytes that may be registered at once; `None`: no bound but the kernel's.
    #[serde(deserialize_with = "size")]
    pub max_registered: Option<u64>,
    /// When memory is registered for on-demand paging.
    pub on_demand: OnDemand,
}

/// When memory is registered without pinning it, if the device can do that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnDemand {
    /// What cannot be pinned crosses by tcp
    Never,
    /// Where memory cannot be pinned: --max-registered, RLIMIT_MEMLOCK
    #[default]
    IfNeeded,
    /// Nothing is pinned
    Always,
}

/// A number for urgent connections and one for bulk connections, as `6,0`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Levels {
    urgent: u8,
    bulk: u8,
}

impl From<Levels> for (u8, u8) {
    fn from(levels: Levels) -> Self {
        (levels.urgent, levels.bulk)
    }
}

impl From<Levels> for String {
    fn from(levels: Levels) -> Self {
        format!("{},{}", levels.urgent, levels.bulk)
    }
}

/// What is no [`Levels`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected two numbers up to 255, as 6,0, found \"{0}\"")]
pub struct NotLevels(String);

impl TryFrom<String> for Levels {
    type Error = NotLevels;
    fn try_from(text: String) -> Result<Self, NotLevels> {
        text.parse()
    }
}

impl std::str::FromStr for Levels {
    type Err = NotLevels;
    fn from_str(text: &str) -> Result<Self, NotLevels> {
        let parts = text.split_once(',').map(|(urgent, bulk)| (urgent.trim().parse(), bulk.trim().parse()));
        match parts {
            Some((Ok(urgent), Ok(bulk))) => Ok(Self { urgent, bulk }),
            _ => Err(NotLevels(text.to_owned())),
        }
    }
}

fn size<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(from)?;
    units::parse_rate(&text).map(Some).map_err(serde::de::Error::custom)
}

impl RdmaConfig {
    /// With the flags over it.
    pub(super) fn overridden(self, flags: RdmaFlags) -> Self {
        Self {
            device: flags.rdma_device.or(self.device),
            port: flags.rdma_port.or(self.port),
            gid_index: flags.rdma_gid_index.or(self.gid_index),
            pkey_index: flags.rdma_pkey_index.unwrap_or(self.pkey_index),
            service_level: flags.rdma_service_level.unwrap_or(self.service_level),
            traffic_class: flags.rdma_traffic_class.unwrap_or(self.traffic_class),
            max_registered: flags.max_registered.or(self.max_registered),
            on_demand: flags.rdma_on_demand.unwrap_or(self.on_demand),
        }
    }

    pub(super) fn checked(self) -> Result<Self, ConfigError> {
        if self.service_level.urgent > 15 || self.service_level.bulk > 15 {
            let found = String::from(self.service_level);
            return Err(value("rdma.service-level", format!("expected 0 to 15 each, found {found}")));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_override_the_table() {
        let text = "device = 'mlx5_1'\nservice-level = '3,1'\nmax-registered = '64GiB'\non-demand = 'always'\ngid-index = 3\npkey-index = 2";
        let file: RdmaConfig = toml::from_str(text).unwrap();
        let flags = RdmaFlags {
            rdma_device: Some("rxe0".to_owned()),
            rdma_traffic_class: Some("104,0".parse().unwrap()),
            ..RdmaFlags::default()
        };
        let both = file.overridden(flags).checked().unwrap();
        assert_eq!(both.device.as_deref(), Some("rxe0"));
        assert_eq!((both.gid_index, both.pkey_index, both.max_registered), (Some(3), 2, Some(64 << 30)));
        assert_eq!(both.on_demand, OnDemand::Always);
        assert_eq!(<(u8, u8)>::from(both.service_level), (3, 1));
        assert_eq!(<(u8, u8)>::from(both.traffic_class), (104, 0));
    }

    #[test]
    fn impossible_numbers_are_named() {
        let high = RdmaConfig { service_level: Levels { urgent: 16, bulk: 0 }, ..RdmaConfig::default() };
        assert!(high.checked().unwrap_err().to_string().contains("16,0"));
        assert!("300,1".parse::<Levels>().is_err() && "6".parse::<Levels>().is_err());
    }
}
