//! What `vmoved` tells systemd, over a socket as systemd's.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use common::{Node, signal};
use rustix::process::Signal;

/// Time of the watchdog.
const WATCHDOG: Duration = Duration::from_millis(900);

/// systemd's end: what is told within some time, a word each.
struct Systemd(UnixDatagram);

impl Systemd {
    fn hear(&self, time: Duration) -> Vec<String> {
        let end = Instant::now() + time;
        let mut heard = Vec::new();
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.0.set_read_timeout(Some(left)).unwrap();
            let mut bytes = [0; 4096];
            let Ok(count) = self.0.recv(&mut bytes) else { break };
            heard.extend(String::from_utf8_lossy(&bytes[..count]).lines().map(str::to_owned));
        }
        heard
    }
}

#[test]
fn the_watchdog_hears_of_a_daemon_as_long_as_it_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let systemd = Systemd(UnixDatagram::bind(&path).unwrap());
    let mut node = Node::start_with_environment(&[
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("WATCHDOG_USEC", &WATCHDOG.as_micros().to_string()),
    ]);
    let heard = systemd.hear(WATCHDOG * 4);
    assert!(heard.contains(&"READY=1".to_owned()), "{heard:?}\n{}", node.log());
    let told = |heard: &[String]| heard.iter().filter(|word| *word == "WATCHDOG=1").count();
    assert!(told(&heard) >= 4, "within four times the watchdog's: {heard:?}\n{}", node.log());

    signal(node.pid(), Signal::STOP);
    systemd.hear(Duration::from_millis(100));
    let heard = systemd.hear(WATCHDOG * 2);
    assert_eq!(told(&heard), 0, "of a daemon that stands still: {heard:?}");
    signal(node.pid(), Signal::CONT);
    assert!(told(&systemd.hear(WATCHDOG)) > 0, "it goes on: {}", node.log());

    // It runs, and nobody reaches it.
    std::fs::remove_file(node.control()).unwrap();
    systemd.hear(WATCHDOG / 2);
    let heard = systemd.hear(WATCHDOG * 2);
    assert_eq!(told(&heard), 0, "of a daemon without a socket: {heard:?}\n{}", node.log());
    assert!(node.log().contains("the watchdog is not told"), "{}", node.log());
    assert_eq!(node.stop(), Some(0));
    assert!(systemd.hear(Duration::from_millis(100)).contains(&"STOPPING=1".to_owned()));
}
