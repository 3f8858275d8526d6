//! Where the scripts wait that are run in the guests of a group once these have their devices: for the devices of all others.
//!
//! A rank of a parallel job that goes on before its partners can answer may give them up. So no guest of a group is told to go on before each of
//! them has its devices, wherever the group has ended up. A guest whose migration has ended is not waited for: it has what it will have.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::board::Board;

/// A guest among those that wait for each other's devices.
#[derive(Debug)]
pub(crate) struct ResumePlace {
    lacking: Arc<Board<BTreeSet<usize>>>,
    index: usize,
}

/// Places of so many guests, none of which has its devices.
pub(crate) fn places(count: usize) -> Vec<Arc<ResumePlace>> {
    let lacking = Arc::new(Board::new((0..count).collect()));
    (0..count).map(|index| Arc::new(ResumePlace { lacking: Arc::clone(&lacking), index })).collect()
}

impl ResumePlace {
    /// Its guest has its devices, or it is known that it does not get them.
    pub(crate) fn has_devices(&self) {
        self.lacking.change(|lacking| lacking.remove(&self.index));
    }

    /// Waits until this is so for each of them. Cancel-safe.
    pub(crate) async fn all_have_devices(&self) {
        self.lacking.find(|lacking| lacking.is_empty().then_some(())).await;
    }
}

impl Drop for ResumePlace {
    /// Its migration has ended.
    fn drop(&mut self) {
        self.has_devices();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_script_waits_for_the_devices_of_all_and_not_for_who_has_ended() {
        let [a, b, c] = <[_; 3]>::try_from(places(3)).unwrap();
        let waiting = |place: &Arc<ResumePlace>| {
            let place = Arc::clone(place);
            async move { tokio::time::timeout(Duration::from_millis(20), place.all_have_devices()).await.is_err() }
        };
        a.has_devices();
        assert!(waiting(&a).await, "two lack their devices");
        b.has_devices();
        assert!(waiting(&a).await && waiting(&b).await, "one lacks its devices");
        drop(c);
        assert!(!waiting(&a).await && !waiting(&b).await);
    }
}
