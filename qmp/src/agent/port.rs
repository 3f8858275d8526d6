//! Where the agent's port is.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::{Client, QmpError};

/// Name of the port that the agent opens in the guest.
const PORT_NAME: &str = "org.qemu.guest_agent.0";

/// The socket of the guest agent's port, if QEMU has such a port and it is a Unix socket.
///
/// # Errors
/// Any [`QmpError`] but a refusal.
pub async fn socket_of(client: &Client, deadline: Duration) -> Result<Option<PathBuf>, QmpError> {
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let Some(rows) = ask(client, "qom-list", json!({ "path": folder }), deadline).await? else {
            continue;
        };
        for row in rows.as_array().map(Vec::as_slice).unwrap_or_default() {
            let text = |key: &str| row.get(key).and_then(Value::as_str).unwrap_or_default();
            if text("type") != "child<virtserialport>" {
                continue;
            }
            let path = format!("{folder}/{}", text("name"));
            let property = |property: &'static str| {
                ask(client, "qom-get", json!({ "path": path, "property": property }), deadline)
            };
            if property("name").await?.is_none_or(|name| name != PORT_NAME) {
                continue;
            }
            let Some(id) = property("chardev").await? else { continue };
            let all = ask(client, "query-chardev", Value::Null, deadline).await?.unwrap_or_default();
            let rows = all.as_array().map(Vec::as_slice).unwrap_or_default();
            let named = rows.iter().find(|row| row.get("label") == Some(&id));
            let found = named.and_then(|row| row.get("filename")?.as_str()).and_then(unix_path);
            if found.is_some() {
                return Ok(found);
            }
        }
    }
    Ok(None)
}

/// QEMU writes `unix:/path,server=on`, with `disconnected:` before it while nobody is connected.
fn unix_path(filename: &str) -> Option<PathBuf> {
    let rest = filename.split_once("unix:")?.1;
    let path = rest.split(',').next()?;
    (!path.is_empty()).then(|| PathBuf::from(path))
}

async fn ask(
    client: &Client,
    command: &str,
    arguments: Value,
    deadline: Duration,
) -> Result<Option<Value>, QmpError> {
    match client.execute_raw(command, arguments, deadline).await {
        Err(error) if error.is_refusal() => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_socket_is_read() {
        for name in [
            "disconnected:unix:/run/vm/agent,server=on",
            "unix:/run/vm/agent,server=on",
            "unix:/run/vm/agent",
        ] {
            assert_eq!(unix_path(name), Some(PathBuf::from("/run/vm/agent")), "{name}");
        }
        assert_eq!(unix_path("pty:/dev/pts/1"), None);
    }
}
