//! A node without a daemon: a fork engine that other nodes reach by plain TCP.

pub mod devices;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use vmove_clone::engine::{EngineOptions, ForkDialer, ForkEngine, ForkPolicy, read_opening};
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{Class, Endpoint, Fabric, FabricKind, Multicast};
use vmove_hooks::Hooks;
use vmove_hooks::hooks::Settings;
use vmove_node::devices::Devices;
use vmove_node::migrations::NoMigrations;
use vmove_node::monitors::Monitors;
use vmove_node::peer::hello::{answer, read_answer};
use vmove_node::peer::{
    BoxedStream, Caller, Dialer, FabricOffer, Hello, KnownPeers, LinkError, LinkKind, PeerPolicy, PeerTarget,
    Status, Token,
};
use vmove_node::registry::{Means, Registry};
use vmove_node::reservations::Reservations;
use vmove_node::starter::Starter;
use vmove_node::store::VmStore;
use vmove_qmp::confine::Confinement;

use crate::mounts::Mounts;

/// A host with an engine. Dropping it ends its VMs and unmounts its memory.
pub struct Node {
    pub engine: Arc<ForkEngine>,
    pub registry: Arc<Registry>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Last: what is in it goes first.
    memory: Mounts,
}

impl Node {
    /// A node whose files are in `dir`.
    pub async fn start(name: &str, dir: &Path, policy: ForkPolicy) -> Self {
        Self::start_with(name, dir, policy, Arc::new(vmove_node::devices::NoDevices)).await
    }

    /// The same with devices.
    pub async fn start_with(name: &str, dir: &Path, policy: ForkPolicy, devices: Arc<dyn Devices>) -> Self {
        let dir = dir.join(name);
        let (run, memory, state) = (dir.join("run"), dir.join("memory"), dir.join("state"));
        for folder in [&run, &memory, &state] {
            vmove_node::files::make_private_dir(folder).unwrap();
        }
        let vms = Arc::new(VmStore::open(&state.join("vms")).unwrap());
        let monitors = Arc::new(Monitors::default());
        let registry = Registry::new(
            vms,
            monitors,
            Arc::new(NoMigrations),
            Means {
                run_dir: run,
                reservations: Reservations::new(memory.clone()),
                starter: Starter::plain(),
                devices,
                confinement: Confinement::default(),
                keep_stopped: Duration::MAX,
            },
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let fabric = Arc::new(TcpFabric::new(TcpOptions::default()).unwrap());
        let qemu = vmove_skip::qemu().ok().map(|program| vec![program.into()]);
        let peers = PeerPolicy { qemu_binaries: qemu, ..PeerPolicy::default() };
        let settings = Settings {
            node: name.to_owned(),
            control: dir.join("control.sock"),
            journal: state.join("hooks"),
        };
        let hooks = Hooks::open(settings, Vec::new()).unwrap();
        let options = EngineOptions {
            admission: Arc::new(vmove_node::admission::AdmitsAll),
            node: name.to_owned(),
            policy,
            peers: Arc::new(peers),
            known: KnownPeers::default(),
            listen: address,
            tls: false,
            state_dir: state,
            reconnect_for: Duration::from_secs(10),
            dialer: Arc::new(PlainDialer(fabric.clone())),
            standby: None,
            hooks,
        };
        let engine = ForkEngine::open(options, registry.clone()).unwrap();
        tokio::spawn(serve(listener, engine.clone(), fabric));
        Self { engine, registry, address, memory: Mounts(memory) }
    }

    /// Guest memory from 0 on, as its processor would see it.
    pub async fn guest_memory(&self, vm: &str, bytes: u64) -> Vec<u8> {
        let record = self.registry.vms().get(vm).unwrap();
        let monitor = self.registry.monitor(&record).await.unwrap();
        let file = self.memory.0.join(format!("{vm}.dump"));
        let arguments = serde_json::json!({ "val": 0, "size": bytes, "filename": file });
        monitor.execute_raw("pmemsave", arguments, Duration::from_secs(30)).await.unwrap();
        let dump = std::fs::read(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        dump
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for pid in self.registry.records().iter().filter_map(|vm| Pid::from_raw(vm.pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Takes the connections of other engines, as a daemon does at its peer port.
async fn serve(listener: TcpListener, engine: Arc<ForkEngine>, fabric: Arc<TcpFabric>) {
    while let Ok((stream, from)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        tokio::spawn(greeted(stream, from, engine.clone(), fabric.clone()));
    }
}

async fn greeted(mut stream: TcpStream, from: SocketAddr, engine: Arc<ForkEngine>, fabric: Arc<TcpFabric>) {
    let Ok(hello) = Hello::read(&mut stream).await else { return };
    if let Err((status, why)) = engine.wants(&hello) {
        let _ = answer(&mut stream, status, &why).await;
        return;
    }
    answer(&mut stream, Status::Welcome, "").await.unwrap();
    match hello.kind {
        LinkKind::Fork => engine.serve_order(hello, Box::new(stream), (from.ip(), Caller::default())).await,
        LinkKind::ForkDisk => engine.serve_disk(hello, Box::new(stream)).await,
        LinkKind::ForkMemory => {
            let (class, greeting) = read_opening(&mut stream).await.unwrap();
            let endpoint = endpoint(fabric, stream, class).await.unwrap();
            engine.accept_memory(&hello, class, greeting, endpoint);
        }
        other => panic!("a fork needs no connection of kind {other:?}"),
    }
}

async fn endpoint(
    fabric: Arc<TcpFabric>,
    stream: TcpStream,
    class: Class,
) -> Result<Box<dyn Endpoint>, vmove_fabric::FabricError> {
    let stream = stream.into_std().unwrap();
    tokio::task::spawn_blocking(move || fabric.adopt(stream, class)).await.unwrap()
}

/// Connections without TLS.
struct PlainDialer(Arc<TcpFabric>);

impl PlainDialer {
    async fn connect(to: &PeerTarget, hello: &Hello) -> Result<TcpStream, LinkError> {
        let unreachable =
            |e: std::io::Error| LinkError::Unreachable { peer: to.to_string(), why: e.to_string() };
        let mut stream = TcpStream::connect(&to.address).await.map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        stream.write_all(&hello.encode()).await.map_err(unreachable)?;
        let refused = |source| LinkError::Hello { peer: to.to_string(), source };
        read_answer(&mut stream).await.map_err(refused)?;
        Ok(stream)
    }
}

#[async_trait]
impl Dialer for PlainDialer {
    async fn stream(&self, to: &PeerTarget, hello: &Hello) -> Result<BoxedStream, LinkError> {
        Ok(Box::new(Self::connect(to, hello).await?))
    }

    async fn endpoint(
        &self,
        to: &PeerTarget,
        fabric: FabricKind,
        _: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        Err(LinkError::Fabric { peer: to.to_string(), why: format!("no fabric {fabric} in this test") })
    }

    fn fabrics(&self) -> Vec<FabricOffer> {
        let kind = FabricKind::Tcp;
        vec![FabricOffer { kind, reach: String::new(), address: String::new(), why_not: None }]
    }

    fn fabric(&self, kind: FabricKind, _: Token) -> Option<Arc<dyn Fabric>> {
        (kind == FabricKind::Tcp).then(|| self.0.clone() as Arc<dyn Fabric>)
    }
}

#[async_trait]
impl ForkDialer for PlainDialer {
    async fn fork_memory(
        &self,
        to: &PeerTarget,
        hello: &Hello,
        class: Class,
        opening: &[u8],
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        let failed = |why: String| LinkError::Fabric { peer: to.to_string(), why };
        let mut stream = Self::connect(to, hello).await?;
        stream.write_all(opening).await.map_err(|e| failed(e.to_string()))?;
        endpoint(self.0.clone(), stream, class).await.map_err(|e| failed(e.to_string()))
    }

    fn multicast(&self, _: FabricKind, _: Token) -> Option<Box<dyn Multicast>> {
        None
    }

    fn tcp(&self) -> Option<Arc<TcpFabric>> {
        Some(self.0.clone())
    }
}
