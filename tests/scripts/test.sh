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
    build_tested
    if readelf -d "$(target_dir)/debug/vmoved" | grep -E 'NEEDED.*(ibverbs|rdmacm)'; then
        die "vmoved would not start on a host without libibverbs"
    fi
    # Private items are documented too, and may be linked to.
    RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --workspace --no-deps --document-private-items
    if command -v cargo-deny >/dev/null; then
        # Advisories come from the network: ask for them with 'cargo deny check'.
        cargo deny --offline check bans licenses sources
    else
        warn "SKIP cargo deny: it is not installed ('cargo install --locked cargo-deny')"
    fi
}

# What is tested is built as the tests are: with checks for overflow, and without compiling every dependency once more.
build_tested() {
    say "building the programs and their tests"
    # With the tests: without them, dependencies would have fewer features, and be built twice.
    (cd "$ROOT" && cargo build --workspace --bins --tests)
}

test_unit() {
    cargo test --workspace --lib --bins -- --show-output | skips_shown
    cargo test --workspace --doc
}

# Of tests that passed, why they were skipped; all else as it is.
skips_shown() {
    awk '/^successes:$/ { hide = 1 } /^(failures:|test result:)/ { hide = 0 } !hide || /^SKIP / { print; fflush() }'
}

# Only crates that use loom know `cfg(loom)`; everything would be rebuilt with it, so it has its own target folder.
test_loom() {
    RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-3} \
        cargo test --release -p vmove-memory --lib --target-dir "$(target_dir)/loom" -- loom
}

# One test at a time, since each starts guests that fill this machine; but those of TWO_AT_A_TIME mostly wait for guests to
# start.
TWO_AT_A_TIME=(crashes faults fork_disks fork_disks_hosts fork_early fork_hosts fork_warm forks)
# Everything that they speak with is there after ./run setup: none may be skipped.
NEVER_SKIPPED=(killed kills python)

test_e2e() {
    build_tested
    build_guest "$(target_dir)/debug"
    local two=1 others
    [ "$(nproc)" -ge 2 ] && two=2
    mapfile -t others < <(integration_tests | grep -vxF "$(printf '%s\n' "${TWO_AT_A_TIME[@]}" "${NEVER_SKIPPED[@]}")")
    VMOVE_NO_SKIP=1 run_tests "${NEVER_SKIPPED[@]}"
    run_tests "${others[@]}" -- --test-threads=1
    run_tests "${TWO_AT_A_TIME[@]}" -- --test-threads=$two
    # Left out: what kills daemons at many moments, and what does not come to a second QEMU. On 10.0 they have run.
    say "moves, forks and crashes again, on QEMU 7.2"
    export VMOVE_QEMU=$VMOVE_QEMU_7_2
    run_tests moves -- --test-threads=1
    run_tests forks -- --test-threads=$two parent_and_children templates_are_kept
    run_tests crashes -- --test-threads=$two \
        --skip at_any_moment --skip again_and_again --skip in_the_rounds --skip a_caller_that_waits
}

# Names of all integration tests.
integration_tests() {
    local path
    for path in "$ROOT"/*/tests/*.rs "$ROOT"/*/*/tests/*.rs; do
        basename "$path" .rs
    done
    for path in "$ROOT"/*/tests/*/main.rs; do
        basename "$(dirname "$path")"
    done
}

# run_tests NAME... [-- ARGUMENTS]. Chosen by package they would be built once more, with fewer features of what they depend on.
# One that fails does not hide what the others say.
run_tests() {
    local targets=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        targets+=(--test "$1")
        shift
    done
    [ $# -eq 0 ] && set -- --
    cargo test --no-fail-fast --workspace "${targets[@]}" "$@" --show-output | skips_shown
}
