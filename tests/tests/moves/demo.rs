//! `./run demo`, as whoever wants to see vmove runs it after the build: what it says, and how long it takes.
#![cfg(test)]

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use vmove_skip::installed::text;
use vmove_skip::need;
use vmove_tests::process::Guarded;
use vmove_tests::scene::ready;

/// Nobody waits longer for a demonstration.
const LIMIT: Duration = Duration::from_secs(180);
/// To end its guest and daemons.
const CLEANING_UP: Duration = Duration::from_secs(30);

/// The steps that it tells, without numbers: times and ports are others each time.
fn steps(said: &str) -> Vec<String> {
    let steps = said.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("] "));
    steps.map(|(_, step)| step.chars().filter(|c| !c.is_ascii_digit()).collect()).collect()
}

#[test]
fn the_demonstration_is_over_within_three_minutes() {
    need!(ready());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("said");
    let file = std::fs::File::create(&path).expect("a file");
    let said = || std::fs::read_to_string(&path).expect("what it said");
    let began = Instant::now();
    let child = Command::new(env!("CARGO_BIN_EXE_demo"))
        .stdout(file.try_clone().expect("the file again"))
        .stderr(file)
        .spawn()
        .expect("it starts");
    let mut demo = Guarded::from(child);
    let Some(ended) = demo.wait(LIMIT).expect("it is waited for") else {
        let _ = demo.signal(Signal::SIGTERM).and_then(|()| demo.wait(CLEANING_UP));
        panic!("expected the demonstration to be over within {LIMIT:?}, found it here:\n{}", said());
    };
    let (took, said) = (began.elapsed(), said());
    assert!(ended.success(), "{ended}:\n{said}");
    assert!(said.contains("guest memory is intact"), "{said}");
    eprintln!("the demonstration took {:.1} s", took.as_secs_f64());
    let readme = text("README.md");
    let (_, shown) = readme.split_once("<!-- demo output -->").expect("its begin");
    let (shown, _) = shown.split_once("<!-- /demo output -->").expect("its end");
    assert_eq!(steps(shown), steps(&said), "the README shows other steps");
}
