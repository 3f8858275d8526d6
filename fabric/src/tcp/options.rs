//! What can be tuned.

use std::time::Duration;

/// Options of a [`TcpFabric`](super::TcpFabric). The defaults are for a local network.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpOptions {
    /// How long sent bytes may stay unacknowledged, or an idle peer's host silent, before the connection counts
    /// as lost. Default 10 s, whole milliseconds, 1 ms or more. (`TCP_USER_TIMEOUT` and keepalive.) A peer
    /// that stops receiving for so long while bytes wait for it is cut off too.
    pub user_timeout: Duration,
    /// How long connecting and greeting may take. Default 5 s.
    pub connect_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self { user_timeout: Duration::from_secs(10), connect_timeout: Duration::from_secs(5) }
    }
}
