# shellcheck shell=bash
# ./run package: vmove_VERSION_amd64.deb and vmove-bridge_VERSION_amd64.deb in target/debian. What is in them is said in
# [package.metadata.deb] of daemon/Cargo.toml and sched-bridge/service/Cargo.toml.

CARGO_DEB_VERSION=3.8.0

vmove_package() {
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    check_cargo
    setup_machine "${PACKAGE_BUILD_PACKAGES[@]}"
    with_cache_locked setup_cargo_deb
    export_env
    build_packages "$(target_dir)/debian"
    say "packages: $(echo "$(target_dir)"/debian/vmove*.deb)"
}

setup_cargo_deb() {
    [ -x "$CACHE/cargo-deb-$CARGO_DEB_VERSION/bin/cargo-deb" ] && return 0
    say "installing cargo-deb $CARGO_DEB_VERSION"
    # Compression is xz's own.
    CARGO_TARGET_DIR=$CACHE/cargo-deb.build cargo install --quiet --locked --debug --no-default-features --version "$CARGO_DEB_VERSION" \
        --root "$CACHE/cargo-deb.new" cargo-deb || die "cargo-deb could not be installed; is crates.io reachable?"
    rm -rf "$CACHE/cargo-deb.build"
    mv "$CACHE/cargo-deb.new" "$CACHE/cargo-deb-$CARGO_DEB_VERSION"
}

# build_packages FOLDER [OPTION...]: the packages into the folder, and further options of cargo-deb. VMOVE_PROFILE=debug takes the programs of
# the debug build, which is faster to compile than to run.
build_packages() {
    local folder=$1 profile=${VMOVE_PROFILE:-release} package
    # Symbols of what panics in the field, in packages of their own.
    local symbols=--dbgsym
    shift
    if [ "$profile" = debug ]; then
        profile=dev
        symbols=--strip
    fi
    bridge_asks_for_this_vmove
    say "building programs (profile $profile)"
    (cd "$ROOT" && cargo build --quiet --profile "$profile" "${PACKAGED[@]}")
    make_pages "$(target_dir)/${VMOVE_PROFILE:-release}"
    # shellcheck source=tests/scripts/build.sh
    source "$ROOT/tests/scripts/build.sh"
    build_fork_program
    install -D "$CACHE/guest/vmove-fork" "$(target_dir)/${VMOVE_PROFILE:-release}/packages/guest/vmove-fork"
    mkdir -p "$folder"
    rm -f "$folder"/vmove*.{,d}deb
    for package in vmove-daemon vmove-bridge; do
        say "packing $package"
        # Fast: with the best compression, symbols take minutes, and packages are a fifth smaller.
        (cd "$ROOT" && "$CACHE/cargo-deb-$CARGO_DEB_VERSION/bin/cargo-deb" --quiet --package "$package" --no-build --profile "$profile" \
            "$symbols" --fast --compress-system --output "$folder/" "$@") || die "cargo-deb could not pack $package"
    done
}

# The version in the dependency of vmove-bridge is that of the workspace.
bridge_asks_for_this_vmove() {
    local version manifest=sched-bridge/service/Cargo.toml
    version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml")
    grep -qF "\"vmove (>= $version)\"" "$ROOT/$manifest" ||
        die "expected \"vmove (>= $version)\" in depends of $manifest, found $(grep '^depends' "$ROOT/$manifest"): write this version there"
}

PACKAGED=(-p vmove-daemon -p vmove-cli -p vmove-bridge -p vmove-adapter --bins)

# make_pages FOLDER: man pages and completions, by the programs in the folder, below packages/ in it.
make_pages() {
    local into=$1/packages command
    rm -rf "$into"
    mkdir -p "$into"/{bash,zsh,fish}
    "$1/vmove" man "$into/man" >/dev/null
    gzip --best --no-name "$into"/man/*.1
    # Those of the other package. The patterns of cargo-deb have no "but".
    mkdir -p "$into/man-bridge"
    mv "$into"/man/{vbridged,vmove-*-adapter}.1.gz "$into/man-bridge/"
    for command in vmove vfork vmove-pve; do
        "$1/$command" completions bash >"$into/bash/$command"
        "$1/$command" completions zsh >"$into/zsh/_$command"
        "$1/$command" completions fish >"$into/fish/$command.fish"
    done
}
