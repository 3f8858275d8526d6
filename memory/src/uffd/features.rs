//! What is asked of a userfaultfd.

use userfaultfd::{FeatureFlags, Uffd, UffdBuilder};

use crate::error::{MemoryError, Result};

// Bits that the userfaultfd crate has no names for.
const MINOR_HUGETLBFS: u64 = 1 << 9;
const MINOR_SHMEM: u64 = 1 << 10;
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const WP_UNPOPULATED: u64 = 1 << 13;
const POISON: u64 = 1 << 14;
const WP_ASYNC: u64 = 1 << 15;

/// What a userfaultfd is for; decides the features asked of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UffdFeatures {
    /// Serving pages: minor and missing faults, discard events, thread ids; poisoning where the kernel has it.
    Faults,
    /// Asynchronous write protection: [`DirtyTracker`](crate::DirtyTracker). Needs Linux 6.7.
    DirtyTracking,
    /// Write protection whose writers wait: [`Keeper`](crate::Keeper). Needs Linux 5.19.
    WriteProtection,
}

impl UffdFeatures {
    /// Whether this kernel has them.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] names what is missing.
    pub fn check(self) -> Result<()> {
        self.bits().map(drop)
    }

    /// The bits to ask for on this kernel.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] names what is missing.
    pub(crate) fn bits(self) -> Result<u64> {
        match self {
            Self::Faults => {
                let named = FeatureFlags::EVENT_REMOVE
                    | FeatureFlags::MISSING_SHMEM
                    | FeatureFlags::MISSING_HUGETLBFS
                    | FeatureFlags::THREAD_ID;
                let wanted = named.bits() | MINOR_SHMEM | MINOR_HUGETLBFS;
                if !kernel_has(wanted) {
                    return Err(MemoryError::Unsupported {
                        feature: "userfaultfd minor faults on shared memory (Linux 5.14), or access to them",
                        consequence: "no page can be served to a guest",
                    });
                }
                Ok(if kernel_has(wanted | POISON) { wanted | POISON } else { wanted })
            }
            Self::DirtyTracking => {
                let wanted =
                    FeatureFlags::PAGEFAULT_FLAG_WP.bits() | WP_HUGETLBFS_SHMEM | WP_UNPOPULATED | WP_ASYNC;
                if kernel_has(wanted) {
                    return Ok(wanted);
                }
                Err(MemoryError::Unsupported {
                    feature: "userfaultfd asynchronous write protection (Linux 6.7)",
                    consequence: "full post-copy is possible, pre-copy and hybrid are not",
                })
            }
            Self::WriteProtection => {
                let named = FeatureFlags::PAGEFAULT_FLAG_WP | FeatureFlags::EVENT_REMOVE;
                let wanted = named.bits() | WP_HUGETLBFS_SHMEM;
                if kernel_has(wanted) {
                    return Ok(wanted);
                }
                Err(MemoryError::Unsupported {
                    feature: "userfaultfd write protection of shared memory (Linux 5.19)",
                    consequence: "memory cannot be copied as it was while its process writes to it",
                })
            }
        }
    }
}

/// True if a userfaultfd with these features can be had. Asking takes a descriptor that is thrown away, since the
/// features of each are settled once.
fn kernel_has(bits: u64) -> bool {
    local(bits).is_ok()
}

/// A userfaultfd for this process, for faults in user mode only.
pub(super) fn local(bits: u64) -> Result<Uffd> {
    UffdBuilder::new()
        .close_on_exec(true)
        .non_blocking(true)
        .user_mode_only(true)
        .require_features(FeatureFlags::from_bits_retain(bits))
        .create()
        .map_err(|error| {
            MemoryError::system("Creating a userfaultfd", std::io::Error::other(error.to_string()))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_not_supported() {
        assert!(kernel_has(0), "this machine has userfaultfd");
        assert!(!kernel_has(1 << 63));
    }
}
