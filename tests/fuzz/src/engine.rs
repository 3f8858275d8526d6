//! Feeds a target, and says what failed and how to see it again.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::mutate::mutated;
use crate::random::Random;
use crate::targets::Target;
use crate::{allocation, corpus};

/// How long one input may take. So long because the machine may be busy.
pub const LONGEST: Duration = Duration::from_secs(20);

/// An input that is being read.
struct Current {
    target: &'static str,
    input: Vec<u8>,
    since: Instant,
}

/// What each thread feeds. An allocator that ends the process, and a watchdog, tell of it.
static CURRENT: LazyLock<Mutex<HashMap<ThreadId, Current>>> = LazyLock::new(Mutex::default);

fn current() -> MutexGuard<'static, HashMap<ThreadId, Current>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An input that a target did not stand.
#[derive(Debug)]
pub struct Failed {
    /// What was wrong, where the input is, and how to feed it again.
    pub report: String,
}

/// Feeds one input.
///
/// # Errors
/// The target panicked. One that takes too much memory or time ends the process.
pub fn feed(target: &'static Target, input: &[u8]) -> Result<(), Failed> {
    watch();
    let id = thread::current().id();
    current().insert(id, Current { target: target.name, input: input.to_vec(), since: Instant::now() });
    let mut done = Ok(());
    allocation::bounded(too_much_memory, || {
        done = catch_unwind(AssertUnwindSafe(|| (target.feed)(input)));
    });
    current().remove(&id);
    done.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        Failed { report: report(target.name, input, text) }
    })
}

/// Feeds the corpus, then so many mutations of it. How many inputs that were.
///
/// # Errors
/// As [`feed`].
pub fn run(target: &'static Target, seed: u64, mutations: u64) -> Result<u64, Failed> {
    let corpus = inputs(target);
    for input in &corpus {
        feed(target, input)?;
    }
    let mut random = Random::new(seed, target.name);
    for _ in 0..mutations {
        feed(target, &mutated(&mut random, &corpus, target.words))?;
    }
    Ok(corpus.len() as u64 + mutations)
}

/// Valid inputs of a target, and the files of its corpus.
///
/// # Panics
/// The files cannot be read.
#[must_use]
pub fn inputs(target: &Target) -> Vec<Vec<u8>> {
    let files = corpus::read(&corpus::folder(target.name));
    let files = files.unwrap_or_else(|error| panic!("no corpus for {}: {error}", target.name));
    (target.seeds)().into_iter().chain(files.into_iter().map(|(_, bytes)| bytes)).collect()
}

fn report(target: &str, input: &[u8], what: &str) -> String {
    let path = corpus::keep_failed(target, input);
    let path = path.display();
    format!(
        "{target}: {what}\nThe input is in {path}; to feed it again: cargo run -p vmove-fuzz --bin fuzz -- again {target} {path}"
    )
}

/// Ends the process: nothing can unwind from an allocation.
fn too_much_memory() -> ! {
    let found = current().remove(&thread::current().id());
    if let Some(Current { target, input, .. }) = found {
        let what = format!("more than {} MiB of memory", allocation::MOST >> 20);
        eprintln!("{}", report(target, &input, &what));
    }
    eprintln!("{}", std::backtrace::Backtrace::force_capture());
    std::process::abort()
}

/// Ends the process when an input takes too long.
fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        thread::spawn(|| {
            loop {
                thread::sleep(Duration::from_secs(1));
                if let Some(slow) = current().values().find(|current| current.since.elapsed() > LONGEST) {
                    let what = format!("not done after {} s", LONGEST.as_secs());
                    eprintln!("{}", report(slow.target, &slow.input, &what));
                    std::process::abort();
                }
            }
        });
    });
}
