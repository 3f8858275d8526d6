//! How two queue pairs get to know each other: over the connection that is open between the two sides.
//!
//! Each side sends what the other needs, connects its queue pair, and says so; nobody asks for anything before both
//! have. Then each reads a page of the other's, as a trial, and says how that went. Layout, little endian: magic, version `u16`, class `u8`, 1 on Ethernet `u8`, number of the queue pair `u32`,
//! number of the first packet `u32`, READs asked for at a time `u8`, READs answered at a time `u8`, packet size `u8`, 0,
//! local address `u16`, 0 `u16`, global address 16 bytes, address of the page `u64`, its key `u32`.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::address::Class;
use crate::error::FabricError;

/// Bytes of a hello.
pub(super) const LEN: usize = 52;
/// Said when a queue pair is connected.
pub(super) const READY: [u8; 4] = *b"vmvr";

/// Said when the trial READ brought the right bytes.
pub(super) const WORKS: [u8; 4] = *b"vmvw";

const MAGIC: [u8; 4] = *b"vmvq";
const VERSION: u16 = 2;

/// What a peer must know of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) class: Class,
    pub(super) ethernet: bool,
    pub(super) number: u32,
    pub(super) first_packet: u32,
    pub(super) asks: u8,
    pub(super) answers: u8,
    pub(super) mtu: u8,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// Where the page is that the other side reads as a trial, and its key.
    pub(super) page: u64,
    pub(super) page_key: u32,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&[self.class as u8, u8::from(self.ethernet)]);
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.first_packet.to_le_bytes());
        bytes[16..20].copy_from_slice(&[self.asks, self.answers, self.mtu, 0]);
        bytes[20..22].copy_from_slice(&self.lid.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.gid);
        bytes[40..48].copy_from_slice(&self.page.to_le_bytes());
        bytes[48..].copy_from_slice(&self.page_key.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; LEN]) -> Result<Self, FabricError> {
        if bytes[..4] != MAGIC {
            let found = &bytes[..4];
            return Err(FabricError::protocol(format!(
                "{found:02x?} where a queue pair should be introduced"
            )));
        }
        let version = u16::from_le_bytes(part(bytes, 4));
        if version != VERSION {
            return Err(FabricError::protocol(format!("verbs version {version}; this side has {VERSION}")));
        }
        let class = Class::from_wire(bytes[6])
            .ok_or_else(|| FabricError::protocol(format!("unknown connection class {}", bytes[6])))?;
        let hello = Self {
            class,
            ethernet: bytes[7] == 1,
            number: u32::from_le_bytes(part(bytes, 8)),
            first_packet: u32::from_le_bytes(part(bytes, 12)),
            asks: bytes[16],
            answers: bytes[17],
            mtu: bytes[18],
            lid: u16::from_le_bytes(part(bytes, 20)),
            gid: part(bytes, 24),
            page: u64::from_le_bytes(part(bytes, 40)),
            page_key: u32::from_le_bytes(part(bytes, 48)),
        };
        let sane = bytes[7] <= 1
            && hello.number < 1 << 24
            && hello.first_packet < 1 << 24
            && hello.asks > 0
            && hello.answers > 0
            && (1..=5).contains(&hello.mtu);
        if sane { Ok(hello) } else { Err(FabricError::protocol("a queue pair with impossible numbers")) }
    }
}

fn part<const N: usize>(bytes: &[u8; LEN], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// A socket on which the introduction is made, in the clear or within TLS.
pub(super) enum Wire<'a> {
    Plain(&'a TcpStream),
    Tls(&'a TcpStream, &'a mut rustls::Connection),
}

impl Wire<'_> {
    /// Sends `bytes`, and takes as many as `into` holds and none beyond.
    pub(super) fn exchange(&mut self, bytes: &[u8], into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => {
                stream.write_all(bytes)?;
                stream.read_exact(into)
            }
            Self::Tls(stream, rustls::Connection::Client(tls)) => {
                let mut stream = rustls::Stream::new(tls, stream);
                stream.write_all(bytes)?;
                stream.flush()?;
                stream.read_exact(into)
            }
            Self::Tls(stream, rustls::Connection::Server(tls)) => {
                let mut stream = rustls::Stream::new(tls, stream);
                stream.write_all(bytes)?;
                stream.flush()?;
                stream.read_exact(into)
            }
        }
    }
}

/// Decodes bytes as a hello, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn any_hello(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<LEN>() else { return };
    if let Ok(hello) = Hello::decode(bytes) {
        assert!(hello.number < 1 << 24 && hello.asks > 0 && hello.answers > 0 && hello.mtu <= 5);
        assert_eq!(Hello::decode(&hello.encode()).expect("it was decoded"), hello);
    }
}

/// The bytes of a hello, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn some_hello() -> Vec<u8> {
    let hello = Hello {
        class: Class::Urgent,
        ethernet: true,
        number: 0x12_3456,
        first_packet: 0xab_cdef,
        asks: 16,
        answers: 8,
        mtu: 5,
        lid: 7,
        gid: [9; 16],
        page: 0x1234_5678_9abc_def0,
        page_key: 0xfedc_ba98,
    };
    hello.encode().to_vec()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HELLO: Hello = Hello {
        class: Class::Urgent,
        ethernet: true,
        number: 0x12_3456,
        first_packet: 0xab_cdef,
        asks: 16,
        answers: 8,
        mtu: 5,
        lid: 7,
        gid: [9; 16],
        page: 0x1234_5678_9abc_def0,
        page_key: 0xfedc_ba98,
    };

    #[test]
    fn a_hello_survives_and_another_version_is_named() {
        assert_eq!(Hello::decode(&HELLO.encode()).unwrap(), HELLO);
        let mut bytes = HELLO.encode();
        bytes[4] = 9;
        assert!(Hello::decode(&bytes).unwrap_err().to_string().contains("version 9"));
        bytes[0] = b'G';
        assert!(Hello::decode(&bytes).unwrap_err().to_string().contains("introduced"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_or_an_error(tail in any::<[u8; LEN - 6]>()) {
            let mut bytes = HELLO.encode();
            bytes[6..].copy_from_slice(&tail);
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert!(hello.number < 1 << 24 && hello.asks > 0 && hello.mtu <= 5);
            }
        }
    }
}
