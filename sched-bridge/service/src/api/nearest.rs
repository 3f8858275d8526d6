//! What is the nearest that would fit, for requests that do not.

use std::time::{Duration, Instant};

use sched_bridge::place::{ClusterRequest, Nearest};
use serde_json::json;

use super::App;
use super::problem::{Code, Problem};

/// For so long is searched for whoever asks why.
const TIME_TO_EXPLAIN: Duration = Duration::from_secs(2);
/// The same for whoever wants a lease: schedulers ask again and again.
const TIME_TO_REFUSE: Duration = Duration::from_millis(250);
/// So many changes are in the message; all of them are in the details.
const IN_MESSAGE: usize = 3;

/// For a request that was not placed, and whose sender wants to know why.
pub(super) async fn explained(app: &App, request: ClusterRequest) -> Option<Nearest> {
    let _turn = app.explaining.acquire().await.ok()?;
    app.bridge.nearest(request, Instant::now() + TIME_TO_EXPLAIN).await.ok()
}

/// Adds to a refusal what would fit. Only one refusal is searched for at a time: others are not kept waiting, and go without.
pub(super) async fn told(app: &App, request: &ClusterRequest, problem: Problem) -> Problem {
    if problem.code != Code::NoRoom {
        return problem;
    }
    let Ok(_turn) = app.explaining.try_acquire() else { return problem };
    match app.bridge.nearest(request.clone(), Instant::now() + TIME_TO_REFUSE).await {
        Ok(nearest) => with(problem, &nearest),
        Err(_) => problem,
    }
}

fn with(mut problem: Problem, nearest: &Nearest) -> Problem {
    let texts: Vec<&str> = nearest.fits.iter().take(IN_MESSAGE).map(|fit| fit.text.as_str()).collect();
    if !texts.is_empty() {
        problem.message.push_str(&format!(". It {}", texts.join("; or ")));
    } else if nearest.complete {
        problem.message.push_str(". No single change of the request lets it fit");
    }
    problem.details = Some(json!({ "nearest": nearest }));
    problem
}
