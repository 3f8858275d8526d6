//! Against the other end of a socket, which says what a host says, and in what pieces.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use super::*;
use crate::MAX_LINE;

/// A port whose host reads a line and says the next of `answers`, until there are no more. Gives the lines back.
fn port(answers: Vec<String>) -> (Port, JoinHandle<Vec<String>>) {
    let (guest, host) = UnixStream::pair().unwrap();
    guest.set_nonblocking(true).unwrap();
    let port = Port::of(File::from(OwnedFd::from(guest)), Duration::from_secs(2));
    let host = std::thread::spawn(move || {
        let mut lines = BufReader::new(host.try_clone().unwrap()).lines();
        let mut host = host;
        let mut heard = Vec::new();
        for answer in answers {
            heard.push(lines.next().unwrap().unwrap());
            // In pieces.
            for piece in answer.as_bytes().chunks(7_000.max(answer.len() / 5)) {
                host.write_all(piece).unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        heard
    });
    (port, host)
}

fn lines(answers: &[&str]) -> Vec<String> {
    answers.iter().map(|answer| format!("{answer}\n")).collect()
}

const CHILD: &str = r#"{"role":"child","index":3,"size":4,"ticket":"t"}"#;

#[test]
fn a_fork_is_asked_for_and_answered() {
    let (mut port, host) = port(lines(&[CHILD]));
    assert_eq!(port.fork(4).unwrap(), Role { index: 3, size: 4, ticket: "t".to_owned() });
    assert_eq!(host.join().unwrap(), [r#"{"fork":4}"#]);
}

#[test]
fn a_busy_host_is_asked_again() {
    let busy = r#"{"error":"busy","message":"too many lines"}"#;
    let (mut port, host) = port(lines(&[busy, busy, CHILD]));
    assert_eq!(port.fork(1).unwrap().index, 3);
    assert_eq!(host.join().unwrap().len(), 3);
}

#[test]
fn one_that_stays_busy_is_told_of() {
    let (mut port, _host) = port(lines(&[r#"{"error":"busy","message":"another fork"}"#]));
    port.patience = Duration::ZERO;
    let problem = port.fork(1).unwrap_err();
    assert!(matches!(&problem, Problem::Refused { code, .. } if code == "busy"), "{problem}");
    assert!(problem.to_string().contains("another fork. Try again later"), "{problem}");
}

#[test]
fn answers_to_others_are_passed_over_and_long_ones_read() {
    let long = "r".repeat(60_000);
    let children: Vec<Value> = (1..=40).map(|index| json!({ "index": index, "result": long })).collect();
    let joined = json!({ "joined": "t", "children": children });
    let (mut port, host) = port(vec![format!("{CHILD}\n{{\"joined\":\"u\",\"children\":[]}}\n{joined}\n")]);
    let ends = port.join("t").unwrap();
    assert_eq!(ends.len(), 40);
    assert_eq!((ends[39].index, ends[39].result.as_str()), (40, Some(&*long)));
    host.join().unwrap();
}

#[test]
fn what_was_said_before_a_request_is_no_answer_to_it() {
    let (guest, mut host) = UnixStream::pair().unwrap();
    guest.set_nonblocking(true).unwrap();
    let mut port = Port::of(File::from(OwnedFd::from(guest)), Duration::from_secs(2));
    host.write_all(b"{\"error\":\"forbidden\",\"message\":\"of somebody else\"}\n{\"joined\"").unwrap();
    let answer = std::thread::spawn(move || {
        BufReader::new(host.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
        host.write_all(b"{\"killed\":\"t\",\"children\":2}\n").unwrap();
        host
    });
    assert_eq!(port.kill("t").unwrap(), 2);
    answer.join().unwrap();
}

#[test]
fn what_is_too_long_is_not_written() {
    let (mut port, host) = port(Vec::new());
    let problem = port.exit("t", &json!("x".repeat(MAX_LINE)));
    assert!(matches!(problem, Problem::TooLong(length) if length > MAX_LINE), "{problem}");
    host.join().unwrap();
}

#[test]
fn a_host_that_reads_nothing_is_told_of() {
    let (guest, _host) = UnixStream::pair().unwrap();
    guest.set_nonblocking(true).unwrap();
    let mut port = Port::of(File::from(OwnedFd::from(guest)), Duration::from_millis(200));
    let line = "x".repeat(MAX_LINE);
    let problem = (0..100).find_map(|_| port.say(&line).err()).expect("sockets hold less");
    assert!(matches!(problem, Problem::NobodyListens { .. }), "{problem}");
}

#[test]
fn what_is_no_answer_is_shown() {
    let (mut port, _host) = port(lines(&["OK"]));
    let problem = port.join("t").unwrap_err();
    assert_eq!(problem.to_string(), r#"expected an answer in JSON, found "OK""#);
}
