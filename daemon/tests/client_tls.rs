//! The typed client over TLS, and the commands over it, at a real `vmoved`.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use common::{Node, Pki, Shown};
use vmove_client::{Client, ConnectError, Error, TlsFiles, TlsRefusal};
use vmove_types::problem::Code;
use vmove_types::vm::Running;

/// A node with TLS and these clients.
fn serve(pki: &Pki, clients: &[(&str, &str)]) -> (Node, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("vmoved.toml");
    let entry = |(name, role): &(&str, &str)| format!("[[client]]\nname = \"{name}\"\nrole = \"{role}\"\n");
    std::fs::write(&config, clients.iter().map(entry).collect::<String>()).unwrap();
    let mut flags = pki.flags();
    flags.extend(["--config".to_owned(), config.display().to_string()]);
    (Node::start_with(&flags.iter().map(String::as_str).collect::<Vec<_>>()), dir)
}

fn files(shown: &Shown) -> TlsFiles {
    TlsFiles { cert: shown.cert.clone(), key: shown.key.clone(), ca: shown.ca.clone() }
}

fn client(node: &Node, shown: &Shown) -> Client {
    Client::connect_tls(&node.listen.to_string(), &files(shown)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_calls_go_over_tls_as_far_as_the_role_goes() {
    let pki = Pki::new();
    let (node, _config) = serve(&pki, &[("ops", "operator"), ("eyes", "viewer")]);
    let ops = client(&node, &pki.client("ops"));
    let info = ops.node().await.unwrap();
    assert_eq!((info.node.as_str(), info.security.as_str()), ("tester", "mutual-tls"));
    assert!(ops.vms().await.unwrap().vms.is_empty());
    let Error::Refused(problem) = ops.set_state("web", Running::Paused).await.unwrap_err() else { panic!() };
    assert_eq!(problem.code, Code::UnknownVm);
    let Err(Error::Refused(problem)) = ops.follow_migration("7").await else { panic!() };
    assert_eq!(problem.code, Code::UnknownMigration);
    let eyes = client(&node, &pki.client("eyes"));
    assert!(eyes.migrations().await.unwrap().migrations.is_empty());
    for (shown, word) in [("eyes", "viewer"), ("nobody", "[[client]]")] {
        let refused = client(&node, &pki.client(shown)).stop("web", false).await.unwrap_err();
        let Error::Refused(problem) = refused else { panic!("{shown}: {refused}") };
        assert_eq!(problem.code, Code::Forbidden);
        assert!(problem.message.contains(word), "{shown}: {problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_refuses_whose_certificate_and_why_is_told() {
    let pki = Pki::new();
    let (node, _config) = serve(&pki, &[("ops", "admin")]);
    let (good, other) = (pki.client("ops"), Pki::new());
    let why = async |client: Client| match client.vms().await.unwrap_err() {
        error @ Error::Tls { .. } if !error.is_unreachable() => panic!("{error}"),
        Error::Tls { why, endpoint, .. } => {
            assert!(endpoint.to_string().starts_with("https://127.0.0.1:"), "{endpoint}");
            why
        }
        error => panic!("{error}"),
    };
    // The answer must not get lost on the way, in whatever order things come.
    for _ in 0..10 {
        let expired = |params: &mut rcgen::CertificateParams| {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        };
        let refused = why(client(&node, &pki.client_as("late", expired))).await;
        assert_eq!(refused, TlsRefusal::OwnExpired);
        assert!(refused.to_string().contains("out of date") && refused.to_string().contains("issue"));
        let stranger = Shown { ca: good.ca.clone(), ..other.client("ops") };
        assert_eq!(why(client(&node, &stranger)).await, TlsRefusal::OwnUnknownAuthority);
    }
    let untrusting = Shown { ca: other.client("x").ca, ..good.clone() };
    assert_eq!(why(client(&node, &untrusting)).await, TlsRefusal::TheirsUnknownAuthority);
    let address = node.listen.to_string();
    let named = |name| Client::connect_tls_as(&address, name, &files(&good));
    assert!(matches!(why(named("node9.example").unwrap()).await, TlsRefusal::TheirsOtherName(_)));
    named("127.0.0.1").unwrap().vms().await.unwrap();
    let plain = Node::start();
    assert_eq!(why(client(&plain, &good)).await, TlsRefusal::NoTls);
}

#[test]
fn what_cannot_be_used_is_said_before_anything_is_sent() {
    let pki = Pki::new();
    let good = files(&pki.client("ops"));
    for address in ["node1", ":7420", "https://node1:7420", "node1:x", ""] {
        let error = Client::connect_tls(address, &good).unwrap_err();
        assert!(matches!(&error, ConnectError::Address(found) if found == address), "{error}");
        assert!(error.to_string().contains("HOST:PORT"));
    }
    let error = Client::connect_tls_as("node1:7420", "no name", &good).unwrap_err();
    assert!(matches!(error, ConnectError::ServerName(_)), "{error}");
    let missing = TlsFiles { key: "/nowhere/x.key".into(), ..good.clone() };
    let error = Client::connect_tls("node1:7420", &missing).unwrap_err().to_string();
    assert!(error.contains("private key") && error.contains("/nowhere/x.key"), "{error}");
    let swapped = TlsFiles { ca: good.key.clone(), ..good };
    let error = Client::connect_tls("node1:7420", &swapped).unwrap_err().to_string();
    assert!(error.contains("certificate authority") && error.contains("BEGIN CERTIFICATE"), "{error}");
}

/// `vmove` with a node elsewhere.
fn remote(node: &Node, shown: &Shown, args: &[&str]) -> common::Ended {
    let mut command = std::process::Command::new(common::vmove());
    command.args(["--json", "--at", &node.listen.to_string()]);
    command.arg("--tls-cert").arg(&shown.cert).arg("--tls-key").arg(&shown.key);
    command.arg("--tls-ca").arg(&shown.ca).args(args);
    common::Ended::of(&mut command)
}

#[test]
fn commands_ask_a_node_elsewhere() {
    let pki = Pki::new();
    let (node, _config) = serve(&pki, &[("ops", "operator"), ("eyes", "viewer")]);
    let (ops, eyes) = (pki.client("ops"), pki.client("eyes"));
    assert_eq!(remote(&node, &ops, &["node"]).expect(0).json()["node"], "tester");
    assert_eq!(remote(&node, &eyes, &["list"]).expect(0).json()["vms"], serde_json::json!([]));
    assert_eq!(remote(&node, &ops, &["cancel", "7"]).expect(1).json()["code"], "unknown-migration");
    for args in [&["cancel", "7"][..], &["pause", "web"], &["migrate", "web", "--to", "b"], &["stop", "web"]]
    {
        let refused = remote(&node, &eyes, args).expect(3).json();
        assert_eq!(refused["code"], "forbidden", "{args:?}");
    }
    // The same from the environment, and by vfork.
    let mut command = std::process::Command::new(common::vmove().with_file_name("vfork"));
    command.env("VMOVE_AT", node.listen.to_string()).env("VMOVE_TLS_CERT", &ops.cert);
    command.env("VMOVE_TLS_KEY", &ops.key).env("VMOVE_TLS_CA", &ops.ca).args(["--json", "list"]);
    assert_eq!(common::Ended::of(&mut command).expect(0).json()["forks"], serde_json::json!([]));

    let late = pki.client_as("late", |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let refused = remote(&node, &late, &["list"]).expect(5).json();
    let message = refused["error"].as_str().unwrap();
    for word in ["vmoved", "https://127.0.0.1:", "out of date", "issue a new one"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    let nowhere = Shown { key: "/nowhere/x.key".into(), ..ops.clone() };
    let refused = remote(&node, &nowhere, &["list"]).expect(2).json();
    assert!(refused["error"].as_str().unwrap().contains("/nowhere/x.key"), "{refused}");
    // Half of what is needed, no address, and nobody there.
    let half = common::Ended::of(std::process::Command::new(common::vmove()).args(["--at", "a:1", "list"]));
    assert!(half.expect(2).err.contains("found no --tls-cert, --tls-key, --tls-ca"));
    let ask = |at: &str| {
        let mut command = std::process::Command::new(common::vmove());
        command.args(["list", "--at", at]).arg("--tls-cert").arg(&ops.cert);
        common::Ended::of(command.arg("--tls-key").arg(&ops.key).arg("--tls-ca").arg(&ops.ca))
    };
    assert!(ask("node1").expect(2).err.contains("HOST:PORT"));
    let nobody = ask(&vmove_skip::free_port().to_string()).expect(5);
    assert!(nobody.err.contains("peer port"), "{nobody:?}");
}
