# shellcheck shell=bash
# ./run test [LAYER...]

LAYERS=(fmt lint unit loom e2e)

vmove_test() {
    local layers=("$@") layer
    [ ${#layers[@]} -eq 0 ] && layers=("${LAYERS[@]}")
    for layer in "${layers[@]}"; do
        declare -F "test_$layer" >/dev/null || die "unknown layer '$layer'; there are: ${LAYERS[*]}"
    done
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    vmove_setup
    export_env
    cd "$ROOT" || exit
    for layer in "${layers[@]}"; do
        say "test layer: $layer"
        "test_$layer"
    done
    say "all layers passed: ${layers[*]}"
}

test_fmt() {
    cargo fmt --all --check || die "run 'cargo fmt --all'"
}

test_lint() {
    cargo clippy --workspace --all-targets -- -D warnings
    # Hosts without libibverbs run the same program: it is loaded, not linked.
    build_product
    if readelf -d "$(target_dir)/release/vmoved" | grep -E 'NEEDED.*(ibverbs|rdmacm)'; then
        die "vmoved would not start on a host without libibverbs"
    fi
    # Private items are documented too, and may be linked to.
    RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --workspace --no-deps --document-private-items
}

test_unit() {
    cargo test --workspace --lib --bins
    cargo test --workspace --doc
}

# Only crates that use loom know `cfg(loom)`; everything would be rebuilt with it, so it has its own target folder.
test_loom() {
    RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-3} \
        cargo test --release -p vmove-memory --lib --target-dir "$(target_dir)/loom" -- loom
}

# Programs under test are the release builds, the tests themselves are not: they wait more than they compute. One test at
# a time, since each starts guests that fill this machine.
test_e2e() {
    build_product
    build_guest
    export VMOVE_BIN_DIR
    VMOVE_BIN_DIR=$(target_dir)/release
    # Everything that the tests of sched-bridge speak with is there after ./run setup: none may be skipped.
    VMOVE_NO_SKIP=1 cargo test -p vmove-bridge --test '*'
    cargo test --workspace --exclude vmove-bridge --test '*' -- --test-threads=1
    # Left out: what kills daemons at many moments, and what does not come to a second QEMU. On 10.0 they have run.
    say "moves and crashes again, on QEMU 7.2"
    VMOVE_QEMU=$VMOVE_QEMU_7_2 cargo test -p vmove-tests --test moves --test crashes -- --test-threads=1 \
        --skip at_any_moment --skip again_and_again --skip in_the_rounds --skip a_caller_that_waits
}
