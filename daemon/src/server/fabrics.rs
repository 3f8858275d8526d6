//! The fabric back ends of this node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{Class, Endpoint, Fabric, FabricError, FabricKind, Multicast};
use vmove_node::peer::FabricOffer;
use vmove_node::peer::{Hello, Token};
use vmove_types::problem::chain;

use super::endpoint::{EndpointError, NoVerbs, make_blocking};
#[cfg(feature = "verbs")]
use super::rdma::Rdma;
use crate::config::{FabricChoice, RdmaConfig};

/// Why the fabric that was asked for cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FabricsError {
    /// `--fabric verbs` was asked for.
    #[error("Fabric verbs cannot be used here: {}; use --fabric auto, which falls back to tcp", chain(.0))]
    Verbs(NoVerbs),
    /// `--fabric local` was asked for.
    #[error("Fabric local cannot be used here: {}; use --fabric tcp", chain(.0))]
    Local(NoLocal),
    /// The kernel refuses something basic.
    #[error("Fabric tcp cannot be used here: {}", chain(.0))]
    Tcp(FabricError),
}

/// Why fabric local cannot be used here.
#[derive(Debug, thiserror::Error)]
pub enum NoLocal {
    /// The fabric itself says so.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A peer could not know that it runs on this kernel.
    #[error("could not tell this kernel from others: {0}")]
    Kernel(std::io::Error),
}

/// Reaching another vmoved on the same kernel.
#[derive(Debug)]
struct Local {
    fabric: Arc<LocalFabric>,
    /// Where we listen for it.
    socket: PathBuf,
    /// Same word at both ends: they can reach each other.
    reach: String,
}

/// Back ends in use.
#[derive(Debug)]
pub struct Fabrics {
    tcp: Option<Arc<TcpFabric>>,
    local: Option<Local>,
    /// Wanted; whether it can be used is found out each time.
    #[cfg(feature = "verbs")]
    rdma: Option<Rdma>,
    /// RDMA is wanted at all.
    #[cfg(not(feature = "verbs"))]
    rdma: bool,
}

impl Fabrics {
    /// Sets up what `choice` asks for. `socket` is where peers of the same kernel shall connect to.
    pub fn new(choice: FabricChoice, rdma: &RdmaConfig, socket: &Path) -> Result<Self, FabricsError> {
        let tcp = || match TcpFabric::new(TcpOptions::default()) {
            Ok(fabric) => Ok(Some(Arc::new(fabric))),
            Err(error) => Err(FabricsError::Tcp(error)),
        };
        #[cfg(feature = "verbs")]
        let (none, wanted) = (None, Some(Rdma::new(rdma)));
        #[cfg(not(feature = "verbs"))]
        let (none, wanted) = (false, true);
        #[cfg(not(feature = "verbs"))]
        let _ = rdma;
        let fabrics = match choice {
            FabricChoice::Verbs => {
                let fabrics = Self { tcp: None, local: None, rdma: wanted };
                fabrics.verbs().map_err(FabricsError::Verbs)?;
                fabrics
            }
            FabricChoice::Tcp => Self { tcp: tcp()?, local: None, rdma: none },
            FabricChoice::Local => {
                let local = Local::new(socket).map_err(FabricsError::Local)?;
                Self { tcp: None, local: Some(local), rdma: none }
            }
            FabricChoice::Auto => {
                let local = Local::new(socket)
                    .inspect_err(|why| tracing::info!(why = %chain(why), "fabric local is not offered"))
                    .ok();
                Self { tcp: tcp()?, local, rdma: wanted }
            }
        };
        if choice == FabricChoice::Auto
            && let Err(why) = fabrics.verbs()
        {
            tracing::info!(why = %chain(&why), "fabric verbs is not offered");
        }
        Ok(fabrics)
    }

    /// The kind of RDMA network that this node is on; or why there is none.
    fn verbs(&self) -> Result<String, NoVerbs> {
        #[cfg(feature = "verbs")]
        return match &self.rdma {
            Some(rdma) => rdma.fabric().map(|fabric| fabric.network()),
            None => Err(NoVerbs::SwitchedOff),
        };
        #[cfg(not(feature = "verbs"))]
        Err(NoVerbs::NotBuiltIn)
    }

    fn wants_verbs(&self) -> bool {
        #[cfg(feature = "verbs")]
        return self.rdma.is_some();
        #[cfg(not(feature = "verbs"))]
        self.rdma
    }

    /// What we tell a peer, best first.
    pub fn offers(&self) -> Vec<FabricOffer> {
        let local = self.local.as_ref().map(|local| FabricOffer {
            kind: FabricKind::Local,
            reach: local.reach.clone(),
            address: local.socket.display().to_string(),
            why_not: None,
        });
        let verbs = self.wants_verbs().then(|| {
            let (reach, why_not) = match self.verbs() {
                Ok(network) => (network, None),
                Err(why) => (String::new(), Some(chain(&why))),
            };
            FabricOffer { kind: FabricKind::Verbs, reach, address: String::new(), why_not }
        });
        let tcp = self.tcp.as_ref().map(|_| FabricOffer::tcp());
        local.into_iter().chain(verbs).chain(tcp).collect()
    }

    /// A back end for the session with this secret to register memory with.
    pub fn fabric(&self, kind: FabricKind, secret: Token) -> Option<Arc<dyn Fabric>> {
        match kind {
            FabricKind::Tcp => self.tcp.clone().map(|f| f as Arc<dyn Fabric>),
            FabricKind::Local => self.local.as_ref().map(|l| l.fabric.clone() as Arc<dyn Fabric>),
            #[cfg(feature = "verbs")]
            FabricKind::Verbs => {
                self.rdma.as_ref()?.of_session(secret).ok().map(|fabric| fabric as Arc<dyn Fabric>)
            }
            _ => {
                let _ = secret;
                None
            }
        }
    }

    /// A session's multicast beside the back end of this kind, where there is an RDMA device for it.
    pub fn multicast(&self, kind: FabricKind, secret: Token) -> Option<Box<dyn Multicast>> {
        #[cfg(feature = "verbs")]
        if let (FabricKind::Verbs, Some(rdma)) = (kind, &self.rdma) {
            return rdma.multicast(secret);
        }
        let _ = (kind, secret);
        None
    }

    /// Fabric tcp itself, unless it is switched off.
    pub fn tcp(&self) -> Option<Arc<TcpFabric>> {
        self.tcp.clone()
    }

    /// Whether peers of the same kernel may connect.
    pub fn has_local(&self) -> bool {
        self.local.is_some()
    }

    /// Makes an endpoint of a greeted TCP connection, with or without TLS. Off the worker threads: it may block.
    async fn adopt_tcp(
        &self,
        stream: tokio::net::TcpStream,
        tls: Option<rustls::Connection>,
        class: Class,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let fabric = self.tcp.clone().ok_or(EndpointError::NoTcp)?;
        let stream = stream.into_std()?;
        make_blocking(move || match tls {
            None => fabric.adopt(stream, class),
            Some(tls) => fabric.adopt_tls(stream, tls, class),
        })
        .await
    }

    /// Makes an endpoint of a greeted page connection: over RDMA if the greeting said so.
    pub async fn adopt(
        &self,
        hello: &Hello,
        stream: tokio::net::TcpStream,
        tls: Option<rustls::Connection>,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.adopt_as(hello, hello.kind.class(), stream, tls).await
    }

    /// The same for a connection whose class did not come with its greeting.
    pub async fn adopt_as(
        &self,
        hello: &Hello,
        class: Class,
        stream: tokio::net::TcpStream,
        tls: Option<rustls::Connection>,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        if !hello.rdma {
            return self.adopt_tcp(stream, tls, class).await;
        }
        #[cfg(feature = "verbs")]
        return match &self.rdma {
            Some(rdma) => rdma.adopt(hello.token, stream, tls, class).await,
            None => Err(NoVerbs::SwitchedOff.into()),
        };
        #[cfg(not(feature = "verbs"))]
        Err(NoVerbs::NotBuiltIn.into())
    }

    /// Makes an endpoint of a greeted Unix connection. Off the worker threads: both ends exchange a message.
    pub async fn adopt_local(
        &self,
        stream: tokio::net::UnixStream,
        class: Class,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let local = self.local.as_ref().ok_or(EndpointError::NoLocal)?;
        let fabric = local.fabric.clone();
        let stream = stream.into_std()?;
        make_blocking(move || fabric.adopt(stream, class)).await
    }
}

impl Local {
    fn new(socket: &Path) -> Result<Self, NoLocal> {
        let fabric = LocalFabric::new()?;
        let reach = same_kernel_id().map_err(NoLocal::Kernel)?;
        Ok(Self { fabric: Arc::new(fabric), socket: socket.to_owned(), reach })
    }
}

/// Equal for two daemons that can read each other's memory by process id and open each other's socket by path: the same
/// boot of the same kernel, the same process ids, the same mounts.
fn same_kernel_id() -> std::io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}"));
    Ok(format!("{}/{}/{}", boot.trim(), namespace("pid")?.display(), namespace("mnt")?.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_verbs_is_refused_or_listed_with_the_reason() {
        let no_device = RdmaConfig { device: Some("no_such_device".to_owned()), ..RdmaConfig::default() };
        let new = |choice| Fabrics::new(choice, &no_device, Path::new("/nowhere"));
        let error = new(FabricChoice::Verbs).unwrap_err().to_string();
        assert!(error.contains("--fabric auto"), "{error}");
        let offers = new(FabricChoice::Auto).unwrap().offers();
        let verbs = offers.iter().find(|offer| offer.kind == FabricKind::Verbs).unwrap();
        assert!(verbs.why_not.as_ref().is_some_and(|why| why.contains("no_such_device")), "{verbs:?}");
        assert!(new(FabricChoice::Auto).unwrap().fabric(FabricKind::Verbs, Token::random()).is_none());
    }

    #[test]
    fn tcp_offers_only_tcp() {
        let fabrics = Fabrics::new(FabricChoice::Tcp, &RdmaConfig::default(), Path::new("/nowhere")).unwrap();
        assert_eq!(fabrics.offers().len(), 1);
        let has = |kind| fabrics.fabric(kind, Token::random()).is_some();
        assert!(has(FabricKind::Tcp) && !has(FabricKind::Local));
    }

    #[test]
    fn this_kernel_is_the_same_as_itself() {
        assert_eq!(same_kernel_id().unwrap(), same_kernel_id().unwrap());
    }
}
