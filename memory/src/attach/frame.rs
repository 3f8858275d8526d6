//! A call that cleans up after itself.
//!
//! While a thread of QEMU stands at an injected call, our death must not harm it: the kernel would let it go on
//! right there, with the wrong registers. So the call is dressed up as a signal handler: below the thread's stack lies
//! a signal frame with the registers to return to, the call is made at a `syscall; ret`, and the `ret` leads to
//! `rt_sigreturn`, which restores everything. Normally we restore the registers ourselves and the frame is not used.

use super::ptrace::{self, Regs, signed, unsigned};

/// Bytes below the stack pointer that belong to the interrupted function.
const RED_ZONE: u64 = 128;
/// `pretcode`, `ucontext` and `siginfo` of the kernel's `rt_sigframe` on x86-64.
const FRAME: usize = 8 + 304 + 128;
/// An XSAVE area is aligned so.
const XSAVE_ALIGN: u64 = 64;
/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const UC_FLAGS: u64 = 7;
/// Not a valid value, so that the kernel leaves the alternate signal stack as it is.
const NO_SIGALTSTACK: u64 = 0xff;

/// Position in an XSAVE area of the bytes that the hardware leaves to software.
const SW_RESERVED: usize = 464;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;

/// A frame and where it goes.
pub(super) struct Frame {
    /// Address of its first byte; the stack pointer for the call.
    pub at: u64,
    pub bytes: Vec<u8>,
}

/// Registers as they must be for the interrupted system call to start over, if there was one.
///
/// For calls that continue from a restart block this is EINTR: `rt_sigreturn` discards the block.
pub(super) fn restarted(regs: &Regs) -> Regs {
    let mut regs = *regs;
    if signed(regs.orig_rax) >= 0 {
        match signed(regs.rax) {
            ptrace::ERESTARTSYS | ptrace::ERESTARTNOINTR | ptrace::ERESTARTNOHAND => {
                regs.rax = regs.orig_rax;
                regs.rip -= 2;
            }
            ptrace::ERESTART_RESTARTBLOCK => regs.rax = unsigned(-i64::from(libc::EINTR)),
            _ => {}
        }
    }
    regs
}

/// Builds the frame below the stack of a thread with these registers, signal mask and XSAVE area.
pub(super) fn build(regs: &Regs, mask: u64, xstate: &[u8], sigreturn: u64) -> Frame {
    let xstate = with_signature(xstate);
    let fp_at = (regs.rsp - RED_ZONE - xstate.len() as u64) & !(XSAVE_ALIGN - 1);
    // As for a function just entered: the stack pointer is 8 below a multiple of 16.
    let at = ((fp_at - FRAME as u64) & !15) - 8;

    let mut words = vec![sigreturn, UC_FLAGS, 0, 0, NO_SIGALTSTACK, 0];
    words.extend([regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15]);
    words.extend([regs.rdi, regs.rsi, regs.rbp, regs.rbx, regs.rdx, regs.rax, regs.rcx, regs.rsp, regs.rip]);
    words.push(regs.eflags);
    words.push((regs.cs & 0xffff) | (regs.ss & 0xffff) << 48);
    words.extend([0; 4]); // err, trapno, oldmask, cr2
    words.push(fp_at);
    words.extend([0; 8]);
    words.push(mask);

    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    let fp_offset = usize::try_from(fp_at - at).unwrap_or(FRAME);
    bytes.resize(fp_offset, 0);
    bytes.extend(xstate);
    Frame { at, bytes }
}

/// An XSAVE area as ptrace gives it, made into one as signal frames have it: the software bytes say how long it is,
/// and a second magic number follows it.
fn with_signature(area: &[u8]) -> Vec<u8> {
    let mut area = area.to_vec();
    let Some(features) = area.get(SW_RESERVED..SW_RESERVED + 8) else { return area };
    let features = u64::from_le_bytes(features.try_into().unwrap_or_default());
    let (features, len) = default_part(features, area.len());
    area.truncate(len);
    let len = u32::try_from(len).unwrap_or(0);

    let signature = [
        &FP_XSTATE_MAGIC1.to_le_bytes()[..],
        &(len + 4).to_le_bytes(),
        &features.to_le_bytes(),
        &len.to_le_bytes(),
    ]
    .concat();
    area[SW_RESERVED..SW_RESERVED + signature.len()].copy_from_slice(&signature);
    area.extend(FP_XSTATE_MAGIC2.to_le_bytes());
    area
}

/// Without the AMX tiles: ptrace includes them always, a signal frame only for threads that asked for them (and QEMU
/// does not use them outside a guest).
fn default_part(features: u64, len: usize) -> (u64, usize) {
    const TILES: u64 = 3 << 17;
    /// Behind the protection keys, the last part before the tiles on every CPU that has tiles. If a kernel disagrees,
    /// it restores the x87 and SSE registers only.
    const END_WITHOUT_TILES: usize = 2696;
    if features & TILES == 0 {
        return (features, len);
    }
    (features & !TILES, len.min(END_WITHOUT_TILES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regs() -> Regs {
        Regs {
            r15: 15,
            r14: 14,
            r13: 13,
            r12: 12,
            rbp: 5,
            rbx: 3,
            r11: 11,
            r10: 10,
            r9: 9,
            r8: 8,
            rax: 1,
            rcx: 2,
            rdx: 4,
            rsi: 6,
            rdi: 7,
            orig_rax: u64::MAX,
            rip: 0x40_1000,
            cs: 0x33,
            eflags: 0x246,
            rsp: 0x7fff_0000_1238,
            ss: 0x2b,
            fs_base: 0,
            gs_base: 0,
            ds: 0,
            es: 0,
            fs: 0,
            gs: 0,
        }
    }

    #[test]
    fn frame_lies_below_the_red_zone_and_is_aligned() {
        let xstate = vec![0; 832];
        let frame = build(&regs(), 0xabcd, &xstate, 0x7000);
        assert!(frame.at + frame.bytes.len() as u64 <= regs().rsp - RED_ZONE);
        assert_eq!(frame.at % 16, 8);
        let word = |i: usize| u64::from_le_bytes(frame.bytes[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
        assert_eq!(word(0), 0x7000, "the return address");
        assert_eq!(word(6 + 15), regs().rsp);
        assert_eq!(word(6 + 16), regs().rip);
        assert_eq!(word(6 + 18), 0x33 | 0x2b << 48);
        let fp_at = word(6 + 23);
        assert_eq!(fp_at % XSAVE_ALIGN, 0);
        assert_eq!(word(6 + 32), 0xabcd, "the signal mask, behind 256 bytes of registers");
        let magic_at = usize::try_from(fp_at - frame.at).expect("small") + SW_RESERVED;
        assert_eq!(frame.bytes[magic_at..magic_at + 4], FP_XSTATE_MAGIC1.to_le_bytes());
        assert_eq!(frame.bytes[frame.bytes.len() - 4..], FP_XSTATE_MAGIC2.to_le_bytes());
    }

    #[test]
    fn an_interrupted_call_starts_over() {
        let mut interrupted = regs();
        interrupted.orig_rax = 7;
        interrupted.rax = unsigned(-512);
        assert_eq!((restarted(&interrupted).rax, restarted(&interrupted).rip), (7, 0x40_0ffe));
        interrupted.rax = unsigned(-516);
        assert_eq!(signed(restarted(&interrupted).rax), -4);
        interrupted.rax = 5;
        assert_eq!((restarted(&interrupted).rax, restarted(&interrupted).rip), (5, 0x40_1000));
        interrupted.orig_rax = u64::MAX;
        interrupted.rax = unsigned(-512);
        assert_eq!(restarted(&interrupted).rip, 0x40_1000, "no call was interrupted");
    }
}
