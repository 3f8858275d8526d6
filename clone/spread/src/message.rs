//! What hosts say to each other over their control connections.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmove_fabric::{Group, PeerAddress, RemoteRegion};

use crate::host_id::HostId;
use crate::layout::Layout;
use crate::route::Route;
use crate::span::Span;

/// How a connection opens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Greeting {
    /// Control messages follow.
    Control { from: HostId },
    /// READs follow, that only have to be answered.
    Reads { from: HostId },
}

/// A control message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Root to host, first: all it needs to know.
    Welcome(Box<Welcome>),
    /// Host to root, after the welcome: the host can begin. `hears`: it receives the multicast group from now on.
    Ready { hears: bool },
    /// Root to host: these have been sent by multicast since the last mark, and which of them last; `None` if that is long ago.
    /// Answered by [`Message::Seen`].
    Mark { number: u32, spans: Vec<Span>, last: Option<u32> },
    /// Root to host: read these yourself.
    Fetch { spans: Vec<Span> },
    /// Root to host: somebody waits for these blocks.
    Hint { blocks: Vec<u32> },
    /// Host to root: what has not arrived of a mark.
    Seen { number: u32, missing: Vec<Span> },
    /// Host to root: somebody here waits for a chunk.
    Want { chunk: u32 },
    /// Host to root: everything is here and verified.
    Complete,
    /// Host to host: where to read.
    Regions(Vec<RemoteRegion>),
    /// Host to host: what can be read now.
    Have { blocks: Vec<u32> },
}

/// The root's welcome to a host that has joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The template's layout.
    pub(crate) layout: Layout,
    /// The root's regions; the last is the table.
    pub(crate) regions: Vec<RemoteRegion>,
    /// From where the host reads what.
    pub(crate) route: Route,
    /// Where the hosts listen that it reads from.
    pub(crate) peers: Vec<(HostId, PeerAddress)>,
    /// The multicast group, if there is one.
    pub(crate) group: Option<Group>,
}

/// Bytes of a message that go into one frame.
const FRAME: usize = 60 << 10;

/// A message in frames, each with a first byte that shows whether more follow.
pub(crate) fn frames(message: &impl Serialize) -> Vec<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).expect("messages are plain data");
    let mut frames: Vec<Vec<u8>> = bytes
        .chunks(FRAME)
        .map(|part| {
            let mut frame = vec![1];
            frame.extend(part);
            frame
        })
        .collect();
    if let Some(last) = frames.last_mut() {
        last[0] = 0;
    }
    frames
}

/// Puts frames together.
#[derive(Debug, Default)]
pub(crate) struct Assembly(Vec<u8>);

/// Most bytes of one message: a layout with four million extents.
const MAX_ASSEMBLED: usize = 64 << 20;

/// Why frames are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AssemblyError {
    #[error("an empty frame")]
    Empty,
    #[error("a frame of kind {0}; expected 0 (the last of a message) or 1 (more follow)")]
    UnknownKind(u8),
    #[error("a message of more than {MAX_ASSEMBLED} bytes")]
    TooLong,
    #[error("a message that says nothing: {0}")]
    Malformed(postcard::Error),
}

impl Assembly {
    /// The message that ends with this frame, if one does.
    pub(crate) fn push<T: DeserializeOwned>(&mut self, frame: &[u8]) -> Result<Option<T>, AssemblyError> {
        let Some((more, part)) = frame.split_first() else { return Err(AssemblyError::Empty) };
        if *more > 1 {
            return Err(AssemblyError::UnknownKind(*more));
        }
        if self.0.len() + part.len() > MAX_ASSEMBLED {
            return Err(AssemblyError::TooLong);
        }
        self.0.extend(part);
        if *more == 1 {
            return Ok(None);
        }
        let message = postcard::from_bytes(&self.0);
        self.0.clear();
        message.map(Some).map_err(AssemblyError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_that_are_no_message_are_told_apart() {
        let push = |frame: &[u8]| Assembly::default().push::<Message>(frame).unwrap_err();
        assert_eq!(push(&[]), AssemblyError::Empty);
        assert_eq!(push(&[2, 0]), AssemblyError::UnknownKind(2));
        assert!(matches!(push(&[0, 0xff]), AssemblyError::Malformed(_)));
        let mut assembly = Assembly(vec![0; MAX_ASSEMBLED]);
        assert_eq!(assembly.push::<Message>(&[1, 0]), Err(AssemblyError::TooLong));
    }

    proptest! {
        #[test]
        fn messages_of_any_length_cross(blocks in prop::collection::vec(any::<u32>(), 0..60_000)) {
            let message = Message::Have { blocks };
            let mut assembly = Assembly::default();
            let mut frames = frames(&message);
            let last = frames.pop().unwrap();
            for frame in frames {
                prop_assert!(frame.len() <= vmove_fabric::MAX_MESSAGE);
                prop_assert_eq!(assembly.push::<Message>(&frame), Ok(None));
            }
            prop_assert_eq!(assembly.push(&last), Ok(Some(message)));
        }

        #[test]
        fn random_bytes_are_taken_calmly(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..10)) {
            let mut assembly = Assembly::default();
            for frame in frames {
                let _ = assembly.push::<Message>(&frame);
            }
        }
    }
}
