# shellcheck shell=bash
# ./run soak: builds, then hands over to the program of that name, which starts and cleans up everything by itself.

vmove_soak() {
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    case " $* " in *" --help "* | *" -h "*) ;; *) need_root soak ;; esac
    if [ "${1:-}" = --libvirt ]; then
        soak_libvirt
        return
    fi
    if [ "${1:-}" = --databases ]; then
        soak_databases
        return
    fi
    vmove_build
    exec "$(target_dir)/release/soak" "$@"
}

# Moves by virsh that meet blows, among them forty of which twenty do.
soak_libvirt() {
    vmove_build
    export_env
    (cd "$ROOT" && cargo test --release -p vmove-tests --test libvirt -- --ignored --test-threads=1 --nocapture)
}

# A guest with PostgreSQL and SQLite moves with its disk: thirty times, and fifteen times with blows.
soak_databases() {
    # shellcheck source=tests/scripts/databases.sh
    source "$ROOT/tests/scripts/databases.sh"
    vmove_build
    with_cache_locked setup_databases
    export_env
    (cd "$ROOT" && cargo test --release -p vmove-tests --test faults -- --ignored --test-threads=1 --nocapture databases)
}
