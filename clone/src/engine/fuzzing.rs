//! Messages of a fork, on any bytes, and what is done with them before anything else is.

use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddrV4};

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmove_fabric::FabricKind;
use vmove_node::peer::codec::{decode, encode};
use vmove_node::peer::{FabricOffer, PeerTarget, SessionId};
use vmove_spread::CHUNK;
use vmove_types::Backing;
use vmove_types::fork_report::ChildReport;
use vmove_types::report::FaultStats;

use super::distribution::{lie_in, part_at};
use super::message::{
    AskTicket, At, Begin, Came, Done, Kin, Kind, Numbers, OfGuest, Order, OrderDisk, Phase, Pieces, RamPart,
    Reached, Sight, Sights, Taken, TicketAct, TicketEnds, ToHost, ToParent, WarmOrder,
};
use crate::disk::Disk;
use crate::template::Manifest;

pub use super::guest::any_lines as guest;

/// RAM blocks of a host, in bytes.
const RAM: [u64; 2] = [64 << 20, 1 << 20];

/// The message in these bytes; it says the same when it is sent on.
fn message<M: DeserializeOwned + Serialize + Debug>(bytes: &[u8]) -> Option<M> {
    let message: M = decode(bytes).ok()?;
    let again: M = decode(&encode(&message).ok()?[4..]).expect("it was decoded");
    assert_eq!(format!("{again:?}"), format!("{message:?}"));
    Some(message)
}

/// What a host of a fork hears.
pub fn to_host(bytes: &[u8]) {
    let Some(message) = message::<ToHost>(bytes) else { return };
    let _ = message.word();
    let ToHost::Begin(begin) = message else { return };
    if let Ok(manifest) = serde_json::from_str::<Manifest>(&begin.manifest) {
        let _ = manifest.guest_bytes();
    }
    if !lie_in(&begin.parts, &RAM) {
        return;
    }
    for (at, part) in begin.parts.iter().enumerate() {
        let of = |offset| part_at(&begin.parts, part.ram, offset).map(|(index, _)| usize::from(index));
        if at <= usize::from(u16::MAX) {
            assert_eq!((of(part.start), of(part.end() - 1)), (Some(at), Some(at)));
        }
        assert_ne!(of(part.end()), Some(at));
    }
}

/// What the parent's node hears.
pub fn to_parent(bytes: &[u8]) {
    let Some(message) = message::<ToParent>(bytes) else { return };
    let _ = message.word();
    if let Ok(ToParent::Done(done)) = message.unless_refused(&"a node") {
        let children: Result<Vec<ChildReport>, _> = serde_json::from_str(&done.children);
        drop(children);
        drop(done.faults.map(|faults| serde_json::from_str::<FaultStats>(&faults)));
    }
}

fn kind() -> Kind {
    Kind {
        command_line: vec!["qemu-system-x86_64".to_owned(), "-m".to_owned(), "1G".to_owned()],
        environment: vec![("HOME".to_owned(), "/".to_owned())],
        machine: "pc-q35-10.0".to_owned(),
        qemu: "10.0.2".to_owned(),
        backing: Backing::Thp,
    }
}

fn disk() -> Disk {
    Disk {
        device: "d0".to_owned(),
        node: "n0".to_owned(),
        image: "{vmdir}/d.img".to_owned(),
        file: "/vm/d.img".into(),
        format: "qcow2".to_owned(),
        size: 1 << 30,
        direct: true,
    }
}

fn order() -> Order {
    let offer = FabricOffer {
        kind: FabricKind::Tcp,
        reach: String::new(),
        address: "a:1".to_owned(),
        why_not: Some("no".to_owned()),
    };
    let sight = Sight { path: "/vm/d.img".into(), link: "/vm/.d".into(), inode: 77 };
    Order {
        fork: "f-1".to_owned(),
        parent: "web".to_owned(),
        node: "n1".to_owned(),
        port: 7420,
        indexes: vec![1, 2, 3],
        names: Vec::new(),
        grants: std::collections::BTreeMap::new(),
        guest: Some(OfGuest { root: "n1/web".to_owned(), depth: 2 }),
        verify: true,
        whole: false,
        expect_written: Some(1 << 20),
        kind: kind(),
        warm: vec!["w".to_owned()],
        guest_bytes: 1 << 30,
        live_bytes: 1 << 29,
        registered_bytes: 1 << 29,
        offers: vec![offer],
        group: Some(SocketAddrV4::new(Ipv4Addr::new(239, 1, 2, 3), 7421)),
        disks: vec![
            OrderDisk { disk: disk(), layers: Sights::Of(vec![sight]) },
            OrderDisk { disk: disk(), layers: Sights::None("nowhere".to_owned()) },
        ],
        no_export: None,
        devices: Some(
            r#"{"children":[[{"request":{"role":"nic","address":"0000:01:10.0"},"id":"vmove-nic","bus":"p"}],[],[]],"models":{"nic":"8086:10ca"},
            "parting":{"quiesce":null,"resume":"true","script_timeout_ms":30000,"unplug_timeout_ms":20000}}"#
                .to_owned(),
        ),
    }
}

fn begin() -> Begin {
    let manifest = r#"{"version":1,"id":"f-1","name":null,"vm":"web","created":1,"qemu":"10.0.2","machine":"pc","backing":"thp",
        "command_line":["q"],"environment":[],"ram":[{"id":"ram0","size":67108864,"file":"/r"}],"state_bytes":4,"state_checksum":5}"#;
    let chunk = u64::from(CHUNK);
    let part = |ram, start, len| RamPart { ram, start: start * chunk, len: len * chunk };
    Begin {
        me: 1,
        listens: true,
        peers: vec![(
            "host-2".to_owned(),
            PeerTarget { name: "n2".to_owned(), address: "n2:7420".to_owned() },
        )],
        manifest: manifest.to_owned(),
        state: b"state".to_vec(),
        checksum: Some(7),
        parts: vec![part(0, 0, 2), part(0, 512, 1), part(1, 0, 4)],
        no_verbs: Some("why".to_owned()),
        numbers: Some(Numbers { first: 3, size: 8 }),
    }
}

fn encoded<M: Serialize>(messages: &[M]) -> Vec<Vec<u8>> {
    messages.iter().map(|message| encode(message).expect("it is short")[4..].to_vec()).collect()
}

/// Valid input of [`to_host`].
#[must_use]
pub fn to_host_seeds() -> Vec<Vec<u8>> {
    let kin = || Kin { name: "web-1".to_owned(), fork: "f-1".to_owned() };
    let warm = WarmOrder {
        id: "w".to_owned(),
        parent: "web".to_owned(),
        node: "n1".to_owned(),
        indexes: vec![1],
        kind: kind(),
    };
    let session = SessionId(uuid::Uuid::from_u128(7));
    encoded(&[
        ToHost::Order(Box::new(order())),
        ToHost::Begin(Box::new(begin())),
        ToHost::Alive,
        ToHost::Release,
        ToHost::GiveUp("why".to_owned()),
        ToHost::Which(vec![kin()]),
        ToHost::End(kin()),
        ToHost::Came(Came { session, passed: 1, end: true }),
        ToHost::Reads(session),
        ToHost::Warm(Box::new(warm)),
        ToHost::Ticket(AskTicket { ticket: "f-1".to_owned(), act: TicketAct::Kill, taken: vec![1, 2] }),
    ])
}

/// Valid input of [`to_parent`].
#[must_use]
pub fn to_parent_seeds() -> Vec<Vec<u8>> {
    let pieces = Pieces { by_multicast: 1, from_root: 2, from_peers: 3, repaired: 4 };
    let taken = Taken {
        verbs: true,
        why: "best".to_owned(),
        hears: true,
        disks: Some(Reached { shared: true, why: "seen".to_owned() }),
    };
    let done = Done {
        children: "[]".to_owned(),
        template_ms: 1.5,
        pieces,
        wrong: 0,
        wanted: 1,
        fabric: "tcp".to_owned(),
        fabric_reason: "asked".to_owned(),
        faults: Some("{}".to_owned()),
    };
    encoded(&[
        ToParent::Accepted(taken),
        ToParent::Refused(r#"{"code":"no-room","message":"full"}"#.to_owned()),
        ToParent::Progress(At { phase: Phase::Load, chunks: 9, missing: 3, running: 1, pieces }),
        ToParent::Done(Box::new(done)),
        ToParent::Failed("why".to_owned()),
        ToParent::Living(vec!["web-1".to_owned()]),
        ToParent::Ended("killed".to_owned()),
        ToParent::Reads(true),
        ToParent::Prepared,
        ToParent::Ends(TicketEnds { known: true, living: 1, ends: vec![(2, r#"{"result":1}"#.to_owned())] }),
    ])
}
