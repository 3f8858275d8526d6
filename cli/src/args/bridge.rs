//! What several commands that speak with a bridge take: where it is, requests for clusters, values.

use std::path::PathBuf;

use clap::Args;
use vmove_bridge_types::request_text::RequestFormat;
use vmove_client::Endpoint;

/// Address of the bridge. Part of every command that uses one.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// Address of the bridge: unix:/PATH, https://HOST:PORT or http://HOST:PORT
    #[arg(long, value_name = "BRIDGE", env = "VBRIDGE", default_value = "unix:/run/vbridged/control.sock")]
    pub bridge: Endpoint,
    /// File with the bearer token for TCP
    #[arg(long, value_name = "FILE", env = "VBRIDGE_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// File with the certificate authority that vouches for the bridge (PEM), for https
    #[arg(long, value_name = "FILE", env = "VBRIDGE_CA_FILE")]
    pub ca_file: Option<PathBuf>,
}

/// A request in one of its formats.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// File with the request; - is standard input
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The request itself, as an instance type string: "cg1.small; xpus=2"
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    pub text: Option<String>,
    /// Format of the request [default: by the extension of the file: .toml, .yaml, .json for a flavor]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<RequestFormat>,
    /// Number of VMs, for formats that describe one VM
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub count: u32,
    /// Name of the virtual cluster, for formats without one
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
}

/// In whose name resources are leased, and for how long.
#[derive(Debug, Args)]
pub struct HolderArgs {
    /// Holder of the lease
    #[arg(long, value_name = "NAME", env = "USER", default_value = "unknown")]
    pub holder: String,
    /// Time to live of the lease without a heartbeat, while no VM runs
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = milliseconds)]
    pub ttl: u64,
    /// Project on whose account it goes
    #[arg(long, value_name = "NAME")]
    pub project: Option<String>,
    /// Have plans move its VMs at one barrier, all of a node or none; those with devices always do
    #[arg(long)]
    pub together: bool,
}

pub(super) fn field_value(text: &str) -> Result<(String, String), String> {
    let both = text.split_once('=').filter(|(field, _)| !field.is_empty());
    let both = both.map(|(field, value)| (field.to_owned(), value.to_owned()));
    both.ok_or_else(|| format!("expected FIELD=VALUE, found {text:?}"))
}

/// Reads a duration: `500ms`, `60s`, `5m`, `2h`.
fn milliseconds(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("expected a time like 500ms, 60s, 5m or 2h, found {text:?}")),
    };
    let number: u64 = number.parse().map_err(|_| format!("expected a time like 60s, found {text:?}"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text:?} is too long a time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(milliseconds("90s"), Ok(90_000));
        assert_eq!(milliseconds("2h"), Ok(7_200_000));
        for bad in ["90", "s", "1d", "99999999999999999999s", "18446744073709551615h"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
    }
}
