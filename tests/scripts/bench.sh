# shellcheck shell=bash
# ./run bench: builds, then hands over to the program of that name, which starts and cleans up everything by itself.

vmove_bench() {
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    case " $* " in *" --help "* | *" -h "*) ;; *) need_root bench ;; esac
    vmove_build
    exec "$(target_dir)/release/bench" "$@"
}
