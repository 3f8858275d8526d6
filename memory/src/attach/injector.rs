//! Running system calls in a thread of another process.

use crate::error::Result;
use crate::process::Process;

/// One stopped thread of another process, in which system calls can be run.
#[derive(Debug)]
pub struct Injector {
    _private: (),
}

impl Injector {
    /// Stops a thread of the process.
    ///
    /// # Errors
    /// Not yet written.
    pub fn attach(_process: &Process) -> Result<Self> {
        todo!()
    }

    /// Runs a system call there and returns its result.
    ///
    /// # Errors
    /// Not yet written.
    pub fn syscall(&mut self, _nr: i64, _args: [u64; 6]) -> Result<u64> {
        todo!()
    }
}
