//! The least that shows that the RDMA path works, in minutes: one fork by multicast, and one post-copy whose path is cut.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::forks::Forks;
use crate::moves::{Moves, Parts};
use crate::supervisor::Lab;

/// Hosts it needs.
pub const HOSTS: usize = 3;

/// Runs it on daemons that are started once.
///
/// # Errors
/// What does not end as it should.
pub fn run(lab: &Lab, parts: &Parts) -> Result<()> {
    let forks = Forks(Moves::new(lab, parts));
    (1..=HOSTS).try_for_each(|host| forks.start(host, ""))?;
    forks.0.guest("g")?;
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        let begin = Instant::now();
        case().with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("a_fork_goes_out_by_rdma_multicast", &|| forks.multicast(0.0, "--verify"))?;
    case("a_path_cut_in_post_copy_is_left_for_tcp", &|| forks.0.cut_while("postcopy", "fetch"))?;
    // Nothing of RDMA may be left.
    case("daemons_end_and_leave_nothing", &|| (1..=HOSTS).try_for_each(|host| forks.0.stop(host)))
}
