# shellcheck shell=bash
# ./run fuzz [MINUTES] [TARGET...]: seeds that are new each time, unless --seed N says otherwise.

vmove_fuzz() {
    local minutes=${1:-60} seed=(--seed "$((RANDOM * 1000000))")
    [ $# -gt 0 ] && shift
    case " $* " in *" --seed "*) seed=() ;; esac
    check_cargo
    export_env
    say "building the targets"
    (cd "$ROOT" && cargo build --quiet --profile fuzz -p vmove-fuzz --bin fuzz)
    "$(target_dir)/fuzz/fuzz" run "$minutes" "$@" "${seed[@]}"
}
