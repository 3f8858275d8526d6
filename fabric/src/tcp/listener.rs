//! Connections that the fabric dials and accepts by itself.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::Class;
use crate::error::FabricError;
use crate::sys;
use crate::wire::{HELLO_LEN, Hello, Reply};

/// How long a peer that connected may take to greet. Others wait meanwhile.
const GREETING_TIME: Duration = Duration::from_secs(1);

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
}

impl Listener {
    pub(super) fn bind(address: SocketAddr) -> Result<(Self, SocketAddr), FabricError> {
        let socket = TcpListener::bind(address).map_err(FabricError::io("listen at the fabric's address"))?;
        socket.set_nonblocking(true).map_err(FabricError::io("make the listening socket non-blocking"))?;
        let address = socket.local_addr().map_err(FabricError::io("read the listening address"))?;
        Ok((Self { socket }, address))
    }

    /// Waits for a peer that greets as it should.
    pub(super) fn accept(&self, timeout: Duration) -> Result<(TcpStream, Class, Vec<u8>), FabricError> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.socket.accept() {
                Ok((stream, peer)) => match greet(&stream) {
                    Ok((class, greeting)) => return Ok((stream, class, greeting)),
                    Err(error) => tracing::warn!(%peer, %error, "dropped a connection that did not greet"),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                        return Err(FabricError::Timeout { what: "a peer to connect", waited_ms });
                    }
                    sys::net::wait(self.socket.as_fd(), false, Some(left))
                        .map_err(FabricError::io("wait for a connection"))?;
                }
                // The peer went away before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(source) => return Err(FabricError::Io { operation: "accept a connection", source }),
            }
        }
    }
}

fn greet(stream: &TcpStream) -> Result<(Class, Vec<u8>), FabricError> {
    let failed = FabricError::io("exchange greetings");
    let deadline = Instant::now() + GREETING_TIME;
    let exchange = || -> io::Result<Result<(Class, Vec<u8>), FabricError>> {
        let bytes = read_exactly(stream, HELLO_LEN, deadline)?;
        let Some(head) = bytes.first_chunk::<HELLO_LEN>() else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let hello = match Hello::decode(head) {
            Ok(hello) => hello,
            Err(error) => return Ok(Err(error)),
        };
        let greeting = read_exactly(stream, hello.greeting, deadline)?;
        write_all(stream, &Reply::encode())?;
        Ok(Ok((hello.class, greeting)))
    };
    exchange().map_err(failed)?
}

/// Connects and says hello.
pub(super) fn dial(address: SocketAddr, hello: &[u8], timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    write_all(&stream, hello)?;
    Ok(stream)
}

/// A few bytes into an empty socket buffer: never blocks for long.
fn write_all(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.set_write_timeout(Some(GREETING_TIME))?;
    stream.write_all(bytes)?;
    stream.set_write_timeout(None)
}

/// Exactly `len` bytes, and none beyond: what follows is the endpoint's.
pub(super) fn read_exactly(mut stream: &TcpStream, len: usize, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sys::net::wait(stream.as_fd(), false, Some(left))?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => at += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    stream.set_read_timeout(None)?;
    Ok(bytes)
}
