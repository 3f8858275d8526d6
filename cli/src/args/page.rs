//! The command line of `vmove page`, and where any page is served.

use std::net::SocketAddr;

use clap::Args;

/// Arguments of `page`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove page
  vmove page --listen 127.0.0.1:8420
  vmove page --at node2.example:7420 --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem
  vmove --json page | jq -r .url

Prints the address of the page, and serves it until Ctrl-C. The address has a secret: whoever
knows it sees what you may see, so hand it to nobody. The page shows, and changes nothing; over
--at it shows what the role of your certificate allows.
From another machine: ssh -t -L 8420:127.0.0.1:8420 HOST vmove page --listen 127.0.0.1:8420")]
pub struct Page {
    /// Where it is served.
    #[command(flatten)]
    pub at: Listen,
}

/// Where a page is served.
#[derive(Debug, Clone, Copy, Args)]
pub struct Listen {
    /// Loopback address to serve the page at, of IPv4 or IPv6; port 0: any free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0", value_parser = loopback)]
    pub listen: SocketAddr,
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text
        .parse()
        .map_err(|_| format!("expected ADDRESS:PORT, such as 127.0.0.1:8420, found \"{text}\""))?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err(format!(
        "expected an address that only this host reaches, such as 127.0.0.1:{port}, found \"{text}\": the page has no TLS. \
         From another machine, forward the port: ssh -L {port}:127.0.0.1:{port} HOST",
        port = if address.port() == 0 { 8420 } else { address.port() }
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_this_host_are_taken() {
        assert!(loopback("127.0.0.1:0").is_ok() && loopback("[::1]:8420").is_ok());
        for wrong in ["0.0.0.0:8420", "[::]:1", "192.0.2.1:80"] {
            assert!(loopback(wrong).unwrap_err().contains("ssh -L"), "{wrong}");
        }
        assert!(loopback("8420").unwrap_err().contains("ADDRESS:PORT"));
    }
}
