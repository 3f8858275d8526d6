//! Plans in the store.

use super::grant::json;
use super::{Bridge, BridgeError, Step};
use crate::keys;
use crate::lease::LeaseId;
use crate::plan::Plan;
use crate::store::{Expect, Txn};

impl Bridge {
    /// A plan.
    ///
    /// # Errors
    /// There is none, or the view is old.
    pub fn plan(&self, id: &LeaseId) -> Result<Plan, BridgeError> {
        let view = self.view()?;
        let (text, _) = view.plans().get(id).ok_or_else(|| BridgeError::UnknownPlan(id.clone()))?;
        serde_json::from_str(text).map_err(|e| BridgeError::Bad(format!("plan {id} cannot be read: {e}")))
    }

    /// Writes a plan, if its runner is still the one that it was.
    ///
    /// # Errors
    /// Another bridge has taken it over, or the store does not answer.
    pub async fn put_plan(&self, plan: &Plan, runner: Option<&str>) -> Result<(), BridgeError> {
        self.change(|view| {
            let key = keys::plan(&plan.id);
            let Some((text, revision)) = view.plans().get(&plan.id) else {
                return Ok(Step::Commit(
                    Txn::default().expect(&key, Expect::Absent).put(key, json(plan)),
                    (),
                ));
            };
            let known: Plan = serde_json::from_str(text).map_err(|e| BridgeError::Bad(e.to_string()))?;
            if known == *plan {
                return Ok(Step::Done(()));
            }
            // After a lost answer it may be what we have just written.
            let mine = plan.runner.as_ref().map(|r| r.id.as_str());
            let found = known.runner.as_ref().map(|r| r.id.as_str());
            if found != runner && found != mine {
                return Err(BridgeError::Bad(format!("plan {} was taken over by another bridge", plan.id)));
            }
            Ok(Step::Commit(Txn::default().expect(&key, Expect::At(*revision)).put(key, json(plan)), ()))
        })
        .await
    }

    /// Forgets a plan that nobody runs.
    ///
    /// # Errors
    /// There is none, it is being run, or the store does not answer.
    pub async fn remove_plan(&self, id: &LeaseId) -> Result<(), BridgeError> {
        if self.plan(id)?.runner.is_some() {
            return Err(BridgeError::Bad(format!(
                "plan {id} is being run: it can be deleted when it has ended"
            )));
        }
        self.change(|view| {
            let (_, revision) = view.plans().get(id).ok_or_else(|| BridgeError::UnknownPlan(id.clone()))?;
            let key = keys::plan(id);
            Ok(Step::Commit(Txn::default().expect(&key, Expect::At(*revision)).delete(key), ()))
        })
        .await
    }
}
