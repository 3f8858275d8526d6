//! What another node says on a connection, up to its messages.

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmove_fabric::{FabricKind, fuzzing};
use vmove_migrate::proto::message::ToDestination;
use vmove_node::peer::codec::{MAX_FRAME, decode, encode, receive};
use vmove_node::peer::hello::{answer, read_answer};
use vmove_node::peer::{
    FabricOffer, Hello, KnownPeers, LinkKind, MAX_NODE_NAME, PROTOCOL_VERSION, SessionId, Status, Token,
    negotiate, split_address,
};

use super::{Target, migration, ready};

pub const GREETING: Target = Target {
    name: "greeting",
    what: "the first bytes of a connection between daemons",
    feed: greeting,
    seeds: greeting_seeds,
    words: &[],
    mutations: 1_500_000,
};

fn greeting(bytes: &[u8]) {
    let mut rest = bytes;
    let Ok(hello) = ready(Hello::read(&mut rest)) else { return };
    assert!(hello.node.len() <= MAX_NODE_NAME && hello.version == PROTOCOL_VERSION);
    assert_eq!(hello.encode(), bytes[..bytes.len() - rest.len()]);
}

fn greeting_seeds() -> Vec<Vec<u8>> {
    let hello = |kind, rdma, node: &str| Hello {
        version: PROTOCOL_VERSION,
        kind,
        rdma,
        index: 3,
        session: SessionId(Uuid::from_u128(9)),
        token: Token([7; 16]),
        node: node.to_owned(),
    };
    vec![
        hello(LinkKind::Control, false, "n1").encode(),
        hello(LinkKind::Bulk, true, "").encode(),
        hello(LinkKind::Disk, false, "n2").encode(),
        hello(LinkKind::ForkDisk, false, &"ä".repeat(32)).encode(),
    ]
}

pub const ANSWER: Target = Target {
    name: "greeting-answer",
    what: "the answer to a greeting",
    feed: |bytes| drop(ready(read_answer(&mut &bytes[..])).map_err(|error| error.to_string())),
    seeds: answer_seeds,
    words: &[],
    mutations: 1_500_000,
};

fn answer_seeds() -> Vec<Vec<u8>> {
    let said = |status, text| {
        let mut bytes = Vec::new();
        ready(answer(&mut bytes, status, text)).expect("into memory");
        bytes
    };
    vec![said(Status::Welcome, ""), said(Status::Busy, "later"), said(Status::OtherVersion, "é")]
}

pub const NEGOTIATION: Target = Target {
    name: "negotiation",
    what: "the fabrics that two nodes offer, and addresses of nodes",
    feed: negotiation,
    seeds: negotiation_seeds,
    words: &[],
    mutations: 900_000,
};

#[derive(Serialize, Deserialize)]
struct Offers {
    theirs: Vec<FabricOffer>,
    ours: Vec<FabricOffer>,
}

fn negotiation(bytes: &[u8]) {
    let Ok(offers) = decode::<Offers>(bytes) else { return };
    let agreed = negotiate(&offers.theirs, &offers.ours);
    if let Ok(agreed) = agreed {
        let offered = |offers: &[FabricOffer]| offers.iter().any(|offer| offer.kind == agreed.kind);
        assert!(offered(&offers.theirs) && offered(&offers.ours));
    }
    for word in offers.theirs.iter().map(|offer| offer.address.as_str()) {
        if let Some((host, port)) = split_address(word) {
            assert!(!host.is_empty() && port > 0);
        }
        drop(KnownPeers::default().target(word));
    }
}

fn offer(kind: FabricKind, reach: &str, why_not: Option<&str>) -> FabricOffer {
    let address = "host-1:7420".to_owned();
    FabricOffer { kind, reach: reach.to_owned(), address, why_not: why_not.map(str::to_owned) }
}

fn negotiation_seeds() -> Vec<Vec<u8>> {
    let tcp = || offer(FabricKind::Tcp, "", None);
    let theirs = vec![offer(FabricKind::Verbs, "RoCE v2", None), tcp()];
    let ours =
        vec![offer(FabricKind::Local, "boot", None), offer(FabricKind::Verbs, "", Some("none")), tcp()];
    vec![encode(&Offers { theirs, ours }).expect("it is short")[4..].to_vec()]
}

pub const CONTROL_FRAMES: Target = Target {
    name: "control-frames",
    what: "a stream of control messages, with their lengths",
    feed: control_frames,
    seeds: control_frames_seeds,
    words: &[],
    mutations: 600_000,
};

fn control_frames(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(message) = ready(receive::<_, ToDestination>(&mut rest)) {
        let again = encode(&message).expect("it has come in a frame");
        assert!(again.len() <= MAX_FRAME + 4);
    }
}

fn control_frames_seeds() -> Vec<Vec<u8>> {
    let frame = |message: &Vec<u8>| {
        let len = u32::try_from(message.len()).expect("it is short");
        [&len.to_le_bytes()[..], message].concat()
    };
    let mut frames: Vec<Vec<u8>> = migration::to_destination_seeds().iter().map(frame).collect();
    frames.push(frames.concat());
    frames
}

pub const FRAMES: Target = Target {
    name: "frames",
    what: "READs, WRITEs, replies and messages of the fabric, on a connection with requests under way",
    feed: fuzzing::frames,
    seeds: fuzzing::frames_seeds,
    words: &[],
    mutations: 300_000,
};

pub const HEADERS: Target = Target {
    name: "frame-headers",
    what: "headers, segment descriptors and trailers of the fabric",
    feed: fuzzing::headers,
    seeds: fuzzing::headers_seeds,
    words: &[],
    mutations: 1_500_000,
};

pub const HELLOS: Target = Target {
    name: "fabric-hellos",
    what: "the first bytes of connections of tcp, local and verbs, and of a trial of datagrams",
    feed: fuzzing::hellos,
    seeds: fuzzing::hellos_seeds,
    words: &[],
    mutations: 1_500_000,
};

pub const DATAGRAMS: Target = Target {
    name: "datagrams",
    what: "datagrams of multicast, and their numbers",
    feed: fuzzing::datagram,
    seeds: fuzzing::datagram_seeds,
    words: &[],
    mutations: 300_000,
};
