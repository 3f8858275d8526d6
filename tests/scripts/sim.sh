# shellcheck shell=bash
# ./run sim [--seed N] [--schedules N]: without a seed, 100,000 schedules, the same each time.

vmove_sim() {
    check_cargo
    export_env
    say "building the simulation"
    (cd "$ROOT" && cargo build --quiet --profile fuzz -p vmove-sim --bin sim)
    "$(target_dir)/fuzz/sim" "$@"
}
