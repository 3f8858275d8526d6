//! Requests about migrations.

use vmove_http::client::encoded;
use vmove_types::go_home::GoHome;
use vmove_types::migration::{MigrateRequest, MigrationList, ReclaimRequest, Taken};
use vmove_types::progress::Progress;

use crate::{Client, Error, Stream};

/// Migrations. An id may be cut short as long as it is unambiguous. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// All migrations that the node remembers: those at work first, then newest first.
    pub async fn migrations(&self) -> Result<MigrationList, Error> {
        self.0.get("/v1/migrations").await
    }

    /// Those at work, those that hold a paused guest, and those that have just ended, in no order. A daemon of an earlier release lists all.
    pub async fn live_migrations(&self) -> Result<MigrationList, Error> {
        self.0.get("/v1/migrations?live=true").await
    }

    /// Begins to move a VM to another node.
    pub async fn migrate(&self, request: &MigrateRequest) -> Result<Taken, Error> {
        self.0.post("/v1/migrations", request).await
    }

    /// One migration now.
    pub async fn migration(&self, id: &str) -> Result<Progress, Error> {
        self.0.get(&path(id, "")).await
    }

    /// Snapshots of a migration as they come, until it has ended.
    pub async fn follow_migration(&self, id: &str) -> Result<Stream<Progress>, Error> {
        Ok(Stream::new(self.0.lines(&path(id, "/events")).await?, self.0.clone()))
    }

    /// Calls a migration off; the guest goes on at the source.
    pub async fn cancel_migration(&self, id: &str) -> Result<Taken, Error> {
        self.0.delete(&path(id, "")).await
    }

    /// Has the guest's copy at the source run again, after the guest has ended at the destination.
    pub async fn reclaim_migration(&self, id: &str, request: &ReclaimRequest) -> Result<Taken, Error> {
        self.0.post(&path(id, "/reclaim"), request).await
    }

    /// Has a guest that came for a visit stay, on the node where it is.
    pub async fn stay(&self, id: &str) -> Result<Taken, Error> {
        self.0.act(&path(id, "/stay")).await
    }

    /// Turns the migration that brings a guest into a visit, on the node where the guest is.
    pub async fn turn_into_visit(&self, id: &str, go_home: &GoHome) -> Result<Taken, Error> {
        self.0.post(&path(id, "/visit"), go_home).await
    }

    /// Takes up a migration that gave up, on the node that owns the guest.
    pub async fn recover_migration(&self, id: &str) -> Result<Taken, Error> {
        self.0.act(&path(id, "/recover")).await
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/v1/migrations/{}{rest}", encoded(id))
}
