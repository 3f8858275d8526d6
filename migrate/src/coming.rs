//! How much memory has come, and how much is still to come: one count over all rounds, without zero pages.

/// Counts bytes of pages that cross. A page that the guest writes to again crosses again, and counts again.
#[derive(Debug, Default)]
pub(crate) struct Coming {
    /// What has crossed in all.
    landed: u64,
    /// That, when the current part began.
    landed_before: u64,
    /// What crosses at most in the current part: a round, or what is left after the stop. `None`: not known.
    planned: Option<u64>,
    /// What the guest's memory held when the migration began: no part is larger.
    content: Option<u64>,
}

impl Coming {
    /// The guest's memory holds so many bytes. All of that is still to come.
    pub(crate) fn begin(&mut self, content: u64) {
        self.content = Some(content);
        self.part(content);
    }

    /// A part begins. At most `bytes` come with it.
    pub(crate) fn part(&mut self, bytes: u64) {
        self.landed_before = self.landed;
        self.planned = Some(bytes.min(self.content.unwrap_or(u64::MAX)));
    }

    /// The rest of the part's pages are zero.
    pub(crate) fn at_most(&mut self, bytes: u64) {
        self.planned = self.planned.map(|planned| planned.min(bytes));
    }

    /// So many bytes have crossed in all.
    pub(crate) fn landed(&mut self, bytes: u64) {
        self.landed = self.landed.max(bytes);
    }

    pub(crate) const fn done(&self) -> u64 {
        self.landed
    }

    /// What is still to come of this part. `missing`: what the destination lacks, zero pages perhaps among it.
    pub(crate) fn left(&self, missing: Option<u64>) -> u64 {
        let planned = self.planned.map(|planned| planned.saturating_sub(self.landed - self.landed_before));
        [planned, missing].into_iter().flatten().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes of memory, 400 of them never used, 100 zero.
    #[test]
    fn zero_pages_are_never_to_come() {
        let mut coming = Coming::default();
        coming.begin(600);
        assert_eq!((coming.done(), coming.left(None)), (0, 600), "nothing has come");
        coming.part(1000);
        coming.landed(200);
        assert_eq!((coming.done(), coming.left(None)), (200, 400));
        coming.at_most(500);
        assert_eq!(coming.left(None), 300, "all are named, and 100 are zero");
        coming.landed(500);
        assert_eq!(coming.left(None), 0);
        // The next round.
        coming.part(50);
        assert_eq!((coming.done(), coming.left(None)), (500, 50));
        coming.landed(520);
        assert_eq!((coming.done(), coming.left(None)), (520, 30));
    }

    #[test]
    fn after_the_stop_what_the_destination_lacks_counts_if_that_is_less() {
        let mut coming = Coming::default();
        coming.begin(600);
        coming.part(1000);
        assert_eq!(coming.left(Some(1000)), 600, "all pages are missing, most of them zero");
        coming.landed(590);
        assert_eq!(coming.left(Some(4)), 4);
        assert_eq!(coming.left(Some(0)), 0, "it has everything");
    }

    #[test]
    fn one_that_was_taken_up_knows_what_is_missing_only() {
        let mut coming = Coming::default();
        assert_eq!((coming.left(None), coming.left(Some(70))), (0, 70));
        coming.landed(30);
        coming.landed(20);
        assert_eq!(coming.done(), 30, "it never falls");
    }
}
