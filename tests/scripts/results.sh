# shellcheck shell=bash
# What a test run found: how many tests of each layer passed, failed and were skipped, and how long the layer took.

# Begins to collect; RESULTS is a folder with a file for each layer, in which each line is a kind and a number.
# BOOTED is a folder for guests that have booted. Both are removed at the end.
begin_results() {
    RESULTS=$(mktemp -d)
    # Gigabytes, which a /tmp in memory would not hold.
    BOOTED=$(target_dir)/booted.$$
    trap 'rm -rf "$RESULTS" "$BOOTED"' EXIT
    LAYERS_RUN=()
}

# run_layer NAME: runs test_NAME to its end. A layer that fails does not keep the others from being run.
run_layer() {
    LAYERS_RUN+=("$1")
    say "test layer: $1"
    collect "$1"
}

# begin_beside NAME: begins a layer that others need not wait for. end_beside shows what it said.
begin_beside() {
    LAYERS_RUN+=("$1")
    BESIDE=$1
    say "test layer: $1, beside the next one"
    collect "$1" >"$RESULTS/said" 2>&1 &
    BESIDE_PID=$!
}

end_beside() {
    [ -n "${BESIDE:-}" ] || return 0
    # collect tells by its results whether the layer failed.
    wait "$BESIDE_PID" || true
    say "what layer $BESIDE said"
    cat "$RESULTS/said"
    BESIDE=
}

# collect NAME: runs test_NAME, and writes down its results and its time.
collect() {
    local begin=$SECONDS status=0
    LAYER=$1
    RESULT=$RESULTS/$LAYER
    : >"$RESULT"
    # In a condition, `set -e` would not hold for what is run.
    set +e
    (
        set -e
        "test_$LAYER"
    )
    status=$?
    set -e
    echo "seconds $((SECONDS - begin))" >>"$RESULT"
    # Something that ended without telling of a test: a program that does not compile, a process that was killed.
    [ $status -eq 0 ] || [ "$(result_of "$LAYER" failed)" -gt 0 ] || echo "failed 1" >>"$RESULT"
}

# result_of LAYER KIND
result_of() {
    awk -v kind="$2" '$1 == kind { sum += $2 } END { print sum + 0 }' "$RESULTS/$1"
}

# A check that is no test of cargo's: checked NAME COMMAND...
checked() {
    local name=$1
    shift
    if "$@"; then
        echo "passed 1" >>"$RESULT"
    else
        warn "failed: $name"
        echo "failed 1" >>"$RESULT"
        return 1
    fi
}

# One that cannot be made here: skipped NAME REASON. As the macro `skip!` does it.
skipped() {
    case ${VMOVE_NO_SKIP:-0} in
        0) ;;
        *) die "$1 cannot be run, and VMOVE_NO_SKIP forbids to skip it: $2" ;;
    esac
    echo "SKIP $1: $2"
    echo "skipped 1" >>"$RESULT"
}

# Counts what cargo's tests say (with --show-output), and shows it: of tests that passed only why they were skipped, all else as it is.
# Lines of `skip!` are "SKIP NAME: REASON"; with "(PART)" at the end of NAME the test did run, but for that part.
counted() {
    local live=()
    # Debian's awk waits for 4 KiB of input otherwise, so that a failure is shown minutes late.
    ! awk -W version 2>&1 | grep -q mawk || live=(-W interactive)
    awk "${live[@]}" -v result="$RESULT" -v times="$RESULTS/times" -v failures="$RESULT.failures" -v failing="$RESULT.failing" \
        -v ended="$RESULT.ended" '
        /^successes:$/ { hide = 1 }
        /^(failures:|test result:)/ { hide = 0 }
        /^---- .* stdout ----$/ {
            test = $2
            if (!hide) print test >>failing
        }
        # test NAME ... ok <1.234s>
        !hide && /^test .* <[0-9.]+s>$/ { time = $NF; gsub(/[<s>]/, "", time); print time, $2 >>times }
        # Of a test that failed: where, and the first words of why.
        /^(----|failures:|test result:|note: run with |stack backtrace:)/ { why = 0 }
        !hide && / panicked at / { why = 12; print test >>failures }
        why > 0 { print "    " substr($0, 1, 600) >>failures; why-- }
        hide && /^SKIP / { if ($0 ~ /^SKIP [^:]*(::[^:]+)*\): /) part++; else whole[test] = 1 }
        /^test result:/ {
            print >>ended
            passed += $4; failed += $6; ignored += $8
            for (name in whole) { passed--; skipped++ }
            delete whole
        }
        !hide || /^SKIP / { print; fflush() }
        END {
            printf "passed %d\nfailed %d\nskipped %d\nparts %d\nignored %d\n", passed, failed, skipped, part, ignored >>result
        }'
}

# What the next tests say of their failures is kept apart from what others have said.
forget_failing() {
    rm -f "$RESULT.failing" "$RESULT.ended"
    [ ! -e "$RESULT.failures" ] || cat "$RESULT.failures" >>"$RESULT.before.failures"
    rm -f "$RESULT.failures"
}

# The tests that failed since forget_failing. None if one of them did not come to tell why, as in a program that crashed.
failing_tests() {
    [ "$(awk '$1 == "failed" { last = $2 } END { print last + 0 }' "$RESULT")" -eq "$(sort -u "$RESULT.failing" 2>/dev/null | wc -l)" ] || return 0
    sort -u "$RESULT.failing" 2>/dev/null
}

# seen_again NUMBER: reads the second run of NUMBER tests that have failed. If all of them pass, they are counted as unsteady and no longer
# as failed; what they said when they failed is told at the end.
seen_again() {
    local layer_result=$RESULT RESULT=$RESULT.again
    : >"$RESULT"
    counted || return 1
    [ "$(awk '$1 == "passed" { sum += $2 } END { print sum + 0 }' "$RESULT")" -eq "$1" ] || return 1
    printf 'failed -%d\nunsteady %d\n' "$1" "$1" >>"$layer_result"
    cat "$layer_result.failures" >>"$layer_result.unsteady"
    rm "$layer_result.failures"
}

# The table at the end, and success if nothing failed. "unsteady": tests that failed, and passed when they ran once more, alone. "in part":
# tests that passed, of which a part was skipped. "ignored": tests that cargo does not run by itself, such as those that are the processes of
# others.
tell_results() {
    local layer
    printf '\n%-8s' layer
    printf ' %8s' passed failed unsteady skipped 'in part' ignored min:s
    echo
    : >"$RESULTS/all"
    for layer in "${LAYERS_RUN[@]}"; do
        tell_layer "$layer"
        cat "$RESULTS/$layer" >>"$RESULTS/all"
    done
    tell_layer all
    echo
    if [ -s "$RESULTS/times" ]; then
        echo "the slowest tests, in seconds:"
        sort -rn "$RESULTS/times" | head -n 20
        echo
    fi
    # What is printed last is what is seen first.
    if compgen -G "$RESULTS/*.unsteady" >/dev/null; then
        echo "failed, and passed when run once more, alone:"
        cat "$RESULTS"/*.unsteady
        echo
    fi
    if compgen -G "$RESULTS/*.failures" >/dev/null; then
        echo "failed:"
        cat "$RESULTS"/*.failures
        echo
    fi
    [ "$(result_of all failed)" -eq 0 ]
}

tell_layer() {
    local kind seconds
    printf '%-8s' "$1"
    for kind in passed failed unsteady skipped parts ignored; do printf ' %8d' "$(result_of "$1" $kind)"; done
    seconds=$(result_of "$1" seconds)
    printf ' %8s\n' "$(printf '%d:%02d' $((seconds / 60)) $((seconds % 60)))"
}
