//! An image of which only the size is known: what a QEMU is shown that waits for its guest, before the source may give the guest's disk away. It
//! answers every read with an error, so that nothing is ever read that is not the guest's. After `doc/proto.md` of the NBD project, newstyle.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use vmove_qmp::nbd::{
    DISCONNECT, MAGIC, OPTION_GO, OPTION_MAGIC, OPTION_REPLY_MAGIC, REPLY_ACK, REPLY_INFO, REQUEST_MAGIC,
};

/// Fixed newstyle, and no zeros behind the answer to the old option.
const HANDSHAKE_FLAGS: u16 = 0b11;
/// What of a client's flags is known.
const NO_ZEROES: u32 = 0b10;
const REPLY: u32 = 0x6744_6698;
/// The transmission flags are valid, and it is read-only.
const FLAGS: u16 = 0b11;
/// An option longer than this is none of QEMU's.
const LONGEST: u32 = 64 << 10;
/// The kernel's `EIO`, in NBD's numbers the same.
const EIO: u32 = 5;

/// Options of a client.
const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const INFO: u32 = 6;
/// An answer to them.
const UNSUPPORTED: u32 = (1 << 31) + 1;
/// Commands.
const WRITE: u16 = 1;

/// Serves a client until it leaves, or asks for something when `is_over`: from then on it is to ask another.
///
/// # Errors
/// The connection breaks, or the client does not speak NBD.
pub(super) async fn serve<S>(size: u64, mut client: S, is_over: impl Fn() -> bool) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if !negotiate(size, &mut client).await? {
        return Ok(());
    }
    loop {
        let (magic, _flags, kind) =
            (client.read_u32().await?, client.read_u16().await?, client.read_u16().await?);
        let (cookie, _offset, length) =
            (client.read_u64().await?, client.read_u64().await?, client.read_u32().await?);
        // A read of the guest's may have come behind the word that it runs: it is repeated over another connection.
        if magic != REQUEST_MAGIC || kind == DISCONNECT || is_over() {
            return Ok(());
        }
        if kind == WRITE {
            skip(&mut client, length).await?;
        }
        let mut reply = Vec::with_capacity(16);
        reply.extend_from_slice(&REPLY.to_be_bytes());
        reply.extend_from_slice(&EIO.to_be_bytes());
        reply.extend_from_slice(&cookie.to_be_bytes());
        client.write_all(&reply).await?;
        client.flush().await?;
    }
}

/// Whether the client goes on to read.
async fn negotiate(size: u64, client: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<bool> {
    let mut greeting = [MAGIC.as_slice(), OPTION_MAGIC].concat();
    greeting.extend_from_slice(&HANDSHAKE_FLAGS.to_be_bytes());
    client.write_all(&greeting).await?;
    client.flush().await?;
    let flags = client.read_u32().await?;
    loop {
        let mut magic = [0; 8];
        client.read_exact(&mut magic).await?;
        let (option, length) = (client.read_u32().await?, client.read_u32().await?);
        if magic != *OPTION_MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "expected an option of NBD"));
        }
        skip(client, length).await?;
        match option {
            EXPORT_NAME => {
                let mut last = size.to_be_bytes().to_vec();
                last.extend_from_slice(&FLAGS.to_be_bytes());
                if flags & NO_ZEROES == 0 {
                    last.extend_from_slice(&[0; 124]);
                }
                client.write_all(&last).await?;
                client.flush().await?;
                return Ok(true);
            }
            INFO | OPTION_GO => {
                // Information of kind 0: size and flags.
                let mut info = 0_u16.to_be_bytes().to_vec();
                info.extend_from_slice(&size.to_be_bytes());
                info.extend_from_slice(&FLAGS.to_be_bytes());
                answer(client, option, REPLY_INFO, &info).await?;
                answer(client, option, REPLY_ACK, &[]).await?;
                if option == OPTION_GO {
                    return Ok(true);
                }
            }
            ABORT => {
                answer(client, option, REPLY_ACK, &[]).await?;
                return Ok(false);
            }
            _ => answer(client, option, UNSUPPORTED, &[]).await?,
        }
    }
}

async fn answer(
    client: &mut (impl AsyncWrite + Unpin),
    option: u32,
    kind: u32,
    data: &[u8],
) -> io::Result<()> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&u32::try_from(data.len()).unwrap_or_default().to_be_bytes());
    bytes.extend_from_slice(data);
    client.write_all(&bytes).await?;
    client.flush().await
}

async fn skip(client: &mut (impl AsyncRead + Unpin), length: u32) -> io::Result<()> {
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "expected a short option of NBD"));
    }
    let mut left = vec![0; length as usize];
    client.read_exact(&mut left).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use tokio::net::UnixListener;
    use vmove_skip::need;

    use super::*;

    /// QEMU's own client: it sees the size, and reads nothing.
    #[tokio::test(flavor = "multi_thread")]
    async fn qemu_sees_the_size_and_reads_an_error() {
        need!(Command::new("qemu-io").arg("--version").output());
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let serving = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let _ = serve(8 << 20, client, || false).await;
            }
        });
        let run = |what: &'static str| {
            let at = format!("nbd+unix:///disk?socket={}", socket.display());
            let run = move || {
                Command::new("qemu-io").args(["-r", "-f", "raw", "-c", what]).arg(at).output().unwrap()
            };
            tokio::task::spawn_blocking(run)
        };
        let length = run("length").await.unwrap();
        assert_eq!(String::from_utf8_lossy(&length.stdout).trim(), "8 MiB", "{length:?}");
        let read = run("read 0 512").await.unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&read.stdout), String::from_utf8_lossy(&read.stderr));
        assert!(said.contains("Input/output error"), "{said}");
        serving.abort();
    }

    #[tokio::test]
    async fn who_asks_when_it_is_over_is_left() {
        let (mut client, server) = tokio::io::duplex(1024);
        let serving = tokio::spawn(serve(4096, server, || true));
        let mut greeting = [0; 18];
        client.read_exact(&mut greeting).await.unwrap();
        client.write_all(&3_u32.to_be_bytes()).await.unwrap();
        for (option, data) in [(99_u32, &b"x"[..]), (OPTION_GO, &[0; 6][..])] {
            client.write_all(OPTION_MAGIC).await.unwrap();
            client.write_all(&option.to_be_bytes()).await.unwrap();
            client.write_all(&u32::try_from(data.len()).unwrap().to_be_bytes()).await.unwrap();
            client.write_all(data).await.unwrap();
        }
        // Not supported; the information; the end of it.
        let mut answers = [0; 20 + 32 + 20];
        client.read_exact(&mut answers).await.unwrap();
        assert_eq!(answers[12..16], UNSUPPORTED.to_be_bytes());
        assert_eq!(answers[42..50], 4096_u64.to_be_bytes());
        client.write_all(&REQUEST_MAGIC.to_be_bytes()).await.unwrap();
        client.write_all(&[0; 24]).await.unwrap();
        serving.await.unwrap().unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty(), "it was answered: {rest:?}");
    }
}
