//! A client of an NBD server such as QEMU's: reads an export, and what is known of its ranges.
//!
//! It waits where it stands, so it is for threads that may. The server is one that an operator trusts no further than the guest's disk: lengths
//! that it names are checked.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An answer takes milliseconds; a disk that does not answer for so long is broken.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The longest answer to anything but a read: texts, and ranges.
const LONGEST_ANSWER: u32 = 16 << 20;
/// In one answer; a server tells no more than the longest answer has room for.
const MOST_RANGES: usize = LONGEST_ANSWER as usize / 8;

/// First bytes of a server.
pub const MAGIC: &[u8; 8] = b"NBDMAGIC";
/// Before an option, and second bytes of a server.
pub const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
/// Before the answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
/// Fixed newstyle, and no zeros after the handshake.
const CLIENT_FLAGS: u32 = 3;

/// The option that ends the negotiation.
pub const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED: u32 = 8;
const OPTION_SET_CONTEXT: u32 = 10;
/// An answer to an option: done.
pub const REPLY_ACK: u32 = 1;
/// An answer to an option: something of the export.
pub const REPLY_INFO: u32 = 3;
const REPLY_CONTEXT: u32 = 4;

const READ: u16 = 0;
/// The request by which a client leaves.
pub const DISCONNECT: u16 = 2;
const BLOCK_STATUS: u16 = 7;
const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 0x8000;

/// The context by which holes are told.
pub const ALLOCATION: &str = "base:allocation";
/// Of [`ALLOCATION`]: the range reads as zeros.
pub const ZERO: u32 = 2;

/// Why an export cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The socket, or no answer in time.
    #[error("The NBD server on {} does not answer", socket.display())]
    Io {
        /// The server's socket.
        socket: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It said no.
    #[error("The NBD server refused {what}: {why}")]
    Refused {
        /// What it was asked for.
        what: &'static str,
        /// Its reason.
        why: String,
    },
    /// It does not keep to the protocol.
    #[error("The NBD server does not keep to its protocol: expected {expected}, found {found}")]
    Broken {
        /// What should have come.
        expected: &'static str,
        /// What came.
        found: String,
    },
}

fn broken(expected: &'static str, found: impl std::fmt::Display) -> NbdError {
    NbdError::Broken { expected, found: found.to_string() }
}

/// What is known of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length in bytes.
    pub len: u64,
    /// Flags of the context, such as [`ZERO`].
    pub flags: u32,
}

/// An export that is open.
#[derive(Debug)]
pub struct Nbd {
    stream: Wire,
    size: u64,
    context: u32,
    /// Number of the last request.
    cookie: u64,
}

#[derive(Debug)]
struct Wire {
    stream: UnixStream,
    socket: PathBuf,
}

/// Header of a piece of an answer.
struct Chunk {
    flags: u16,
    kind: u16,
    len: u32,
}

impl Wire {
    fn failed(&self, source: std::io::Error) -> NbdError {
        NbdError::Io { socket: self.socket.clone(), source }
    }

    fn read(&mut self, into: &mut [u8]) -> Result<(), NbdError> {
        self.stream.read_exact(into).map_err(|error| self.failed(error))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16, NbdError> {
        Ok(u16::from_be_bytes(self.bytes()?))
    }

    fn u32(&mut self) -> Result<u32, NbdError> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, NbdError> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), NbdError> {
        self.stream.write_all(bytes).map_err(|error| self.failed(error))
    }

    /// The rest of an answer of this length.
    fn rest(&mut self, len: u32) -> Result<Vec<u8>, NbdError> {
        if len > LONGEST_ANSWER {
            return Err(broken("an answer of at most 16 MiB", len));
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> Result<(), NbdError> {
        let mut message = OPTION_MAGIC.to_vec();
        message.extend(option.to_be_bytes());
        message.extend(length(data)?.to_be_bytes());
        message.extend(data);
        self.write(&message)
    }

    /// Kind and content of the next answer to an option.
    fn answer(&mut self, option: u32, what: &'static str) -> Result<(u32, Vec<u8>), NbdError> {
        let (magic, of, kind, len) = (self.u64()?, self.u32()?, self.u32()?, self.u32()?);
        if magic != OPTION_REPLY_MAGIC || of != option {
            return Err(broken("the answer to an option", format!("magic {magic:#x}, option {of}")));
        }
        let data = self.rest(len)?;
        if kind & (1 << 31) != 0 {
            let why = format!("error {:#x} {}", kind & !(1 << 31), String::from_utf8_lossy(&data));
            return Err(NbdError::Refused { what, why });
        }
        Ok((kind, data))
    }
}

fn length(data: &[u8]) -> Result<u32, NbdError> {
    u32::try_from(data.len()).map_err(|_| broken("a name of a length that fits", data.len()))
}

fn put_text(message: &mut Vec<u8>, text: &str) -> Result<(), NbdError> {
    message.extend(length(text.as_bytes())?.to_be_bytes());
    message.extend(text.as_bytes());
    Ok(())
}

/// The four bytes at a place of an answer.
fn number_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

impl Nbd {
    /// Opens an export. `context`: what is to be known of ranges, [`ALLOCATION`] or `qemu:dirty-bitmap:NAME`.
    ///
    /// # Errors
    /// [`NbdError`], also if the server does not know the export or the context.
    pub fn open(socket: &Path, export: &str, context: &str) -> Result<Self, NbdError> {
        let failed = |source| NbdError::Io { socket: socket.to_owned(), source };
        let stream = UnixStream::connect(socket).map_err(failed)?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
        stream.set_write_timeout(Some(TIMEOUT)).map_err(failed)?;
        let mut wire = Wire { stream, socket: socket.to_owned() };
        let (magic, option_magic, _flags) = (wire.bytes::<8>()?, wire.bytes::<8>()?, wire.u16()?);
        if &magic != MAGIC || &option_magic != OPTION_MAGIC {
            return Err(broken("an NBD server", String::from_utf8_lossy(&magic)));
        }
        wire.write(&CLIENT_FLAGS.to_be_bytes())?;
        wire.ask(OPTION_STRUCTURED, &[])?;
        wire.answer(OPTION_STRUCTURED, "structured replies")?;
        let context = set_context(&mut wire, export, context)?;
        let size = go(&mut wire, export)?;
        Ok(Self { stream: wire, size, context, cookie: 0 })
    }

    /// Size of the export in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Reads all of a buffer from this place on; holes are zeros.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NbdError> {
        self.request(READ, offset, length(into)?)?;
        let mut filled = 0;
        loop {
            let chunk = self.chunk("a read")?;
            match chunk.kind {
                CHUNK_NONE => {}
                CHUNK_DATA | CHUNK_HOLE => {
                    let at = self.stream.u64()?;
                    let len = if chunk.kind == CHUNK_HOLE {
                        self.stream.u32()?
                    } else {
                        chunk.len.checked_sub(8).ok_or_else(|| broken("data with a place", chunk.len))?
                    };
                    let part = part(into, offset, at, len)?;
                    filled += part.len();
                    if chunk.kind == CHUNK_HOLE { part.fill(0) } else { self.stream.read(part)? }
                }
                other => return Err(broken("data", format!("a piece of kind {other:#x}"))),
            }
            if chunk.flags & CHUNK_DONE != 0 {
                // The server may not name a byte twice, so as many bytes are all of them.
                let whole = filled == into.len();
                return if whole { Ok(()) } else { Err(broken("all bytes that were asked for", filled)) };
            }
        }
    }

    /// What is known of the ranges from this place on: at least of one byte, at most of `len`.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn status(&mut self, offset: u64, len: u32) -> Result<Vec<Extent>, NbdError> {
        self.request(BLOCK_STATUS, offset, len)?;
        let mut found = Vec::new();
        loop {
            let chunk = self.chunk("the state of a range")?;
            match chunk.kind {
                CHUNK_NONE => {}
                CHUNK_STATUS => {
                    let data = self.stream.rest(chunk.len)?;
                    if number_at(&data, 0) == Some(self.context) {
                        let extents = data[4..].chunks_exact(8);
                        found.extend(extents.filter_map(|extent| {
                            let (len, flags) = (number_at(extent, 0)?, number_at(extent, 4)?);
                            (len > 0).then_some(Extent { len: len.into(), flags })
                        }));
                        if found.len() > MOST_RANGES {
                            return Err(broken("fewer ranges", found.len()));
                        }
                    }
                }
                other => return Err(broken("ranges", format!("a piece of kind {other:#x}"))),
            }
            if chunk.flags & CHUNK_DONE != 0 {
                return if found.is_empty() { Err(broken("at least one range", "none")) } else { Ok(found) };
            }
        }
    }

    fn request(&mut self, kind: u16, offset: u64, len: u32) -> Result<(), NbdError> {
        self.cookie += 1;
        let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
        message.extend(0_u16.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(self.cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        self.stream.write(&message)
    }

    /// The head of the next piece of the answer to the last request; an error that it tells.
    fn chunk(&mut self, what: &'static str) -> Result<Chunk, NbdError> {
        let (magic, flags, kind) = (self.stream.u32()?, self.stream.u16()?, self.stream.u16()?);
        let (cookie, len) = (self.stream.u64()?, self.stream.u32()?);
        if magic != STRUCTURED_MAGIC || cookie != self.cookie {
            return Err(broken("the answer to the last request", format!("magic {magic:#x}")));
        }
        if kind & CHUNK_ERROR == 0 {
            return Ok(Chunk { flags, kind, len });
        }
        let data = self.stream.rest(len)?;
        let error = std::io::Error::from_raw_os_error(number_at(&data, 0).unwrap_or(0).cast_signed());
        let text = String::from_utf8_lossy(data.get(6..).unwrap_or_default()).into_owned();
        Err(NbdError::Refused { what, why: format!("{error} {text}").trim_end().to_owned() })
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // Politely; a server that is gone needs no word.
        let _ = self.request(DISCONNECT, 0, 0);
    }
}

/// The part of a buffer that a piece of an answer is for.
fn part(into: &mut [u8], offset: u64, at: u64, len: u32) -> Result<&mut [u8], NbdError> {
    let found = format!("{len} bytes at {at}");
    let begin = at.checked_sub(offset).and_then(|begin| usize::try_from(begin).ok());
    let range = begin.and_then(|begin| Some(begin..begin.checked_add(usize::try_from(len).ok()?)?));
    range.and_then(|range| into.get_mut(range)).ok_or_else(|| broken("bytes that were asked for", found))
}

/// Asks for a context; its number.
fn set_context(wire: &mut Wire, export: &str, context: &str) -> Result<u32, NbdError> {
    let mut data = Vec::new();
    put_text(&mut data, export)?;
    data.extend(1_u32.to_be_bytes());
    put_text(&mut data, context)?;
    wire.ask(OPTION_SET_CONTEXT, &data)?;
    let mut number = None;
    loop {
        match wire.answer(OPTION_SET_CONTEXT, "to tell of ranges")? {
            (REPLY_CONTEXT, data) => number = number_at(&data, 0),
            (REPLY_ACK, _) => break,
            (other, _) => return Err(broken("a context", format!("an answer of kind {other}"))),
        }
    }
    let unknown = || NbdError::Refused { what: "to tell of ranges", why: format!("it has no {context:?}") };
    number.ok_or_else(unknown)
}

/// Ends the handshake; the size of the export.
fn go(wire: &mut Wire, export: &str) -> Result<u64, NbdError> {
    let mut data = Vec::new();
    put_text(&mut data, export)?;
    data.extend(0_u16.to_be_bytes());
    wire.ask(OPTION_GO, &data)?;
    let mut size = None;
    loop {
        match wire.answer(OPTION_GO, "the export")? {
            // Kind 0 has size and flags; others only advise.
            (REPLY_INFO, data) if data.starts_with(&[0, 0]) => {
                size = data.get(2..10).and_then(|size| Some(u64::from_be_bytes(size.try_into().ok()?)));
            }
            (REPLY_INFO, _) => {}
            (REPLY_ACK, _) => return size.ok_or_else(|| broken("the size of the export", "none")),
            (other, _) => return Err(broken("the export", format!("an answer of kind {other}"))),
        }
    }
}
