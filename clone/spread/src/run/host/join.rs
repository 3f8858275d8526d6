//! How a host comes to its connections: to the root, and to the hosts that it reads from.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmove_fabric::{
    Access, Class, Fabric, FabricError, Multicast, MulticastReceiver, PeerAddress, Region, RemoteRegion,
};

use super::Target;
use super::reader::Reader;
use crate::error::SpreadError;
use crate::host_id::HostId;
use crate::memory::Buffer;
use crate::message::{Greeting, Message, Welcome};
use crate::run::control::Control;
use crate::run::inbox::Inbox;
use crate::template::Copy;

/// How long a peer that does not answer is dialled.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// A host that the root has let in.
pub(super) struct Joined {
    pub(super) root: Control,
    pub(super) welcome: Welcome,
    /// The root's messages after its welcome.
    pub(super) rest: Vec<Message>,
    pub(super) receiver: Option<Box<dyn MulticastReceiver>>,
    /// For chunks that something waits for.
    pub(super) urgent: Reader,
    pub(super) reads: Reader,
    /// When it was let in.
    pub(super) begin: Instant,
}

fn greet(greeting: &Greeting) -> Vec<u8> {
    postcard::to_stdvec(greeting).expect("greetings are plain data")
}

/// An error with its causes; of a lost root only those, since it may yet be reached another way.
pub(super) fn said(error: &SpreadError) -> String {
    let mut next: Option<&dyn Error> = match error {
        SpreadError::RootGone { source, .. } => Some(source),
        other => Some(other),
    };
    let mut words = Vec::new();
    while let Some(error) = next {
        words.push(error.to_string());
        next = error.source();
    }
    words.join(": ")
}

impl Joined {
    /// Joins for the first time, with memory for what comes.
    pub(super) fn begin(
        fabric: &dyn Fabric,
        multicast: Option<Arc<dyn Multicast>>,
        target: &mut dyn Target,
        me: HostId,
        at: &PeerAddress,
    ) -> Result<(Self, Copy), SpreadError> {
        let (mut root, welcome, rest) = Self::enter(fabric, me, at)?;
        let begin = Instant::now();
        let regions = target.regions(fabric, &welcome.layout)?;
        let fits = regions.iter().map(Region::len).eq(welcome.layout.regions.iter().copied());
        if !fits || welcome.regions.len() != regions.len() + 1 || !welcome.route.is_sound() {
            let what = "regions or a route that do not fit each other".to_owned();
            return Err(SpreadError::Protocol { from: HostId::ROOT, what });
        }
        let table = Buffer::new(fabric, welcome.layout.table_bytes(), Access::REMOTE_READ)?;
        let receiver = match (multicast, welcome.group) {
            (Some(multicast), Some(group)) => Some(multicast.join(&group)?),
            _ => None,
        };
        root.send(&Message::Ready { hears: receiver.is_some() });
        let (urgent, reads) = Self::readers(fabric, me, at, &welcome)?;
        Ok((Self { root, welcome, rest, receiver, urgent, reads, begin }, Copy { regions, table }))
    }

    /// Connects to the root and waits for its welcome.
    pub(super) fn enter(
        fabric: &dyn Fabric,
        me: HostId,
        at: &PeerAddress,
    ) -> Result<(Control, Welcome, Vec<Message>), SpreadError> {
        let endpoint = fabric.connect(at, Class::Message, &greet(&Greeting::Control { from: me }))?;
        let mut root = Control::new(HostId::ROOT, endpoint);
        let (welcome, rest) = root.welcomed()?;
        Ok((root, *welcome, rest))
    }

    /// Connections for READs from the root: for what something waits for, and for the rest.
    pub(super) fn readers(
        fabric: &dyn Fabric,
        me: HostId,
        at: &PeerAddress,
        welcome: &Welcome,
    ) -> Result<(Reader, Reader), FabricError> {
        let regions: &Vec<RemoteRegion> = &welcome.regions;
        let reader = |class| -> Result<Reader, FabricError> {
            let endpoint = fabric.connect(at, class, &greet(&Greeting::Reads { from: me }))?;
            let mut reader = Reader::new(HostId::ROOT, endpoint);
            reader.set_regions(regions.clone());
            Ok(reader)
        };
        Ok((reader(Class::Urgent)?, reader(Class::Bulk)?))
    }
}

/// What came of a dial.
pub(super) type Dialled = Result<Box<(Control, Reader)>, FabricError>;

/// Connects to a host to read from, in a thread of its own: one that does not answer holds up nobody.
pub(super) fn dial<E: Send + 'static>(
    fabric: &Arc<dyn Fabric>,
    inbox: &Arc<Inbox<E>>,
    event: fn(HostId, Dialled) -> E,
    me: HostId,
    peer: HostId,
    address: PeerAddress,
) -> Result<(), SpreadError> {
    let (fabric, inbox) = (Arc::clone(fabric), Arc::clone(inbox));
    let connect = move || -> Dialled {
        let control = fabric.connect(&address, Class::Message, &greet(&Greeting::Control { from: me }))?;
        let reads = fabric.connect(&address, Class::Bulk, &greet(&Greeting::Reads { from: me }))?;
        Ok(Box::new((Control::new(peer, control), Reader::new(peer, reads))))
    };
    let dialling = move || {
        let begin = Instant::now();
        loop {
            match connect() {
                Err(_) if begin.elapsed() < DIAL_TIMEOUT => std::thread::sleep(Duration::from_millis(50)),
                result => return inbox.push(event(peer, result)),
            }
        }
    };
    let thread = std::thread::Builder::new().name("vmove-spread-d".to_owned()).spawn(dialling);
    thread.map(drop).map_err(SpreadError::io("start a thread"))
}
