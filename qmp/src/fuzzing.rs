//! Decoders of what QEMU says, each on any bytes: for `tests/fuzz` alone. A wrong result is a panic.

use crate::codec::{Framer, Incoming, encode, parse};

/// Bytes of a monitor's socket, in one piece and in pieces of the length in the first byte: the messages are the same.
pub fn stream(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let read = |piece: usize| {
        let (mut framer, mut found) = (Framer::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            framer.push(piece, |message| found.push(message));
        }
        framer.finish(|message| found.push(message));
        found
    };
    let found = read(usize::from(*first).max(1));
    assert!(found.len() <= bytes.len(), "{} messages in {} bytes", found.len(), bytes.len());
    assert_eq!(found, read(bytes.len().max(1)));
    for message in found {
        if let Incoming::Return { id: Some(id), value } = &message {
            let line = serde_json::json!({ "return": value, "id": id }).to_string();
            assert_eq!(parse(line.as_bytes()), message);
        }
        if let Incoming::Event { name, data, .. } = &message {
            let line = encode(name, Some(data), 1, false).expect("JSON");
            assert!(line.iter().filter(|byte| **byte == b'\n').count() == 1 && line.ends_with(b"\n"));
        }
    }
}
