# shellcheck shell=bash
# ./run semver [REV]: what has changed in the API of published crates since a revision, by cargo-semver-checks.

# Whose API programs use.
SEMVER_PACKAGES=(types client clone migrate qmp)

vmove_semver() {
    [ $# -le 1 ] || die "expected './run semver [REV]', found $# arguments"
    check_cargo
    if ! command -v cargo-semver-checks >/dev/null && [ ! -x "$CACHE/semver/bin/cargo-semver-checks" ]; then
        warn "SKIPPED: no API was compared: cargo-semver-checks is not installed. It takes a long build, once:
         nice cargo install cargo-semver-checks --locked --root '$CACHE/semver'"
        return
    fi
    export_env
    local folder revision failed=0
    for folder in "${SEMVER_PACKAGES[@]}"; do
        if ! semver_is_published "$folder"; then
            warn "skipped: $folder is not published"
            continue
        fi
        revision=$(semver_baseline "$folder" "${1:-}")
        say "$folder since $(git -C "$ROOT" log -1 --format='%h (%s)' "$revision")"
        (cd "$ROOT" && PATH="$CACHE/semver/bin:$PATH" cargo semver-checks --package "$(semver_name "$folder")" \
            --baseline-rev "$revision") || failed=1
    done
    [ "$failed" = 0 ] || die "an API has changed in a way that its version does not tell"
}

semver_name() { sed -n 's/^name = "\(.*\)"/\1/p' "$ROOT/$1/Cargo.toml" | head -1; }

# Crates without the line are published.
semver_is_published() { ! grep -q '^publish *= *false\|^publish\.workspace' "$ROOT/$1/Cargo.toml"; }

# The revision that a crate in this folder is compared with: the one that is given, else the last tag, else the first that has the crate in
# the version of Cargo.toml.
semver_baseline() {
    local folder=$1 wanted=$2 version first
    if [ -n "$wanted" ]; then
        git -C "$ROOT" rev-parse --verify --quiet "$wanted^{commit}" || die "git knows no revision '$wanted'"
        return
    fi
    if wanted=$(git -C "$ROOT" describe --tags --abbrev=0 2>/dev/null); then
        git -C "$ROOT" rev-parse "$wanted^{commit}"
        return
    fi
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml" | head -1)
    # Of the commits that brought the version and the crate, the later one has both.
    first=$(git -C "$ROOT" log --reverse --format=%H -S"version = \"$version\"" -- Cargo.toml | head -1)
    wanted=$(git -C "$ROOT" log --reverse --diff-filter=A --format=%H -- "$folder/Cargo.toml" | tail -1)
    [ -n "$wanted" ] || die "no commit has $folder/Cargo.toml: give a revision"
    if [ -n "$first" ] && git -C "$ROOT" merge-base --is-ancestor "$wanted" "$first"; then
        wanted=$first
    fi
    echo "$wanted"
}
