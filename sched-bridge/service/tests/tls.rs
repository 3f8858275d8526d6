//! The bridge over TLS.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::path::{Path, PathBuf};

use common::{DEADLINE, Vbridged};
use hyper::Method;
use test_servers::Ports;
use vmove_http::client::{Endpoint, HttpClient};
use vmove_http::tls::client_config;

const TOKEN: &str = "0123456789abcdef";

/// An authority, and a certificate of it for `localhost`: the files `ca.pem`, `cert.pem` and `key.pem`.
fn certificates(folder: &Path) -> [PathBuf; 3] {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = authority.self_signed(&key).unwrap().pem();
    let issuer = rcgen::Issuer::new(authority, key);
    let own_key = rcgen::KeyPair::generate().unwrap();
    let own = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let own = own.signed_by(&own_key, &issuer).unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    [file("ca.pem", &pem), file("cert.pem", &own.pem()), file("key.pem", &own_key.serialize_pem())]
}

/// The status of a request for the nodes, or why there is none.
async fn nodes(endpoint: &str, authority: Option<&Path>) -> Result<u16, String> {
    let endpoint: Endpoint = endpoint.parse().unwrap();
    let tls = authority.map(|path| client_config(path).unwrap());
    let client = HttpClient::new(endpoint, DEADLINE).with_token(Some(TOKEN)).with_tls(tls);
    let answer = client.send(Method::GET, "/v1/nodes", Default::default()).await;
    answer.map(|(status, _)| status.as_u16()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_client_speaks_tls_with_the_bridge_that_its_authority_vouches_for() {
    let folder = tempfile::tempdir().unwrap();
    let [authority, cert, key] = certificates(folder.path());
    let token = folder.path().join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let ports = Ports::take();
    // Not loopback: without TLS, that would be refused.
    let listen = format!("0.0.0.0:{}", ports.first);
    let [cert, key, token] = [&cert, &key, &token].map(|path| path.to_str().unwrap());
    let arguments = ["--listen", &listen, "--token-file", token, "--tls-cert", cert, "--tls-key", key];
    let bridge = Vbridged::start(&arguments, &[]);

    let port = ports.first;
    let https = format!("https://localhost:{port}");
    assert_eq!(nodes(&https, Some(&authority)).await, Ok(200), "{}", bridge.log());
    // The name of the certificate, and an authority that vouches for it.
    let other = tempfile::tempdir().unwrap();
    let [other, ..] = certificates(other.path());
    for (endpoint, authority) in [(format!("https://127.0.0.1:{port}"), &authority), (https.clone(), &other)]
    {
        let error = nodes(&endpoint, Some(authority)).await.unwrap_err();
        assert!(error.contains("certificate"), "{endpoint}: {error}");
    }
    let error = nodes(&https, None).await.unwrap_err();
    assert!(error.contains("authority"), "{error}");
    // Nobody is answered in plain text.
    nodes(&format!("http://127.0.0.1:{port}"), None).await.unwrap_err();
}
