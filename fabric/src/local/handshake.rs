//! The first message of each side: where its table is, and which seat of it the connection has.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::Class;
use crate::accept::{read_exactly, wait_readable};
use crate::error::FabricError;
use crate::fabric::MAX_GREETING;
use crate::table::{Participant, PeerTable, PeerWatch, RegionTable};

const MAGIC: [u8; 4] = *b"vmvl";
/// Version of this message and of the table's layout. Both sides must have the same.
const VERSION: u16 = 1;
const LEN: usize = 32;

/// What one side says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) class: Class,
    /// Seat of the connection in the sender's table.
    pub(super) seat: usize,
    /// A number that is in that seat as long as the sender has the connection open.
    pub(super) token: u64,
    /// Where in the sender's process that number is: who reads it there has the right process and may read it.
    pub(super) token_at: u64,
    pub(super) greeting: Vec<u8>,
}

/// This side's part of a connection that is being opened.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) participant: Participant,
    /// From here on, since a peer may use our memory as soon as it has our hello, which may be before we have its own.
    pub(super) watch: PeerWatch,
    token: u64,
    token_at: u64,
}

impl Opening {
    pub(super) fn new(table: &Arc<RegionTable>) -> Result<Self, FabricError> {
        let participant = table.join()?;
        let (token, token_at) = participant.open().map_err(FabricError::io("draw a random number"))?;
        Ok(Self { participant, watch: table.expect_peer(), token, token_at })
    }

    pub(super) fn hello(&self, class: Class, greeting: &[u8]) -> Hello {
        let seat = self.participant.seat();
        Hello { class, seat, token: self.token, token_at: self.token_at, greeting: greeting.to_vec() }
    }

    /// The table to hand over.
    pub(super) fn table_fd(&self) -> Result<BorrowedFd<'_>, FabricError> {
        let fd = self.participant.table().fd();
        fd.map(AsFd::as_fd).ok_or(FabricError::Unsupported { what: "sharing a private table of regions" })
    }
}

impl Hello {
    pub(super) fn check_greeting(greeting: &[u8]) -> Result<(), FabricError> {
        let found = greeting.len();
        if found <= MAX_GREETING {
            return Ok(());
        }
        Err(FabricError::protocol(format!("a greeting of {found} bytes; at most {MAX_GREETING} fit")))
    }

    /// Layout: magic, version `u16`, class `u8`, 0 `u8`, seat `u32`, greeting length `u32`, token `u64`, its address `u64`.
    fn encode(&self) -> Result<[u8; LEN], FabricError> {
        let short = |number: usize| {
            u32::try_from(number).map_err(|_| FabricError::protocol("a number that does not fit a hello"))
        };
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.class as u8;
        bytes[8..12].copy_from_slice(&short(self.seat)?.to_le_bytes());
        bytes[12..16].copy_from_slice(&short(self.greeting.len())?.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.token.to_le_bytes());
        bytes[24..].copy_from_slice(&self.token_at.to_le_bytes());
        Ok(bytes)
    }

    /// The hello in these bytes, without its greeting, and how long that is.
    fn decode(bytes: &[u8; LEN]) -> Result<(Self, usize), FabricError> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        if bytes[..4] != MAGIC {
            return Err(FabricError::protocol("a connection that is not of a local fabric"));
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            return Err(FabricError::protocol(format!(
                "local fabric version {version}; this side has {VERSION}"
            )));
        }
        let class = Class::from_wire(bytes[6])
            .ok_or_else(|| FabricError::protocol(format!("unknown connection class {}", bytes[6])))?;
        let (seat, greeting) = (half(8) as usize, half(12) as usize);
        if bytes[7] != 0 || greeting > MAX_GREETING || seat >= crate::table::PARTICIPANTS || word(16) == 0 {
            return Err(FabricError::protocol(format!(
                "a hello with seat {seat} and {greeting} bytes of greeting"
            )));
        }
        Ok((Self { class, seat, token: word(16), token_at: word(24), greeting: Vec::new() }, greeting))
    }
}

/// Sends hello, table and greeting. They fit into an empty socket buffer.
pub(super) fn send(mut stream: &UnixStream, hello: &Hello, table: BorrowedFd<'_>) -> Result<(), FabricError> {
    let bytes = hello.encode()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [table];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    let result = match sent {
        Ok(LEN) => stream.write_all(&hello.greeting),
        Ok(short) => Err(io::Error::other(format!("{short} bytes of a hello were taken"))),
        Err(error) => Err(error.into()),
    };
    result.map_err(gone)
}

/// Receives what [`send`] sent, and no byte more.
pub(super) fn receive(stream: &UnixStream, timeout: Duration) -> Result<(Hello, PeerTable), FabricError> {
    let deadline = Instant::now() + timeout;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::TimedOut => FabricError::timeout("the peer's first message", timeout),
        io::ErrorKind::UnexpectedEof => FabricError::PeerClosed { outstanding: 0 },
        _ => gone(error),
    };
    let mut bytes = [0; LEN];
    let mut table = None;
    let mut have = 0;
    while have < LEN {
        wait_readable(stream.as_fd(), deadline).map_err(failed)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes[have..])];
        let found = recvmsg(stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
            .map_err(|error| gone(error.into()))?;
        if found.bytes == 0 {
            return Err(FabricError::PeerClosed { outstanding: 0 });
        }
        have += found.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                let fds: Vec<OwnedFd> = fds.collect();
                table = table.or(fds.into_iter().next());
            }
        }
    }
    let (mut hello, greeting) = Hello::decode(&bytes)?;
    hello.greeting = read_exactly(stream, greeting, deadline).map_err(failed)?;
    let table = table.ok_or_else(|| FabricError::protocol("a hello without a table of regions"))?;
    let table = PeerTable::open(table.as_fd())
        .map_err(|error| FabricError::protocol(format!("a table that cannot be used: {error}")))?;
    Ok((hello, table))
}

fn gone(source: io::Error) -> FabricError {
    FabricError::PeerGone { outstanding: 0, source }
}

/// Decodes bytes as a hello, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn any_hello(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<LEN>() else { return };
    if let Ok((hello, greeting)) = Hello::decode(bytes) {
        assert!(greeting <= MAX_GREETING && hello.seat < crate::table::PARTICIPANTS);
        let again = Hello { greeting: vec![0; greeting], ..hello }.encode();
        assert_eq!(again.expect("it was decoded"), *bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hello_and_table_arrive() {
        let table = RegionTable::shared().unwrap();
        let opening = Opening::new(&table).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let hello = opening.hello(Class::Bulk, b"for you");
        send(&ours, &hello, opening.table_fd().unwrap()).unwrap();
        let (found, seen) = receive(&theirs, Duration::from_secs(5)).unwrap();
        assert_eq!(found, hello);
        assert_eq!(seen.token(hello.seat), hello.token);
        opening.participant.close();
        assert_eq!(seen.token(hello.seat), 0);
    }

    #[test]
    fn a_table_that_could_shrink_is_refused() {
        let table = RegionTable::shared().unwrap();
        let opening = Opening::new(&table).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&ours, &opening.hello(Class::Bulk, b""), file.as_fd()).unwrap();
        let error = receive(&theirs, Duration::from_secs(5)).unwrap_err();
        assert!(error.to_string().contains("sealed"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_or_an_error(tail in any::<[u8; LEN - 6]>()) {
            let mut bytes = [0; LEN];
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            bytes[6..].copy_from_slice(&tail);
            if let Ok((hello, greeting)) = Hello::decode(&bytes) {
                prop_assert!(hello.seat < crate::table::PARTICIPANTS && greeting <= MAX_GREETING);
            }
        }
    }
}
