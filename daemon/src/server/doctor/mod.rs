//! `vmoved --doctor`: what this host has and lacks, by the same checks that the daemon makes. `vmove doctor` shows it.

mod areas;
mod daemons;
mod host;
mod moving;

use std::path::{Path, PathBuf};

use vmove_node::peer::PROTOCOL_VERSION;
use vmove_types::doctor::{Area, Diagnosis, Finding, FindingState};
use vmove_types::problem::chain;

use self::host::Host;
use crate::config::{Config, ConfigError, Flags, QemuFlags, Security};

/// Looks at this host, for a daemon with the settings of `flags`. Changes nothing that outlives it.
///
/// # Errors
/// The defaults cannot be used either.
pub async fn diagnose(flags: impl Fn() -> Flags, qemus: &[PathBuf]) -> Result<Diagnosis, ConfigError> {
    let file = flags().config;
    let (config, problem, no_user) = match Config::load(flags()) {
        Ok(config) => (config, None, None),
        // The rest of the host is looked at all the same.
        Err(why) => {
            let (config, no_user) = without_settings(flags().control.as_deref())?;
            (config, Some(chain(&why)), no_user)
        }
    };
    let host = Host::at(Path::new("/"));
    let mut findings = moving::look(&host, &config, no_user);
    findings.push(moving::qemus(qemus).await);
    findings.extend(areas::proxmox(&host));
    findings.extend(areas::huge_pages(&host));
    findings.extend(areas::rdma(&host, config.fabric, &config.rdma));
    findings.extend(areas::passthrough(&host));
    findings.extend(areas::network(&host));
    findings.extend(areas::forks());
    let (own, running) = daemons::own(&config.control).await;
    findings.push(own);
    findings.push(daemons::settings(file.as_deref(), problem, running.is_some()));
    if let Security::MutualTls(files) = &config.security {
        findings.push(daemons::certificate(files));
    }
    findings.extend(daemons::peers(&config).await);
    findings.sort_by_key(|finding| finding.area);
    let stops = |finding: &Finding| finding.area == Area::Moving && finding.state == FindingState::Missing;
    Ok(Diagnosis {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL_VERSION,
        control: config.control.display().to_string(),
        moving: !findings.iter().any(stops),
        findings,
    })
}

/// What there is to look at without the settings of the daemon; and why there is no user for QEMUs, if that is so.
fn without_settings(control: Option<&Path>) -> Result<(Config, Option<String>), ConfigError> {
    let defaults = |user: Option<&str>| Flags {
        insecure: true,
        control: control.map(Path::to_owned),
        qemu: QemuFlags { qemu_user: user.map(str::to_owned), qemu_sandbox: None },
        ..Flags::default()
    };
    match Config::load(defaults(None)) {
        Ok(config) => Ok((config, None)),
        Err(why) => Ok((Config::load(defaults(Some("root")))?, Some(chain(&why)))),
    }
}
