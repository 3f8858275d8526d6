//! What hooks are told of VMs that begin and end.

use std::sync::Arc;

use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use vmove_hooks::{Event, Own};
use vmove_node::record::VmRecord;
use vmove_node::registry::News;

use crate::server::App;

/// Follows what begins and ends. Returns when the registry is gone.
pub async fn follow(app: Arc<App>) {
    let mut news = app.registry.news();
    loop {
        match news.recv().await {
            Ok(News::Started(record)) => {
                let data = json!({ "pid": record.pid, "adopted": record.adopted, "memory": record.backing });
                tell(&app, Own::VmStarted, &record, data);
            }
            Ok(News::Ended { record, why }) => {
                if let Some(child) = app.forks.child_of(&record) {
                    let data = json!({ "parent": child.parent, "fork": child.fork, "child_index": child.index, "why": why });
                    tell(&app, Own::ChildEnd, &record, data);
                }
                let data = json!({ "pid": record.pid, "adopted": record.adopted, "why": why });
                tell(&app, Own::VmEnded, &record, data);
            }
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(missed, "VMs began and ended faster than hooks could be told of it");
            }
            Err(RecvError::Closed) => return,
        }
    }
}

fn tell(app: &App, own: Own, record: &VmRecord, data: serde_json::Value) {
    app.hooks.tell(Event::own(own, &record.name, data).with_labels(record.labels()));
}
