use std::io::Write;

use super::*;

/// A host's end of its wire.
struct Host(UnixStream);

impl Host {
    fn send(&mut self, to: u8, from: u8, text: &[u8]) {
        let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
        if to == 255 {
            frame[..6].fill(255);
        }
        frame.extend(text);
        let mut bytes = u32::try_from(frame.len()).unwrap().to_be_bytes().to_vec();
        bytes.extend(frame);
        self.0.write_all(&bytes).unwrap();
    }

    /// The text of the next frame, if one comes in time.
    fn receive(&mut self, within: Duration) -> Option<Vec<u8>> {
        self.0.set_read_timeout(Some(within)).unwrap();
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        self.0.read_exact(&mut frame).unwrap();
        Some(frame[HEADER..].to_vec())
    }
}

const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);
const SILENCE_INTERVAL: Duration = Duration::from_millis(50);

/// A switch with three hosts that have all been heard.
fn three(name: &str) -> (Arc<Switch>, [Host; 3]) {
    let folder = std::env::temp_dir().join(format!("vmove-switch-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let paths: Vec<_> = (0..3).map(|port| folder.join(port.to_string())).collect();
    let switch = Switch::start(&paths).unwrap();
    let mut hosts = [0, 1, 2].map(|port: usize| Host(UnixStream::connect(&paths[port]).unwrap()));
    std::fs::remove_dir_all(&folder).unwrap();
    // Frames for a host whose connection is not yet accepted are lost, so greet until everybody was heard.
    for from in 0..3 {
        for to in (0..3).filter(|&to| to != from) {
            loop {
                hosts[from].send(255, u8::try_from(from).unwrap(), b"hello");
                if hosts[to].receive(SILENCE_INTERVAL).is_some() {
                    break;
                }
            }
        }
    }
    for host in &mut hosts {
        while host.receive(SILENCE_INTERVAL).is_some() {}
    }
    (switch, hosts)
}

#[test]
fn a_frame_goes_to_its_host_and_a_broadcast_to_all_others() {
    let (_switch, mut hosts) = three("forward");
    hosts[0].send(1, 0, b"for one");
    assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap(), b"for one");
    assert_eq!(hosts[2].receive(SILENCE_INTERVAL), None);
    hosts[2].send(255, 2, b"for all");
    assert_eq!(hosts[0].receive(ARRIVAL_TIMEOUT).unwrap(), b"for all");
    assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap(), b"for all");
    assert_eq!(hosts[2].receive(SILENCE_INTERVAL), None);
}

#[test]
fn a_cut_is_one_way_and_can_be_healed() {
    let (switch, mut hosts) = three("cut");
    switch.set(Some(0), Some(1), Rule { cut: true, ..Rule::default() });
    hosts[0].send(1, 0, b"lost");
    assert_eq!(hosts[1].receive(SILENCE_INTERVAL), None);
    hosts[1].send(0, 1, b"back");
    assert_eq!(hosts[0].receive(ARRIVAL_TIMEOUT).unwrap(), b"back");
    switch.set(None, None, Rule::default());
    hosts[0].send(1, 0, b"again");
    assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap(), b"again");
}

#[test]
fn frames_are_lost_late_and_out_of_order_as_told() {
    let (switch, mut hosts) = three("rules");
    switch.set(Some(0), Some(1), Rule { drop: 0.2, ..Rule::default() });
    for _ in 0..1000 {
        hosts[0].send(1, 0, b"maybe");
    }
    let mut arrived = 0;
    while hosts[1].receive(Duration::from_millis(300)).is_some() {
        arrived += 1;
    }
    assert!((700..900).contains(&arrived), "{arrived} of 1000 arrived at a loss of 20 %");

    // A frame for one host alone is none for a group.
    switch.set(Some(0), Some(1), Rule { drop_multicast: 1.0, ..Rule::default() });
    hosts[0].send(1, 0, b"to one");
    assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap(), b"to one");
    hosts[0].send(0xff, 0, b"to all");
    assert_eq!(hosts[1].receive(SILENCE_INTERVAL), None);
    assert_eq!(hosts[2].receive(ARRIVAL_TIMEOUT).unwrap(), b"to all");

    switch.set(Some(0), Some(1), Rule { delay_us: 100_000, ..Rule::default() });
    let begin = Instant::now();
    hosts[0].send(1, 0, b"late");
    assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap(), b"late");
    assert!(begin.elapsed() >= Duration::from_millis(100), "{:?}", begin.elapsed());

    switch.set(Some(0), Some(1), Rule { reorder: 0.2, ..Rule::default() });
    let numbers: Vec<u8> = (0..100).collect();
    for number in &numbers {
        hosts[0].send(1, 0, &[*number]);
    }
    let mut found: Vec<u8> = (0..100).map(|_| hosts[1].receive(ARRIVAL_TIMEOUT).unwrap()[0]).collect();
    assert_ne!(found, numbers, "nothing was overtaken");
    found.sort_unstable();
    assert_eq!(found, numbers, "something was lost or came twice");
}

#[test]
fn a_rate_holds_frames_back_and_loses_none() {
    let (switch, mut hosts) = three("rate");
    // 100 frames of 1014 bytes at 10 Mbit/s take 81 ms.
    switch.set(Some(0), Some(1), Rule { rate_mbit: 10, ..Rule::default() });
    let begin = Instant::now();
    for _ in 0..100 {
        hosts[0].send(1, 0, &[7; 1000]);
    }
    for _ in 0..100 {
        assert_eq!(hosts[1].receive(ARRIVAL_TIMEOUT).unwrap().len(), 1000);
    }
    let took = begin.elapsed();
    assert!((Duration::from_millis(78)..Duration::from_millis(2000)).contains(&took), "{took:?}");
    assert!(switch.stats().contains("rate=10"), "{}", switch.stats());
}
