# shellcheck shell=bash
# ./run bench: builds, then hands over to the program of that name, which starts and cleans up everything by itself.

vmove_bench() {
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    case ${1:-} in
        bridge | placement)
            local what=$1
            shift
            "bench_$what" "$@"
            return
            ;;
    esac
    case " $* " in *" --help "* | *" -h "*) ;; *) need_root bench ;; esac
    vmove_build
    case ${1:-} in
        disk)
            # shellcheck source=tests/scripts/databases.sh
            source "$ROOT/tests/scripts/databases.sh"
            setup_machine libnbd-bin
            with_cache_locked setup_databases
            export_env
            cd "$ROOT" || exit
            exec cargo test --release -p vmove-tests --test moves -- --ignored --test-threads=1 --nocapture disk_figures
            ;;
        events)
            export_env
            cd "$ROOT" || exit
            exec cargo test --release -p vmove-tests --test kvm -- --ignored --nocapture event_figures
            ;;
        client | evacuate | fork | fork-job | libvirt | pause | promise | visit)
            local program=$1-bench
            shift
            exec "$(target_dir)/release/$program" "$@"
            ;;
    esac
    exec "$(target_dir)/release/bench" "$@"
}

# ./run bench placement [--quick] [--out DIR]: what a placement costs by size of the fleet, and hops beside a model of Slurm's
# topology/tree. Writes a table and a picture.
bench_placement() {
    check_cargo
    local out=(--out "$(target_dir)/bench")
    case " $* " in *" --out "*) out=() ;; esac
    (cd "$ROOT" && cargo run --release -p vmove-bridge-lab --bin placement-bench -- "${out[@]}" "$@")
}

# ./run bench bridge [storm|slurm ARGS]: clients while bridges are killed, and the same requests placed by Slurm and by vmove.
bench_bridge() {
    local program
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    vmove_setup
    export_env
    (cd "$ROOT" && cargo build --release -p vmove-bridge -p vmove-bridge-lab)
    program=$(target_dir)/release/bridge-bench
    if [ $# -gt 0 ]; then
        "$program" "$@"
    else
        "$program" storm && "$program" slurm
    fi
}
