# shellcheck shell=bash
# ./run build: the daemon and its commands, the test tools, and the guest's initramfs.

vmove_build() {
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    vmove_setup
    export_env
    build_product
    build_guest
}

build_product() {
    say "building vmoved, vmove, vbridged and the test tools"
    (cd "$ROOT" && cargo build --release -p vmove-daemon -p vmove-cli -p vmove-bridge -p vmove-adapter -p vmove-tests)
}

# What the demo runs, and no more: the bench and RDMA are left out.
# build_demo [SCENE]: the scene of a cluster needs a bridge, too, and forks.
build_demo() {
    local more=()
    [ "${1:-}" = cluster ] && more=(-p vmove-bridge --bin vbridged --bin vfork)
    say "building vmoved, vmove, the demo and its guest"
    (cd "$ROOT" && cargo build --profile demo --no-default-features -p vmove-daemon -p vmove-cli -p vmove-tests \
        --bin vmoved --bin vmove --bin demo --bin guest-image "${more[@]}")
    build_guest "$(target_dir)/demo"
}

# The guest's program is linked statically, so that the initramfs needs no library. Its flags differ from everything
# else's, hence a target folder of its own: otherwise each build would throw away the other's work.
# build_guest [FOLDER]: of guest-image, if not that of the release build.
build_guest() {
    local target tools
    target=$(target_dir)
    tools=${1:-$target/release}
    say "building the guest's program and its initramfs"
    (cd "$ROOT" && RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' cargo build --release -p vmove-guest \
        --target "$GUEST_TARGET" --target-dir "$target/guest")
    build_fork_program
    "$tools/guest-image" --busybox "$CACHE/busybox/bin/busybox" --modules "$CACHE/kernel/modules" \
        --program "$target/guest/$GUEST_TARGET/release/vmove-guest" --output "$CACHE/guest/initrd.img"
}

# The program for guests that fork themselves: small, and linked statically, so that any guest can run it.
build_fork_program() {
    local target
    target=$(target_dir)/guest
    (cd "$ROOT" && RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' cargo build --profile guest -p vmove-fork \
        --target "$GUEST_TARGET" --target-dir "$target")
    mkdir -p "$CACHE/guest"
    cp "$target/$GUEST_TARGET/guest/vmove-fork" "$CACHE/guest/vmove-fork.new"
    mv "$CACHE/guest/vmove-fork.new" "$CACHE/guest/vmove-fork"
}
