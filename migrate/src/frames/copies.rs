//! At the source: copies of what goes to a guest's taps.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, SystemTime};

use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use vmove_node::peer::BoxedStream;

use super::link::{write_frame, write_name};
use super::packet_socket::{Frame, PacketSocket, Way};
use super::{BEFORE, DOUBT, MOST_KEPT, to_one};
use crate::taps::Tap;

/// The taps of a guest that is about to leave. Dropping this ends the copying; what was copied is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<Copying>);

#[derive(Debug)]
struct Copying {
    tell: mpsc::UnboundedSender<Told>,
    task: JoinHandle<PassedOn>,
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What the task of a tap is told.
#[derive(Debug, Clone, Copy)]
enum Told {
    /// The guest stopped, by this clock.
    Stopped(SystemTime),
    /// It is the destination's.
    GivenUp,
    /// Nothing more comes here for it.
    End,
}

/// What became of frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PassedOn {
    /// They went to the destination.
    pub frames: u64,
    /// There was no room for them.
    pub lost: u64,
}

impl Copies {
    /// Begins to copy what goes to this tap, to be passed on over this connection.
    ///
    /// # Errors
    /// The interface is not there, or the connection does not hold.
    pub(crate) async fn copy(&mut self, tap: &Tap, mut link: BoxedStream) -> io::Result<()> {
        let socket = PacketSocket::open(&tap.interface, Way::Copies)?;
        write_name(&mut link, &tap.netdev).await?;
        let (tell, told) = mpsc::unbounded_channel();
        let task = vmove_node::task::spawn(pass_on(socket, link, told));
        self.0.push(Copying { tell, task });
        Ok(())
    }

    /// The guest has stopped: what came before is not kept any more.
    pub(crate) fn stopped(&self, at: SystemTime) {
        self.tell(Told::Stopped(at));
    }

    /// The guest is the destination's: what came since it stopped goes there, and what still comes.
    pub(crate) fn given_up(&self) {
        self.tell(Told::GivenUp);
    }

    fn tell(&self, word: Told) {
        for tap in &self.0 {
            // One that has ended has told why.
            let _ = tap.tell.send(word);
        }
    }

    /// Ends it, when what is there has gone. `limit`: for each tap.
    pub(crate) async fn end(mut self, limit: Duration) -> PassedOn {
        let mut all = PassedOn::default();
        self.tell(Told::End);
        for tap in &mut self.0 {
            if let Ok(Ok(one)) = tokio::time::timeout(limit, &mut tap.task).await {
                all.frames += one.frames;
                all.lost += one.lost;
            }
        }
        all
    }
}

/// Frames that are kept until the guest is given up.
#[derive(Debug, Default)]
struct Kept {
    frames: VecDeque<Frame>,
    bytes: usize,
    /// When the guest stopped.
    stopped: Option<SystemTime>,
    lost: u64,
}

impl Kept {
    fn add(&mut self, frame: Frame) {
        let from = self.stopped.map_or_else(|| frame.at.checked_sub(BEFORE), |at| at.checked_sub(DOUBT));
        let Some(from) = from else { return };
        if self.stopped.is_none() {
            self.forget_before(from);
        }
        if !to_one(&frame.bytes) || frame.at < from {
            return;
        }
        // Before the stop the oldest go; after it the newest, as in any queue that is full.
        while self.stopped.is_none() && self.bytes + frame.bytes.len() > MOST_KEPT && self.forget_oldest() {}
        if self.bytes + frame.bytes.len() > MOST_KEPT {
            self.lost += 1;
            return;
        }
        self.bytes += frame.bytes.len();
        self.frames.push_back(frame);
    }

    fn stop(&mut self, at: SystemTime) {
        self.stopped = Some(at);
        if let Some(from) = at.checked_sub(DOUBT) {
            self.forget_before(from);
        }
    }

    fn forget_before(&mut self, from: SystemTime) {
        while self.frames.front().is_some_and(|first| first.at < from) && self.forget_oldest() {}
    }

    fn forget_oldest(&mut self) -> bool {
        let oldest = self.frames.pop_front();
        self.bytes -= oldest.as_ref().map_or(0, |frame| frame.bytes.len());
        oldest.is_some()
    }
}

/// Until it is told to end, or the connection breaks.
async fn pass_on(
    socket: PacketSocket,
    link: BoxedStream,
    mut told: mpsc::UnboundedReceiver<Told>,
) -> PassedOn {
    let (mut kept, mut passed) = (Kept::default(), PassedOn::default());
    let done = async {
        keep(&socket, &mut kept, &mut told).await?;
        send(&socket, link, kept.frames.drain(..), &mut told, &mut passed.frames).await
    };
    if let Err(error) = done.await {
        tracing::warn!(%error, "frames for the guest are not passed on any more");
    }
    passed.lost = kept.lost;
    passed
}

/// Until the guest is given up.
async fn keep(
    socket: &PacketSocket,
    kept: &mut Kept,
    told: &mut mpsc::UnboundedReceiver<Told>,
) -> io::Result<()> {
    let mut room = Vec::new();
    loop {
        tokio::select! {
            biased;
            word = told.recv() => match word {
                Some(Told::Stopped(at)) => kept.stop(at),
                Some(Told::GivenUp) => break,
                Some(Told::End) | None => return Err(io::Error::other("the guest was not given up")),
            },
            frame = socket.next(&mut room) => kept.add(frame?),
        }
    }
    while let Some(frame) = socket.waiting(&mut room) {
        kept.add(frame);
    }
    Ok(())
}

/// Sends what was kept, then what comes.
async fn send(
    socket: &PacketSocket,
    mut link: BoxedStream,
    kept: impl Iterator<Item = Frame>,
    told: &mut mpsc::UnboundedReceiver<Told>,
    sent: &mut u64,
) -> io::Result<()> {
    for frame in kept {
        write_frame(&mut link, &frame.bytes).await?;
        *sent += 1;
    }
    link.flush().await?;
    let mut room = Vec::new();
    loop {
        let (mut next, ends) = tokio::select! {
            biased;
            // What else may be said was said before.
            _ = told.recv() => (None, true),
            frame = socket.next(&mut room) => (Some(frame?), false),
        };
        next = next.or_else(|| socket.waiting(&mut room));
        while let Some(frame) = next {
            if to_one(&frame.bytes) {
                write_frame(&mut link, &frame.bytes).await?;
                *sent += 1;
            }
            next = socket.waiting(&mut room);
        }
        link.flush().await?;
        if ends {
            return link.shutdown().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::HEADER;

    const ALL: u8 = 0xff;
    const ONE: u8 = 0x52;

    fn frame(at_ms: u64, first: u8, length: usize) -> Frame {
        let mut bytes = vec![0; HEADER + length];
        bytes[HEADER] = first;
        Frame { at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_000 + at_ms), bytes }
    }

    fn times(kept: &Kept) -> Vec<u64> {
        let since = |frame: &Frame| frame.at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
        kept.frames.iter().map(|frame| u64::try_from(since(frame)).unwrap() - 1_000_000).collect()
    }

    #[test]
    fn what_came_since_the_stop_is_kept_and_little_before_it() {
        let mut kept = Kept::default();
        for at in [0, 10, 30, 38, 39] {
            kept.add(frame(at, ONE, 100));
        }
        assert_eq!(times(&kept), [30, 38, 39], "20 ms before the newest");
        kept.stop(frame(40, ONE, 1).at);
        assert_eq!(times(&kept), [38, 39], "2 ms before the stop");
        kept.add(frame(37, ONE, 100));
        kept.add(frame(45, ONE, 100));
        kept.add(frame(46, ALL, 100));
        assert_eq!(times(&kept), [38, 39, 45], "late, and to all");
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut kept = Kept::default();
        let large = MOST_KEPT / 4 + 1;
        (0..6).for_each(|at| kept.add(frame(at, ONE, large)));
        assert_eq!((times(&kept), kept.lost), (vec![3, 4, 5], 0));
        kept.stop(frame(5, ONE, 1).at);
        kept.add(frame(6, ONE, large));
        assert_eq!((times(&kept), kept.lost), (vec![3, 4, 5], 1));
        let bytes: usize = kept.frames.iter().map(|frame| frame.bytes.len()).sum();
        assert_eq!(kept.bytes, bytes);
    }
}
