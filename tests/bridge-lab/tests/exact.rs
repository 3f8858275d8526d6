//! The search against one that tries everything.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use common::{brute, random_fleet, random_request, random_use};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sched_bridge::model::{Assignment, DeviceKind, Occupancy};
use sched_bridge::place::{Method, Mode, Options, PlaceError, Placement, Score, place, score};

const CASES: u64 = 18_000;

#[test]
fn finds_the_optimum_of_every_small_case() {
    let (mut placed, mut refused, mut two_groups, mut slices) = (0, 0, 0, 0);
    for seed in 0..CASES {
        let mut rng = StdRng::seed_from_u64(seed + 1);
        let fleet = random_fleet(&mut rng, 5);
        let used = random_use(&mut rng, &fleet);
        let request = random_request(&mut rng, 4);
        let best = brute::best(&fleet, &used, &request);
        match place(&fleet, &used, &request, &Options::default()) {
            Ok(placement) => {
                let best = best
                    .unwrap_or_else(|| panic!("seed {seed}: a placement where there is none: {placement:?}"));
                assert_eq!(placement.method, Method::Exact, "seed {seed}");
                let (own, best) = (
                    in_order(placement.score, &request.compactness.mode),
                    in_order(best, &request.compactness.mode),
                );
                assert_eq!(own, best, "seed {seed}: {request:?}");
                fits(seed, &fleet, &used, &request, &placement);
                placed += 1;
                let has_slice = |vm: &Assignment| vm.count(DeviceKind::MigSlice) > 0;
                slices += u32::from(placement.assignments.iter().any(has_slice));
                two_groups += u32::from(request.groups.len() == 2);
            }
            Err(PlaceError::NoRoom { .. } | PlaceError::Contradiction { .. }) => {
                assert_eq!(best, None, "seed {seed}: {request:?}");
                refused += 1;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    println!(
        "{placed} placed, {two_groups} of them with two groups, {slices} with slices, {refused} refused"
    );
    assert!(
        placed > 3000 && refused > 1000 && two_groups > 800 && slices > 100,
        "the cases have become too easy or too hard"
    );
}

fn in_order(score: Score, mode: &Mode) -> Score {
    // The greatest distance does not count where compactness does not.
    if *mode == Mode::Unconstrained { Score { max_hops: 0, ..score } } else { score }
}

/// All VMs are there, what they got was free, and the score is that of the assignments.
fn fits(
    seed: u64,
    fleet: &sched_bridge::model::Fleet,
    used: &Occupancy,
    request: &sched_bridge::place::ClusterRequest,
    placement: &Placement,
) {
    assert_eq!(placement.assignments.len(), request.count() as usize, "seed {seed}");
    let mut after = used.clone();
    for (assignment, (vm, group)) in placement.assignments.iter().zip(request.vm_names().unwrap()) {
        assert_eq!(assignment.vm, vm, "seed {seed}");
        after.take(fleet, assignment).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let right = request.groups[group].alternatives.iter().any(|alternative| {
            assignment.cores() == alternative.vcpus
                && assignment.memory() == alternative.memory
                && alternative
                    .devices
                    .iter()
                    .all(|need| assignment.count(need.filter.kind) == need.count as usize)
        });
        assert!(right, "seed {seed}: {assignment:?}");
    }
    assert_eq!(score(fleet, used, request, &placement.assignments).unwrap(), placement.score, "seed {seed}");
    for assignment in &placement.assignments {
        after.release(fleet, assignment).unwrap();
    }
    assert_eq!(&after, used, "seed {seed}");
}

/// With too many states allowed for none, the heuristic has to do. How far it is off is printed, and has a bound.
#[test]
fn the_heuristic_is_close() {
    let options = {
        let mut options = Options::default();
        options.exact_states = 0;
        options
    };
    let (mut cases, mut same, mut missed, mut hops, mut best_hops) = (0_u32, 0_u32, 0_u32, 0, 0);
    for seed in 0..1500 {
        let mut rng = StdRng::seed_from_u64(seed + 77_777);
        let fleet = random_fleet(&mut rng, 6);
        let used = random_use(&mut rng, &fleet);
        let request = random_request(&mut rng, 5);
        let Ok(best) = place(&fleet, &used, &request, &Options::default()) else { continue };
        cases += 1;
        match place(&fleet, &used, &request, &options) {
            Ok(placement) => {
                fits(seed, &fleet, &used, &request, &placement);
                same += u32::from(placement.score == best.score);
                hops += placement.score.sum_hops;
                best_hops += best.score.sum_hops;
            }
            Err(_) => missed += 1,
        }
    }
    println!(
        "{cases} cases: {same} with the best score, {missed} not placed; sum of hops {hops}, at best {best_hops}"
    );
    assert!(missed * 100 <= cases * 5 && same * 100 >= cases * 80, "{missed} missed, {same} best of {cases}");
    assert!(hops * 100 <= best_hops * 110, "{hops} hops, at best {best_hops}");
}
