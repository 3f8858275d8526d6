//! What tests of every crate need: to say that they cannot run here ([`need!`], [`skip!`]), ports ([`free_port`]),
//! a QEMU ([`qemu`](qemu())), files that earlier releases wrote ([`formats`]), and recorded hosts ([`tree`]).
//!
//! A skipped test prints one line, `SKIP NAME: REASON`, and passes. `./run test` shows and counts these lines. With
//! `VMOVE_NO_SKIP` set (to anything but `0`) the test fails instead, for machines on which everything should run.
//!
//! ```
//! # fn root() -> Result<(), String> { Ok(()) }
//! # fn file() -> Result<String, String> { Ok("text".into()) }
//! // #[test]
//! fn reads_what_only_root_may_read() {
//!     vmove_skip::need!(root()); // returns from the test with a `SKIP` line if this is an error
//!     let text = vmove_skip::need!(file());
//!     if text.is_empty() {
//!         return vmove_skip::skip!("the file is empty");
//!     }
//! }
//! ```

pub mod formats;
pub mod installed;
mod port;
mod qemu;
pub mod reference;
pub mod tree;

use std::ffi::OsStr;
use std::fmt::{Arguments, Display};

pub use port::free_port;
pub use qemu::{QEMUS_OF_SETUP, open_to_qemu, path_with_qemus, qemu, root, user_of_qemus};

/// Says that the calling test does not run, and why: `skip!("no {tool}")`. Evaluates to `()`; returning is the caller's part.
///
/// - `skip!(part = "on hugetlbfs", "no huge pages")`: only a part of the test does not run.
/// - `skip!(test = "name", "no huge pages")`: for a thread that has not the name of its test.
///
/// # Panics
/// With `VMOVE_NO_SKIP`.
#[macro_export]
macro_rules! skip {
    (part = $part:expr, $($reason:tt)+) => {
        $crate::skipped(None, Some(&$part), format_args!($($reason)+))
    };
    (test = $test:expr, $($reason:tt)+) => {
        $crate::skipped(Some(&$test), None, format_args!($($reason)+))
    };
    ($($reason:tt)+) => {
        $crate::skipped(None, None, format_args!($($reason)+))
    };
}

/// The value of a `Result`. If it is an error, the calling test cannot run: it is [skipped](skip!) with the error as the reason, and
/// the calling function returns. So this has no place behind something that the test has already found out: in a loop, report first.
///
/// # Panics
/// On an error, with `VMOVE_NO_SKIP`.
#[macro_export]
macro_rules! need {
    ($needed:expr) => {
        match $needed {
            Ok(value) => value,
            // All causes of an `anyhow::Error`; other errors do not tell the difference.
            Err(reason) => return $crate::skip!("{reason:#}"),
        }
    };
}

/// What [`skip!`] does: not to be called by name.
#[doc(hidden)]
#[track_caller]
pub fn skipped(test: Option<&dyn Display>, part: Option<&dyn Display>, reason: Arguments<'_>) {
    let thread = std::thread::current();
    let name = test.map_or_else(|| thread.name().unwrap_or("a test").to_owned(), ToString::to_string);
    let part = part.map_or_else(String::new, |part| format!(" ({part})"));
    // One line, whatever the reason holds.
    let reason = reason.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    let allowed = std::env::var_os("VMOVE_NO_SKIP").is_none_or(|value| allows(&value));
    assert!(allowed, "{name}{part} cannot run, and VMOVE_NO_SKIP forbids to skip it: {reason}");
    eprintln!("SKIP {name}{part}: {reason}");
}

/// Whether this value of `VMOVE_NO_SKIP` is as good as none.
fn allows(value: &OsStr) -> bool {
    value.is_empty() || value == "0"
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    #[test]
    #[ignore = "run by the other tests, with and without VMOVE_NO_SKIP"]
    fn skips() {
        skip!(part = "on a Tuesday", "no {}", "weather");
        need!(Err::<(), _>("two\nlines"));
        panic!("it went on");
    }

    #[test]
    #[ignore = "run by the other tests, with and without VMOVE_NO_SKIP"]
    fn skips_by_another_name() {
        std::thread::spawn(|| skip!(test = "its own name", "reason")).join().unwrap();
    }

    fn run(test: &str, no_skip: Option<&str>) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        // Also with one test at a time the thread has the name of the test.
        command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
        command.env_remove("VMOVE_NO_SKIP").envs(no_skip.map(|value| ("VMOVE_NO_SKIP", value)));
        command.output().unwrap()
    }

    #[test]
    fn a_skipped_test_passes_and_says_why_in_one_line() {
        for no_skip in [None, Some(""), Some("0")] {
            let output = run("tests::skips", no_skip);
            assert!(output.status.success(), "{no_skip:?}: {output:?}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(said, "SKIP tests::skips (on a Tuesday): no weather\nSKIP tests::skips: two lines\n");
        }
        let output = run("tests::skips_by_another_name", None);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "SKIP its own name: reason\n");
    }

    #[test]
    fn with_the_variable_it_fails_with_the_reason() {
        let output = run("tests::skips", Some("1"));
        assert!(!output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("no weather") && !said.contains("SKIP tests"), "{said}");
    }
}
