//! `[traces]`: where traces of migrations and forks go.

use serde::Deserialize;
use vmove_http::client::Endpoint;

use super::{ConfigError, value};

/// The table in the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct TracesConfig {
    otlp: Option<String>,
}

impl TracesConfig {
    /// The collector, if there is one.
    pub(super) fn collector(self) -> Result<Option<Endpoint>, ConfigError> {
        let Some(text) = self.otlp else { return Ok(None) };
        match text.parse() {
            Ok(Endpoint::Tcp(address)) if text.starts_with("http://") => Ok(Some(Endpoint::Tcp(address))),
            _ => {
                let why = format!(
                    "expected http://HOST:PORT of a collector, such as http://127.0.0.1:4318, found {text:?}"
                );
                Err(value("traces.otlp", why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_speaks_plain_http() {
        let read = |text: &str| toml::from_str::<TracesConfig>(text).unwrap().collector();
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read("otlp = 'http://[::1]:4318'").unwrap(), Some(Endpoint::Tcp("[::1]:4318".to_owned())));
        for bad in
            ["https://c:4318", "127.0.0.1:4318", "unix:/run/c", "http://c", "http://c:4318/v1/traces", ""]
        {
            let error = read(&format!("otlp = '{bad}'")).unwrap_err().to_string();
            assert!(
                error.contains("traces.otlp: expected http://HOST:PORT") && error.contains(bad),
                "{error}"
            );
        }
    }
}
