# shellcheck shell=bash
# ./run demo: builds, then hands over to the program of that name, which starts and cleans up everything by itself.

vmove_demo() {
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    case " $* " in *" --help "* | *" -h "*) ;; *) need_root demo ;; esac
    setup_demo
    export_env
    build_demo "${1:-}"
    exec "$(target_dir)/demo/demo" "$@"
}
