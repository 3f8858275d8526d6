//! What a client makes of answers, and of none.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::path::Path;

use axum::Router;
use axum::routing::get;
use vmove_client::{Client, Error};
use vmove_http::events::Wanted;
use vmove_http::{Refusal, socket};
use vmove_types::problem::{Code, Problem};

/// Serves this on a Unix socket.
fn serve(path: &Path, router: Router) {
    let (listener, held) = socket::listen(path).unwrap();
    tokio::spawn(async move {
        let _held = held;
        axum::serve(listener, router).await
    });
}

#[tokio::test]
async fn an_error_names_the_socket_and_keeps_the_code_of_the_problem() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.sock");
    let client = Client::connect(&path);
    let missing = client.vms().await.unwrap_err();
    assert!(missing.is_unreachable() && missing.to_string().contains("c.sock"), "{missing}");

    let refuse = || async { Refusal::from(Problem::new(Code::UnknownVm, "no VM \"a b\"")) };
    serve(
        &path,
        Router::new().route("/v1/vms/a%20b", get(refuse)).route("/v1/vms", get(|| async { "hello" })),
    );
    let Error::Refused(problem) = client.vm("a b").await.unwrap_err() else { panic!("another error") };
    assert_eq!((problem.code, problem.exit_code), (Code::UnknownVm, 1));
    let other = client.vms().await.unwrap_err();
    assert!(matches!(&other, Error::Unexpected { .. }) && other.to_string().contains("c.sock"), "{other}");
    // No problem, but a status that is none of ours.
    assert!(matches!(client.node().await.unwrap_err(), Error::Unexpected { .. }));
}

#[tokio::test]
async fn a_stream_ends_with_its_daemon_and_refusals_come_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.sock");
    let events = |wanted: Wanted| async {
        let (mut snapshots, answer) = wanted.stream();
        tokio::spawn(async move { snapshots.send(&"not a progress").await });
        answer
    };
    let refuse = || async { Refusal::from(Problem::new(Code::UnknownMigration, "no migration 8")) };
    let router = Router::new()
        .route("/v1/migrations/7/events", get(events))
        .route("/v1/migrations/8/events", get(refuse));
    serve(&path, router);
    let client = Client::connect(&path);
    let mut stream = client.follow_migration("7").await.unwrap();
    assert!(matches!(stream.next().await.unwrap_err(), Error::Unexpected { .. }));
    assert!(stream.next().await.unwrap().is_none());
    let Error::Refused(problem) = client.follow_migration("8").await.unwrap_err() else {
        panic!("another error")
    };
    assert_eq!(problem.code, Code::UnknownMigration);
}

/// A newer daemon may say more than is known here, and in other words. What can be understood is; what cannot is told as it was said.
#[tokio::test]
async fn a_daemon_of_another_version_is_understood_or_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.sock");
    let json = |text: &'static str| move || async move { ([("content-type", "application/json")], text) };
    let refuse = || async {
        let text = r#"{"code":"too-hot","message":"the node is too hot","status":503,"exit_code":9}"#;
        (axum::http::StatusCode::SERVICE_UNAVAILABLE, text)
    };
    let router = Router::new()
        .route("/v1/vms", get(json(r#"{"vms":[],"moons":3}"#)))
        .route("/v1/migrations/7", get(json(r#"{"id":"7","phase":"warp"}"#)))
        .route("/v1/migrations/8", get(refuse))
        // It has no groups: an older one.
        .fallback(vmove_http::fallback::unknown_path);
    serve(&path, router);
    let client = Client::connect(&path);
    assert!(client.vms().await.unwrap().vms.is_empty());
    for (id, words) in [("7", "warp"), ("8", "too-hot: the node is too hot")] {
        let error = client.migration(id).await.unwrap_err();
        assert!(matches!(&error, Error::Unexpected { .. }), "{error}");
        assert!(
            error.to_string().contains("of this version") && error.to_string().contains(words),
            "{error}"
        );
    }
    let Error::Refused(problem) = client.groups().await.unwrap_err() else { panic!("another error") };
    assert_eq!(problem.code, Code::UnknownPath);
}
