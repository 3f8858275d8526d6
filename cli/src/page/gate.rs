//! Who gets anything from the server of the page: a browser on this host that was told the secret, and that no other site has led here.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{HOST, HeaderName, HeaderValue, ORIGIN};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

/// What the page may do: run its own scripts and ask this server. Scripts make no HTML of text (`require-trusted-types-for`).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Said with each answer. The address has the secret: it is told to nobody, and nothing is kept.
const HEADERS: [(&str, &str); 7] = [
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-store"),
];

/// The first part of each path.
#[derive(Debug)]
pub(super) struct Gate(String);

impl Gate {
    /// With a secret of 122 random bits.
    pub(super) fn new() -> Self {
        Self(Uuid::new_v4().simple().to_string())
    }

    pub(super) fn secret(&self) -> &str {
        &self.0
    }

    /// Compares all of it, so that the time it takes tells nothing.
    fn knows(&self, path: &str) -> bool {
        let told = path.split('/').nth(1).unwrap_or_default().as_bytes();
        let same = self.0.as_bytes().iter().zip(told).fold(0, |differs, (a, b)| differs | (a ^ b));
        told.len() == self.0.len() && same == 0
    }
}

/// Lets a request through, or says why not.
pub(super) async fn pass(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let mut answer = match judge(&gate, &request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    answer
}

type Refused = (StatusCode, &'static str);

fn judge(gate: &Gate, request: &Request) -> Result<(), Refused> {
    if !is_ours(request.headers()) {
        return Err((
            StatusCode::FORBIDDEN,
            "expected a browser on this host at the address that vmove printed, found another site or name\n",
        ));
    }
    if !gate.knows(request.uri().path()) {
        return Err(UNKNOWN);
    }
    if *request.method() != Method::GET && *request.method() != Method::HEAD {
        return Err((
            StatusCode::METHOD_NOT_ALLOWED,
            "expected GET: the page shows, and changes nothing; use vmove\n",
        ));
    }
    Ok(())
}

const UNKNOWN: Refused = (
    StatusCode::NOT_FOUND,
    "expected an address that vmove printed, found another one: its secret is new each time that the page is served\n",
);

/// For what is below the secret and is not there.
pub(super) async fn not_found() -> Refused {
    UNKNOWN
}

/// Named as this host, so that no name of somebody else leads here (DNS rebinding), and asked for by no other site.
fn is_ours(headers: &HeaderMap) -> bool {
    let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let Some(host) = text(&HOST) else { return false };
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let own_origin = text(&ORIGIN).is_none_or(|origin| origin.strip_prefix("http://") == Some(host));
    let site = text(&HeaderName::from_static("sec-fetch-site"));
    // `none`: typed, or opened from outside of the browser. What a link of another site leads here is not.
    let own_site = matches!(site, None | Some("same-origin" | "none"));
    matches!(name, "127.0.0.1" | "localhost" | "[::1]") && own_origin && own_site
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(headers: &[(&'static str, &'static str)]) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        is_ours(&headers.collect())
    }

    #[test]
    fn names_and_sites_of_others_are_refused() {
        for host in ["127.0.0.1:80", "localhost:8420", "[::1]:8420", "localhost"] {
            assert!(ours(&[("host", host)]), "{host}");
        }
        for host in ["evil.example", "evil.example:8420", "127.0.0.1.evil.example:80", "localhost:x", ""] {
            assert!(!ours(&[("host", host)]), "{host}");
        }
        assert!(!ours(&[]));
        let host = ("host", "127.0.0.1:8420");
        assert!(ours(&[host, ("origin", "http://127.0.0.1:8420"), ("sec-fetch-site", "same-origin")]));
        assert!(ours(&[host, ("sec-fetch-site", "none")]));
        for origin in ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:8420", "null"] {
            assert!(!ours(&[host, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site"] {
            assert!(!ours(&[host, ("sec-fetch-site", site)]), "{site}");
        }
    }

    #[test]
    fn the_secret_is_known_whole_or_not_at_all() {
        let gate = Gate::new();
        let secret = gate.secret().to_owned();
        assert!(gate.knows(&format!("/{secret}/")) && gate.knows(&format!("/{secret}/v1/vms")));
        for wrong in
            ["/", "", "/x/", &format!("/{}/", &secret[1..]), &format!("/{secret}0/"), &format!("//{secret}/")]
        {
            assert!(!gate.knows(wrong), "{wrong}");
        }
        assert_ne!(secret, Gate::new().secret());
    }
}
