//! Guests that are larger than the small one of the other cases: one whose memory is registered in several steps, and one that
//! runs Linux.

use anyhow::{Result, ensure};

use super::trouble::RunCase;
use super::{COMMAND_TIMEOUT_MS, Moves, expect, figures, report};
use crate::check::collect;

/// Linux under two emulators boots in a minute on a machine that does nothing else.
const BOOT_S: u32 = 600;
/// Small, and all of it is looked at again and again.
const LINUX: &str = "-machine pc -accel tcg -cpu qemu64 -m 224 -nodefaults -no-user-config -display none -serial file:{vmdir}/serial";
const APPEND: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check random.trust_cpu=on cryptomgr.notests \
                      init_on_alloc=0 transparent_hugepage=madvise vmove.ws_mib=16 vmove.cold_mib=16 vmove.rate=500 \
                      vmove.verify=1000 vmove.threads=1 vmove.order=random vmove.period_us=100000";

/// Runs them.
pub(crate) fn all(moves: &Moves<'_>, case: &RunCase<'_>) -> Result<()> {
    case("memory_is_registered_in_steps", &|| registered_in_steps(moves))?;
    case("a_linux_guest_moves_over_rdma", &|| linux(moves))
}

/// Of 336 MiB, most of them bytes that the guest does not touch. At first more than the source may register.
fn registered_in_steps(moves: &Moves<'_>) -> Result<()> {
    moves.stop(1)?;
    moves.start(1, "--max-registered 260MiB")?;
    moves.guest_of(336, "g")?;
    let file = moves.must(1, "find /run/vm/memory -type f -size +330M | head -1")?;
    let fill = format!(
        "import os\nfd = os.open('{}', os.O_RDWR)\nfor at in range(64, 336): os.pwrite(fd, bytes([at % 251 + 1]) * (1 << 20), at << 20)\n",
        file.trim()
    );
    moves.must(1, &format!("python3 -c \"{fill}\""))?;
    let report = moves.migrate("g", 1, 2, "--mode hybrid --verify")?;
    let why = report["fabric_reason"].as_str().unwrap_or_default();
    ensure!(report["fabric"] == "tcp" && why.contains("--max-registered"), "{report}");
    ensure!(report["verified"] == true, "{report}");
    println!("  {}; {why}", figures(&report));
    moves.stop_daemons_only()?;
    moves.start(1, "").and(moves.start(2, ""))?;
    let report = moves.migrate("g", 2, 1, "--mode hybrid --verify")?;
    expect(&report, "fabric", "verbs")?;
    ensure!(report["verified"] == true, "{report}");
    // Said only if connections were used before that.
    let said = moves.must(2, "grep 'all guest memory is registered' /run/lab/vmoved.log | tail -1")?;
    println!("  {}; {}", figures(&report), said.trim());
    moves.works(1, "g")
}

fn linux(moves: &Moves<'_>) -> Result<()> {
    let (qemu, kernel, initrd) =
        (moves.parts.qemu.display(), moves.parts.kernel.display(), moves.parts.initrd.display());
    let line = format!("{qemu} {LINUX} -kernel {kernel} -initrd {initrd} -append '{APPEND}'");
    moves.must(1, &moves.vmove(&format!("run --name linux -- {line}")))?;
    let console = "/run/vm/run/linux/serial";
    let ready = format!(
        "for i in $(seq {BOOT_S}); do grep -q 'VMOVE-GUEST READY' {console} && exit 0; sleep 1; done; tail -5 {console}; exit 1"
    );
    let booted = collect(
        &moves.lab.exec(1, crate::check::shell(&ready, u64::from(BOOT_S) * 1000 + COMMAND_TIMEOUT_MS))?,
    );
    ensure!(booted.as_ref().is_some_and(|done| done.status == 0), "Linux did not boot: {booted:?}");
    for (turn, mode) in ["hybrid", "postcopy"].into_iter().enumerate() {
        let (from, to) = if turn % 2 == 0 { (1, 2) } else { (2, 1) };
        let text = moves.must(from, &moves.migrate_words("linux", to, &format!("--mode {mode} --verify")))?;
        let report = report(&text)?;
        expect(&report, "fabric", "verbs")?;
        ensure!(report["verified"] == true, "{report}");
        println!("  {mode}: {}", figures(&report));
        lives(moves, to, console)?;
    }
    Ok(())
}

/// Its program goes on to write, and has not found anything that it had not written.
fn lives(moves: &Moves<'_>, host: usize, console: &str) -> Result<()> {
    let sum = "find /run/vm/memory -type f -size +200M | head -1 | xargs md5sum";
    let before = moves.must(host, sum)?;
    std::thread::sleep(std::time::Duration::from_secs(10));
    ensure!(moves.must(host, sum)? != before, "the guest on h{host} writes nothing");
    let said = moves.must(host, &format!("cat {console}"))?;
    let bad = ["VMOVE-GUEST FAIL", "VMOVE-GUEST ERROR", "panic", "BUG:", "Oops"];
    ensure!(!bad.iter().any(|word| said.contains(word)), "{said}");
    Ok(())
}
