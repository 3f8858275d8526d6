//! The daemon of this host, its settings and certificate, and its peers.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use vmove_client::{Client, ConnectError, Error};
use vmove_node::peer::PROTOCOL_VERSION;
use vmove_types::doctor::{Area, Finding, FindingState};
use vmove_types::node::NodeInfo;
use vmove_types::problem::chain;

use crate::config::{Config, KnownNode, Security, TlsFiles};
use crate::server::access::Certificate;
use crate::server::tls::Tls;

/// How long a daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// From how long before its end on a certificate is told.
const SOON: u64 = 30;
const DAY: i64 = 24 * 3600;

fn wrong(
    topic: &str,
    state: FindingState,
    found: impl Into<String>,
    expected: &str,
    mend: impl Into<String>,
) -> Finding {
    Finding::wrong(Area::Daemon, topic, state, found, expected, mend)
}

/// The settings, with which this vmoved would start or not. One that runs may have them from its command line.
pub fn settings(file: Option<&Path>, problem: Option<String>, running: bool) -> Finding {
    let expected = "a vmoved.toml with which vmoved starts";
    match (file, problem) {
        (Some(path), None) => Finding::ok(Area::Daemon, "settings", path.display().to_string()),
        (None, _) if running => wrong(
            "settings",
            FindingState::Limited,
            "no file: vmoved has its settings from elsewhere, and its certificate and peers were not looked at",
            expected,
            "vmove doctor --config FILE",
        ),
        (_, problem) => wrong(
            "settings",
            FindingState::Missing,
            problem.unwrap_or_else(|| "no file".to_owned()),
            expected,
            "vmove setup tls makes one, with certificates; docs/operations.md lists all settings",
        ),
    }
}

/// The certificate that this node shows.
pub fn certificate(files: &TlsFiles) -> Finding {
    let mend = "vmove setup tls --ca FOLDER --out ANOTHER-FOLDER --node …, copy node.pem, node.key and ca.pem here, systemctl reload vmoved";
    let expected = "a certificate and a key that fit, signed by the authority of the peers";
    let missing = |why: String| wrong("certificate", FindingState::Missing, why, expected, mend);
    if let Err(why) = Tls::load(files) {
        return missing(chain(&why));
    }
    let own = CertificateDer::from_pem_file(&files.cert).ok();
    let Some(own) = own.and_then(|der| Certificate::of(Some(&[der]))) else {
        return missing(format!("{} cannot be read", files.cert.display()));
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let left = own.ends.saturating_sub_unsigned(now);
    let found = format!("{} is for {}", files.cert.display(), own.names.join(", "));
    if left <= 0 {
        return missing(format!("{found}, and ended {} days ago", -left / DAY));
    }
    let days = (left / DAY).unsigned_abs();
    if days < SOON {
        return wrong(
            "certificate",
            FindingState::Limited,
            format!("{found}, and ends in {days} days"),
            expected,
            mend,
        );
    }
    Finding::ok(Area::Daemon, "certificate", format!("{found}, and ends in {days} days"))
}

/// Whether the daemon of this host answers, and what it says of itself.
pub async fn own(control: &Path) -> (Finding, Option<NodeInfo>) {
    let node = match ask(&Client::connect(control)).await {
        Ok(node) => node,
        Err(why) => {
            let found = format!("no answer at {}: {}", control.display(), chain(&why));
            let mend = "systemctl enable --now vmoved";
            return (wrong("vmoved", FindingState::Missing, found, "vmoved on this host", mend), None);
        }
    };
    let NodeInfo { version, protocol, .. } = &node;
    let installed = env!("CARGO_PKG_VERSION");
    let finding = if version == installed && *protocol == PROTOCOL_VERSION {
        let found = format!(
            "node {} answers at {}: version {version}, protocol {protocol}",
            node.node,
            control.display()
        );
        Finding::ok(Area::Daemon, "vmoved", found)
    } else {
        let found = format!(
            "version {version} (protocol {protocol}) runs, and {installed} (protocol {PROTOCOL_VERSION}) is installed"
        );
        let mend = "systemctl restart vmoved (QEMUs run on)";
        wrong("vmoved", FindingState::Limited, found, "the daemon that is installed", mend)
    };
    (finding, Some(node))
}

/// Whether the nodes of the configuration answer, and speak our protocol.
pub async fn peers(config: &Config) -> Vec<Finding> {
    let mut asked = tokio::task::JoinSet::new();
    for (name, node) in config.nodes.clone() {
        let security = config.security.clone();
        asked.spawn(async move { (name.clone(), peer(&name, &node, &security).await) });
    }
    let mut found = asked.join_all().await;
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    found.into_iter().map(|(_, finding)| finding).collect()
}

async fn peer(name: &str, node: &KnownNode, security: &Security) -> Finding {
    let topic = format!("peer {name}");
    let address = &node.address;
    let client = match security {
        Security::Insecure => Client::connect_insecure(address),
        Security::MutualTls(files) => {
            let files = vmove_client::TlsFiles {
                cert: files.cert.clone(),
                key: files.key.clone(),
                ca: files.ca.clone(),
            };
            match &node.server_name {
                Some(expected) => Client::connect_tls_as(address, expected, &files),
                None => Client::connect_tls(address, &files),
            }
        }
    };
    let answer = match client {
        Ok(client) => ask(&client).await,
        Err(why) => Err(why.into()),
    };
    match answer {
        Ok(other) if other.protocol == PROTOCOL_VERSION => Finding::ok(
            Area::Daemon,
            &topic,
            format!(
                "{} answers at {address}: version {}, protocol {}",
                other.node, other.version, other.protocol
            ),
        ),
        Ok(other) => wrong(
            &topic,
            FindingState::Missing,
            format!(
                "{} at {address} speaks protocol {} (version {})",
                other.node, other.protocol, other.version
            ),
            &format!("protocol {PROTOCOL_VERSION}: daemons of other versions refuse each other"),
            "install the same version there and here, and systemctl restart vmoved",
        ),
        Err(why) => wrong(
            &topic,
            FindingState::Missing,
            format!("no answer at {address}: {}", chain(&why)),
            "vmoved there, a network in between, and a certificate of the same authority",
            "run vmove doctor there; let the firewall pass its port",
        ),
    }
}

/// Why a daemon has not said anything of itself.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Failed(#[from] Error),
    #[error("nothing within {} s", ANSWER.as_secs())]
    Late,
}

/// What a daemon says of itself, in time.
async fn ask(client: &Client) -> Result<NodeInfo, Unanswered> {
    let answer = tokio::time::timeout(ANSWER, client.node()).await;
    Ok(answer.map_err(|_| Unanswered::Late)??)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A certificate that ends after so many days, and signs itself.
    fn ending_in(folder: &Path, days: i64) -> TlsFiles {
        let [cert, key] = ["node.pem", "node.key"].map(|name| folder.join(name));
        let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let end = now.as_secs().checked_add_signed(days * DAY + 60).unwrap();
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(end);
        let made = KeyPair::generate().unwrap();
        std::fs::write(&cert, params.self_signed(&made).unwrap().pem()).unwrap();
        std::fs::write(&key, made.serialize_pem()).unwrap();
        TlsFiles { ca: cert.clone(), cert, key }
    }

    #[test]
    fn certificates_that_end_soon_have_ended_or_do_not_fit_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let state = |days| certificate(&ending_in(dir.path(), days)).state;
        let expected = (FindingState::Ok, FindingState::Limited, FindingState::Missing);
        assert_eq!((state(60), state(29), state(-2)), expected);
        let ended = certificate(&ending_in(dir.path(), -2));
        assert!(ended.found.contains("a.example") && ended.found.contains("ended 1 day"), "{ended:?}");
        let files = ending_in(dir.path(), 60);
        std::fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        let foreign = certificate(&files);
        assert!(foreign.state == FindingState::Missing && foreign.found.contains("node.key"), "{foreign:?}");
        std::fs::remove_file(&files.cert).unwrap();
        assert!(certificate(&files).found.contains("node.pem"));
    }

    #[test]
    fn settings_that_cannot_be_used_are_told() {
        let file = Path::new("/etc/vmove/vmoved.toml");
        let bad = settings(Some(file), Some("x: unknown key".to_owned()), true);
        assert_eq!((bad.state, bad.found.as_str()), (FindingState::Missing, "x: unknown key"));
        assert_eq!(settings(Some(file), None, false).state, FindingState::Ok);
        let none = |running| settings(None, Some("no TLS".to_owned()), running).state;
        assert_eq!((none(false), none(true)), (FindingState::Missing, FindingState::Limited));
    }
}
