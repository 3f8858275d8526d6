//! Hooks: what they hear of on this node, and what they do to its VMs.

mod act;
mod bridge;
mod migrations;
mod news;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use vmove_hooks::{Event, Hooks, Node};
use vmove_node::monitors::Listener;
use vmove_node::store::VmStore;

use super::App;

pub use act::{OfNode, begin_group, begin_migration};
pub use migrations::{follow, wanted};

/// How often VMs are looked for whose monitor nobody holds: those of an earlier daemon, and those that a migration has brought.
const HOLD_INTERVAL: Duration = Duration::from_millis(500);

/// By which hooks hear of the events of QEMUs, whoever holds their monitors: a migration, a fork, or nobody. `None` if they wait for none.
pub fn listener(hooks: &Arc<Hooks>, vms: &Arc<VmStore>) -> Option<Listener> {
    if hooks.qmp_events().is_empty() {
        return None;
    }
    let (hooks, vms) = (Arc::clone(hooks), Arc::clone(vms));
    let names = Mutex::new(HashMap::<PathBuf, String>::new());
    Some(Box::new(move |socket, event| {
        // Most events are none that a hook waits for: nothing is copied for them.
        if !hooks.qmp_events().contains(&event.name) {
            return;
        }
        let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
        let is_still = |name: &String| vms.get(name).is_ok_and(|vm| vm.qmp_socket == socket);
        let name = names.get(socket).filter(|name| is_still(name)).cloned().or_else(|| {
            let found = vms.list().into_iter().find(|vm| vm.qmp_socket == socket)?.name;
            names.insert(socket.to_owned(), found.clone());
            Some(found)
        });
        drop(names);
        match name {
            Some(vm) => hooks.tell(Event::qmp(event, &vm)),
            // A QEMU that is to become a VM here: a migration that has not handed over, or a child that does not run yet.
            None => tracing::debug!(socket = %socket.display(), event = event.name, "no VM of this node yet"),
        }
    }))
}

/// Starts what hooks need beside the events that come by themselves.
pub fn start(app: &Arc<App>, tasks: &mut JoinSet<()>) {
    let hooks = &app.hooks;
    if hooks.is_empty() {
        return;
    }
    let node: Arc<dyn Node> = Arc::new(OfNode(app.clone()));
    tasks.spawn(Arc::clone(hooks).serve(node));
    tasks.spawn(vmove_hooks::signals::watch(Arc::clone(hooks), app.config.signals.clone()));
    tasks.spawn(news::follow(app.clone()));
    if !hooks.qmp_events().is_empty() {
        tasks.spawn(hold_monitors(app.clone()));
    }
}

/// Keeps a connection to each VM's monitor, over which its events come.
async fn hold_monitors(app: Arc<App>) {
    loop {
        let mut connecting = JoinSet::new();
        for record in app.registry.records() {
            let app = app.clone();
            connecting.spawn(async move {
                if let Err(error) = app.registry.monitors().client(&record.qmp_socket).await {
                    tracing::debug!(vm = %record.name, %error, "hooks hear nothing of this VM until its monitor answers");
                }
            });
        }
        while connecting.join_next().await.is_some() {}
        tokio::time::sleep(HOLD_INTERVAL).await;
    }
}
