//! Ids and secrets by chance.

use uuid::Uuid;

/// A random id, version 4. In a simulation it follows from a seed.
#[must_use]
pub fn uuid() -> Uuid {
    #[cfg(feature = "simulation")]
    if let Some(process) = crate::simulation::current() {
        return process.uuid();
    }
    Uuid::new_v4()
}
