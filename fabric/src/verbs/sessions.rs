//! A protection domain for each session: its memory can be reached by its own queue pairs, and by no others.
//!
//! A key of a region is 32 bits, of which few are random, and its addresses are those of this process: a peer of another session could guess
//! both. The device compares the domains of region and queue pair, and refuses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::VerbsFabric;
use super::raw::Domain;
use crate::FabricError;

/// Which sessions have a domain. One goes away with the last region and queue pair in it.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<HashMap<u128, Known>>);

#[derive(Debug)]
struct Known {
    domain: Weak<Domain>,
    fabric: Weak<VerbsFabric>,
}

impl VerbsFabric {
    /// The same fabric for one session: what is registered in it can be reached only over connections that were made in it. It does not
    /// listen. Whoever asks for the same session gets the same, as long as there is anything of it.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`] if the device has no protection domain left.
    pub fn for_session(&self, session: u128) -> Result<Arc<Self>, FabricError> {
        let mut known = self.sessions.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, known| known.domain.strong_count() > 0);
        let found = known.get(&session);
        if let Some(fabric) = found.and_then(|known| known.fabric.upgrade()) {
            return Ok(fabric);
        }
        let domain = match found.and_then(|known| known.domain.upgrade()) {
            Some(domain) => domain,
            None => {
                let made = Domain::new(Arc::clone(self.domain.device()));
                Arc::new(made.map_err(|error| FabricError::NoDevice {
                    why: format!(
                        "{} has no protection domain left for a session: {error}",
                        self.choice.device
                    ),
                })?)
            }
        };
        let fabric = Arc::new(self.in_domain(domain));
        let domain = Arc::downgrade(&fabric.domain);
        known.insert(session, Known { domain, fabric: Arc::downgrade(&fabric) });
        Ok(fabric)
    }

    fn in_domain(&self, domain: Arc<Domain>) -> Self {
        Self {
            table: Arc::clone(&self.table),
            keys: Arc::clone(&self.keys),
            watch: Arc::clone(&self.watch),
            domain,
            choice: self.choice.clone(),
            limits: self.limits,
            on_demand: self.on_demand,
            urgency: Arc::clone(&self.urgency),
            budget: Arc::clone(&self.budget),
            options: self.options.clone(),
            listening: None,
            sessions: Arc::clone(&self.sessions),
        }
    }
}
