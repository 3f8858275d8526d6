//! An endpoint over a byte stream: the part that `tcp` and, for its messages, `local` have in common.
//!
//! | file | owns |
//! |---|---|
//! | `transport` | the socket, plain or TLS: vectored send and receive that never block |
//! | `ops` | requests of this side that wait for their reply |
//! | `outbox` | frames to send: which one next, and how far each has got |
//! | `inbox` | bytes received: which frame they belong to and where they go |
//! | `endpoint` | the back end that joins these |
//! | `urgency` | how bulk connections give way to urgent ones |

mod endpoint;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod inbox;
mod ops;
mod outbox;
mod tls;
mod transport;
mod urgency;

pub(crate) use endpoint::{StreamEndpoint, Tuning};
pub(crate) use transport::Transport;
pub(crate) use urgency::Urgency;
