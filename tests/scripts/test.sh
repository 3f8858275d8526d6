# shellcheck shell=bash
# ./run test [LAYER...]

LAYERS=(fmt lint build unit loom e2e lab)
# What a change needs most.
QUICK=(fmt lint build unit short)
# Only when they are asked for.
LONG=(long package page)

vmove_test() {
    local layers=() layer
    for layer in "$@"; do
        case $layer in
            quick) layers+=("${QUICK[@]}") ;;
            *) layers+=("$layer") ;;
        esac
    done
    [ ${#layers[@]} -eq 0 ] && layers=("${LAYERS[@]}")
    # shellcheck source=tests/scripts/package-test.sh
    source "$ROOT/tests/scripts/package-test.sh"
    for layer in "${layers[@]}"; do
        declare -F "test_$layer" >/dev/null || die "unknown layer '$layer'; there are: ${LAYERS[*]} ${LONG[*]} quick"
    done
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    # shellcheck source=tests/scripts/results.sh
    source "$ROOT/tests/scripts/results.sh"
    vmove_setup
    export_env
    cd "$ROOT" || exit
    begin_results
    for layer in "${layers[@]}"; do
        # Those that use what is built.
        case $layer in
            e2e | short | long | lab | page) [[ " ${LAYERS_RUN[*]} " == *' build '* ]] || run_layer build ;;
        esac
        # Loom computes, and the first tests of e2e mostly wait.
        if [ "$layer" = loom ] && [[ " ${layers[*]} " == *' e2e '* ]]; then
            begin_beside loom
        else
            run_layer "$layer"
        fi
    done
    end_beside
    tell_results || die "tests failed; what they said is above"
    say "all layers passed: ${layers[*]}"
}

test_fmt() {
    checked 'formatting: run "cargo fmt --all"' cargo fmt --all --check
}

test_lint() {
    local failed=0
    checked clippy cargo clippy --workspace --all-targets -- -D warnings || failed=1
    # Private items are documented too, and may be linked to.
    RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' \
        checked rustdoc cargo doc --workspace --no-deps --document-private-items || failed=1
    if command -v cargo-deny >/dev/null; then
        # Advisories come from the network: ask for them with 'cargo deny check'.
        checked 'cargo deny' cargo deny --offline check bans licenses sources || failed=1
    else
        skipped 'cargo deny' "it is not installed ('cargo install --locked cargo-deny')"
    fi
    checked 'modules, files and crates' cargo run --quiet --package vmove-structure || failed=1
    checked 'crates can be published' package_crates || failed=1
    # shellcheck source=tests/scripts/book.sh
    source "$ROOT/tests/scripts/book.sh"
    checked 'the book has every page' book_is_whole || failed=1
    checked 'links lead somewhere' links_lead_somewhere || failed=1
    return $failed
}

# All crates but those of the tests: whether their manifests are whole, and name no crate that has no version. They are not built once more.
package_crates() {
    local packages=() name
    while read -r name; do
        packages+=(-p "$name")
    done < <(sed -n 's/^\(vmove-[a-z-]*\) = { path = "[^"]*", version.*/\1/p' "$ROOT/Cargo.toml")
    [ "${#packages[@]}" -gt 0 ] && cargo package --quiet --allow-dirty --no-verify --offline "${packages[@]}"
}

# What is tested is built as the tests are: with checks for overflow, and without compiling every dependency once more. With the tests:
# without them, dependencies would have fewer features, and be built twice.
test_build() {
    checked 'programs and tests' cargo build --workspace --bins --tests --example scheduler --example fork_and_gather --example two_qemus --example one_into_many
    checked 'vmoved starts on hosts without libibverbs' loaded_not_linked
    build_guest "$(target_dir)/debug"
}

# Hosts without libibverbs run the same program.
loaded_not_linked() {
    ! readelf -d "$(target_dir)/debug/vmoved" | grep -E 'NEEDED.*(ibverbs|rdmacm)'
}

# Seconds for one program of tests, more than any needs: one that hangs does not take the time of all others. Of unit tests:
UNIT_TIME=600
# Of all others:
PROGRAM_TIME=3600

test_unit() {
    local failed=0
    env "$(cargo_runner)=timeout --foreground --verbose $UNIT_TIME" cargo test --no-fail-fast --workspace --lib --bin vmove-structure -- --show-output | counted || failed=1
    cargo test --no-fail-fast --workspace --doc | counted || failed=1
    return $failed
}

# Only crates that use loom know `cfg(loom)`; everything would be rebuilt with it, so it has its own target folder.
test_loom() {
    RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-3} \
        nice cargo test --profile loom -p vmove-memory -p vmove-fabric -p vmove-migrate -p vmove-clone --lib --target-dir "$(target_dir)/loom" -- --show-output loom | counted
}

# One test at a time, since each uses all of this machine; but those of MOSTLY_WAITING wait for guests, links and deadlines half of their
# time, and moves and clusters a third.
MOSTLY_WAITING=(faults forks kvm)
# Everything that they speak with is there after ./run setup: none may be skipped.
NEVER_SKIPPED=(killed kills python slurm)

# Those that take most of the time and find what others find, too, if seldom: random sequences, kills at many moments, long jobs. They are
# the layer `long`.
SELDOM=(
    a_share_of_the_processors_is_kept                       # moves
    wherever_a_daemon_is_killed_on_its_way_home
    a_visit_outlives_the_daemons_of_both_sides
    the_demonstration_goes_as_it_says                       # clusters
    nothing_is_given_twice_or_lost_in_random_sequences
    the_model_agrees_with_real_runs_by_unicast              # namespaces
    the_model_agrees_with_real_runs_in_two_stages
    a_stale_copy_of_a_qcow2_image                           # forks
    on_a_shared_path_a_raw_image
    what_a_host_cannot_take_up_at_once
    daemons_that_are_killed_only_delay_what_is_read
    of_a_qcow2_image_given_by_blockdev
    a_map_in_python_gives
    losses_and_pipelines_leave_them_sound
    at_a_source_that_cannot_write_its_journal               # faults
    at_the_source_of_a_destination_that_cannot_write_its_journal
    a_destination_killed_at_any_moment
    a_source_killed_at_any_moment
    a_guest_whose_qemu_runs_as_root                         # libvirt
    a_guest_moves_while_libvirt_copies_its_disk
)

# What a version of QEMU may change: of it all modes, disks, refusals, and the pages of the tutorials; and forks.
ON_EACH_QEMU=(in_every_mode_on_thp disks:: move_disk:: blockers:: io_threads:: direct_io:: tutorial:: a_confined_guest_moves)

# Of the moves on another QEMU in the layer `long`, not: those that name a QEMU themselves, and those about the kernel's memory, our own
# threads, decisions, clocks and interfaces.
SAME_ON_ALL_QEMUS=(auto:: client:: doctor:: events:: goals:: going_home:: guest:: history:: monitoring:: old_kernel:: pinned:: remote::
    reports:: setup_tls:: slow_link:: slurm:: terminal:: traces:: watching:: before_linux daemons_give_way on_qemu_ newer_qemu:: one_gib what_crossed
    what_is_unchanged a_visit_of_a_large_guest wherever_a_daemon_is_killed a_visit_outlives on_its_visit_is_heard_of ends_on_its_visit
    what_is_no_visit where_it_is_to_read)

# Of the moves: what compares times of the network, which a test beside it would take.
ALONE=(client::)

test_e2e() {
    local moving waiting others skipped alone failed=0
    keep_booted_guests
    moving=$(at_a_time 0)
    waiting=$(at_a_time 1)
    mapfile -t others < <(integration_tests | grep -vxF "$(printf '%s\n' browser moves libvirt clusters "${MOSTLY_WAITING[@]}" "${NEVER_SKIPPED[@]}")")
    mapfile -t skipped < <(without "${SELDOM[@]}")
    mapfile -t alone < <(without "${ALONE[@]}")
    VMOVE_NO_SKIP=1 run_tests "${NEVER_SKIPPED[@]}" || failed=1
    run_tests "${others[@]}" -- --test-threads=1 "${skipped[@]}" || failed=1
    run_tests moves -- --test-threads=1 "${ALONE[@]}" || failed=1
    run_tests moves libvirt clusters -- --test-threads="$moving" "${skipped[@]}" "${alone[@]}" || failed=1
    run_tests "${MOSTLY_WAITING[@]}" -- --test-threads="$waiting" "${skipped[@]}" || failed=1
    on_other_qemus "what a version of QEMU may change" on_each_qemu virsh_migrates_a_guest || failed=1
    return $failed
}

# on_other_qemus WHAT COMMAND [TEST...]: the tests of the command, on each QEMU but 10.0, on which all others run; and these of libvirt (all, if none
# is named) with the libvirt of Debian testing.
on_other_qemus() {
    local failed=0
    say "$1, on QEMU 7.2"
    VMOVE_QEMU=$VMOVE_QEMU_7_2 "$2" || failed=1
    if [ -n "${VMOVE_QEMU_TESTING:-}" ]; then
        say "$1, on the QEMU of Debian testing: $("$VMOVE_QEMU_TESTING" --version | head -n 1)"
        VMOVE_QEMU=$VMOVE_QEMU_TESTING "$2" || failed=1
        # An older libvirt does not speak with it: 9.0 gives `migrate` an argument that QEMU 11 has no more.
        VMOVE_QEMU=$VMOVE_QEMU_TESTING VMOVE_LIBVIRT=$CACHE/libvirt-testing \
            run_tests libvirt -- --test-threads="$(at_a_time 0)" "${@:3}" || failed=1
    else
        skipped 'the QEMU of Debian testing' "it could not be fetched, as ./run setup said"
    fi
    return $failed
}

on_each_qemu() {
    local failed=0
    run_tests moves -- --test-threads="$(at_a_time 0)" "${ON_EACH_QEMU[@]}" || failed=1
    run_tests forks faults -- --test-threads="$(at_a_time 1)" parent_and_children both_killed_in_post_copy || failed=1
    return $failed
}

# What takes long, one at a time; then moves, forks and crashes on the other QEMUs.
test_long() {
    local failed=0
    keep_booted_guests
    run_tests namespaces clusters moves forks faults libvirt -- --test-threads=1 "${SELDOM[@]}" || failed=1
    on_other_qemus "moves, forks and crashes again" again_on_each_qemu virsh_migrates_a_guest || failed=1
    return $failed
}

again_on_each_qemu() {
    local failed=0 same
    mapfile -t same < <(without "${SAME_ON_ALL_QEMUS[@]}")
    run_tests moves -- --test-threads="$(at_a_time 0)" "${same[@]}" || failed=1
    run_tests forks -- --test-threads="$(at_a_time 1)" parent_and_children templates_are_kept || failed=1
    # Of the crashes those in which QEMU is stopped, or dies.
    run_tests faults -- --test-threads="$(at_a_time 1)" _qemu_that_dies_ in_the_switchover _the_commit_the_guest both_killed || failed=1
    return $failed
}

# without NAME...: arguments that leave tests out.
without() {
    printf -- '--skip\n%s\n' "$@"
}

# The page in a browser. With VMOVE_WRITE_PICTURES=1 the pictures in docs/ are made anew.
test_page() {
    if ! (with_cache_locked setup_browser); then
        skipped page "the browser could not be fetched, as said above"
        return
    fi
    run_tests browser -- --test-threads=1
}

# Of the layer e2e, what a change needs most.
test_short() {
    local failed=0
    keep_booted_guests
    run_tests commands vms -- --test-threads="$(at_a_time 0)" || failed=1
    run_tests moves -- --test-threads=1 in_every_mode_on_thp a_vm_that_can_move || failed=1
    run_tests forks faults -- --test-threads="$(at_a_time 0)" parent_and_children children_run_on_other_hosts \
        both_killed_in_post_copy || failed=1
    return $failed
}

# Each kind of guest boots once in this run; later tests take it up from files.
keep_booted_guests() {
    export VMOVE_BOOTED=$BOOTED
    mkdir -p "$VMOVE_BOOTED"
}

# at_a_time MORE: tests to run beside each other, two and as many more where there are two cores at least.
at_a_time() {
    if [ "$(nproc)" -ge 2 ]; then echo $((2 + $1)); else echo 1; fi
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
    forget_failing
    timed_tests "${targets[@]}" "$@" | counted || { all_have_ended $((${#targets[@]} / 2)) && once_more "${targets[@]}"; }
}

# all_have_ended NUMBER: whether so many programs of tests have said what came of them. One that was ended says nothing of the tests that it did not run.
all_have_ended() {
    [ "$(wc -l <"$RESULT.ended")" -eq "$1" ]
}

# timed_tests TARGET... -- ARGUMENTS: runs them, and says how long each took. Rust's test harness does that for nightly compilers, and for
# those that the variable declares to be such; the runner sets it for the tests alone, since with it everything would be compiled once more.
timed_tests() {
    env "$(cargo_runner)=env RUSTC_BOOTSTRAP=1 timeout --foreground --verbose $PROGRAM_TIME" \
        cargo test --no-fail-fast --workspace "$@" --show-output -Z unstable-options --report-time
}

# Name of the variable with the command by which cargo runs what it has built.
cargo_runner() {
    echo "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)_RUNNER"
}

# Tests that failed beside others run once more, alone: many of them measure times, on a machine that others use. One that passes then is
# told of as unsteady, with what it said. More than three at once are no accident.
once_more() {
    local failing
    mapfile -t failing < <(failing_tests)
    [ ${#failing[@]} -gt 0 ] && [ ${#failing[@]} -le 3 ] || return 1
    say "once more, alone: ${failing[*]}"
    timed_tests "$@" -- --test-threads=1 --exact "${failing[@]}" | seen_again "${#failing[@]}"
}

# RDMA between virtual hosts. The programs are those of the other tests.
test_lab() {
    local needed=5000 available
    available=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
    if [ "$available" -lt $needed ]; then
        skipped 'RDMA smoke' "three hosts need $needed MiB of memory, $available are available"
        return
    fi
    # shellcheck source=tests/scripts/lab.sh
    source "$ROOT/tests/scripts/lab.sh"
    lab_sees_us
    if ! (setup_lab); then
        skipped 'RDMA smoke' "what the lab's hosts need could not be fetched, as said above"
        return
    fi
    checked 'RDMA smoke: a fork by multicast, and a post-copy whose path is cut' lab_smoke "$(target_dir)/debug"
}
