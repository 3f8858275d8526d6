//! Hears what is sent to a multicast group, as anybody on the network can.

use std::net::{IpAddr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, bind, setsockopt, socket, sockopt};

use crate::networks::Networks;

/// Most bytes that are kept.
const KEPT: usize = 8 << 20;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A socket in the namespace of a node, and a thread that reads it.
#[derive(Debug)]
pub struct Tap {
    stop: Arc<AtomicBool>,
    reader: JoinHandle<Vec<u8>>,
}

impl Tap {
    /// Joins `group` in the namespace of a node (from 1).
    ///
    /// # Errors
    /// Without root, or when the socket cannot be made.
    pub fn open(networks: &Networks, number: u8, group: SocketAddrV4) -> Result<Self> {
        let IpAddr::V4(own) = networks.address(number).ip() else { bail!("nodes have IPv4 addresses") };
        let socket = networks.within(number, || {
            let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            setsockopt(&fd, sockopt::ReuseAddr, &true)?;
            bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &nix::sys::socket::SockaddrIn::from(group))?;
            let socket = UdpSocket::from(fd);
            socket.join_multicast_v4(group.ip(), &own)?;
            socket.set_read_timeout(Some(POLL_INTERVAL))?;
            Ok(socket)
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let reader = std::thread::spawn(move || {
            let (mut heard, mut datagram) = (Vec::new(), [0; 9000]);
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(len) = socket.recv(&mut datagram) {
                    let room = KEPT - heard.len();
                    heard.extend_from_slice(&datagram[..len.min(room)]);
                }
            }
            heard
        });
        Ok(Self { stop, reader })
    }

    /// The datagrams heard so far, one after the other: at most the first 8 MiB.
    ///
    /// # Panics
    /// If the thread that reads has panicked.
    #[must_use]
    pub fn heard(self) -> Vec<u8> {
        self.stop.store(true, Ordering::Relaxed);
        self.reader.join().expect("it only reads")
    }
}
