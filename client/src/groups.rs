//! Requests about VMs that move at one barrier.

use vmove_http::client::encoded;
use vmove_types::group::{GroupList, GroupProgress, GroupRequest, GroupTaken};
use vmove_types::migration::Taken;

use crate::{Client, Error, Stream};

/// Groups. An id may be cut short as long as it is unambiguous. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// All groups that the node remembers: those at work first.
    pub async fn groups(&self) -> Result<GroupList, Error> {
        self.0.get("/v1/groups").await
    }

    /// Begins to move several VMs at one barrier.
    pub async fn migrate_group(&self, request: &GroupRequest) -> Result<GroupTaken, Error> {
        self.0.post("/v1/groups", request).await
    }

    /// One group now.
    pub async fn group(&self, id: &str) -> Result<GroupProgress, Error> {
        self.0.get(&path(id, "")).await
    }

    /// Snapshots of a group as they come, until it has ended.
    pub async fn follow_group(&self, id: &str) -> Result<Stream<GroupProgress>, Error> {
        Ok(Stream::new(self.0.lines(&path(id, "/events")).await?, self.0.clone()))
    }

    /// Calls a group off; every guest goes on at the source.
    pub async fn cancel_group(&self, id: &str) -> Result<Taken, Error> {
        self.0.delete(&path(id, "")).await
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/v1/groups/{}{rest}", encoded(id))
}
