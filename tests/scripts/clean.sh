# shellcheck shell=bash
# ./run clean: what setup and build put into .cache/. Cargo's target folder is left to 'cargo clean'.

vmove_clean() {
    rm -rf "$CACHE"
}
