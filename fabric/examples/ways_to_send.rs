//! What it costs to send a RAM file over TCP, by the calls that Linux has for it: `send` from memory, `sendfile`, and `splice` by way of a
//! pipe. The bytes come out of a file on tmpfs and are received into memory, over loopback.
//!
//! `MSG_ZEROCOPY` is left out: the kernel copies what is looped back all the same
//! ([Documentation](https://docs.kernel.org/networking/msg_zerocopy.html), "Loopback").
//!
//! ```console
//! # cargo run --release -p vmove-fabric --example ways_to_send -- /dev/shm 1024
//! ```
#![allow(missing_docs, clippy::cast_precision_loss)]

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::fs::sendfile;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use rustix::time::{ClockId, clock_gettime};

/// Bytes of one call.
const CHUNK: usize = 1 << 20;
const ROUNDS: usize = 5;

#[derive(Clone, Copy)]
enum Way {
    Send,
    Sendfile,
    Splice,
}

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| "/dev/shm".to_owned());
    let mib: usize = arguments.next().map_or(Ok(1024), |text| text.parse()).map_err(io::Error::other)?;
    let path = format!("{folder}/ways-to-send.{}", std::process::id());
    let result = compare(&path, mib << 20);
    // Also after a failure.
    let _ = std::fs::remove_file(&path);
    result
}

fn compare(path: &str, bytes: usize) -> io::Result<()> {
    let mut content = vec![0; bytes];
    for (part, byte) in content.chunks_mut(4096).zip((1..=u8::MAX).cycle()) {
        part.fill(byte);
    }
    let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
    file.write_all(&content)?;
    println!("{:<9} {:>22} {:>18}", "", "GB/s, median (min-max)", "CPU of the sender");
    for (name, way) in [("send", Way::Send), ("sendfile", Way::Sendfile), ("splice", Way::Splice)] {
        let mut rates = Vec::new();
        let mut cpu = Duration::ZERO;
        for _ in 0..ROUNDS {
            file.seek(SeekFrom::Start(0))?;
            let (took, used) = transfer(way, &file, &content)?;
            rates.push(bytes as f64 / 1e9 / took.as_secs_f64());
            cpu += used;
        }
        rates.sort_by(f64::total_cmp);
        let per_gb = cpu.as_secs_f64() * 1e9 / (ROUNDS * bytes) as f64;
        let spread = format!("{:.2} ({:.2}-{:.2})", rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
        println!("{name:<9} {spread:>22} {per_gb:>13.2} s/GB");
    }
    Ok(())
}

/// How long it takes until all has been received, and processor time of the thread that sends.
fn transfer(way: Way, file: &File, content: &[u8]) -> io::Result<(Duration, Duration)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let stream = TcpStream::connect(listener.local_addr()?)?;
    let (mut peer, _) = listener.accept()?;
    let mut into = vec![1; content.len()];
    std::thread::scope(|scope| {
        let begun = Instant::now();
        let sender = scope.spawn(move || send(way, file, content, &stream));
        peer.read_exact(&mut into)?;
        let took = begun.elapsed();
        let used = sender.join().map_err(|_| io::Error::other("the sender failed"))??;
        if into != content {
            return Err(io::Error::other("what was received differs"));
        }
        Ok((took, used))
    })
}

fn send(way: Way, file: &File, content: &[u8], mut stream: &TcpStream) -> io::Result<Duration> {
    let before = cpu_time();
    match way {
        Way::Send => content.chunks(CHUNK).try_for_each(|part| stream.write_all(part))?,
        Way::Sendfile => {
            let mut at = 0;
            while at < content.len() as u64 {
                sendfile(stream, file, Some(&mut at), CHUNK)?;
            }
        }
        Way::Splice => {
            let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
            fcntl_setpipe_size(&to, CHUNK)?;
            let mut left = content.len();
            while left > 0 {
                let mut taken = splice(file, None, &to, None, CHUNK.min(left), SpliceFlags::empty())?;
                left -= taken;
                while taken > 0 {
                    taken -= splice(&from, None, stream, None, taken, SpliceFlags::MORE)?;
                }
            }
        }
    }
    Ok(cpu_time().saturating_sub(before))
}

/// Of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
