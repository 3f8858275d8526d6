//! `vmove setup tls` as an operator runs it: what it makes, what it refuses, what it leaves alone.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::Value;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// Exit code, standard output, standard error.
fn vmove(words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmove"));
    let output = command.args(["setup", "tls"]).args(words).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn made(words: &[&str]) -> String {
    let (code, out, err) = vmove(words);
    assert_eq!(code, Some(0), "{words:?}: {err}");
    out
}

#[track_caller]
fn refused(code: i32, word: &str, words: &[&str]) {
    let (found, out, err) = vmove(words);
    assert_eq!(found, Some(code), "{words:?}: {out}{err}");
    assert!(err.contains(word), "{words:?}: expected {word:?}: {err}");
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

/// All files below a folder, by relative name, with their modes.
fn files(folder: &Path) -> Vec<(String, u32)> {
    fn look(at: &Path, folder: &Path, found: &mut Vec<(String, u32)>) {
        for entry in std::fs::read_dir(at).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                look(&path, folder, found);
            } else {
                let name = path.strip_prefix(folder).unwrap().display().to_string();
                found.push((name, entry.metadata().unwrap().permissions().mode() & 0o777));
            }
        }
    }
    let mut found = Vec::new();
    look(folder, folder, &mut found);
    found.sort();
    found
}

#[test]
fn nodes_and_clients_get_what_they_need_and_keys_are_secret() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new/pki");
    let folder = out.display().to_string();
    let said = made(&[
        "--out",
        &folder,
        "--node",
        "a=10.0.0.1:7421,A.example",
        "--node",
        "b=2001:db8::2",
        "--client",
        "ops:operator",
        "--days",
        "30",
    ]);
    let expected = [
        ("ca.key", 0o600),
        ("ca.pem", 0o644),
        ("clients/ops/ca.pem", 0o644),
        ("clients/ops/client.key", 0o600),
        ("clients/ops/client.pem", 0o644),
        ("clients/ops/client.toml", 0o644),
        ("nodes/a/ca.pem", 0o644),
        ("nodes/a/node.key", 0o600),
        ("nodes/a/node.pem", 0o644),
        ("nodes/a/vmoved.toml", 0o644),
        ("nodes/b/ca.pem", 0o644),
        ("nodes/b/node.key", 0o600),
        ("nodes/b/node.pem", 0o644),
        ("nodes/b/vmoved.toml", 0o644),
    ];
    assert_eq!(files(&out), expected.map(|(name, mode)| (name.to_owned(), mode)));
    assert_eq!(std::fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o700);
    for word in [
        "scp -p",
        "root@10.0.0.1:/etc/vmove/",
        "root@[2001:db8::2]:",
        "Keep ca.key here",
        "restart vmoved",
        "30 days",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let settings: toml::Value = toml::from_str(&read(&out, "nodes/a/vmoved.toml")).unwrap();
    assert_eq!(settings["node"].as_str(), Some("a"));
    assert_eq!(settings["listen"].as_str(), Some("[::]:7421"));
    assert_eq!(settings["nodes"]["b"].as_str(), Some("[2001:db8::2]:7420"));
    assert_eq!(settings["client"][0]["role"].as_str(), Some("operator"));
    let settings: toml::Value = toml::from_str(&read(&out, "nodes/b/vmoved.toml")).unwrap();
    assert!(settings.get("listen").is_none());
    assert_eq!(settings["nodes"]["a"].as_str(), Some("10.0.0.1:7421"));

    let authority = der(&out, "ca.pem");
    let (_, authority) = X509Certificate::from_der(&authority).unwrap();
    assert!(authority.is_ca());
    let node = der(&out, "nodes/a/node.pem");
    let (_, node) = X509Certificate::from_der(&node).unwrap();
    node.verify_signature(Some(authority.public_key())).unwrap();
    let names = node.subject_alternative_name().unwrap().unwrap();
    let names: Vec<String> = names.value.general_names.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["IPAddress(0a:00:00:01)", "DNSName(a.example)", "DNSName(a)"]);
    let days = node.validity().time_to_expiration().unwrap().whole_days();
    assert!((29..=30).contains(&days), "{days}");
    let usage = |cert: &X509Certificate<'_>| {
        let usage = cert.extended_key_usage().unwrap().unwrap();
        (usage.value.server_auth, usage.value.client_auth)
    };
    assert_eq!(usage(&node), (true, true));
    let client = der(&out, "clients/ops/client.pem");
    let (_, client) = X509Certificate::from_der(&client).unwrap();
    assert_eq!((usage(&client), client.subject().to_string().as_str()), ((false, true), "CN=ops"));
    assert!(client.subject_alternative_name().unwrap().is_none_or(|names| {
        names.value.general_names.iter().all(|name| matches!(name, GeneralName::Invalid(..)))
    }));
}

fn der(folder: &Path, name: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(read(folder, name).as_bytes()).unwrap()
}

#[test]
fn an_authority_that_is_there_gets_more_nodes_and_renews_old_ones() {
    let dir = tempfile::tempdir().unwrap();
    let folder = path(dir.path(), "pki");
    made(&["--out", &folder, "--node", "a=10.0.0.1:7421", "--client", "ops:operator"]);
    let before = (read(dir.path(), "pki/ca.pem"), read(dir.path(), "pki/nodes/a/vmoved.toml"));

    let said = made(&["--ca", &folder, "--node", "c=c.example", "--client", "eyes:viewer"]);
    assert!(
        said.contains("Nodes that were there before (a)") && said.contains("\"c\" = \"c.example:7420\""),
        "{said}"
    );
    assert!(!said.contains("Keep ca.key"), "{said}");
    let settings: toml::Value = toml::from_str(&read(dir.path(), "pki/nodes/c/vmoved.toml")).unwrap();
    assert_eq!(settings["nodes"]["a"].as_str(), Some("10.0.0.1:7421"));
    let clients: Vec<_> =
        settings["client"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(clients, ["ops", "eyes"]);
    assert_eq!(before, (read(dir.path(), "pki/ca.pem"), read(dir.path(), "pki/nodes/a/vmoved.toml")));

    let out = path(dir.path(), "later");
    let said = made(&["--ca", &folder, "--out", &out, "--node", "a=10.0.0.1:7421", "--days", "1"]);
    assert_eq!(read(dir.path(), "later/nodes/a/ca.pem"), before.0);
    assert!(!dir.path().join("later/ca.key").exists(), "{said}");
    let settings: toml::Value = toml::from_str(&read(dir.path(), "later/nodes/a/vmoved.toml")).unwrap();
    assert_eq!(settings["nodes"]["c"].as_str(), Some("c.example:7420"));
    let authority = der(dir.path(), "pki/ca.pem");
    let (_, authority) = X509Certificate::from_der(&authority).unwrap();
    let node = der(dir.path(), "later/nodes/a/node.pem");
    let (_, node) = X509Certificate::from_der(&node).unwrap();
    node.verify_signature(Some(authority.public_key())).unwrap();
    assert_eq!(node.issuer(), authority.subject());
}

#[test]
fn nothing_is_overwritten_and_what_fails_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = path(dir.path(), "pki");
    made(&["--out", &folder, "--node", "a=10.0.0.1"]);
    let before = files(dir.path());
    refused(1, "ca.pem is there already", &["--out", &folder, "--node", "b=10.0.0.2"]);
    refused(1, "nodes/a is there already", &["--ca", &folder, "--node", "a=10.0.0.9"]);
    assert_eq!(files(dir.path()), before);
    // Half of it can be written: the authority, before the folder of nodes.
    let half = dir.path().join("half");
    std::fs::create_dir(&half).unwrap();
    std::fs::write(half.join("nodes"), "a file").unwrap();
    refused(1, "half/nodes", &["--out", &half.display().to_string(), "--node", "a=10.0.0.1"]);
    assert_eq!(files(&half).len(), 1, "{:?}", files(&half));
    refused(1, "could not make /proc/pki", &["--out", "/proc/pki", "--node", "a=10.0.0.1"]);
    // A link to nowhere is not written through.
    let link = dir.path().join("link");
    std::fs::create_dir(&link).unwrap();
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), link.join("ca.key")).unwrap();
    refused(1, "ca.key is there already", &["--out", &link.display().to_string(), "--node", "a=10.0.0.1"]);
    assert!(!dir.path().join("elsewhere").exists());
}

#[test]
fn names_that_cannot_be_told_apart_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "pki");
    for (word, words) in [
        ("found two", &["--node", "a=10.0.0.1", "--node", "A=10.0.0.2"][..]),
        ("found two", &["--node", "a=10.0.0.1", "--client", "a:viewer"]),
        ("of a and of b", &["--node", "a=10.0.0.1", "--node", "b=10.0.0.1"]),
        ("ops.example", &["--node", "a=ops.example", "--client", "ops.example:viewer"]),
        ("neither an address nor a DNS name", &["--node", "a=10.0.0.300"]),
        ("no name of 1 to 64", &["--node", "../a=10.0.0.1"]),
        ("viewer, operator and admin", &["--client", "ops:root"]),
        ("36500", &["--node", "a=10.0.0.1", "--days", "0"]),
        ("--node", &[]),
    ] {
        refused(2, word, &[&["--out", &out], words].concat());
    }
    refused(2, "--out", &["--node", "a=10.0.0.1"]);
    assert!(!dir.path().join("pki").exists());
    // Those of earlier runs count.
    made(&["--out", &out, "--node", "a=10.0.0.1", "--client", "ops:viewer"]);
    refused(2, "found two", &["--ca", &out, "--node", "OPS=10.0.0.2"]);
    refused(2, "of a and of b", &["--ca", &out, "--node", "b=10.0.0.1"]);
    std::fs::write(dir.path().join("pki/nodes/a/node.pem"), "nothing").unwrap();
    refused(1, "nodes/a/node.pem", &["--ca", &out, "--node", "b=10.0.0.2"]);
}

/// A folder with an authority, changed by a test.
fn authority(dir: &Path, change: impl FnOnce(&mut CertificateParams)) -> PathBuf {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    std::fs::write(dir.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(dir.join("ca.key"), key.serialize_pem()).unwrap();
    dir.to_owned()
}

#[test]
fn an_authority_that_cannot_sign_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let add = |word: &str, code: i32| {
        let folder = dir.path().display().to_string();
        refused(code, word, &["--ca", &folder, "--node", "a=10.0.0.1"]);
        assert!(!dir.path().join("nodes").exists());
    };
    add("ca.pem", 1);
    authority(dir.path(), |_| {});
    std::fs::remove_file(dir.path().join("ca.key")).unwrap();
    add("could not read", 1);
    std::fs::write(dir.path().join("ca.key"), KeyPair::generate().unwrap().serialize_pem()).unwrap();
    add("is not the key of a certificate", 2);
    std::fs::write(dir.path().join("ca.key"), "nothing").unwrap();
    add("BEGIN PRIVATE KEY", 2);
    authority(dir.path(), |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    add("and not now", 2);
    authority(dir.path(), |params| params.not_before = rcgen::date_time_ymd(2090, 1, 1));
    add("and not now", 2);
    authority(dir.path(), |params| params.is_ca = IsCa::NoCa);
    add("is no authority's", 2);
    std::fs::write(dir.path().join("ca.pem"), "nothing").unwrap();
    add("BEGIN CERTIFICATE", 2);
    // One that holds, beside the one that it replaces.
    authority(dir.path(), |_| {});
    let old = read(dir.path(), "ca.pem");
    authority(dir.path(), |_| {});
    std::fs::write(dir.path().join("ca.pem"), old + &read(dir.path(), "ca.pem")).unwrap();
    made(&["--ca", &dir.path().display().to_string(), "--node", "a=10.0.0.1"]);
    assert_eq!(read(dir.path(), "nodes/a/ca.pem").matches("BEGIN CERTIFICATE").count(), 2);
}

#[test]
fn certificates_do_not_outlive_their_authority() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().display().to_string();
    made(&["--out", &folder, "--node", "a=10.0.0.1"]);
    refused(2, "--days 3649", &["--ca", &folder, "--node", "b=10.0.0.2", "--days", "3651"]);
    made(&["--ca", &folder, "--node", "b=10.0.0.2", "--days", "3649"]);
}

#[test]
fn programs_get_one_object() {
    let dir = tempfile::tempdir().unwrap();
    let said = made(&[
        "--json",
        "--out",
        &path(dir.path(), "pki"),
        "--node",
        "a=10.0.0.1",
        "--client",
        "ops:viewer",
    ]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["nodes"][0]["certificate_for"], serde_json::json!(["10.0.0.1", "a"]));
    assert_eq!((&said["clients"][0]["role"], &said["new_authority"]), (&"viewer".into(), &true.into()));
    let (code, out, _) = vmove(&["--json", "--ca", "/nowhere", "--node", "a=10.0.0.1"]);
    let said: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &said["code"]), (Some(1), &"local-file".into()));
}
