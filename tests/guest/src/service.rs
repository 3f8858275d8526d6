//! A service on the network that counts: to each word of eight bytes it answers with the word and with how many words this connection has sent.
//! A client sees by that whether one was lost, doubled, or answered out of order.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use vmove_guest::SERVICE_PORT;

pub struct Service {
    listener: TcpListener,
}

impl Service {
    pub fn open(address: Ipv4Addr) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind((address, SERVICE_PORT))? })
    }

    /// Works until the machine ends.
    pub fn work(self) {
        for client in self.listener.incoming() {
            match client {
                Ok(client) => drop(std::thread::spawn(|| answer(client))),
                Err(error) => println!("VMOVE-GUEST ERROR service: {error}"),
            }
        }
    }
}

/// Until the client closes.
fn answer(mut client: TcpStream) {
    // A client that goes away is no error of this machine.
    let _ = client.set_nodelay(true);
    let mut word = [0; 8];
    for count in 1_u64.. {
        let mut said = [0; 16];
        if client.read_exact(&mut word).is_err() {
            return;
        }
        said[..8].copy_from_slice(&word);
        said[8..].copy_from_slice(&count.to_le_bytes());
        if client.write_all(&said).is_err() {
            return;
        }
    }
}
