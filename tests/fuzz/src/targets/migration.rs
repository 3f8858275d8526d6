//! Messages of a migration, and sets of pages in them.

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vmove_fabric::{FabricKind, RemoteRegion};
use vmove_migrate::pending::{PageSet, WirePart, WireSet};
use vmove_migrate::proto::message::{
    Accepted, BlockInfo, BlockRegions, Complete, Counted, DestinationStand, Disk, Final, Hashes, MovedDisk,
    Outdated, Prepare, RegionPart, Regions, RoundBegun, RoundDone, Running, SourceCpu, SourceStand,
    ToDestination, ToSource, WireRun,
};
use vmove_node::clock::ClockOffset;
use vmove_node::peer::Token;
use vmove_node::peer::codec::{decode, encode};
use vmove_types::Backing;
use vmove_types::spec::{MigrationSpec, Mode};
use vmove_types::time::Mono;

use super::Target;

/// Pages of the RAM block that sets speak of.
const PAGES: u64 = 300;

pub const TO_DESTINATION: Target = Target {
    name: "to-destination",
    what: "messages of a migration's source",
    feed: to_destination,
    seeds: to_destination_seeds,
    words: &[],
    mutations: 450_000,
};

/// The message in these bytes; it says the same when it is sent on.
fn message<M: DeserializeOwned + Serialize + Debug>(bytes: &[u8]) -> Option<M> {
    let message: M = decode(bytes).ok()?;
    let again: M = decode(&encode(&message).ok()?[4..]).expect("it was decoded");
    assert_eq!(format!("{again:?}"), format!("{message:?}"));
    Some(message)
}

fn to_destination(bytes: &[u8]) {
    let Some(message) = message::<ToDestination>(bytes) else { return };
    let _ = message.name();
    match message {
        ToDestination::Prepare(prepare) => {
            let _ = (prepare.guest_bytes(), prepare.spec.validate(), prepare.spec.timeout());
            prepare.blocks.iter().for_each(|block| pages(&block.data));
        }
        ToDestination::Runs(runs) => {
            let ranges = runs.iter().filter_map(|run| run.range(PAGES));
            assert!(ranges.into_iter().all(|range| range.start < range.end && range.end <= PAGES));
        }
        ToDestination::Outdated(named) => {
            for Outdated { part, .. } in named {
                let mut set = PageSet::empty(PAGES);
                if set.insert_part(&part).is_ok() {
                    assert!(set.runs().all(|run| run.end <= PAGES));
                }
            }
        }
        _ => {}
    }
}

fn pages(wire: &WireSet) {
    let Ok(set) = PageSet::decode(wire, PAGES) else { return };
    assert!(set.runs().all(|run| run.end <= PAGES));
    assert_eq!(set.count(), set.runs().map(|run| run.end - run.start).sum::<u64>());
    assert_eq!(PageSet::decode(&set.encode(), PAGES), Ok(set));
}

pub fn to_destination_seeds() -> Vec<Vec<u8>> {
    let region = RemoteRegion { addr: 4096, len: 2 << 20, rkey: 5 };
    let part = RegionPart { start: 2 << 20, region };
    let run = WireRun { block: 0, start: 3, len: 9, zero: true };
    let sets = [WireSet::All, WireSet::Runs(vec![(3, 4), (1, 9)]), WireSet::Bits(vec![5; 1])];
    let outdated = |set| Outdated { block: 0, part: WirePart { first: 2, pages: 64, set } };
    let last = Final { stopped_at: Mono(77), mode: Mode::Hybrid };
    encoded(&[
        ToDestination::Prepare(Box::new(prepare())),
        ToDestination::Ping(7),
        ToDestination::Regions(Regions {
            fabric: FabricKind::Tcp,
            update: true,
            blocks: vec![BlockRegions { parts: vec![part] }],
        }),
        ToDestination::Round(RoundBegun { number: 1, compare: true, bytes: 4096 }),
        ToDestination::Runs(vec![run]),
        ToDestination::RoundEnd(1),
        ToDestination::Outdated(sets.into_iter().map(outdated).collect()),
        ToDestination::Stopped(last),
        ToDestination::FinalEnd,
        ToDestination::DisksWhole,
        ToDestination::Commit,
        ToDestination::Abort("why".to_owned().into()),
        ToDestination::Hashes(Hashes { block: 0, start: 5, hashes: vec![1, u64::MAX] }),
        ToDestination::HashesEnd,
        ToDestination::HostCpu(SourceCpu { used_ns: 1 << 40, processors: 2 }),
        ToDestination::RunsHere,
        ToDestination::Released("{}".to_owned()),
        ToDestination::AllAttached,
        ToDestination::Resume(SourceStand::Committed),
    ])
}

fn prepare() -> Prepare {
    let data = WireSet::Runs(vec![(0, 3)]);
    let disk = Disk {
        node: "n0".to_owned(),
        path: "/d.img".to_owned(),
        size: 1 << 30,
        read_only: false,
        shared: Some(true),
        fs: "nfs".to_owned(),
    };
    Prepare {
        vm: "web".to_owned(),
        source: "n1".to_owned(),
        boot_id: "boot".to_owned(),
        token: Token([3; 16]),
        spec: MigrationSpec::default(),
        check_only: false,
        command_line: vec!["qemu".to_owned(), "-m".to_owned(), "1G".to_owned()],
        environment: vec![("A".to_owned(), "b".to_owned())],
        backing: Backing::Thp,
        blocks: vec![BlockInfo { id: "ram0".to_owned(), size: 6 << 20, page_size: 4096, data }],
        qemu_version: "10.0.2".to_owned(),
        machine: "pc-q35-10.0".to_owned(),
        was_running: true,
        disks: vec![disk],
        moved: vec![MovedDisk {
            name: "vda".to_owned(),
            image: "{vmdir}/d.qcow2".to_owned(),
            format: "qcow2".to_owned(),
            size: 1 << 30,
            allocated: 1 << 20,
            cluster: 1 << 16,
            to: Some("/srv/d.qcow2".to_owned()),
        }],
        fabrics: Vec::new(),
        devices: Vec::new(),
        taps: Vec::new(),
        in_group: true,
        libvirt: None,
        home: None,
        home_port: None,
    }
}

fn encoded<M: Serialize>(messages: &[M]) -> Vec<Vec<u8>> {
    messages.iter().map(|message| encode(message).expect("it is short")[4..].to_vec()).collect()
}

pub const TO_SOURCE: Target = Target {
    name: "to-source",
    what: "messages of a migration's destination, and what its clock says",
    feed: to_source,
    seeds: to_source_seeds,
    words: &[],
    mutations: 450_000,
};

fn to_source(bytes: &[u8]) {
    let Some(message) = message::<ToSource>(bytes) else { return };
    let _ = message.name();
    if let ToSource::Pong { token, now } = message {
        for (sent, got) in [(0, 0), (5, u64::from(token)), (u64::MAX, 1), (now.0, u64::MAX)] {
            let _ = ClockOffset::from_sample(Mono(sent), now, Mono(got)).to_ours(now);
        }
    }
}

fn to_source_seeds() -> Vec<Vec<u8>> {
    let accepted = Accepted {
        destination: "n2".to_owned(),
        boot_id: "boot".to_owned(),
        fabric: FabricKind::Verbs,
        fabric_reason: "best".to_owned(),
        fabric_address: "n2:1".to_owned(),
        bulk_connections: 4,
        may_fall_back: true,
    };
    let counted = Counted { landed_bytes: 1, wire_bytes: 2, pages_left: 3 };
    encoded(&[
        ToSource::Accepted(Box::new(accepted)),
        ToSource::Refused(Vec::new()),
        ToSource::Checked { blockers: Vec::new(), fabric: "tcp".to_owned(), warnings: Vec::new() },
        ToSource::Pong { token: 1, now: Mono(2) },
        ToSource::Prepared,
        ToSource::RoundDone(RoundDone { round: 1, bytes: 2, micros: 3 }),
        ToSource::Loaded,
        ToSource::Attached,
        ToSource::Running(Running { resumed_at: Some(Mono(5)), pages_left: 9 }),
        ToSource::Progress(counted),
        ToSource::Complete(Box::new(Complete { counted, differing_pages: Some(0), ..Complete::default() })),
        ToSource::Failed("why".to_owned()),
        ToSource::Resume(DestinationStand::Owner),
        ToSource::PagesLost { why: "cut".to_owned(), same_fabric: true },
    ])
}

pub const PAGE_SETS: Target = Target {
    name: "page-sets",
    what: "sets of pages, of a RAM block of any length",
    feed: page_sets,
    seeds: page_sets_seeds,
    words: &[],
    mutations: 600_000,
};

#[derive(Serialize, Deserialize)]
struct Sets {
    pages: u16,
    sets: Vec<WireSet>,
}

fn page_sets(bytes: &[u8]) {
    let Ok(Sets { pages, sets }) = decode::<Sets>(bytes) else { return };
    let pages = u64::from(pages);
    let mut all = PageSet::empty(pages);
    for set in sets.iter().take(16).filter_map(|set| PageSet::decode(set, pages).ok()) {
        assert_eq!(PageSet::decode(&set.encode(), pages).as_ref(), Ok(&set));
        let before = all.count();
        all.union(&set);
        assert!(all.count() >= before.max(set.count()) && all.count() <= pages);
        assert_eq!(all.common(&set), set);
    }
    all.runs().collect::<Vec<_>>().into_iter().for_each(|run| all.remove(run));
    assert!(all.is_empty());
}

fn page_sets_seeds() -> Vec<Vec<u8>> {
    let sets = vec![WireSet::Runs(vec![(0, 64), (5, 1)]), WireSet::Bits(vec![1, 2, 3]), WireSet::All];
    encoded(&[Sets { pages: 130, sets }, Sets { pages: 0, sets: vec![WireSet::All] }])
}
