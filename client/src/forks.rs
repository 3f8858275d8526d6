//! Requests about forks and templates.

use vmove_http::client::encoded;
use vmove_types::fork::{
    ForkList, ForkNode, ForkRecovered, ForkRequest, Promoted, Removed, RestoreRequest, Restored,
    TemplateInfo, TemplateList, TemplateRequest, Warm, WarmRequest,
};
use vmove_types::fork_report::{ForkProgress, ForkReport};
use vmove_types::vm::Stopped;

use crate::vms::path as vm_path;
use crate::{Client, Error};

/// Forks and templates. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// Forks a guest, or a template. Answers when everything is done; [`Client::fork_progress`] tells meanwhile.
    pub async fn fork(&self, request: &ForkRequest) -> Result<ForkReport, Error> {
        self.0.post("/v1/forks", request).await
    }

    /// Forks of the node: those whose journals cannot be read first, then the newest.
    pub async fn forks(&self) -> Result<ForkList, Error> {
        self.0.get("/v1/forks").await
    }

    /// Takes up a fork whose journal could not be read.
    pub async fn recover_fork(&self, id: &str) -> Result<ForkRecovered, Error> {
        self.0.act(&format!("/v1/forks/{}/recover", encoded(id))).await
    }

    /// How far a fork is.
    pub async fn fork_progress(&self, id: &str) -> Result<ForkProgress, Error> {
        self.0.get(&format!("/v1/forks/{}", encoded(id))).await
    }

    /// A VM and everything that came from it; with `ask`, other nodes are asked about children there.
    pub async fn fork_tree(&self, vm: &str, ask: bool) -> Result<ForkNode, Error> {
        let query = if ask { "?ask=true" } else { "" };
        self.0.get(&format!("{}{query}", vm_path(vm, "/tree"))).await
    }

    /// Ends a child at once, also one on another node.
    pub async fn kill_child(&self, name: &str) -> Result<Stopped, Error> {
        self.0.delete(&format!("/v1/children/{}", encoded(name))).await
    }

    /// Gives a VM memory of its own, so that it can be moved or forked again.
    pub async fn promote(&self, vm: &str) -> Result<Promoted, Error> {
        self.0.act(&vm_path(vm, "/promote")).await
    }

    /// Keeps children of a VM prepared for its next fork.
    pub async fn prepare_children(&self, vm: &str, request: &WarmRequest) -> Result<Warm, Error> {
        self.0.put(&vm_path(vm, "/warm"), request).await
    }

    /// Templates in memory and on disk.
    pub async fn templates(&self) -> Result<TemplateList, Error> {
        self.0.get("/v1/templates").await
    }

    /// Keeps a guest as it is now, in memory and on disk; the guest runs on.
    pub async fn save_template(&self, request: &TemplateRequest) -> Result<TemplateInfo, Error> {
        self.0.post("/v1/templates", request).await
    }

    /// Brings a template from disk into memory, verified.
    pub async fn load_template(&self, name: &str) -> Result<TemplateInfo, Error> {
        self.0.act(&format!("/v1/templates/{}/load", encoded(name))).await
    }

    /// Lets the guest of a template run again on the node, as it was when the template was made.
    pub async fn restore_template(&self, name: &str, request: &RestoreRequest) -> Result<Restored, Error> {
        self.0.post(&format!("/v1/templates/{}/restore", encoded(name)), request).await
    }

    /// Removes a template from memory and disk.
    pub async fn remove_template(&self, name: &str) -> Result<Removed, Error> {
        self.0.delete(&format!("/v1/templates/{}", encoded(name))).await
    }
}
