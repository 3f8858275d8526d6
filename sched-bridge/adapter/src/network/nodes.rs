//! Several nodes at once. What one of them does not do keeps no other from doing it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::config::Config;
use super::names::{self, Names};
use super::node::{self, Found};

/// By the name of the node: why it did not do what it was asked for.
pub type Failed = BTreeMap<String, String>;

/// The nodes that one request is about.
#[derive(Debug)]
pub struct Nodes {
    config: Arc<Config>,
    /// Nodes that were not reached. They are not asked again: a request has little time.
    silent: RefCell<Failed>,
}

impl Nodes {
    /// Reached as the configuration says.
    #[must_use]
    pub fn new(config: &Arc<Config>) -> Self {
        Self { config: Arc::clone(config), silent: RefCell::default() }
    }

    /// What each node has, and which could not be looked at.
    pub async fn look(&self, names: &Names, nodes: &[String]) -> (BTreeMap<String, Found>, Failed) {
        let mut failed = Failed::new();
        let mut work = JoinSet::new();
        for node in nodes.iter().cloned() {
            if let Some(why) = self.silent.borrow().get(&node) {
                failed.insert(node, why.clone());
                continue;
            }
            let (config, namespace) = (Arc::clone(&self.config), names::of_node(names, &node));
            work.spawn(async move {
                let found = node::look(&config, &node, &namespace).await;
                (node, found)
            });
        }
        let mut all = BTreeMap::new();
        for (node, found) in work.join_all().await {
            match found {
                Ok(found) => {
                    all.insert(node, found);
                }
                Err(error) => self.note(&mut failed, node, &error),
            }
        }
        (all, failed)
    }

    /// Runs a script on each node. Gives those on which it failed.
    pub async fn run(&self, scripts: Vec<(String, String)>) -> Failed {
        let mut work = JoinSet::new();
        for (node, script) in scripts {
            let config = Arc::clone(&self.config);
            work.spawn(async move {
                let done = node::run(&config, &node, &script).await;
                (node, done)
            });
        }
        let mut failed = Failed::new();
        for (node, done) in work.join_all().await {
            if let Err(error) = done {
                self.note(&mut failed, node, &error);
            }
        }
        failed
    }

    fn note(&self, failed: &mut Failed, node: String, error: &node::Error) {
        let why = error.to_string();
        if matches!(error, node::Error::NotReached { .. }) {
            self.silent.borrow_mut().insert(node.clone(), why.clone());
        }
        failed.insert(node, why);
    }
}

/// All of them in one line.
#[must_use]
pub fn told(failed: &Failed) -> String {
    failed.values().map(String::as_str).collect::<Vec<_>>().join("; ")
}
