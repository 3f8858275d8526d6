//! What the table is made of and lies in: the real atomics, locks and mappings, or loom's where its model checker runs.

#[cfg(loom)]
pub(super) use model::{Mapped, pause, random};
#[cfg(not(loom))]
pub(super) use real::{Mapped, pause, random};

#[cfg(loom)]
pub(super) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering, fence},
};
#[cfg(not(loom))]
pub(super) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering, fence},
};

#[cfg(not(loom))]
mod real {
    pub(in super::super) use crate::sys::net::random;
    pub(in super::super) use crate::sys::shm::Mapped;

    /// Lets others run. Sleeping, not spinning: whoever is waited for may have to run on this processor, and this thread may
    /// outrank it.
    pub(in super::super) fn pause() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

/// The same without the kernel: loom's atomics are no plain words and cannot lie in a mapping, and a model must not depend on
/// chance.
#[cfg(loom)]
mod model {
    use std::io;
    use std::ops::Deref;
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::Arc;

    pub(in super::super) use loom::thread::yield_now as pause;

    use crate::sys::shm::Shareable;

    /// One value. Clones stand for the mappings of other processes.
    #[derive(Debug)]
    pub(in super::super) struct Mapped<T>(Arc<T>);

    impl<T: Shareable + Default> Mapped<T> {
        pub(in super::super) fn private() -> io::Result<Self> {
            Ok(Self(Arc::default()))
        }

        pub(in super::super) fn shared(_: &std::ffi::CStr) -> io::Result<(Self, OwnedFd)> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(in super::super) fn open(_: BorrowedFd<'_>) -> io::Result<Self> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(in super::super) fn again(&self) -> Self {
            Self(Arc::clone(&self.0))
        }
    }

    impl<T> Deref for Mapped<T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.0
        }
    }

    /// Numbers that differ from each other. The program only asks whether two are equal, so it takes the same branches whichever
    /// they are.
    pub(in super::super) fn random() -> io::Result<u64> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Ok(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) << 16)
    }
}
