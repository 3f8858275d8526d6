use proptest::prelude::*;

use super::course::tests::outlook;
use super::*;

fn goals(pause: Option<u64>, within: Option<u64>) -> Goals {
    Goals { max_pause_ms: pause, within_ms: within, host_cpu_percent: None }
}

fn promised(goals: &Goals, outlook: &Outlook) -> Result<Promise, Broken> {
    promise(goals, &MODES, outlook, "")
}

fn why(goals: &Goals, allowed: &[Mode], outlook: &Outlook) -> String {
    promise(goals, allowed, outlook, "link moves 1 GB/s").unwrap_err().why
}

#[test]
fn the_safest_mode_that_keeps_the_goals_is_taken() {
    let idle = outlook(1e9, 0.0, 0.0, 1e9);
    assert_eq!(promised(&goals(Some(20), Some(10_000)), &idle).unwrap().mode, Mode::Precopy);
    // 40 MB over and over: pre-copy would send them in the pause.
    let busy = outlook(1e9, 5e9, 4e7, 1e9);
    assert_eq!(promised(&goals(Some(70), None), &busy).unwrap().mode, Mode::Precopy);
    assert_eq!(promised(&goals(Some(20), None), &busy).unwrap().mode, Mode::Hybrid);
    // Rounds over all of its memory take a second each: only post-copy sends it once.
    let wild = outlook(1e9, 2e9, 1e9, 1e9);
    assert_eq!(promised(&goals(Some(20), Some(1550)), &wild).unwrap().mode, Mode::Postcopy);
}

#[test]
fn a_goal_for_the_pause_is_held_to_what_nine_of_ten_keep() {
    let even = outlook(1e9, 0.0, 0.0, 1e9);
    let uneven = Outlook { beside: Beside { pause_up_to_ms: 25.0, ..even.beside }, ..even };
    assert_eq!(promised(&goals(Some(20), None), &even).unwrap().pause_up_to_ms, Some(10.0));
    let told = why(&goals(Some(20), None), &MODES, &uneven);
    assert!(told.starts_with("--max-pause 20ms cannot be kept: precopy would take 25.0 ms"), "{told}");
    let promise = promised(&goals(Some(30), None), &uneven).unwrap();
    assert_eq!((promise.pause_ms, promise.pause_up_to_ms), (10.0, Some(25.0)));
}

#[test]
fn a_goal_that_cannot_be_kept_is_named_with_what_could() {
    let large = outlook(1e10, 0.0, 0.0, 1e9);
    let told = why(&goals(None, Some(5_000)), &MODES, &large);
    assert!(told.starts_with("--within 5s cannot be kept: precopy would take 10.16 s"), "{told}");
    assert!(
        told.contains("what could be kept: --within 13s by precopy") && told.contains("1 GB/s"),
        "{told}"
    );
    let told = why(&goals(Some(5), Some(60_000)), &MODES, &large);
    assert!(
        told.contains("--max-pause 5ms cannot be kept") && told.contains("--max-pause 12ms by"),
        "{told}"
    );
    // Each alone could be kept, and no mode keeps both.
    let wild = outlook(1e9, 2e9, 1e9, 1e9);
    let told = why(&goals(Some(20), Some(1700)), &[Mode::Precopy, Mode::Hybrid], &wild);
    assert!(
        told.contains("--within 1.7s cannot be kept") && told.contains("precopy does not converge"),
        "{told}"
    );
    assert!(told.contains("what could be kept: --within 3s by hybrid"), "{told}");
}

#[test]
fn a_share_of_the_processors_takes_time_and_is_named_where_it_is_in_the_way() {
    // 4 GB/s by all processors: 5 % move 200 MB/s.
    let large = outlook(1e10, 0.0, 0.0, 1e9);
    let share = |within, percent| Goals { host_cpu_percent: Some(percent), ..goals(None, within) };
    let promise = promised(&share(None, 5), &large).unwrap();
    assert_eq!(promise.mode, Mode::Precopy);
    assert!((50_000.0..51_000.0).contains(&promise.time_ms), "{promise:?}");
    assert!(promise.host_cpu_percent.is_some_and(|used| (4.9..=5.0).contains(&used)), "{promise:?}");
    assert!(
        promise.basis.contains("5 % of the processors, which all together move 3.73 GiB/s"),
        "{promise:?}"
    );
    // Without, the link is what holds it back.
    assert!(promised(&share(None, 100), &large).unwrap().host_cpu_percent.is_some_and(|used| used < 26.0));
    let told = why(&share(Some(20_000), 5), &MODES, &large);
    assert!(told.starts_with("--within 20s cannot be kept: precopy would take 50"), "{told}");
    assert!(
        told.contains("what could be kept: --within 61s by precopy; or --host-cpu 13% by precopy"),
        "{told}"
    );
    let kept = promised(&share(Some(20_000), 13), &large).unwrap();
    assert!(kept.time_ms <= 20_000.0, "{kept:?}");
    // No share is large enough.
    let told = why(&share(Some(5_000), 5), &MODES, &large);
    assert!(!told.contains("or --host-cpu"), "{told}");
    // The more the guest writes, the less is left of it.
    let holds_to =
        |goals: &Goals| super::promise(goals, &[Mode::Precopy], &large, "").unwrap().holds_to_bytes_per_s;
    let (free, held) = (holds_to(&goals(None, Some(60_000))), holds_to(&share(Some(60_000), 5)).unwrap());
    assert!(held < free.unwrap_or(f64::INFINITY), "{held} {free:?}");
}

#[test]
fn precopy_that_does_not_converge_is_refused_before_it_begins() {
    let wild = outlook(1e9, 2e9, 1e9, 1e9);
    let told = why(&goals(Some(50), None), &[Mode::Precopy], &wild);
    assert!(told.contains("does not converge"), "{told}");
}

#[test]
fn what_is_suggested_is_kept() {
    let large = outlook(1e10, 5e8, 1e10, 1e9);
    let told = why(&goals(Some(60), Some(5_000)), &MODES, &large);
    let suggested = told.split("--within ").last().unwrap().split('s').next().unwrap();
    let seconds: u64 = suggested.parse().unwrap_or_else(|_| panic!("{told}"));
    promised(&goals(Some(60), Some(seconds * 1000)), &large).unwrap();
}

#[test]
fn goals_hold_up_to_a_rate_of_writes() {
    let idle = outlook(1e9, 0.0, 0.0, 1e9);
    let strict = promised(&goals(Some(20), Some(1500)), &idle).unwrap().holds_to_bytes_per_s.unwrap();
    let loose = promised(&goals(Some(20), Some(2500)), &idle).unwrap().holds_to_bytes_per_s;
    assert!(strict < loose.unwrap_or(f64::INFINITY), "{strict} {loose:?}");
    assert_eq!(promised(&Goals::default(), &idle).unwrap().holds_to_bytes_per_s, None);
}

proptest! {
    /// What is promised keeps the goals; and goals that are looser are never refused.
    #[test]
    fn promises_keep_goals_and_looser_ones_hold(
        content in 1e7..1e10, rate in 0.0..3e9, reach in 0.0..1.0, link in 5e7..1e10,
        pause in 11_u64..1000, within in 500_u64..60_000, share in 1_u64..=100, looser in 1.0..3.0,
    ) {
        let o = outlook(content, rate, reach * content, link);
        let wanted = goals(Some(pause), Some(within));
        if let Ok(promise) = promised(&wanted, &o) {
            for (goal, ms) in wanted.each() {
                prop_assert!(promise.of(goal) <= ms);
            }
            let grown = |ms: u64| whole(ms as f64 * looser);
            prop_assert!(promised(&goals(Some(grown(pause)), Some(grown(within))), &o).is_ok());
            prop_assert!(promised(&goals(Some(pause), None), &o).is_ok());
        }
        let wanted = Goals { host_cpu_percent: Some(share), ..wanted };
        if let Ok(promise) = promised(&wanted, &o) {
            for (goal, value) in wanted.each() {
                prop_assert!(promise.of(goal) <= value);
            }
        }
    }
}
