//! What hooks are told of a migration, on both of its sides.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use vmove_hooks::{Event, Hooks, Own};
use vmove_migrate::engine::Engine;
use vmove_types::progress::{Outcome, Progress};

/// A peer's greeting is heard a moment before its session is there. One that has not become a session by then was a question.
const TRIES: u32 = 100;
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// Whether hooks want to hear of migrations at all.
pub fn wanted(hooks: &Hooks) -> bool {
    [Own::MigrationPhase, Own::AfterMigration, Own::PeerLost].into_iter().any(|own| hooks.wants_own(own))
}

/// Follows a migration to its end.
pub async fn follow(engine: Arc<Engine>, hooks: Arc<Hooks>, id: String) {
    if !wanted(&hooks) {
        return;
    }
    for _ in 0..TRIES {
        if let Ok(progress) = engine.progress(&id) {
            return tell(&hooks, progress).await;
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// A phase that is shorter than it takes to look is in the report of `after-migration` only.
async fn tell(hooks: &Hooks, mut progress: watch::Receiver<Progress>) {
    let (mut phase, mut lost) = (None, false);
    loop {
        let news = |p: &Progress| {
            let is_lost = matches!(p.outcome, Outcome::Reconnecting { .. });
            Some(p.phase) != phase || is_lost != lost || p.outcome.is_end()
        };
        // The session's end is always told before its sender goes.
        let Ok(now) = progress.wait_for(news).await.map(|now| now.clone()) else { return };
        let own = |own: Own, data: Value| hooks.tell(Event::own(own, &now.vm, data));
        if Some(now.phase) != phase {
            let left = phase.map(|phase: vmove_types::progress::Phase| phase.as_str());
            phase = Some(now.phase);
            own(Own::MigrationPhase, facts(&now, json!({ "phase": now.phase, "left": left })));
        }
        match &now.outcome {
            Outcome::Reconnecting { error, .. } if !lost => {
                lost = true;
                own(Own::PeerLost, facts(&now, json!({ "error": error })));
            }
            Outcome::Running => lost = false,
            outcome if outcome.is_end() => return own(Own::AfterMigration, facts(&now, end(outcome))),
            _ => {}
        }
    }
}

fn facts(now: &Progress, more: Value) -> Value {
    let mut all = json!({ "migration": now.id, "role": now.role, "peer": now.peer, "mode": now.mode });
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all
}

fn end(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Done { report } => json!({
            "outcome": "done", "guest": "destination", "total_ms": report.total_ms, "downtime_ms": report.downtime_ms, "report": report,
        }),
        Outcome::Refused { blockers } => {
            json!({ "outcome": "refused", "guest": "source", "blockers": blockers })
        }
        Outcome::Failed { error, guest, cancelled } => json!({
            "outcome": if *cancelled { "cancelled" } else { "failed" }, "guest": guest, "error": error,
        }),
        Outcome::Running | Outcome::Reconnecting { .. } => json!({ "outcome": "running" }),
    }
}

#[cfg(test)]
mod tests {
    use vmove_hooks::config::HookEntry;
    use vmove_hooks::hooks::Settings;
    use vmove_types::progress::{GuestPlace, Phase, Role};

    use super::*;

    fn hooks(folder: &std::path::Path, out: &std::path::Path) -> Arc<Hooks> {
        #[derive(serde::Deserialize)]
        struct File {
            hook: Vec<HookEntry>,
        }
        let one = |on: &str| {
            format!(
                "[[hook]]\nname = '{on}'\non = '{on}'\ndo = {{ run = ['/bin/sh', '-c', 'echo $VMOVE_EVENT $VMOVE_PHASE $VMOVE_OUTCOME $VMOVE_GUEST >> {}'] }}\n",
                out.display()
            )
        };
        let text: String = ["migration-phase", "after-migration", "peer-lost"].map(one).concat();
        let entries = toml::from_str::<File>(&text).unwrap().hook;
        let settings =
            Settings { node: "a".to_owned(), control: "/c".into(), journal: folder.join("journal") };
        Hooks::open(settings, vmove_hooks::config::check(entries, None).unwrap()).unwrap()
    }

    struct NoVms;

    #[async_trait::async_trait]
    impl vmove_hooks::Node for NoVms {
        fn vm(&self, _: &str) -> Option<vmove_hooks::Vm> {
            None
        }
        fn vms(&self) -> Vec<vmove_hooks::Vm> {
            Vec::new()
        }
        async fn act(
            &self,
            _: &vmove_hooks::Action,
            _: vmove_hooks::Order,
        ) -> Result<String, vmove_hooks::ActError> {
            unreachable!("only programs are run")
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn phases_a_lost_peer_and_the_end_are_told_once_each() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let hooks = hooks(folder.path(), &out);
        let serving = tokio::spawn(Arc::clone(&hooks).serve(Arc::new(NoVms)));
        let (sender, progress) = watch::channel(Progress::begun("1", "web", Role::Source, "b"));
        let told = {
            let hooks = Arc::clone(&hooks);
            tokio::spawn(async move { tell(&hooks, progress).await })
        };
        let lines = |wanted: usize| {
            let out = out.clone();
            async move {
                for _ in 0..1000 {
                    let text = std::fs::read_to_string(&out).unwrap_or_default();
                    if text.lines().count() >= wanted {
                        return text;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                panic!("only: {}", std::fs::read_to_string(&out).unwrap_or_default());
            }
        };
        assert_eq!(lines(1).await, "migration-phase check\n");
        sender.send_modify(|p| p.phase = Phase::Fetch);
        lines(2).await;
        sender.send_modify(|p| p.bytes_sent = 5);
        let error = || Outcome::Reconnecting { error: "cut".to_owned(), since: 0 };
        sender.send_modify(|p| p.outcome = error());
        lines(3).await;
        sender.send_modify(|p| p.outcome = error());
        let failed =
            Outcome::Failed { error: "gone".to_owned(), guest: GuestPlace::PausedAtSource, cancelled: false };
        sender.send_modify(|p| p.outcome = failed);
        told.await.unwrap();
        let said = lines(4).await;
        let said: Vec<&str> = said.lines().map(str::trim).collect();
        assert_eq!(
            said,
            [
                "migration-phase check",
                "migration-phase fetch",
                "peer-lost",
                "after-migration failed paused-at-source"
            ]
        );
        serving.abort();
    }
}
