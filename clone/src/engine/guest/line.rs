//! What a guest may say on its port: lines of JSON, not too long and not too many. The guest is not trusted.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;

use vmove_types::problem::Code;

/// Longest line, in bytes: a child's result is one.
pub const MAX_LINE: usize = 64 << 10;
/// Lines that may come at once.
const BURST: u32 = 16;
/// Lines in a second, over longer times.
const PER_SECOND: u32 = 8;
/// A guest that is faster is not listened to for so long.
const REST_INTERVAL: Duration = Duration::from_secs(2);

/// A line as it came.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// Without its end.
    Whole(Vec<u8>),
    /// Its end did not come in time; the rest of it is passed over.
    TooLong,
    /// It came too soon after many others.
    TooFast,
}

impl Line {
    /// Whether it is this request.
    pub fn asks(&self, request: &Request) -> bool {
        matches!(self, Self::Whole(line) if parse(line).is_ok_and(|asked| asked == *request))
    }
}

/// Lines of a port.
#[derive(Debug)]
pub struct Lines<R> {
    from: R,
    buffer: Vec<u8>,
    /// Inside a line that is too long.
    passing: bool,
    /// Lines that may come now, in thousandths.
    credit: u64,
    counted: Instant,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub fn new(from: R) -> Self {
        let credit = u64::from(BURST) * 1000;
        Self { from, buffer: Vec::new(), passing: false, credit, counted: Instant::now() }
    }

    /// The next line; `None` when the port is closed. May be dropped and called again.
    pub async fn next(&mut self) -> Option<Line> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
                line.pop();
                if std::mem::take(&mut self.passing) {
                    continue;
                }
                return Some(match self.pay().await {
                    true if line.len() > MAX_LINE => Line::TooLong,
                    true => Line::Whole(line),
                    false => Line::TooFast,
                });
            }
            if self.buffer.len() > MAX_LINE {
                self.buffer.clear();
                if !std::mem::replace(&mut self.passing, true) {
                    return Some(if self.pay().await { Line::TooLong } else { Line::TooFast });
                }
            }
            match self.from.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Takes one line's credit. Without any, waits: QEMU stops the guest's writes when nobody reads.
    async fn pay(&mut self) -> bool {
        let now = Instant::now();
        let passed = u64::try_from(now.duration_since(self.counted).as_millis()).unwrap_or(u64::MAX);
        self.counted = now;
        let earned = passed.saturating_mul(PER_SECOND.into());
        self.credit = self.credit.saturating_add(earned).min(u64::from(BURST) * 1000);
        if self.credit >= 1000 {
            self.credit -= 1000;
            return true;
        }
        tokio::time::sleep(REST_INTERVAL).await;
        false
    }
}

/// Of a result: what joins it has libraries that read no deeper.
const DEEPEST: usize = 56;

/// What a guest asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// So many children.
    Fork(usize),
    /// Wait until all children of this ticket have ended.
    Join(String),
    /// This child has ended, with this result.
    Exit(String, Value),
    /// End all children of this ticket.
    Kill(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Words {
    fork: Option<usize>,
    join: Option<String>,
    exit: Option<String>,
    kill: Option<String>,
    result: Value,
}

/// Reads a line.
///
/// # Errors
/// What to tell the guest.
pub fn parse(line: &[u8]) -> Result<Request, Refusal> {
    let request: Words =
        serde_json::from_slice(line).map_err(|error| Refusal::new(Code::BadRequest, error.to_string()))?;
    let Words { fork, join, exit, kill, result } = request;
    match (fork, join, exit, kill) {
        (Some(count), None, None, None) if result.is_null() => Ok(Request::Fork(count)),
        (None, Some(ticket), None, None) if result.is_null() => Ok(Request::Join(ticket)),
        (None, None, Some(_), None) if depth(&result) > DEEPEST => {
            let text =
                format!("expected a result with at most {DEEPEST} lists and objects within each other");
            Err(Refusal::new(Code::BadRequest, text))
        }
        (None, None, Some(ticket), None) => Ok(Request::Exit(ticket, result)),
        (None, None, None, Some(ticket)) if result.is_null() => Ok(Request::Kill(ticket)),
        _ => {
            let text = "expected one of fork, join, exit and kill; only exit has a result";
            Err(Refusal::new(Code::BadRequest, text))
        }
    }
}

/// A list or object is one deeper than what it holds. The line was read with a limit for that.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(all) => 1 + all.iter().map(depth).max().unwrap_or(0),
        Value::Object(all) => 1 + all.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Why a guest does not get what it asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    code: Code,
    message: String,
}

impl Refusal {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Guests may not fork themselves.
    pub fn not_here() -> Self {
        Self::new(Code::Forbidden, "this host lets no guest fork itself")
    }

    /// What another node is told.
    pub fn into_parts(self) -> (Code, String) {
        (self.code, self.message)
    }

    /// What is written to the guest.
    pub fn line(&self) -> Value {
        json!({ "error": self.code.word(), "message": self.message })
    }
}

/// Reads bytes as those of a guest, for `tests/fuzz`. More lines than may come at once are left out: they would be waited for.
#[cfg(feature = "fuzzing")]
pub fn any_lines(bytes: &[u8]) {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    let most = bytes.split_inclusive(|byte| *byte == b'\n').take(BURST as usize - 1).map(<[u8]>::len).sum();
    let mut lines = Lines::new(&bytes[..most]);
    while let Poll::Ready(Some(line)) = pin!(lines.next()).poll(&mut Context::from_waker(Waker::noop())) {
        assert_ne!(line, Line::TooFast);
        let Line::Whole(line) = line else { continue };
        assert!(line.len() <= MAX_LINE);
        match parse(&line) {
            Ok(_) => {}
            Err(refusal) => assert!(refusal.line()["error"].is_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lines_are_cut_bounded_and_counted() {
        let (mut guest, host) = tokio::io::duplex(4 << 20);
        let mut lines = Lines::new(host);
        guest.write_all(b"{\"a\":1}\n\nhalf").await.unwrap();
        assert_eq!(lines.next().await, Some(Line::Whole(b"{\"a\":1}".to_vec())));
        assert_eq!(lines.next().await, Some(Line::Whole(Vec::new())));
        guest.write_all(b" a line\n").await.unwrap();
        assert_eq!(lines.next().await, Some(Line::Whole(b"half a line".to_vec())));
        // However long it is, it is told of once, and what follows it is a line again.
        guest.write_all(&vec![b'x'; 10 * MAX_LINE]).await.unwrap();
        assert_eq!(lines.next().await, Some(Line::TooLong));
        guest.write_all(b"\nnext\n").await.unwrap();
        assert_eq!(lines.next().await, Some(Line::Whole(b"next".to_vec())));
        assert!(lines.buffer.len() <= MAX_LINE);

        let begun = Instant::now();
        guest.write_all(&b"x\n".repeat(100)).await.unwrap();
        let mut passed = 0_u64;
        for _ in 0..100 {
            passed += u64::from(lines.next().await != Some(Line::TooFast));
        }
        let seconds = begun.elapsed().as_secs();
        assert!(passed >= 11 && passed < 16 + 8 * (seconds + 1), "{passed} lines in {seconds} s");
        drop(guest);
        assert_eq!(lines.next().await, None);
    }

    #[test]
    fn a_result_is_not_too_deep_for_who_joins_it() {
        let exit = |deep: usize| {
            let line = format!(r#"{{"exit":"t","result":{}{}}}"#, "[".repeat(deep), "]".repeat(deep));
            parse(line.as_bytes())
        };
        assert!(matches!(exit(DEEPEST), Ok(Request::Exit(..))));
        assert!(exit(DEEPEST + 1).unwrap_err().to_string().contains("within each other"));
        exit(1000).unwrap_err();
    }

    #[test]
    fn requests_are_read_or_refused() {
        let ask = |text: &str| parse(text.as_bytes());
        assert_eq!(ask(r#"{"fork": 4}"#), Ok(Request::Fork(4)));
        assert_eq!(ask(r#"{"join": "t"}"#), Ok(Request::Join("t".to_owned())));
        assert_eq!(ask(r#"{"exit":"t"}"#), Ok(Request::Exit("t".to_owned(), Value::Null)));
        assert_eq!(ask(r#"{"exit":"t","result":[1]}"#), Ok(Request::Exit("t".to_owned(), json!([1]))));
        assert_eq!(ask(r#"{"kill":"t"}"#), Ok(Request::Kill("t".to_owned())));
        for bad in [
            "",
            "fork 3",
            "{}",
            "[]",
            r#"{"fork":-1}"#,
            r#"{"fork":1e99}"#,
            r#"{"fork":1,"kill":"t"}"#,
            r#"{"fork":1,"result":2}"#,
            r#"{"fork":1,"to":"b"}"#,
            r#"{"join":7}"#,
            &"[".repeat(60_000),
        ] {
            let refused = ask(bad).unwrap_err().line();
            assert_eq!(refused["error"], "bad-request", "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
        }
    }
}
