//! A schedule: what is asked for, and what breaks when. Everything in it follows from its seed.

use crate::rng::Rng;

/// One of the two nodes: the guest begins at 0.
pub type NodeIndex = usize;

/// Names of the nodes.
pub const NODES: [&str; 2] = ["a", "b"];

/// A migration and what happens to it.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// What it follows from.
    pub seed: u64,
    /// `precopy`, `postcopy`, `hybrid` or `auto`.
    pub mode: &'static str,
    /// The guest is paused before.
    pub paused: bool,
    /// Slowest way of a message, in milliseconds.
    pub latency_ms: u64,
    /// What breaks.
    pub blows: Vec<Planned>,
    /// The guest owns a device.
    pub device: bool,
    /// How it takes it to be asked for that, while blows come.
    pub manner: Manner,
    /// How many guests move at one barrier; the first alone may own a device.
    pub guests: usize,
    /// It goes for a visit, and how that ends. `mode` is that of later migrations then.
    pub visit: Option<VisitEnds>,
    /// Moved back when all is well again: what was left over would be in the way.
    pub and_back: bool,
}

/// How a guest takes it to be asked for its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It lets it go.
    LetsGo,
    /// It says no.
    Refuses,
    /// It lets it go, after so many milliseconds.
    Late(u64),
}

/// How a visit ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisitEnds {
    /// This many milliseconds after it was first seen.
    pub after_ms: u64,
    /// The guest stays where it visits; otherwise it is taken home.
    pub stays: bool,
    /// It begins as a post-copy migration, which is to become a visit while pages are missing.
    pub turned: bool,
}

/// A blow and its moment.
#[derive(Debug, Clone)]
pub struct Planned {
    /// When.
    pub when: Moment,
    /// What.
    pub blow: Blow,
}

/// When something breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// At the so manieth thing that the daemon of this node does to its disk, its QEMUs or the network. It is not done.
    Step(NodeIndex, u64),
    /// When the daemon of this node first does something of whose description this is a part. It is not done.
    Doing(NodeIndex, &'static str),
    /// So many milliseconds after the migration was asked for.
    Millis(u64),
}

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blow {
    /// SIGKILL of a daemon, which is started anew.
    Kill {
        /// Whose.
        node: NodeIndex,
        /// Of what is being written when it dies, so many percent are written.
        written_percent: u64,
        /// Until it is started anew.
        down_ms: u64,
        /// As another protocol version first.
        other_version: bool,
    },
    /// Every connection is reset.
    Reset,
    /// Nothing passes between the nodes.
    Partition {
        /// How long.
        ms: u64,
    },
    /// A disk fails.
    Disk {
        /// Whose.
        node: NodeIndex,
        /// ENOSPC or EIO.
        error: DiskError,
        /// How long.
        ms: u64,
        /// Of what is written, so many percent are, before the error.
        written_percent: u64,
        /// What an error left cannot be cut off either.
        cuts_fail: bool,
        /// Nothing can be read either.
        reads_fail: bool,
    },
    /// A QEMU dies.
    QemuDies {
        /// Those of this node.
        node: NodeIndex,
    },
    /// The operator calls the migration off.
    Cancel,
    /// The clocks jump: everything that waits for less is over.
    ClockJump {
        /// How far.
        ms: u64,
    },
    /// Page connections break, and nothing else.
    PagesBreak,
}

/// What the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskError {
    /// `ENOSPC`
    NoSpace,
    /// `EIO`
    Io,
}

/// Things that a daemon does in a migration without trouble, some more than usual.
const STEPS: u64 = 64;
/// A migration without trouble is over by then.
const MILLIS: u64 = 700;

impl Schedule {
    /// A migration of a mode to which these blows happen.
    #[must_use]
    pub const fn with(mode: &'static str, blows: Vec<Planned>) -> Self {
        let (device, manner) = (false, Manner::LetsGo);
        let (guests, visit) = (1, None);
        Self {
            seed: 1,
            mode,
            paused: false,
            latency_ms: 2,
            blows,
            device,
            manner,
            guests,
            visit,
            and_back: true,
        }
    }

    /// The schedule of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7363_6865_6475_6c65);
        let count = rng.of(&[0, 1, 1, 1, 1, 2, 2, 2, 3, 4]);
        let mode = rng.of(&["precopy", "postcopy", "postcopy", "hybrid", "auto"]);
        let (paused, latency_ms) = (rng.percent(8), rng.of(&[1, 2, 5, 20, 60]));
        let and_back = rng.percent(20);
        let mut blows: Vec<_> =
            (0..count).map(|_| Planned { when: moment(&mut rng), blow: blow(&mut rng) }).collect();
        // Last: what came before stays what it was for each seed.
        let device = !paused && rng.percent(40);
        let manner = match rng.below(20) {
            0 => Manner::Refuses,
            1 => Manner::Late(rng.of(&[3_000, 19_000, 25_000, 60_000])),
            _ => Manner::LetsGo,
        };
        if device {
            blows.iter_mut().for_each(|planned| later(planned, &mut rng));
        }
        // What one guest alone does is half as much.
        let guests = if rng.percent(40) { 2 } else { 1 };
        let visits = guests == 1 && !device && rng.percent(50);
        let mut visit = visits.then(|| VisitEnds {
            after_ms: rng.of(&[0, 300, 1_000, 6_000]),
            stays: rng.percent(25),
            turned: false,
        });
        if let Some(visit) = &mut visit {
            blows.iter_mut().for_each(|planned| later_on_a_visit(planned, &mut rng));
            visit.turned = rng.percent(40);
        }
        Self { seed, mode, paused, latency_ms, blows, device, manner, guests, visit, and_back }
    }
}

/// With a device there is more to do.
fn later(planned: &mut Planned, rng: &mut Rng) {
    if let Moment::Step(_, step) = &mut planned.when
        && rng.percent(50)
    {
        *step += rng.below(STEPS / 2);
    }
}

/// A visit is two ways, and what is between them.
fn later_on_a_visit(planned: &mut Planned, rng: &mut Rng) {
    match &mut planned.when {
        Moment::Step(_, step) if rng.percent(60) => *step += rng.below(2 * STEPS),
        Moment::Millis(ms) if rng.percent(60) => *ms += rng.below(4 * MILLIS),
        _ => {}
    }
}

fn moment(rng: &mut Rng) -> Moment {
    match rng.percent(75) {
        true => Moment::Step(rng.of(&[0, 1]), rng.below(STEPS)),
        false => Moment::Millis(rng.below(MILLIS)),
    }
}

fn blow(rng: &mut Rng) -> Blow {
    let node = rng.of(&[0, 1]);
    match rng.below(100) {
        0..45 => Blow::Kill {
            node,
            written_percent: rng.of(&[0, 0, 30, 99, 100]),
            down_ms: rng.of(&[1, 20, 500, 4000, 20_000]),
            other_version: rng.percent(5),
        },
        45..57 => Blow::Reset,
        57..67 => Blow::Partition { ms: rng.of(&[50, 2000, 12_000, 40_000]) },
        67..82 => Blow::Disk {
            node,
            error: rng.of(&[DiskError::NoSpace, DiskError::Io]),
            ms: rng.of(&[1, 50, 3000, 30_000]),
            written_percent: rng.of(&[0, 50, 99, 100]),
            cuts_fail: rng.percent(30),
            reads_fail: rng.percent(15),
        },
        82..88 => Blow::QemuDies { node },
        88..92 => Blow::Cancel,
        92..95 => Blow::ClockJump { ms: rng.of(&[1000, 16_000, 200_000]) },
        _ => Blow::PagesBreak,
    }
}
