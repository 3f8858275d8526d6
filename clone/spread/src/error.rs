//! What can go wrong.

use vmove_fabric::FabricError;

use crate::host_id::HostId;
use crate::layout::LayoutError;

/// Why a distribution, or one host's part in it, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpreadError {
    /// The root died or hung up before everything was here.
    #[error(
        "The connection to the root ended while {missing} of {chunks} chunks of 4 KiB were missing here; distribute from another copy"
    )]
    RootGone {
        /// Chunks that are not verified here.
        missing: u32,
        /// Chunks in all.
        chunks: u32,
        /// What the connection reported.
        #[source]
        source: FabricError,
    },
    /// Bytes arrived again and again that are not those that the root listed. Its memory changes, or is damaged.
    #[error(
        "{wrong} chunks arrived with wrong checksums; make sure that nothing writes to the template at the root"
    )]
    Wrong {
        /// How many times a chunk was wrong.
        wrong: u64,
    },
    /// A host sent an invalid message.
    #[error("{from} broke the protocol: {what}; check that all hosts run the same version")]
    Protocol {
        /// Who.
        from: HostId,
        /// What was found.
        what: String,
    },
    /// The root refused a READ.
    #[error("The root refused a READ: {status}; it may have dropped the template")]
    Refused {
        /// Why.
        status: vmove_fabric::RemoteStatus,
    },
    /// The template cannot be cut up.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Memory or connections.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A thread or descriptor could not be made.
    #[error("Could not {operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// What the kernel reported.
        #[source]
        source: std::io::Error,
    },
    /// It was not over in time.
    #[error("Waited {waited_ms} ms; {missing} chunks of 4 KiB are missing")]
    Timeout {
        /// How long, in milliseconds.
        waited_ms: u64,
        /// Chunks that are not verified.
        missing: u32,
    },
}

impl SpreadError {
    pub(crate) fn io(operation: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { operation, source }
    }
}
