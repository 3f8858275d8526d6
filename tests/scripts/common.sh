# shellcheck shell=bash
# shellcheck disable=SC2034 # used by those who source this
# What every command of ./run shares: where things are, and how to say something.

CACHE=${VMOVE_CACHE:-$ROOT/.cache}
QEMU_7_2=$CACHE/qemu-7.2/usr/bin/qemu-system-x86_64
QEMU_10_0=$CACHE/qemu-10.0/usr/bin/qemu-system-x86_64
# That of Debian testing.
QEMU_TESTING=$CACHE/qemu-testing/usr/bin/qemu-system-x86_64
GUEST_KERNEL=$CACHE/kernel/vmlinux
GUEST_INITRD=$CACHE/guest/initrd.img
GUEST_TARGET=x86_64-unknown-linux-gnu

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The variables that the tests, the bench and the demo read. A variable set by the caller wins, so that a test run
# can be pointed at another QEMU or kernel.
export_env() {
    export VMOVE_CACHE=$CACHE
    export VMOVE_QEMU_7_2=${VMOVE_QEMU_7_2:-$QEMU_7_2}
    export VMOVE_QEMU_10_0=${VMOVE_QEMU_10_0:-$QEMU_10_0}
    # It could perhaps not be fetched.
    if [ -n "${VMOVE_QEMU_TESTING:-}" ] || [ -x "$QEMU_TESTING" ]; then
        export VMOVE_QEMU_TESTING=${VMOVE_QEMU_TESTING:-$QEMU_TESTING}
    fi
    export VMOVE_GUEST_KERNEL=${VMOVE_GUEST_KERNEL:-$GUEST_KERNEL}
    export VMOVE_GUEST_INITRD=${VMOVE_GUEST_INITRD:-$GUEST_INITRD}
    # bindgen takes any libclang it finds; newer ones are not tried with our crates.
    if [ -d /usr/lib/llvm-14/lib ]; then
        export LIBCLANG_PATH=${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}
    fi
}

print_env() {
    export_env
    local name
    for name in VMOVE_CACHE VMOVE_QEMU_7_2 VMOVE_QEMU_10_0 VMOVE_QEMU_TESTING VMOVE_GUEST_KERNEL VMOVE_GUEST_INITRD LIBCLANG_PATH; do
        [ -n "${!name:-}" ] && printf 'export %s=%q\n' "$name" "${!name}"
    done
    return 0
}

# The folder that cargo builds into, so that scripts find the programs in it.
target_dir() { echo "${CARGO_TARGET_DIR:-$ROOT/target}"; }

# Runs a command as root: directly, or through sudo where that is possible.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        die "root is needed for: $*
       run this as root, or install sudo"
    fi
}

need_root() {
    [ "$(id -u)" = 0 ] || die "'./run $1' must be run as root: it attaches to QEMU with ptrace and mounts tmpfs"
}

# cargo and rustc of at least the version in Cargo.toml.
check_cargo() {
    local wanted have
    wanted=$(sed -n 's/^rust-version *= *"\([0-9.]*\)".*/\1/p' "$ROOT/Cargo.toml")
    command -v cargo >/dev/null || die "cargo was not found; install Rust >= $wanted from https://rustup.rs and try again"
    have=$(cd "$ROOT" && cargo --version | awk '{print $2}')
    [ "$(printf '%s\n%s\n' "$wanted" "${have%%-*}" | sort -V | head -1)" = "$wanted" ] ||
        die "cargo $have is too old: $wanted or newer is needed; 'rustup update' installs it"
}
