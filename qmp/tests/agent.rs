//! The guest agent: one that is played, well and badly, and a real qemu-ga.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use vmove_qmp::agent::{Agent, AgentError, ExecRequest, Finish};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// For those that answer nothing.
const SHORT: Duration = Duration::from_millis(300);

/// What a played agent says to a command, as bytes; the number says how many commands came before.
type Script = fn(&Value, usize) -> Vec<u8>;

struct Played {
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

/// Answers `guest-sync-delimited` as it should, and everything else by the script.
fn play(script: Script) -> Played {
    play_after(Vec::new(), script)
}

/// The same with bytes that are in the port already: answers to questions of an earlier life.
fn play_after(before: Vec<u8>, script: Script) -> Played {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, before.clone(), script));
        }
    });
    Played { socket, _folder: folder }
}

async fn serve(mut stream: UnixStream, before: Vec<u8>, script: Script) {
    let _ = stream.write_all(&before).await;
    let (mut input, mut count) = (Vec::new(), 0);
    loop {
        while let Some(at) = input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = input.drain(..=at).collect();
            let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
            let command: Value = serde_json::from_slice(line).unwrap();
            let said = if command["execute"] == "guest-sync-delimited" {
                [vec![0xff], answer(&command["arguments"]["id"])].concat()
            } else {
                count += 1;
                script(&command, count - 1)
            };
            // Whoever asked may have gone.
            let _ = stream.write_all(&said).await;
        }
        if stream.read_buf(&mut input).await.unwrap_or(0) == 0 {
            return;
        }
    }
}

fn answer(value: &Value) -> Vec<u8> {
    format!("{}\n", json!({ "return": value })).into_bytes()
}

async fn connect(played: &Played) -> Agent {
    Agent::connect(&played.socket, ANSWER_TIMEOUT).await.unwrap()
}

#[tokio::test]
async fn a_program_runs_and_its_output_is_kept() {
    let played = play(|command, count| match (command["execute"].as_str(), count) {
        (Some("guest-exec"), _) => {
            assert_eq!(command["arguments"]["path"], "/bin/sh");
            assert_eq!(command["arguments"]["arg"], json!(["-c", "checkpoint"]));
            answer(&json!({ "pid": 77 }))
        }
        (Some("guest-exec-status"), 1..3) => answer(&json!({ "exited": false })),
        (Some("guest-exec-status"), _) => {
            assert_eq!(command["arguments"]["pid"], 77);
            answer(&json!({ "exited": true, "exitcode": 3, "out-data": "aGVsbG8=", "err-data": "b2g=" }))
        }
        other => panic!("{other:?}"),
    });
    let done = connect(&played).await.execute(&ExecRequest::shell("checkpoint")).await.unwrap();
    assert_eq!(
        (done.finish, done.out.as_slice(), done.err.as_slice()),
        (Finish::Exit(3), &b"hello"[..], &b"oh"[..])
    );
    assert!(!done.success() && !done.truncated);
}

#[tokio::test]
async fn answers_of_an_earlier_life_are_passed_over() {
    let before = [&b"{\"return\": {\"pid\": 1}}\n{\"retu"[..], &[0xff], b"{\"return\": 5}\n"].concat();
    let played = play_after(before, |_, _| answer(&json!({})));
    connect(&played).await.ping(ANSWER_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn an_agent_that_hangs_does_not_hang_us() {
    // Nobody reads the other end.
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent");
    let _listener = UnixListener::bind(&socket).unwrap();
    let begun = Instant::now();
    let error = Agent::connect(&socket, SHORT).await.unwrap_err();
    assert!(matches!(error, AgentError::Silent { .. }), "{error}");
    // It answers the first command and no other; the late answer of one is not taken for that of the next.
    let played = play(|command, count| match count {
        0 => Vec::new(),
        _ => answer(&command["execute"]),
    });
    let mut agent = connect(&played).await;
    let error = agent.ask("first", &Value::Null, SHORT).await.unwrap_err();
    assert!(matches!(&error, AgentError::Silent { command, .. } if command == "first"), "{error}");
    assert_eq!(agent.ask("second", &Value::Null, ANSWER_TIMEOUT).await.unwrap(), "second");
    // A program that never ends, and one whose end is never told.
    for script in [
        (|_: &Value, count| {
            if count == 0 { answer(&json!({"pid": 9})) } else { answer(&json!({"exited": false})) }
        }) as Script,
        |_, count| if count == 0 { answer(&json!({"pid": 9})) } else { Vec::new() },
    ] {
        let played = play(script);
        let request = ExecRequest { time: SHORT, ..ExecRequest::new("/bin/sleep") };
        let error = connect(&played).await.execute(&request).await.unwrap_err();
        assert!(matches!(error, AgentError::StillRuns { pid: 9, .. }), "{error}");
    }
    assert!(begun.elapsed() < ANSWER_TIMEOUT, "{:?}", begun.elapsed());
    let error = Agent::connect(Path::new("/nowhere/agent"), ANSWER_TIMEOUT).await.unwrap_err();
    assert!(matches!(error, AgentError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn an_agent_that_lies_is_told_from_one_that_works() {
    let cases: [(&str, Script); 7] = [
        ("no JSON", |_, _| b"yes yes\n".to_vec()),
        ("no object", |_, _| b"[1, 2]\n".to_vec()),
        ("no process id", |_, _| answer(&json!({ "pid": "seven" }))),
        ("no end", |_, count| {
            answer(&json!({ "pid": 1, "exited": if count > 0 { json!(7) } else { json!(null) } }))
        }),
        ("no status", |_, _| answer(&json!({ "pid": 1, "exited": true }))),
        ("no base64", |_, _| answer(&json!({ "pid": 1, "exited": true, "exitcode": 0, "out-data": "!!" }))),
        ("a number out of range", |_, _| answer(&json!({ "pid": 18_446_744_073_709_551_615_u64 }))),
    ];
    for (name, script) in cases {
        let played = play(script);
        let error = connect(&played).await.execute(&ExecRequest::new("/bin/true")).await.unwrap_err();
        assert!(matches!(error, AgentError::Nonsense { .. }), "{name}: {error}");
    }
    // More than an answer may have, without an end and with one; then it works again.
    let played = play(|_, count| match count {
        0 => vec![b'x'; 1 << 20],
        1 => [vec![b'x'; 1 << 20], b"\n".to_vec()].concat(),
        _ => answer(&json!({})),
    });
    let mut agent = connect(&played).await;
    for _ in 0..2 {
        let error = agent.ping(ANSWER_TIMEOUT).await.unwrap_err();
        assert!(matches!(error, AgentError::TooMuch { .. }), "{error}");
    }
    agent.ping(ANSWER_TIMEOUT).await.unwrap();
    let refused =
        play(|_, _| b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"disabled\"}}\n".to_vec());
    let error = connect(&refused).await.ping(ANSWER_TIMEOUT).await.unwrap_err();
    assert!(
        matches!(&error, AgentError::Refused { description, .. } if description == "disabled"),
        "{error}"
    );
    let closing = play(|_, _| answer(&json!({})));
    let mut agent = connect(&closing).await;
    drop(closing);
    // Its listener is gone, its connection is not: it still answers.
    agent.ping(ANSWER_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn more_output_than_wanted_is_cut() {
    let played = play(|_, count| match count {
        0 => answer(&json!({ "pid": 1 })),
        _ => answer(&json!({ "exited": true, "exitcode": 0, "out-data": "QUFB".repeat(100_000) })),
    });
    let request = ExecRequest { output: 1000, ..ExecRequest::new("/bin/cat") };
    let done = connect(&played).await.execute(&request).await.unwrap();
    assert!(done.truncated && done.out == vec![b'A'; 1000], "{} bytes", done.out.len());
}

/// A real agent on a socket, ended when dropped.
struct Real {
    child: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn real() -> Option<Real> {
    let named = std::env::var_os("VMOVE_QEMU_GA").map(PathBuf::from);
    let program = named.unwrap_or_else(|| PathBuf::from("/usr/sbin/qemu-ga"));
    if !program.is_file() {
        vmove_skip::skip!("no /usr/sbin/qemu-ga, and VMOVE_QEMU_GA names none (Debian: qemu-guest-agent)");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent");
    let child = Command::new(program)
        .args(["-m", "unix-listen", "-p"])
        .arg(&socket)
        .arg("-t")
        .arg(folder.path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    for _ in 0..100 {
        if socket.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(Real { child, socket, _folder: folder })
}

#[tokio::test]
async fn a_real_agent_runs_programs() {
    let Some(real) = real() else { return };
    let mut agent = Agent::connect(&real.socket, ANSWER_TIMEOUT).await.unwrap();
    agent.ping(ANSWER_TIMEOUT).await.unwrap();
    let info = agent.info(ANSWER_TIMEOUT).await.unwrap();
    println!("qemu-ga {}", info.version);
    assert!(info.can_execute);
    let mut request = ExecRequest::shell("echo $NAME; echo bad >&2; exit 4");
    request.environment.push("NAME=vmove".to_owned());
    let done = agent.execute(&request).await.unwrap();
    assert_eq!(
        (done.finish, done.out.as_slice(), done.err.as_slice()),
        (Finish::Exit(4), &b"vmove\n"[..], &b"bad\n"[..])
    );
    let done = agent.execute(&ExecRequest::shell("kill -TERM $$")).await.unwrap();
    assert_eq!(done.finish, Finish::Signal(15));
    let begun = Instant::now();
    let request = ExecRequest { time: SHORT, ..ExecRequest::shell("sleep 3") };
    let error = agent.execute(&request).await.unwrap_err();
    assert!(matches!(error, AgentError::StillRuns { .. }) && begun.elapsed() < ANSWER_TIMEOUT, "{error}");
    let request = ExecRequest { output: 100, ..ExecRequest::shell("head -c 300000 /dev/zero") };
    let done = agent.execute(&request).await.unwrap();
    assert!(done.truncated && done.out == [0; 100] && done.success(), "{done:?}");
    let error = agent.execute(&ExecRequest::new("/no/such/program")).await.unwrap_err();
    assert!(matches!(error, AgentError::Refused { .. }), "{error}");
}
