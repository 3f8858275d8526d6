//! Bytes of a QMP socket to messages. Knows nothing of sockets, ids in use or events wanted.
//!
//! QEMU ends each message with CR LF and never starts a line with `{` except at the start of a message, also with
//! `pretty=on`, where nested lines are indented. That is the resynchronisation rule: a line that starts with `{` begins a
//! new message, whatever was pending; so one broken line costs one message, not the connection.

use serde_json::Value;

/// Longest message accepted, in bytes. The largest of QEMU 10.0 is `query-qmp-schema`, about 0.5 MiB.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;

/// How much of a bad message an error shows, in bytes.
const EXCERPT: usize = 120;

/// One thing read from a QMP socket.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Incoming {
    /// First message of a connection.
    Greeting(Value),
    /// A command succeeded.
    Return { id: Option<u64>, value: Value },
    /// A command was refused.
    Refused { id: Option<u64>, class: String, description: String },
    /// An event; the whole message.
    Event { name: String, data: Value, seconds: i64, micros: i64, whole: Value },
    /// Not QMP. `id` is set when the remains show which command it answered.
    Malformed { id: Option<u64>, detail: String },
}

/// Cuts a byte stream into messages.
#[derive(Debug)]
pub(crate) struct Framer {
    /// Bytes of the message under way.
    pending: Vec<u8>,
    /// Scanner state over `pending`: how many brackets are open, and whether we are in a string.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// Set while the rest of an overlong or broken message is thrown away.
    skipping: bool,
    at_line_start: bool,
}

impl Default for Framer {
    fn default() -> Self {
        Self {
            pending: Vec::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            skipping: false,
            at_line_start: true,
        }
    }
}

impl Framer {
    /// Takes `bytes` and calls `out` once per message that they complete.
    pub(crate) fn push(&mut self, bytes: &[u8], mut out: impl FnMut(Incoming)) {
        for line in bytes.split_inclusive(|&b| b == b'\n') {
            if self.at_line_start && line.first() == Some(&b'{') {
                self.abandon(&mut out);
            }
            self.at_line_start = line.ends_with(b"\n");
            self.take(line, &mut out);
        }
    }

    /// What is pending at the end of the stream, if it is more than blanks.
    pub(crate) fn finish(&mut self, mut out: impl FnMut(Incoming)) {
        self.abandon(&mut out);
    }

    fn abandon(&mut self, out: &mut impl FnMut(Incoming)) {
        if !self.skipping && !self.pending.trim_ascii().is_empty() {
            out(malformed(&self.pending, "message is cut off"));
        }
        self.reset();
    }

    fn reset(&mut self) {
        self.pending.clear();
        (self.depth, self.in_string, self.escaped, self.skipping) = (0, false, false, false);
    }

    fn take(&mut self, line: &[u8], out: &mut impl FnMut(Incoming)) {
        if self.skipping {
            // Broken text that had no bracket open ends with its line.
            if self.depth == 0 && line.ends_with(b"\n") {
                self.reset();
            }
            return;
        }
        for &byte in line {
            self.scan(byte);
        }
        self.pending.extend_from_slice(line);
        if self.pending.len() > MAX_MESSAGE {
            out(malformed(&self.pending, "message is longer than 16 MiB"));
            self.pending = Vec::new();
            self.skipping = true;
            self.depth = self.depth.max(1);
        } else if self.depth == 0 && line.ends_with(b"\n") {
            let message = self.pending.trim_ascii();
            if !message.is_empty() {
                out(parse(message));
            }
            self.reset();
        }
    }

    fn scan(&mut self, byte: u8) {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                // No line end inside a JSON string: the string is broken, let the parser say so.
                b'\n' => (self.in_string, self.depth) = (false, 0),
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth = self.depth.saturating_add(1),
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
    }
}

/// Reads one complete message.
pub(crate) fn parse(message: &[u8]) -> Incoming {
    let value: Value = match serde_json::from_slice(message) {
        Ok(value) => value,
        Err(error) => return malformed(message, &error.to_string()),
    };
    let Value::Object(object) = &value else {
        return malformed(message, "a message must be a JSON object");
    };
    let id = object.get("id").and_then(Value::as_u64);
    if let Some(name) = object.get("event").and_then(Value::as_str) {
        let stamp = |field| {
            object.get("timestamp").and_then(|t| t.get(field)).and_then(Value::as_i64).unwrap_or_default()
        };
        return Incoming::Event {
            name: name.to_owned(),
            data: object.get("data").cloned().unwrap_or(Value::Null),
            seconds: stamp("seconds"),
            micros: stamp("microseconds"),
            whole: value,
        };
    }
    if let Some(error) = object.get("error") {
        let text = |field| error.get(field).and_then(Value::as_str).unwrap_or("not given").to_owned();
        return Incoming::Refused { id, class: text("class"), description: text("desc") };
    }
    match value {
        Value::Object(mut object) => {
            if let Some(value) = object.remove("return") {
                Incoming::Return { id, value }
            } else if let Some(greeting) = object.remove("QMP") {
                Incoming::Greeting(greeting)
            } else {
                malformed(message, "neither return, error, event nor greeting")
            }
        }
        _ => malformed(message, "a message must be a JSON object"),
    }
}

fn malformed(message: &[u8], why: &str) -> Incoming {
    let text = String::from_utf8_lossy(&message[..message.len().min(EXCERPT)]);
    Incoming::Malformed { id: find_id(message), detail: format!("{why}, in {:?}", text.trim_end()) }
}

/// The id in a message that does not parse, so that the command it answers can fail at once. QEMU writes the id last or
/// first, so only an unambiguous single hit counts.
fn find_id(message: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(message).ok()?;
    let mut hits = text.match_indices("\"id\":").map(|(at, key)| {
        let digits = text[at + key.len()..].trim_start();
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().ok()
    });
    match (hits.next(), hits.next()) {
        (Some(id), None) => id,
        _ => None,
    }
}

/// One command line for the wire, with its line end.
pub(crate) fn encode(
    command: &str,
    arguments: Option<&Value>,
    id: u64,
    out_of_band: bool,
) -> Result<Vec<u8>, serde_json::Error> {
    let mut message = serde_json::Map::new();
    message.insert(if out_of_band { "exec-oob" } else { "execute" }.to_owned(), command.into());
    if let Some(arguments) = arguments {
        message.insert("arguments".to_owned(), arguments.clone());
    }
    message.insert("id".to_owned(), id.into());
    let mut line = serde_json::to_vec(&message)?;
    line.push(b'\n');
    Ok(line)
}
