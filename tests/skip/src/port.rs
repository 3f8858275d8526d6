//! Ports for servers of tests.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Below those that the kernel gives to outgoing connections (`net.ipv4.ip_local_port_range`, 32768 to 60999): a port of that range may be
/// taken by anybody's connection before a server has bound it, and again while a server is started anew.
const FIRST: u32 = 10_000;
const COUNT: u32 = 22_000;
/// Processes of one test run rarely need more ports than that.
const PER_PROCESS: u32 = 97;

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// An address of the loopback interface on which nobody listens. It is given out once in this process.
///
/// # Panics
/// When all ports are in use.
#[must_use]
pub fn free_port() -> SocketAddr {
    let begin = (std::process::id() % COUNT) * PER_PROCESS;
    for _ in 0..COUNT {
        let number = begin.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let Ok(port) = u16::try_from(FIRST + number % COUNT) else { continue };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
    panic!("no free port from {FIRST} to {}", FIRST + COUNT - 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_out_twice_and_none_that_is_in_use() {
        let first = free_port();
        let second = free_port();
        assert_ne!(first, second);
        assert!(first.port() < 32_768 && second.port() < 32_768);
        // The next one is in use.
        let following = SocketAddr::from((Ipv4Addr::LOCALHOST, second.port() + 1));
        let _used = TcpListener::bind(following);
        assert_ne!(free_port(), following);
    }
}
