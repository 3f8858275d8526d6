//! Bytes of a QMP socket to messages. Knows nothing of sockets, ids in use or events wanted.
//!
//! QEMU writes a message as one line; with `pretty=on` as several, the first being `{` alone, the last `}` alone and all
//! between them indented. So a line that starts with `{` begins a new message, whatever was pending, and one broken
//! message never costs another.

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
#[derive(Debug, Default)]
pub(crate) struct Framer {
    /// The line under way.
    line: Vec<u8>,
    /// Lines of a pretty-printed message whose end has not come yet.
    pretty: Vec<u8>,
    /// Set while the rest of an overlong line is thrown away.
    skipping: bool,
}

impl Framer {
    /// Takes `bytes` and calls `out` once per message that they complete.
    pub(crate) fn push(&mut self, bytes: &[u8], mut out: impl FnMut(Incoming)) {
        for part in bytes.split_inclusive(|&b| b == b'\n') {
            let ends = part.ends_with(b"\n");
            if !self.skipping {
                self.line.extend_from_slice(part);
                if self.line.len() + self.pretty.len() > MAX_MESSAGE {
                    out(malformed(&self.line, "message is longer than 16 MiB"));
                    self.forget();
                    self.skipping = true;
                }
            }
            if ends {
                let line = std::mem::take(&mut self.line);
                if !std::mem::take(&mut self.skipping) {
                    self.take(&line, &mut out);
                }
            }
        }
    }

    /// What is pending at the end of the stream, if it is more than blanks.
    pub(crate) fn finish(&mut self, mut out: impl FnMut(Incoming)) {
        let line = std::mem::take(&mut self.line);
        self.take(&line, &mut out);
        self.abandon(&mut out);
    }

    fn take(&mut self, line: &[u8], out: &mut impl FnMut(Incoming)) {
        let text = line.trim_ascii_end();
        if text.first() == Some(&b'{') {
            self.abandon(out);
            if text.len() == 1 {
                self.pretty.extend_from_slice(line);
            } else {
                out(parse(text));
            }
        } else if !self.pretty.is_empty() {
            self.pretty.extend_from_slice(line);
            if text == b"}" {
                out(parse(&self.pretty));
                self.forget();
            }
        } else if !text.is_empty() {
            out(parse(text));
        }
    }

    fn abandon(&mut self, out: &mut impl FnMut(Incoming)) {
        if !self.pretty.is_empty() {
            out(malformed(&self.pretty, "message is cut off"));
            self.forget();
        }
    }

    /// Also gives the memory of a large message back.
    fn forget(&mut self) {
        self.line = Vec::new();
        self.pretty = Vec::new();
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn all(bytes: &[u8], chunks: &[usize]) -> Vec<Incoming> {
        let (mut framer, mut out, mut rest) = (Framer::default(), Vec::new(), bytes);
        for &chunk in chunks {
            let (now, later) = rest.split_at(chunk.min(rest.len()));
            framer.push(now, |message| out.push(message));
            rest = later;
        }
        framer.push(rest, |message| out.push(message));
        framer.finish(|message| out.push(message));
        out
    }

    fn is_malformed(message: &Incoming) -> bool {
        matches!(message, Incoming::Malformed { .. })
    }

    #[test]
    fn the_four_kinds_of_message() {
        let text = b"{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n\
            {\"return\": {}, \"id\": 1}\r\n\
            {\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}, \"id\": 2}\r\n\
            {\"timestamp\": {\"seconds\": 5, \"microseconds\": 7}, \"event\": \"STOP\"}\r\n";
        let found = all(text, &[]);
        assert_eq!(found.len(), 4);
        assert_eq!(found[0], Incoming::Greeting(json!({"version": {}, "capabilities": ["oob"]})));
        assert_eq!(found[1], Incoming::Return { id: Some(1), value: json!({}) });
        let refused =
            Incoming::Refused { id: Some(2), class: "GenericError".to_owned(), description: "no".to_owned() };
        assert_eq!(found[2], refused);
        let Incoming::Event { name, data, seconds, micros, .. } = &found[3] else {
            panic!("{:?}", found[3]);
        };
        assert_eq!((name.as_str(), data, *seconds, *micros), ("STOP", &Value::Null, 5, 7));
    }

    #[test]
    fn pretty_printed_messages_span_lines() {
        let pretty =
            b"{\r\n    \"return\": {\r\n        \"a\": \"}{\\\"\"\r\n    },\r\n    \"id\": 3\r\n}\r\n";
        assert_eq!(all(pretty, &[1, 5]), [Incoming::Return { id: Some(3), value: json!({"a": "}{\""}) }]);
    }

    #[test]
    fn a_cut_off_message_costs_only_itself_and_names_its_command() {
        let text = b"{\"return\": [1, 2, \"id\": 4}\r\n{\"return\": {}, \"id\": 5}\r\n";
        let found = all(text, &[]);
        assert!(matches!(&found[0], Incoming::Malformed { id: Some(4), .. }), "{found:?}");
        assert_eq!(found[1], Incoming::Return { id: Some(5), value: json!({}) });
        let open = b"{\"return\": {\"x\": \"no end\r\n{\"return\": {}, \"id\": 6}\r\n";
        let found = all(open, &[]);
        assert!(is_malformed(&found[0]) && found.len() == 2, "{found:?}");
    }

    #[test]
    fn an_overlong_message_is_dropped_and_the_next_is_read() {
        let mut text = b"{\"return\": \"".to_vec();
        text.resize(MAX_MESSAGE + 10, b'x');
        text.extend_from_slice(b"\", \"id\": 1}\r\n{\"return\": {}, \"id\": 2}\r\n");
        let found = all(&text, &[1 << 20; 20]);
        assert!(is_malformed(&found[0]), "{:?}", found[0]);
        assert_eq!(found[1..], [Incoming::Return { id: Some(2), value: json!({}) }]);
    }

    #[test]
    fn what_is_no_message_is_malformed() {
        for text in ["[1]\r\n", "7\r\n", "{\"nothing\": 1}\r\n", "QEMU 10.0 monitor\r\n", "{\"return\"\r\n"] {
            let found = all(text.as_bytes(), &[]);
            assert!(found.len() == 1 && is_malformed(&found[0]), "{text:?} gave {found:?}");
        }
        assert_eq!(all(b"\r\n  \r\n", &[]), []);
    }

    #[test]
    fn a_command_is_one_line() {
        let line = encode("add-fd", Some(&json!({"opaque": "a\nb"})), 9, false).unwrap();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let oob: Value = serde_json::from_slice(&encode("yank", None, 1, true).unwrap()).unwrap();
        assert_eq!(oob, json!({"exec-oob": "yank", "id": 1}));
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(".{0,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn write(value: &Value, id: u64, pretty: bool) -> Vec<u8> {
        let message = json!({"return": value, "id": id});
        let text =
            if pretty { serde_json::to_string_pretty(&message) } else { serde_json::to_string(&message) };
        let mut text = text.unwrap().replace('\n', "\r\n").into_bytes();
        text.extend_from_slice(b"\r\n");
        text
    }

    proptest! {
        /// However the bytes are cut, the messages are the same.
        #[test]
        fn cutting_does_not_matter(
            values in prop::collection::vec((json_value(), any::<bool>()), 1..6),
            chunks in prop::collection::vec(1usize..40, 0..40),
        ) {
            let mut text = Vec::new();
            let mut expected = Vec::new();
            for (id, (value, pretty)) in (1u64..).zip(&values) {
                text.extend(write(value, id, *pretty));
                expected.push(Incoming::Return { id: Some(id), value: value.clone() });
            }
            prop_assert_eq!(all(&text, &chunks), expected);
        }

        /// No input makes it panic, or give a message that was not there.
        #[test]
        fn any_bytes_are_survived(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            chunks in prop::collection::vec(0usize..50, 0..20),
        ) {
            let found = all(&bytes, &chunks);
            prop_assert!(found.len() <= bytes.len());
        }

        /// A broken line between good ones costs no good one, whatever it is.
        #[test]
        fn good_messages_around_a_broken_line_survive(junk in "[ -~]{0,60}", value in json_value()) {
            let mut text = write(&value, 1, false);
            text.extend_from_slice(junk.as_bytes());
            text.extend_from_slice(b"\r\n");
            text.extend(write(&value, 2, true));
            let found = all(&text, &[]);
            for id in [1, 2] {
                let wanted = Incoming::Return { id: Some(id), value: value.clone() };
                prop_assert!(found.contains(&wanted), "{:?} not in {:?}", wanted, found);
            }
        }

        /// A truncated message is reported, never taken for a whole one.
        #[test]
        fn truncation_is_noticed(value in json_value(), keep in 1usize..60) {
            let whole = write(&value, 1, false);
            let end = keep.min(whole.len() - 3);
            let mut text = whole[..end].to_vec();
            text.extend_from_slice(b"\r\n");
            text.extend(write(&value, 2, false));
            let found = all(&text, &[]);
            let wanted = Incoming::Return { id: Some(2), value };
            prop_assert!(found.contains(&wanted), "{:?}", found);
            prop_assert!(found.iter().any(is_malformed), "{:?}", found);
        }
    }
}
