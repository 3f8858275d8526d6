//! Requests about hooks.

use vmove_http::client::encoded;
use vmove_types::hook::{HookList, HookTest, HookTestRequest};

use crate::{Client, Error};

/// Hooks. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// Hooks in the order in which they run, and what came of them.
    pub async fn hooks(&self) -> Result<HookList, Error> {
        self.0.get("/v1/hooks").await
    }

    /// Tries a hook with an event that is made up.
    pub async fn test_hook(&self, name: &str, request: &HookTestRequest) -> Result<HookTest, Error> {
        self.0.post(&format!("/v1/hooks/{}/test", encoded(name)), request).await
    }
}
