# shellcheck shell=bash
# ./run miri: library tests of crates without system calls under Miri, which stops at undefined behaviour.

MIRI_PACKAGES=(vmove-bitset vmove-types)

vmove_miri() {
    check_cargo
    if ! cargo +nightly miri --version >/dev/null 2>&1; then
        warn "skipped: Miri is not installed ('rustup toolchain install nightly --component miri,rust-src')"
        return
    fi
    local package
    for package in "${MIRI_PACKAGES[@]}"; do
        say "$package"
        # It is a thousand times slower: a few cases of each property are what it can do.
        (cd "$ROOT" && PROPTEST_CASES=${PROPTEST_CASES:-4} PROPTEST_DISABLE_FAILURE_PERSISTENCE=1 MIRIFLAGS=-Zmiri-disable-isolation \
            cargo +nightly miri test --quiet --package "$package" --lib --target-dir "$(target_dir)/miri") ||
            die "Miri has found something in $package"
    done
}
