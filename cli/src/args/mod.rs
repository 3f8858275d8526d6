//! Command lines.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;
use vmove_client::{Client, TlsFiles};
use vmove_types::node::DEFAULT_CONTROL;
use vmove_types::units;

use crate::failure::Failure;

pub mod blueprint;
pub mod bridge;
pub mod cluster;
pub mod clusters;
pub mod disk_moves;
mod disks;
pub mod doctor;
mod goals;
pub mod hooks;
pub mod libvirt;
mod members;
pub mod page;
pub mod pve;
pub mod reads;
pub mod report;
mod requests;
pub mod setup;
pub mod tune;
pub mod vfork;
pub mod visit;
pub mod vmove;
mod vms;
pub mod watch;

/// Options that every command takes.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Control socket of the daemon of this host; not used with --at
    #[arg(long, global = true, value_name = "SOCK", env = "VMOVE_CONTROL", default_value = DEFAULT_CONTROL)]
    pub control: PathBuf,
    /// A node elsewhere.
    #[command(flatten)]
    pub elsewhere: Elsewhere,
    /// Answer with one JSON object on standard output
    #[arg(long, global = true)]
    pub json: bool,
}

/// A node elsewhere, instead of the daemon of this host.
#[derive(Debug, Clone, Args)]
pub struct Elsewhere {
    /// Ask the node whose peer port this is, over TLS, instead of the daemon of this host
    #[arg(long, global = true, value_name = "HOST:PORT", env = "VMOVE_AT")]
    pub at: Option<String>,
    /// Certificate chain to show to the node of --at (PEM); its configuration says what that client may do
    #[arg(long, global = true, value_name = "FILE", env = "VMOVE_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, global = true, value_name = "FILE", env = "VMOVE_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// The authority of the certificates of nodes (PEM)
    #[arg(long, global = true, value_name = "FILE", env = "VMOVE_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove completions bash > /usr/share/bash-completion/completions/vmove")]
pub struct Completions {
    /// For which shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove man /usr/local/share/man/man1")]
pub struct Man {
    /// Folder; made if it is not there
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

fn milliseconds(text: &str) -> Result<u64, String> {
    let duration = units::parse_duration(text)?;
    if !duration.is_zero() && duration.as_millis() == 0 {
        return Err(format!("expected at least 1ms, found \"{text}\""));
    }
    u64::try_from(duration.as_millis()).map_err(|_| format!("expected a shorter time, found \"{text}\""))
}

impl Global {
    /// A client of the daemon that is meant.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let at = self.elsewhere.at.as_ref();
        at.map_or_else(|| Ok(Client::connect(&self.control)), |at| self.elsewhere.client_at(at))
    }

    /// A client of the node that is named by its control socket, or by `HOST:PORT`.
    pub(crate) fn client_of(&self, node: &str) -> Result<Client, Failure> {
        if node.contains('/') { Ok(Client::connect(node)) } else { self.elsewhere.client_at(node) }
    }
}

impl Elsewhere {
    fn client_at(&self, at: &str) -> Result<Client, Failure> {
        self.client_for(&format!("--at {at}"), at, None)
    }

    /// A client of the node at this peer port, which `what` on the command line needs. `name`: that of its certificate, if it is not the host of `at`.
    pub(crate) fn client_for(&self, what: &str, at: &str, name: Option<&str>) -> Result<Client, Failure> {
        let files = self.tls_files(what)?;
        let client = match name {
            Some(name) => Client::connect_tls_as(at, name, &files),
            None => Client::connect_tls(at, &files),
        };
        client.map_err(|error| Failure::bad_request(format!("{what}: {error}")))
    }

    /// The files of TLS, which something on the command line needs.
    pub(crate) fn tls_files(&self, what: &str) -> Result<TlsFiles, Failure> {
        let Self { tls_cert, tls_key, tls_ca, .. } = self;
        let (Some(cert), Some(key), Some(ca)) = (tls_cert, tls_key, tls_ca) else {
            let files = [("--tls-cert", tls_cert), ("--tls-key", tls_key), ("--tls-ca", tls_ca)];
            let missing: Vec<_> =
                files.iter().filter(|(_, file)| file.is_none()).map(|(name, _)| *name).collect();
            return Err(Failure::bad_request(format!(
                "{what} needs --tls-cert, --tls-key and --tls-ca, found no {}; give them, or VMOVE_TLS_CERT, VMOVE_TLS_KEY and VMOVE_TLS_CA",
                missing.join(", ")
            )));
        };
        Ok(TlsFiles { cert: cert.clone(), key: key.clone(), ca: ca.clone() })
    }
}
