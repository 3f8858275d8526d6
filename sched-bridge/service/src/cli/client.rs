//! Speaks with the bridge.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::Value;

use super::args::Where;
use crate::api::problem::{Code, Problem};
use crate::http::{Endpoint, HttpClient};

/// Plans run for hours.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A part of a path or a query.
pub fn segment(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// A bridge, as seen from a command.
#[derive(Debug)]
pub struct Client(HttpClient);

impl Client {
    pub fn new(at: &Where) -> Result<Self, Problem> {
        let token = at.token_file.as_deref().map(token).transpose()?;
        Ok(Self(HttpClient::new(at.bridge.clone(), PATIENCE).with_token(token.as_deref())))
    }

    pub async fn text(
        &self,
        method: Method,
        path: &str,
        body: Option<&(impl Serialize + Sync)>,
    ) -> Result<String, Problem> {
        let body = match body {
            Some(body) => Bytes::from(serde_json::to_vec(body).map_err(Problem::bad)?),
            None => Bytes::new(),
        };
        let (status, answer) =
            self.0.send(method, path, body).await.map_err(|e| self.unreachable(&e.to_string()))?;
        let text = String::from_utf8_lossy(&answer).into_owned();
        if status.is_success() {
            return Ok(text);
        }
        Err(serde_json::from_str(&text)
            .unwrap_or_else(|_| self.unreachable(&format!("HTTP status {status}"))))
    }

    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&(impl Serialize + Sync)>,
    ) -> Result<Value, Problem> {
        let text = self.text(method, path, body).await?;
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).map_err(|e| self.unreachable(&format!("no JSON: {e}")))
    }

    pub async fn get(&self, path: &str) -> Result<Value, Problem> {
        self.ask(Method::GET, path, None::<&()>).await
    }

    fn unreachable(&self, found: &str) -> Problem {
        let at = self.0.endpoint();
        let next = match at {
            Endpoint::Unix(_) => "start it (systemctl start vbridged), or name it by --bridge or VBRIDGE",
            Endpoint::Tcp(_) => "is it started with --listen? Name it by --bridge or VBRIDGE",
        };
        Problem::new(Code::BridgeUnreachable, format!("expected vbridged at {at}, found: {found}; {next}"))
    }
}

fn token(path: &Path) -> Result<String, Problem> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Problem::bad(format!("token file {}: {e}", path.display())))?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}
