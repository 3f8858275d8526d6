//! Ids as people type them: the beginning is enough, as long as it says which one is meant.

use vmove_client::bridge::Bridge;

use crate::failure::Failure;

/// The id of the lease that is meant.
pub async fn of_lease(bridge: &Bridge, given: &str) -> Result<String, Failure> {
    let leases = bridge.leases(None).await?.leases;
    meant(given, "lease", leases.into_iter().map(|lease| lease.id.to_string()).collect())
}

/// The id of the plan that is meant.
pub async fn of_plan(bridge: &Bridge, given: &str) -> Result<String, Failure> {
    let plans = bridge.plans().await?.plans;
    meant(given, "plan", plans.into_iter().map(|plan| plan.id.to_string()).collect())
}

/// The one of `ids` that is `given`, or else begins with it; dots at its end mean that it is a beginning. What is no beginning is left to
/// the bridge, which says that there is none.
fn meant(given: &str, kind: &str, ids: Vec<String>) -> Result<String, Failure> {
    if ids.iter().any(|id| id == given) {
        return Ok(given.to_owned());
    }
    let beginning = given.trim_end_matches('…').trim_end_matches("...");
    let mut meant: Vec<String> =
        ids.into_iter().filter(|id| !beginning.is_empty() && id.starts_with(beginning)).collect();
    match meant.len() {
        0 => Ok(given.to_owned()),
        1 => Ok(meant.remove(0)),
        count => {
            meant.sort_unstable();
            let shown = meant[..count.min(8)].join(", ");
            let more = if count > 8 { format!(" and {} more", count - 8) } else { String::new() };
            Err(Failure::bad_request(format!(
                "{given:?} is the beginning of {count} {kind} ids: {shown}{more}; give more of the one that you mean"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_an_id_is_enough_if_it_is_of_one_alone() {
        let found = |given: &str| {
            let ids = ["3f2a-1", "3f2b-2", "train-17", "train-1"].map(str::to_owned).to_vec();
            meant(given, "lease", ids).map_err(|failure| failure.message)
        };
        for (given, wanted) in [("3f2a", "3f2a-1"), ("3f2a...", "3f2a-1"), ("3f2b…", "3f2b-2")] {
            assert_eq!(found(given).as_deref(), Ok(wanted));
        }
        // An id is itself, also if it is the beginning of another one.
        assert_eq!(found("train-1").as_deref(), Ok("train-1"));
        let message = found("3f2").unwrap_err();
        assert!(message.contains("2 lease ids: 3f2a-1, 3f2b-2;"), "{message}");
        // The bridge says that there is no such lease.
        assert_eq!(
            (found("other").as_deref(), found("").as_deref(), found("...").as_deref()),
            (Ok("other"), Ok(""), Ok("..."))
        );
        let many = (0..20).map(|n| format!("x{n}")).collect();
        assert!(meant("x", "plan", many).unwrap_err().message.contains("and 12 more"));
    }
}
