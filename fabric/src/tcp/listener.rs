//! Connections that the fabric dials and accepts by itself.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::Class;
use crate::accept::{GREETING_TIMEOUT, accept, read_exactly};
use crate::error::FabricError;
use crate::wire::{HELLO_LEN, Hello, Reply};

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
        let greet = |(stream, peer): (TcpStream, SocketAddr)| match greet(&stream) {
            Ok((class, greeting)) => Some((stream, class, greeting)),
            Err(error) => {
                tracing::warn!(%peer, %error, "dropped a connection that did not greet");
                None
            }
        };
        accept(self.socket.as_fd(), timeout, || self.socket.accept(), greet)
    }
}

fn greet(stream: &TcpStream) -> Result<(Class, Vec<u8>), FabricError> {
    let failed = FabricError::io("exchange greetings");
    let deadline = Instant::now() + GREETING_TIMEOUT;
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
    stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
    stream.write_all(bytes)?;
    stream.set_write_timeout(None)
}
