//! The controller of a machine: how it is reached, what it must show, and as whom we log in.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use vmove_http::client::{Endpoint, HttpClient, HttpError};
use vmove_http::tls::client_config;
use vmove_http::tls_refusal::TlsRefusal;

/// A service that takes longer for one answer does not answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// What others than the owner may do with a file.
const OTHERS: u32 = 0o077;

/// A machine, or rather its controller, as the configuration has it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// `https://HOST:PORT` or `http://HOST:PORT`.
    url: String,
    /// Path of the system.
    pub system: String,
    /// Authorities that vouch for the controller (PEM), for https.
    ca: Option<PathBuf>,
    /// User.
    user: Option<String>,
    /// File with the password.
    password_file: Option<PathBuf>,
}

/// The service of a controller.
#[derive(Debug)]
pub struct Controller {
    machine: String,
    authority: Option<PathBuf>,
    http: HttpClient,
}

impl Controller {
    /// Of the machine of this name.
    ///
    /// # Errors
    /// A file cannot be read, or the password would be shown to others.
    pub fn new(name: &str, machine: &Machine) -> Result<Self, String> {
        let wrong = |why: &dyn std::fmt::Display| format!("machine {name}: {why}");
        // Messages and logs show the address.
        if machine.url.contains('@') {
            return Err(wrong(
                &"expected a url without a user and a password: name them by `user` and `password_file`",
            ));
        }
        let endpoint: Endpoint = machine.url.parse().map_err(|e| wrong(&e))?;
        let tls = match (&endpoint, &machine.ca) {
            (Endpoint::Tls(_), Some(ca)) => Some(client_config(ca).map_err(|e| wrong(&e))?),
            (Endpoint::Tls(_), None) => {
                return Err(wrong(
                    &"https needs `ca`, a file with the authority of the controller's certificate",
                ));
            }
            _ => None,
        };
        let login = machine.login().map_err(|e| wrong(&e))?;
        if let (Some(_), Endpoint::Tcp(address)) = (&login, &endpoint)
            && !is_own_host(address)
        {
            return Err(wrong(&format_args!(
                "over {endpoint} everybody on the way would read the password: expected https://"
            )));
        }
        let http = HttpClient::new(endpoint, ANSWER_LIMIT).with_tls(tls).with_authorization(login.as_deref());
        Ok(Self { machine: name.to_owned(), authority: machine.ca.clone(), http })
    }

    /// Sends a request. Gives the answer.
    ///
    /// # Errors
    /// There is none, or it is a refusal.
    pub async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Value, String> {
        let (status, bytes) = match self.http.send(method, path, body).await {
            Ok(answered) => answered,
            Err(error) => return Err(format!("machine {}: {}", self.machine, self.why(&error))),
        };
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if status.is_success() {
            return Ok(answer);
        }
        let said = answer["error"]["message"].as_str().unwrap_or_default();
        let next = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "; look at `user` and `password_file`",
            _ => "",
        };
        let endpoint = self.http.endpoint();
        Err(format!("machine {}: {endpoint} {path}: status {status} {said}{next}", self.machine))
    }

    /// Why there is no answer. A certificate that is not trusted is told with the file that says what is.
    fn why(&self, error: &HttpError) -> String {
        let authority = self.authority.as_deref().unwrap_or(Path::new("")).display();
        let endpoint = self.http.endpoint();
        match TlsRefusal::of(error) {
            Some(TlsRefusal::TheirsUnknownAuthority) => format!(
                "{endpoint} shows a certificate that {authority} does not vouch for: expected one of an authority in this file; nothing was sent. Is it the right machine? Then put its authority into the file"
            ),
            Some(TlsRefusal::TheirsOtherName(why)) => format!(
                "{endpoint} shows a certificate for another name ({why}): name it in `url` as its certificate does, or give it a certificate for this name"
            ),
            Some(TlsRefusal::TheirsExpired) => format!(
                "{endpoint} shows a certificate that is out of date, or not valid yet: renew it there, or set the clocks"
            ),
            Some(TlsRefusal::NoTls) => {
                format!("{endpoint} speaks no TLS that is known here: is this the right port?")
            }
            Some(other) => format!("{endpoint}: {other}"),
            None => error.to_string(),
        }
    }
}

impl Machine {
    /// The header by which we log in, if we do.
    fn login(&self) -> Result<Option<String>, String> {
        match (&self.user, &self.password_file) {
            (Some(user), Some(file)) => {
                Ok(Some(format!("Basic {}", STANDARD.encode(format!("{user}:{}", password(file)?)))))
            }
            (None, None) => Ok(None),
            _ => Err("expected both of `user` and `password_file`, or none, found one".to_owned()),
        }
    }
}

/// The first line of a file that nobody else may read.
fn password(file: &Path) -> Result<String, String> {
    let wrong = |error: std::io::Error| format!("could not read {}: {error}", file.display());
    let mode = std::fs::metadata(file).map_err(wrong)?.mode();
    if mode & OTHERS != 0 {
        return Err(format!(
            "{}: expected a file that only its owner may read, found mode {:04o}: chmod 0600",
            file.display(),
            mode & 0o7777
        ));
    }
    let text = std::fs::read_to_string(file).map_err(wrong)?;
    match text.lines().next().filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => Err(format!("{}: expected the password in the first line, found none", file.display())),
    }
}

fn is_own_host(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_password_is_not_shown_to_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        let with = |text: &str, mode: u32| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let login = format!("user = \"vmove\"\npassword_file = {file:?}\n");
        let made = |url: &str, more: &str| {
            let machine: Machine =
                toml::from_str(&format!("url = \"{url}\"\nsystem = \"/s\"\n{more}")).unwrap();
            Controller::new("m1", &machine).map(drop)
        };
        with("secret\n", 0o600);
        for own in ["http://127.0.0.1:80", "http://localhost:80", "http://[::1]:80"] {
            made(own, &login).unwrap();
        }
        made("http://bmc7:80", "").unwrap();
        let refused = |url: &str, more: &str, wanted: &str| {
            let why = made(url, more).unwrap_err();
            assert!(why.starts_with("machine m1: ") && why.contains(wanted), "{why}");
        };
        refused("http://bmc7:80", &login, "expected https://");
        refused("https://bmc7:443", &login, "https needs `ca`");
        refused("http://vmove:secret@bmc7:80", "", "expected a url without a user");
        refused("http://127.0.0.1:80", "user = \"vmove\"\n", "expected both of");
        refused("http://127.0.0.1:80", &format!("password_file = {file:?}\n"), "expected both of");
        with("secret\n", 0o640);
        refused("http://127.0.0.1:80", &login, "found mode 0640: chmod 0600");
        with("\n", 0o600);
        refused("http://127.0.0.1:80", &login, "found none");
        std::fs::remove_file(&file).unwrap();
        refused("http://127.0.0.1:80", &login, "could not read");
        // Nothing turns the check of certificates off.
        for key in ["insecure = true", "verify = false", "password = \"secret\""] {
            toml::from_str::<Machine>(&format!("url = \"https://bmc7:443\"\nsystem = \"/s\"\n{key}\n"))
                .unwrap_err();
        }
    }
}
