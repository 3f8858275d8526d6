//! Session messages as frames: a little-endian `u32` length, then that many bytes of postcard.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Longest frame in bytes. The longest message is a page bitmap: 8 MiB speak for 256 GiB of 4 KiB pages.
pub const MAX_FRAME: usize = 64 << 20;

/// Why a message could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The peer closed the connection between two messages.
    #[error("The peer closed the session")]
    Closed,
    /// The connection broke, or the peer closed it within a message.
    #[error("Session connection lost: {0}")]
    Io(#[from] io::Error),
    /// The length cannot be right.
    #[error("Malformed frame: expected at most {MAX_FRAME} bytes, found a length of {0}")]
    TooLong(usize),
    /// The bytes are not a message.
    #[error("Malformed frame of {len} bytes: {why}")]
    Malformed {
        /// Length of the frame.
        len: usize,
        /// What the decoder said.
        why: postcard::Error,
    },
}

/// Sends one message.
///
/// # Errors
/// [`CodecError::Io`].
pub async fn send<W, M>(to: &mut W, message: &M) -> Result<(), CodecError>
where
    W: AsyncWrite + Unpin + ?Sized,
    M: Serialize + Sync,
{
    let bytes = encode(message)?;
    to.write_all(&bytes).await?;
    to.flush().await?;
    Ok(())
}

/// Receives one message. Not cancel-safe: a dropped call may have taken a part of a frame.
///
/// # Errors
/// [`CodecError`].
pub async fn receive<R, M>(from: &mut R) -> Result<M, CodecError>
where
    R: AsyncRead + Unpin + ?Sized,
    M: DeserializeOwned,
{
    let mut len = [0; 4];
    let first = from.read(&mut len).await?;
    if first == 0 {
        return Err(CodecError::Closed);
    }
    from.read_exact(&mut len[first..]).await?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(CodecError::TooLong(len));
    }
    // Grows as bytes arrive: a length alone does not make us allocate.
    let mut bytes = Vec::with_capacity(len.min(64 << 10));
    let got = from.take(len as u64).read_to_end(&mut bytes).await?;
    if got < len {
        return Err(CodecError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    decode(&bytes)
}

fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, CodecError> {
    let mut bytes =
        postcard::to_extend(message, vec![0; 4]).map_err(|why| CodecError::Malformed { len: 0, why })?;
    let len = bytes.len() - 4;
    let prefix = u32::try_from(len).ok().filter(|_| len <= MAX_FRAME).ok_or(CodecError::TooLong(len))?;
    bytes[..4].copy_from_slice(&prefix.to_le_bytes());
    Ok(bytes)
}

fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, CodecError> {
    let malformed = |why| CodecError::Malformed { len: bytes.len(), why };
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(malformed(postcard::Error::SerdeDeCustom)),
        Err(why) => Err(malformed(why)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pending::WireSet;
    use crate::proto::message::{Final, ToDestination, ToSource};

    fn block_on<F: Future>(f: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(f)
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<ToDestination>(&bytes);
            let _ = decode::<ToSource>(&bytes);
            let _: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
        }

        #[test]
        fn a_flipped_byte_is_an_error_or_another_message(at in 0usize..1000, bit in 0u8..8) {
            let message = ToDestination::Stopped(Final { sets: vec![WireSet::Runs(vec![(3, 4), (1, 9)])], stopped_at: crate::clock::Mono(77), mode: crate::spec::Mode::Precopy });
            let mut bytes = encode(&message).unwrap();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
        }
    }

    #[test]
    fn a_frame_that_ends_early_is_lost_not_closed() {
        let bytes = encode(&ToSource::Pong { token: 1, now: crate::clock::Mono(2) }).unwrap();
        for cut in 1..bytes.len() {
            let got: Result<ToSource, _> = block_on(receive(&mut &bytes[..cut]));
            assert!(matches!(got, Err(CodecError::Io(_))), "cut at {cut}: {got:?}");
        }
        let got: Result<ToSource, _> = block_on(receive(&mut &[][..]));
        assert!(matches!(got, Err(CodecError::Closed)));
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_read() {
        let got: Result<ToSource, _> = block_on(receive(&mut &[0xff, 0xff, 0xff, 0xff, 0][..]));
        assert!(matches!(got, Err(CodecError::TooLong(_))));
    }

    #[test]
    fn bytes_after_the_message_are_refused() {
        let mut bytes = encode(&ToDestination::Commit).unwrap();
        bytes.push(0);
        let len = u32::try_from(bytes.len() - 4).unwrap();
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        let got: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
        assert!(matches!(got, Err(CodecError::Malformed { .. })));
    }
}
