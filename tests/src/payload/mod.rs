//! A guest of a few hundred instructions: it boots in a second, with KVM as well as emulated.
//!
//! It does what the [Linux guest](vmove_guest) does to memory, and tells of it in the same beacon. It fills its pages, rewrites them at a rate,
//! checks each before, and checks all of them in rotation: a word in each 512 bytes, from the first of the page to the last. What a page must
//! hold follows from the number of rewrites, which is in a register and in no memory: so a stale page cannot agree with a stale table.
//! Between two periods it halts until the timer interrupts.
//!
//! It is its own firmware and stays in 32-bit mode without paging. There are KVMs that interpret each instruction of such a guest (a tenth of
//! a million a second), and do not get a stock Linux to its first line; this guest works there too.
//!
//! If asked to, it has KVM write to its memory: the paravirtual clock, the wall clock, the steal time, and the tokens of asynchronous page
//! faults. The last it provokes: it switches such faults on again in each period, whereupon KVM writes the token that wakes everybody.

mod code;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use vmove_guest::beacon::{Phase, fixed_words, place};
use vmove_guest::config::{Config, Rate};
use vmove_guest::order::Order;

use crate::beacon::BeaconPage;
use crate::guest::{Accel, Guest, System};
use crate::places::{self, Qemu};
use crate::sampler::now;
use code::{BEACON_WORDS, HIDDEN_BEACON, HIDDEN_BY, IMAGE_BYTES, LOW_MIB, PARAMETERS};

/// What KVM itself writes to the guest's memory, by the guest's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvmPages {
    /// Nothing.
    None,
    /// Clock, wall clock, steal time and asynchronous page faults, as far as KVM has them.
    All,
}

/// Words of the image at [`PARAMETERS`].
type Parameters = [u32; 7];

/// Offset in guest memory of the page with number 0, in bytes.
pub const PAGES_START: u64 = (LOW_MIB as u64) << 20;
/// Memory that it does not use.
const FREE_MIB: u32 = 28;
/// Frequency of the timer in Hz.
const TIMER_HZ: u64 = 1_193_182;
/// Bits of CPUID leaf 0x40000001: `KVM_FEATURE_CLOCKSOURCE2`, `KVM_FEATURE_STEAL_TIME`, and `KVM_FEATURE_ASYNC_PF` with
/// `KVM_FEATURE_ASYNC_PF_INT`.
const KVM_CLOCK: u32 = 1 << 3;
const KVM_STEAL_TIME: u32 = 1 << 5;
const KVM_ASYNC_FAULTS: u32 = (1 << 4) | (1 << 14);
/// Numbers of the beacon's words in which the payload says what KVM is and has written.
const FEATURES: usize = 48;
const CLOCK_VERSION: usize = 49;
const STEAL_VERSION: usize = 50;
const ASYNC_TOKENS: usize = 51;

/// What the payload says of KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvmSeen {
    /// KVM has the paravirtual clock. False if the guest is emulated.
    pub has_clock: bool,
    /// KVM has the steal time.
    pub has_steal_time: bool,
    /// KVM has asynchronous page faults that end with an interrupt.
    pub has_async_faults: bool,
    /// Version of the clock; KVM makes it larger at each write.
    pub clock_version: u64,
    /// Version of the steal time.
    pub steal_version: u64,
    /// Tokens of asynchronous page faults that KVM has written.
    pub async_tokens: u64,
}

/// Reads it from the payload's beacon.
///
/// # Errors
/// When it cannot be read.
pub fn kvm_seen(beacon: &BeaconPage) -> Result<KvmSeen> {
    let features = beacon.word(FEATURES)?;
    Ok(KvmSeen {
        has_clock: features & u64::from(KVM_CLOCK) != 0,
        has_steal_time: features & u64::from(KVM_STEAL_TIME) != 0,
        has_async_faults: features & u64::from(KVM_ASYNC_FAULTS) == u64::from(KVM_ASYNC_FAULTS),
        clock_version: beacon.word(CLOCK_VERSION)?,
        steal_version: beacon.word(STEAL_VERSION)?,
        async_tokens: beacon.word(ASYNC_TOKENS)?,
    })
}

/// Checks that a payload can run here with `accel`, between the daemons that were built.
///
/// # Errors
/// What is missing.
pub fn ready(accel: Accel) -> Result<()> {
    places::root()?;
    places::product("vmoved")?;
    places::product("vmove")?;
    Qemu::under_test()?;
    accel.usable()
}

/// A task that dirties pages fast enough for several rounds over a slow link.
#[must_use]
pub fn busy() -> Config {
    Config {
        working_set_mib: 8,
        cold_mib: 8,
        rate: Rate::PagesPerSecond(1_000),
        verify: 4_000,
        period_us: 10_000,
        ..Config::default()
    }
}

/// A task that leaves enough of two cores to children.
#[must_use]
pub fn light() -> Config {
    Config { working_set_mib: 4, cold_mib: 4, rate: Rate::PagesPerSecond(300), verify: 2_000, ..busy() }
}

/// A task like that of the Linux guest of most tests, in a quarter of the memory.
#[must_use]
pub fn steady() -> Config {
    Config { working_set_mib: 16, cold_mib: 16, rate: Rate::PagesPerSecond(500), ..busy() }
}

/// A task for the benchmark: as fast as [`busy`], with more memory.
#[must_use]
pub fn measured() -> Config {
    Config { working_set_mib: 32, cold_mib: 32, verify: 1_000, ..busy() }
}

/// Memory of a guest with this task, in MiB.
#[must_use]
pub const fn memory_mib(config: &Config) -> u32 {
    LOW_MIB + config.working_set_mib + config.cold_mib + FREE_MIB
}

/// A guest with this task: one virtual CPU, 32 MiB more than its pages. Its image is written to `folder`.
///
/// # Errors
/// When the task is not one for the payload, QEMU is not there, or the image cannot be written.
pub fn guest(folder: &Path, accel: Accel, config: &Config, kvm: KvmPages) -> Result<Guest> {
    let config = Config { order: Order::Random, threads: 1, ..config.clone() };
    let path = folder.join(if kvm == KvmPages::All { "payload-kvm-pages" } else { "payload" });
    std::fs::write(&path, image(&config, kvm)?)
        .with_context(|| format!("could not write {}", path.display()))?;
    Ok(Guest { system: System::Payload { image: path, accel }, ..Guest::new(memory_mib(&config), config)? })
}

fn image(config: &Config, kvm: KvmPages) -> Result<Vec<u8>> {
    let Rate::PagesPerSecond(rate) = config.rate else {
        anyhow::bail!("the payload rewrites pages at a rate only, not as fast as it can");
    };
    ensure!(config.working_set_mib > 0, "the payload needs a working set");
    let period = u64::from(config.period_us);
    let in_period = |rate: u32| u32::try_from((u64::from(rate) * period).div_ceil(1_000_000));
    let divisor = TIMER_HZ * period / 1_000_000;
    ensure!(
        (1..=0xffff).contains(&divisor),
        "the payload's period must be between 1 us and 54 ms, not {period} us"
    );
    let parameters: Parameters = [
        config.working_pages(),
        config.cold_pages(),
        in_period(rate)?,
        in_period(config.verify)?,
        config.period_us,
        u32::try_from(divisor)?,
        if kvm == KvmPages::All { KVM_CLOCK | KVM_STEAL_TIME | KVM_ASYNC_FAULTS } else { 0 },
    ];
    let mut image = code::image();
    debug_assert_eq!(image.len(), IMAGE_BYTES);
    for (number, word) in parameters.iter().enumerate() {
        put(&mut image, PARAMETERS + number * 4, *word);
    }
    let mut beacon = [0_u64; BEACON_WORDS];
    for (at, word) in fixed_words(config, now()) {
        beacon[at] = word;
    }
    beacon[place::PHASE] = Phase::Filling as u64;
    for (number, word) in beacon.iter().flat_map(|word| [*word & 0xffff_ffff, word >> 32]).enumerate() {
        put(&mut image, HIDDEN_BEACON + number * 4, u32::try_from(word)? ^ HIDDEN_BY);
    }
    Ok(image)
}

fn put(image: &mut [u8], at: usize, word: u32) {
    image[at..at + 4].copy_from_slice(&word.to_le_bytes());
}
