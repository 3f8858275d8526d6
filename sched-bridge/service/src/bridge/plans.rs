//! Plans in the store.

use super::transactions::json;
use super::{Attempt, Bridge, BridgeError};
use crate::keys;
use crate::lease::LeaseId;
use crate::store::{Expect, Txn};
use vmove_bridge_types::plan::Plan;

impl Bridge {
    /// A plan.
    ///
    /// # Errors
    /// There is no such plan, or the store does not answer.
    pub fn plan(&self, id: &LeaseId) -> Result<Plan, BridgeError> {
        let view = self.view()?;
        let (text, _) = view.plans().get(id).ok_or_else(|| BridgeError::UnknownPlan(id.clone()))?;
        serde_json::from_str(text).map_err(|e| BridgeError::Invalid(format!("plan {id} cannot be read: {e}")))
    }

    /// Writes a plan, provided that its runner in the store is still `runner`.
    ///
    /// # Errors
    /// Another bridge runs it now, or the store does not answer.
    pub async fn put_plan(&self, plan: &Plan, runner: Option<&str>) -> Result<(), BridgeError> {
        self.change(|view| {
            let key = keys::plan(&plan.id);
            let Some((text, revision)) = view.plans().get(&plan.id) else {
                return Ok(Attempt::Commit(
                    Txn::default().expect(&key, Expect::Absent).put(key, json(plan)),
                    (),
                ));
            };
            let known: Plan = serde_json::from_str(text).map_err(|e| BridgeError::Invalid(e.to_string()))?;
            if known == *plan {
                return Ok(Attempt::Done(()));
            }
            // After a lost answer the store may have what was just written.
            let ours = plan.runner.as_ref().map(|r| r.id.as_str());
            let found = known.runner.as_ref().map(|r| r.id.as_str());
            if found != runner && found != ours {
                return Err(BridgeError::Invalid(format!("another bridge runs plan {} now", plan.id)));
            }
            Ok(Attempt::Commit(Txn::default().expect(&key, Expect::At(*revision)).put(key, json(plan)), ()))
        })
        .await
    }

    /// Deletes a plan that is not being run.
    ///
    /// # Errors
    /// There is no such plan, it is being run, or the store does not answer.
    pub async fn remove_plan(&self, id: &LeaseId) -> Result<(), BridgeError> {
        if self.plan(id)?.runner.is_some() {
            return Err(BridgeError::Invalid(format!(
                "plan {id} is being run: wait for its end, then delete it"
            )));
        }
        self.change(|view| {
            let (_, revision) = view.plans().get(id).ok_or_else(|| BridgeError::UnknownPlan(id.clone()))?;
            let key = keys::plan(id);
            Ok(Attempt::Commit(Txn::default().expect(&key, Expect::At(*revision)).delete(key), ()))
        })
        .await
    }
}
