//! What crosses a connection for frames: the name of a network back end, then frames.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{HEADER, MAX_FRAME};

pub(super) async fn write_name(to: &mut (impl AsyncWrite + Unpin), netdev: &str) -> io::Result<()> {
    let length = u8::try_from(netdev.len()).map_err(|_| io::Error::other("a name of more than 255 bytes"))?;
    to.write_u8(length).await?;
    to.write_all(netdev.as_bytes()).await?;
    to.flush().await
}

pub(super) async fn read_name(from: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let mut name = vec![0; usize::from(from.read_u8().await?)];
    from.read_exact(&mut name).await?;
    String::from_utf8(name).map_err(io::Error::other)
}

/// Without a flush: others may follow.
pub(super) async fn write_frame(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).map_err(io::Error::other)?;
    to.write_u32_le(length).await?;
    to.write_all(frame).await
}

/// `None`: no other follows.
pub(super) async fn read_frame<'a>(
    from: &mut (impl AsyncRead + Unpin),
    room: &'a mut Vec<u8>,
) -> io::Result<Option<&'a [u8]>> {
    let length = match from.read_u32_le().await {
        Ok(length) => length as usize,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if !(HEADER + 1..=MAX_FRAME).contains(&length) {
        return Err(io::Error::other(format!("a frame of {length} bytes")));
    }
    room.resize(length, 0);
    from.read_exact(room).await?;
    Ok(Some(room))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_read_and_nonsense_is_refused() {
        let (mut here, mut there) = tokio::io::duplex(1 << 20);
        write_name(&mut here, "net0").await.unwrap();
        let frames = [vec![1; HEADER + 1], vec![2; MAX_FRAME]];
        for frame in &frames {
            write_frame(&mut here, frame).await.unwrap();
        }
        assert_eq!(read_name(&mut there).await.unwrap(), "net0");
        let mut room = Vec::new();
        for frame in &frames {
            assert_eq!(read_frame(&mut there, &mut room).await.unwrap(), Some(&frame[..]));
        }
        // Longer than any frame, or nothing but a header.
        for length in [u32::MAX, u32::try_from(HEADER).unwrap()] {
            here.write_u32_le(length).await.unwrap();
            read_frame(&mut there, &mut room).await.unwrap_err();
        }
        drop(here);
        assert_eq!(read_frame(&mut there, &mut room).await.unwrap(), None);
    }
}
