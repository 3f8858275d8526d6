//! What can be tuned.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

use crate::Class;
use crate::error::FabricError;
use crate::stream::Tuning;
use crate::sys::net::set_option;

/// Options of a [`TcpFabric`](super::TcpFabric). The defaults are for a local network.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpOptions {
    /// How long sent bytes may stay unacknowledged, or an idle peer's host silent, before the connection counts
    /// as lost. Default 10 s, whole milliseconds, 1 ms or more. (`TCP_USER_TIMEOUT` and keepalive.) A peer that
    /// stops receiving for so long while bytes wait for it is cut off too.
    pub user_timeout: Duration,
    /// How long connecting and greeting may take. Default 5 s.
    pub connect_timeout: Duration,
    /// Send and receive buffer of a bulk connection, in bytes; `None`: the kernel's own tuning. The kernel caps it
    /// at `net.core.wmem_max` and `rmem_max`.
    pub bulk_buffer: Option<usize>,
    /// Send and receive buffer of an urgent connection, in bytes; `None`: the kernel's own tuning. Default 256 KiB:
    /// enough for what is read around a page, and no more can pile up in front of the next.
    pub urgent_buffer: Option<usize>,
    /// Bytes per system call of a bulk connection. Default 512 KiB.
    pub bulk_chunk: usize,
    /// The same while urgent connections of this fabric are busy: a kernel that does not preempt itself lets a waiting
    /// thread have the processor only when such a call ends. Default 128 KiB.
    pub polite_chunk: usize,
    /// How long [`Endpoint::wait`](crate::Endpoint::wait) on an urgent connection spins for outstanding work before it
    /// sleeps: being woken takes longer than a page takes to come. Default 50 us; 0: sleep at once.
    pub urgent_spin: Duration,
    /// Congestion control, by the kernel's name of it. `None`: the kernel's default, unless that is `bbr`: within a data
    /// centre its timers cost more than its pacing gains (a tenth of the time a guest loses in post-copy), so then
    /// `cubic` is taken where it is there and this process may choose it.
    pub congestion: Option<String>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            user_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            bulk_buffer: None,
            urgent_buffer: Some(256 * 1024),
            bulk_chunk: 512 * 1024,
            polite_chunk: 128 * 1024,
            urgent_spin: Duration::from_micros(50),
            congestion: None,
        }
    }
}

impl TcpOptions {
    /// Sets up a connected socket.
    pub(crate) fn configure(&self, stream: &TcpStream, class: Class) -> Result<(), FabricError> {
        self.try_configure(stream, class).map_err(FabricError::io("set the options of a connection"))
    }

    fn try_configure(&self, stream: &TcpStream, class: Class) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        self.choose_congestion(stream)?;
        let fd = stream.as_fd();
        let millis = i32::try_from(self.user_timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, millis)?;
        // The user timeout covers bytes under way; probes cover a peer that says nothing. Three in that time.
        let interval = (millis / 3000).clamp(1, 32_767);
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, interval)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, interval)?;
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
        let buffer = match class {
            Class::Bulk => self.bulk_buffer,
            Class::Urgent => self.urgent_buffer,
            Class::Message => None,
        };
        if let Some(bytes) = buffer {
            let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
            set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)?;
            set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
        }
        // Hints for queues on the way; refusal (a priority needs CAP_NET_ADMIN above 6) harms nothing.
        let (priority, tos) = match class {
            Class::Urgent => (6, libc::IPTOS_LOWDELAY),
            Class::Message => (4, libc::IPTOS_LOWDELAY),
            Class::Bulk => (2, libc::IPTOS_THROUGHPUT),
        };
        let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_PRIORITY, priority);
        let ipv6 = stream.local_addr()?.is_ipv6();
        let (level, name) =
            if ipv6 { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) } else { (libc::IPPROTO_IP, libc::IP_TOS) };
        let _ = set_option(fd, level, name, i32::from(tos));
        Ok(())
    }

    fn choose_congestion(&self, stream: &TcpStream) -> std::io::Result<()> {
        match &self.congestion {
            Some(name) => sockopt::set_tcp_congestion(stream, name)?,
            None if sockopt::tcp_congestion(stream).is_ok_and(|name| name == "bbr") => {
                // Not there, or not for this process: as the system has it.
                let _ = sockopt::set_tcp_congestion(stream, "cubic");
            }
            None => {}
        }
        Ok(())
    }

    /// How much to do at a time.
    pub(crate) fn tuning(&self, class: Class) -> Tuning {
        match class {
            Class::Bulk => Tuning {
                chunk: self.bulk_chunk.max(4096),
                polite_chunk: self.polite_chunk.clamp(4096, self.bulk_chunk.max(4096)),
                budget: 2 << 20,
                spin: Duration::ZERO,
            },
            Class::Urgent | Class::Message => Tuning {
                chunk: 64 << 10,
                polite_chunk: 64 << 10,
                budget: 256 << 10,
                spin: if class == Class::Urgent { self.urgent_spin } else { Duration::ZERO },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configured(options: &TcpOptions) -> Result<String, FabricError> {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        options.configure(&stream, Class::Bulk)?;
        Ok(sockopt::tcp_congestion(&stream).unwrap())
    }

    #[test]
    fn congestion_control_is_what_was_asked_for() {
        // Every kernel has it, and every process may choose it.
        let reno = TcpOptions { congestion: Some("reno".to_owned()), ..TcpOptions::default() };
        assert_eq!(configured(&reno).unwrap(), "reno");
        let unknown = TcpOptions { congestion: Some("none-such".to_owned()), ..TcpOptions::default() };
        configured(&unknown).unwrap_err();
    }

    #[test]
    fn bbr_is_taken_only_if_asked_for() {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{name}")).unwrap_or_default()
        };
        let default = read("congestion_control").trim().to_owned();
        let can_cubic = is_root() && read("available_congestion_control").contains("cubic");
        let expected = if default == "bbr" && can_cubic { "cubic" } else { default.as_str() };
        assert_eq!(configured(&TcpOptions::default()).unwrap(), expected);
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }
}
