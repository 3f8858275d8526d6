//! The first bytes of every connection between two daemons, and their answer.
//!
//! Wire form, all integers little-endian:
//!
//! ```text
//! 0  magic    8 bytes  "VMOVE\r\n\0"   (no HTTP request begins so: the same port serves both)
//! 8  version  u16      PROTOCOL_VERSION of the sender
//! 10 kind     u8       1 control, 2 device state, 3 urgent pages, 4 bulk pages, 5 disk, 6 frames, 16 trial of a fabric, 32 fork,
//!                      33 memory of a fork, 34 disk of a fork, 48 question for a libvirt domain; 0x80 is added for pages by RDMA, whose queue
//!                      pairs are introduced next
//! 11 index    u8       which of several connections of a kind
//! 12 session  16 bytes
//! 28 token    16 bytes secret of the session; zero in the first control connection
//! 44 node     u8 length, then that many bytes of UTF-8: the sender's name
//! ```
//! Answer: magic, version `u16` of the answerer, status `u8` (0 welcome, 1 other protocol version, 2 unknown session or wrong
//! token, 3 busy or shutting down), `u8` length and that many bytes of UTF-8 text for people.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use uuid::Uuid;
use vmove_fabric::Class;

/// First bytes of a greeting and of its answer.
pub const MAGIC: [u8; 8] = *b"VMOVE\r\n\0";
/// Version of everything between two daemons: greeting, control messages, page frames. Both must be equal.
pub const PROTOCOL_VERSION: u16 = 15;
/// Longest node name in bytes.
pub const MAX_NODE_NAME: usize = 64;
const FIXED: usize = 45;
/// In the byte of the kind.
const RDMA: u8 = 0x80;

/// Id of a migration session, chosen by the source.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(pub Uuid);

impl SessionId {
    /// A new random id.
    #[must_use]
    pub fn random() -> Self {
        Self(crate::chance::uuid())
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Secret shared by the two ends of a session. Never printed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// A new random secret.
    #[must_use]
    pub fn random() -> Self {
        Self(*crate::chance::uuid().as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum LinkKind {
    /// Session messages.
    Control = 1,
    /// QEMU's device state, a plain byte stream.
    State = 2,
    /// Faulted pages: becomes a fabric endpoint of class urgent.
    Urgent = 3,
    /// All other pages: becomes a fabric endpoint of class bulk.
    Bulk = 4,
    /// A disk that moves, the `index`th, as the source's QEMU speaks to the destination's (NBD).
    Disk = 5,
    /// Frames that came for the guest while it stood still: those of the `index`th network back end.
    Frames = 6,
    /// Belongs to no session: becomes a fabric endpoint on which the sender reads memory that is there for that.
    Trial = 16,
    /// A fork that is to have children at the receiver: messages of its own.
    Fork = 32,
    /// Belongs to a fork: becomes a fabric endpoint, once the sender has said what for.
    ForkMemory = 33,
    /// Belongs to a fork: a child's disk, the `index`th, as its reader speaks to the server of its image.
    ForkDisk = 34,
    /// Belongs to no session: asks for the guest of a libvirt domain, whose QEMU waits at the sender.
    Domain = 48,
}

impl LinkKind {
    /// Whether it belongs to a migration.
    #[must_use]
    pub const fn is_of_migration(self) -> bool {
        matches!(self, Self::Control | Self::State | Self::Urgent | Self::Bulk | Self::Disk | Self::Frames)
    }

    /// The traffic class of its endpoint.
    #[must_use]
    pub const fn class(self) -> Class {
        match self {
            Self::Urgent | Self::Trial => Class::Urgent,
            Self::Bulk => Class::Bulk,
            Self::Control
            | Self::State
            | Self::Disk
            | Self::Frames
            | Self::Fork
            | Self::ForkMemory
            | Self::ForkDisk
            | Self::Domain => Class::Message,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Control,
            2 => Self::State,
            3 => Self::Urgent,
            4 => Self::Bulk,
            5 => Self::Disk,
            6 => Self::Frames,
            16 => Self::Trial,
            32 => Self::Fork,
            33 => Self::ForkMemory,
            34 => Self::ForkDisk,
            48 => Self::Domain,
            _ => return None,
        })
    }
}

/// A greeting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Protocol version of the sender.
    pub version: u16,
    /// What the connection is for.
    pub kind: LinkKind,
    /// Pages cross by RDMA: queue pairs are introduced over this connection.
    pub rdma: bool,
    /// Which of several.
    pub index: u8,
    /// The session it belongs to.
    pub session: SessionId,
    /// The session's secret.
    pub token: Token,
    /// Name of the sender's node.
    pub node: String,
}

/// Why a greeting could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// Something else is at the other end.
    #[error("Expected a vmove daemon at the other end, found something that does not greet as one")]
    NotVmove,
    /// Versions differ.
    #[error(
        "Expected protocol version {PROTOCOL_VERSION}, found {0}: run the same version of vmoved on both nodes"
    )]
    Version(u16),
    /// A field is out of range.
    #[error("Malformed greeting: {0}")]
    Malformed(&'static str),
    /// The peer does not want this connection: it knows no such session.
    #[error("The peer refused the connection: {0}")]
    Refused(String),
    /// The peer cannot take this connection now; later it may.
    #[error("The peer refused the connection: {0}")]
    Busy(String),
    /// The connection broke.
    #[error("Connection lost while greeting")]
    Io(#[from] std::io::Error),
}

impl Hello {
    /// The bytes to send.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let node = clip(&self.node, MAX_NODE_NAME);
        let mut out = Vec::with_capacity(FIXED + node.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.to_le_bytes());
        out.push(self.kind as u8 | if self.rdma { RDMA } else { 0 });
        out.push(self.index);
        out.extend_from_slice(self.session.0.as_bytes());
        out.extend_from_slice(&self.token.0);
        push_text(&mut out, node);
        out
    }

    /// Reads a greeting, magic included.
    ///
    /// # Errors
    /// [`HelloError::NotVmove`], [`HelloError::Version`], [`HelloError::Malformed`] or [`HelloError::Io`].
    pub async fn read<R: AsyncRead + Unpin + ?Sized>(from: &mut R) -> Result<Self, HelloError> {
        let mut fixed = [0; FIXED];
        from.read_exact(&mut fixed[..10]).await?;
        if fixed[..8] != MAGIC {
            return Err(HelloError::NotVmove);
        }
        let version = u16::from_le_bytes([fixed[8], fixed[9]]);
        if version != PROTOCOL_VERSION {
            return Err(HelloError::Version(version));
        }
        from.read_exact(&mut fixed[10..]).await?;
        let kind = LinkKind::from_byte(fixed[10] & !RDMA)
            .ok_or(HelloError::Malformed("unknown kind of connection"))?;
        let session = SessionId(Uuid::from_bytes(array(&fixed[12..28])));
        let token = Token(array(&fixed[28..44]));
        let node = read_text(from, fixed[44], MAX_NODE_NAME).await?;
        let rdma = fixed[10] & RDMA != 0;
        if rdma && !matches!(kind, LinkKind::Urgent | LinkKind::Bulk | LinkKind::Trial | LinkKind::ForkMemory)
        {
            return Err(HelloError::Malformed("RDMA for something else than pages"));
        }
        Ok(Self { version, kind, rdma, index: fixed[11], session, token, node })
    }
}

/// Status of the answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Go on.
    Welcome = 0,
    /// Other protocol version.
    OtherVersion = 1,
    /// No such session here, or the wrong secret.
    UnknownSession = 2,
    /// Not now.
    Busy = 3,
}

/// Sends the answer to a greeting.
///
/// # Errors
/// The kernel's answer.
pub async fn answer<W: AsyncWrite + Unpin + ?Sized>(
    to: &mut W,
    status: Status,
    text: &str,
) -> std::io::Result<()> {
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    out.push(status as u8);
    push_text(&mut out, clip(text, 255));
    to.write_all(&out).await?;
    to.flush().await
}

/// Reads the answer to a greeting.
///
/// # Errors
/// [`HelloError::Refused`] and [`HelloError::Busy`] with the peer's reason, [`HelloError::Version`], or what [`Hello::read`] can meet.
pub async fn read_answer<R: AsyncRead + Unpin + ?Sized>(from: &mut R) -> Result<(), HelloError> {
    let mut fixed = [0; 12];
    from.read_exact(&mut fixed).await?;
    if fixed[..8] != MAGIC {
        return Err(HelloError::NotVmove);
    }
    let text = read_text(from, fixed[11], 255).await?;
    match fixed[10] {
        0 => Ok(()),
        1 => Err(HelloError::Version(u16::from_le_bytes([fixed[8], fixed[9]]))),
        3 => Err(HelloError::Busy(text)),
        _ => Err(HelloError::Refused(text)),
    }
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    // `clip` keeps every text below 256 bytes.
    out.push(u8::try_from(text.len()).unwrap_or(0));
    out.extend_from_slice(text.as_bytes());
}

fn clip(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

async fn read_text<R: AsyncRead + Unpin + ?Sized>(
    from: &mut R,
    len: u8,
    most: usize,
) -> Result<String, HelloError> {
    if usize::from(len) > most {
        return Err(HelloError::Malformed("text too long"));
    }
    let mut text = vec![0; usize::from(len)];
    from.read_exact(&mut text).await?;
    String::from_utf8(text).map_err(|_| HelloError::Malformed("text is not UTF-8"))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(node: &str) -> Hello {
        Hello {
            version: PROTOCOL_VERSION,
            kind: LinkKind::Bulk,
            rdma: node.len() % 2 == 1,
            index: 3,
            session: SessionId::random(),
            token: Token::random(),
            node: node.to_owned(),
        }
    }

    fn block_on<F: Future>(f: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(f)
    }

    proptest! {
        #[test]
        fn a_greeting_comes_back_as_it_was(node in "\\PC{0,16}") {
            for kind in [LinkKind::Urgent, LinkKind::Bulk, LinkKind::Trial, LinkKind::ForkMemory] {
                let sent = Hello { kind, ..hello(&node) };
                let got = block_on(Hello::read(&mut sent.encode().as_slice())).unwrap();
                prop_assert_eq!(got, sent);
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), magic in any::<bool>()) {
            let mut all = if magic { hello("n").encode()[..10].to_vec() } else { Vec::new() };
            all.extend(bytes);
            let _ = block_on(Hello::read(&mut all.as_slice()));
            let _ = block_on(read_answer(&mut all.as_slice()));
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = hello("n").encode();
        let other = PROTOCOL_VERSION + 1;
        bytes[8..10].copy_from_slice(&other.to_le_bytes());
        let error = block_on(Hello::read(&mut bytes.as_slice())).unwrap_err();
        assert!(error.to_string().contains(&format!("found {other}")), "{error}");
    }

    #[test]
    fn http_is_not_a_greeting() {
        let mut bytes: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        assert!(matches!(block_on(Hello::read(&mut bytes)), Err(HelloError::NotVmove)));
    }

    #[test]
    fn a_refusal_carries_its_reason() {
        let mut bytes = Vec::new();
        block_on(answer(&mut bytes, Status::UnknownSession, "no such session")).unwrap();
        let error = block_on(read_answer(&mut bytes.as_slice())).unwrap_err();
        assert!(error.to_string().contains("no such session"));
    }
}
