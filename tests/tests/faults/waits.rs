//! What tests of full disks and of starts ask of a daemon, until it is so.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use vmove_tests::daemon::Node;
use vmove_tests::scene::STEP_TIMEOUT;

/// A migration as `node` tells of it.
pub fn status(node: &Node, id: &str) -> Result<Value> {
    Ok(node.rest("GET", &format!("/v1/migrations/{id}"), &Value::Null)?.1)
}

/// Waits as long as a step of a scene may take.
pub fn until(what: &str, done: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    while !done()? {
        ensure!(Instant::now() < deadline, "not within {STEP_TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
