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

/// A message as a frame.
///
/// # Errors
/// [`CodecError::Malformed`], [`CodecError::TooLong`].
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, CodecError> {
    let mut bytes =
        postcard::to_extend(message, vec![0; 4]).map_err(|why| CodecError::Malformed { len: 0, why })?;
    let len = bytes.len() - 4;
    let prefix = u32::try_from(len).ok().filter(|_| len <= MAX_FRAME).ok_or(CodecError::TooLong(len))?;
    bytes[..4].copy_from_slice(&prefix.to_le_bytes());
    Ok(bytes)
}

/// The message of a frame without its length.
///
/// # Errors
/// [`CodecError::Malformed`], also for bytes left over.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, CodecError> {
    let malformed = |why| CodecError::Malformed { len: bytes.len(), why };
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(malformed(postcard::Error::SerdeDeCustom)),
        Err(why) => Err(malformed(why)),
    }
}
