# shellcheck shell=bash
# ./run bench: builds, then hands over to the program of that name, which starts and cleans up everything by itself.

vmove_bench() {
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    if [ "${1:-}" = bridge ]; then
        shift
        bench_bridge "$@"
        return
    fi
    case " $* " in *" --help "* | *" -h "*) ;; *) need_root bench ;; esac
    vmove_build
    exec "$(target_dir)/release/bench" "$@"
}

# ./run bench bridge [storm|slurm ARGS]: clients while bridges are killed, and the same requests placed by Slurm and by vmove.
bench_bridge() {
    local program
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    vmove_setup
    export_env
    (cd "$ROOT" && cargo build --release -p vmove-bridge --features lab)
    program=$(target_dir)/release/bridge-bench
    if [ $# -gt 0 ]; then
        "$program" "$@"
    else
        "$program" storm && "$program" slurm
    fi
}
