# shellcheck shell=bash
# ./run lab: virtual hosts with RDMA (the kernel's soft RoCE) on a switch of our own. See tests/lab/README.md.

# Raise it when what is unpacked changes, so that older caches are made anew.
LAB_VERSION=3
# In the hosts, over the machine's own files.
LAB_HOST_PACKAGES=(kmod perftest rdmacm-utils ibverbs-utils ibverbs-providers iproute2 python3-pyverbs)
# Modules of the hosts' kernel, with what they need. The first line is what it takes to reach the root file system.
LAB_BOOT_MODULES=(virtio_pci 9pnet_virtio 9p overlay virtio_console)
LAB_MODULES=(virtio_net virtio_rng virtio_blk virtio_balloon rdma_rxe ib_uverbs rdma_ucm
    vfio_pci vfio_iommu_type1 igb igbvf sch_netem tun vhost_net dummy)
# Not there any more from Linux 6.15 on.
LAB_OLD_MODULES=(crc32_generic crc32c_generic)
# Raise it when the second kernel changes.
LAB_NEXT_VERSION=2

# The lab's hosts see this machine's files, but for folders that they have for themselves (tests/lab/host/start): nothing starts in them
# without what is built.
lab_sees_us() {
    local path folder
    for path in "$ROOT" "$(target_dir)"; do
        for folder in /run /tmp /dev/shm; do
            case $path/ in
                "$folder"/*) die "the lab's hosts have a $folder of their own and do not see $path: run this from a folder elsewhere" ;;
            esac
        done
    done
}

vmove_lab() {
    case ${1:-help} in up | test | bench) lab_sees_us ;; esac
    # shellcheck source=tests/scripts/setup.sh
    source "$ROOT/tests/scripts/setup.sh"
    case ${1:-help} in up | test | bench) setup_lab ;; esac
    export_env
    export VMOVE_LAB_FILES=$CACHE/lab
    case ${1:-help} in
        up | test | bench) build_lab ;;
        # Help needs the program only, and the rest a lab that is up.
        *) [ -x "$(target_dir)/release/vmove-lab" ] || build_lab ;;
    esac
    case ${1:-help} in
        bench)
            shift
            build_lab_programs
            build_lab_moves
            set -- bench --program "$LAB_BENCH" --moves "$(target_dir)/release" --guest "$LAB_GUEST" "$@"
            ;;
        test)
            # Moves only, all of them or those whose name contains the next word.
            if [ "${2:-}" = moves ]; then
                build_lab_moves
                shift 2
                local word=''
                if [ $# -gt 0 ] && [[ $1 != --* ]]; then word=$1 && shift; fi
                set -- test --hosts 2 --no-check --moves "$(target_dir)/release" --guest "$LAB_GUEST" --only "$word" "$@"
            fi
            # Forks to other hosts only, the same.
            if [ "${2:-}" = forks ]; then
                build_lab_moves
                shift 2
                local only=a_fork_
                if [ $# -gt 0 ] && [[ $1 != --* ]]; then only=$1 && shift; fi
                set -- test --hosts 3 --no-check --moves "$(target_dir)/release" --guest "$LAB_GUEST" --forks --only "$only" "$@"
            fi
            # Memory that is not pinned: needs a kernel whose soft RoCE has on-demand paging.
            if [ "${2:-}" = on-demand ]; then
                build_lab_moves
                setup_lab_next
                set -- test --hosts 2 --no-check --kernel next --moves "$(target_dir)/release" --guest "$LAB_GUEST" --only on_demand "${@:3}"
            fi
            # A host with two NUMA nodes, on which VMs are pinned.
            if [ "${2:-}" = pinned ]; then
                build_lab_moves
                set -- test --hosts 1 --no-check --no-rdma --processors 4 --numa-nodes 2 --memory-mib 1024 -- \
                    sh "$ROOT/tests/lab/host/pinned" "$(target_dir)/release" "$VMOVE_QEMU_10_0" "$LAB_GUEST"
            fi
            # Datagrams only.
            if [ "${2:-}" = multicast ]; then
                build_lab_programs
                set -- test --no-check --multicast "$LAB_MULTICAST" --spread "$LAB_SPREAD" "${@:3}"
            fi
            # Guests that own devices, all cases or those whose name contains the next word; 'linux' names a slow one, which runs only
            # when it is asked for.
            if [ "${2:-}" = devices ]; then
                build_lab_devices
                build_lab_moves
                shift 2
                local which='' linux=()
                if [ $# -gt 0 ] && [[ $1 != --* ]]; then which=$1 && shift; fi
                if [[ $which == linux* ]]; then build_lab_linux && linux=(--device-linux "$LAB_LINUX"); fi
                set -- test --hosts 2 --memory-mib 1536 --processors 2 --devices --no-check --device-programs "$(target_dir)/release/examples" \
                    --device-moves "$(target_dir)/release" \
                    --device-guest "$LAB_DEVICE_GUEST" "${linux[@]}" --only "$which" "$@"
            fi
            # The least of moves and forks, as './run test lab' runs it.
            if [ "${2:-}" = smoke ]; then
                build_lab_moves
                lab_smoke "$(target_dir)/release"
                return
            fi
            # Without a command of the caller's own: everything there is.
            if [ $# -eq 1 ]; then
                build_lab_programs
                build_lab_moves
                set -- test --faults "$LAB_BENCH" --multicast "$LAB_MULTICAST" --spread "$LAB_SPREAD" --moves "$(target_dir)/release" --guest "$LAB_GUEST" --forks -- "$LAB_SUITE" verbs --test-threads=1
            fi
            ;;
    esac
    exec "$(target_dir)/release/vmove-lab" "$@"
}

build_lab() {
    check_cargo
    say "building the lab"
    (cd "$ROOT" && cargo build --quiet --release -p vmove-lab)
}

# Sets LAB_GUEST, and builds the daemons that move it and the guest that runs Linux.
build_lab_moves() {
    say "building vmoved and the lab's guest"
    (cd "$ROOT" && cargo build --quiet --release -p vmove-daemon -p vmove-cli)
    build_lab_guest
    # Also one that was made by an earlier version.
    if [ ! "$GUEST_INITRD" -nt "$ROOT/tests/src/initramfs.rs" ]; then
        # shellcheck source=tests/scripts/build.sh
        source "$ROOT/tests/scripts/build.sh"
        build_product
        build_guest
    fi
}

# Sets LAB_DEVICE_GUEST, and builds the programs that give devices to it.
build_lab_devices() {
    say "building the programs for devices and their guest"
    (cd "$ROOT" && cargo build --quiet --release -p vmove-devices -p vmove-qmp --example devices --example hotplug &&
        cargo build --quiet --release -p vmove-daemon -p vmove-cli)
    LAB_DEVICE_GUEST=$CACHE/lab/devices.elf
    lab_compile "$ROOT/tests/lab/guest/devices.c" "$LAB_DEVICE_GUEST"
}

# lab_compile SOURCE IMAGE: a guest without an operating system, as a multiboot image.
lab_compile() {
    # The multiboot header must be within the first 8 KiB of the file.
    gcc -m32 -march=i686 -O2 -Wall -Wextra -Werror -ffreestanding -fno-pic -no-pie -fno-stack-protector -fno-asynchronous-unwind-tables \
        -nostdlib -static -Wl,--build-id=none,--no-warn-rwx-segments,-n,--section-start=.header=0x100000,-Ttext=0x101000 \
        -o "$2.new" "$1"
    mv "$2.new" "$2"
}

# Sets LAB_LINUX: an initramfs with the driver of the virtual functions. Its kernel is that of the hosts.
build_lab_linux() {
    local work=$CACHE/lab/linux version module file
    version=$(cat "$CACHE/lab/kernel-version")
    LAB_LINUX=$CACHE/lab/device-linux.img
    rm -rf "$work"
    mkdir -p "$work"/{bin,modules,proc,sys,dev}
    cp "$CACHE/busybox/bin/busybox" "$work/bin/busybox"
    ln -s busybox "$work/bin/sh"
    ln -s busybox "$work/bin/cat"
    cp "$ROOT/tests/lab/guest/linux-init" "$work/init"
    chmod +x "$work/init"
    # A failover pair is of a virtio card and a function.
    for module in virtio_pci virtio_net igbvf; do
        lab_kmod modprobe -d "$CACHE/lab/root/usr" -S "$version" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
    done | awk '!seen[$0]++' | while read -r file; do
        xz -dc "$file" >"$work/modules/$(basename "$file" .xz)"
        basename "$file" .xz >>"$work/modules/order"
    done
    (cd "$work" && find . | "$CACHE/busybox/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$LAB_LINUX.new"
    mv "$LAB_LINUX.new" "$LAB_LINUX"
    rm -rf "$work"
}

# Sets LAB_GUEST: goes over its memory without an operating system. Another one has a network card; the lab finds it by its name.
build_lab_guest() {
    lab_compile "$ROOT/tests/lab/guest/network.c" "$CACHE/lab/network.elf"
    LAB_GUEST=$CACHE/lab/pattern.bin
    as --32 -o "$LAB_GUEST.o" "$ROOT/tests/lab/guest/pattern.s" && objcopy -O binary "$LAB_GUEST.o" "$LAB_GUEST.new"
    mv "$LAB_GUEST.new" "$LAB_GUEST"
}

# lab_smoke FOLDER: one fork by multicast and one post-copy whose path is cut, between the programs of this folder.
lab_smoke() {
    build_lab_guest
    export VMOVE_LAB_FILES=$CACHE/lab
    # It takes two minutes; whatever hangs must not hold up all else.
    timeout 600 "$1/vmove-lab" test --hosts 3 --no-check --moves "$1" --guest "$LAB_GUEST" --smoke
}

# Sets LAB_BENCH and LAB_MULTICAST, which measure; LAB_SUITE, the fabric's conformance suite; LAB_SPREAD, the tests of
# distribution. All run in the hosts. One command, so that the fabric is compiled once for all of them.
build_lab_programs() {
    local said
    say "building the fabric's tests and measuring programs"
    said=$(cd "$ROOT" && cargo build --quiet --release -p vmove-fabric -p vmove-spread \
        --features vmove-fabric/verbs,vmove-spread/verbs --example verbs_bench --example verbs_multicast \
        --test conformance --test namespaces --message-format=json-render-diagnostics) || die "the tests do not build"
    LAB_BENCH=$(target_dir)/release/examples/verbs_bench
    LAB_MULTICAST=$(target_dir)/release/examples/verbs_multicast
    LAB_SUITE=$(lab_executable conformance <<<"$said")
    LAB_SPREAD=$(lab_executable namespaces <<<"$said")
}

# The program of a test, of what cargo says while it builds.
lab_executable() {
    local found
    found=$(sed -n "s/.*\"executable\":\"\([^\"]*\/$1-[^\"]*\)\".*/\1/p" | tail -1)
    [ -n "$found" ] || die "cargo named no program of the test $1"
    echo "$found"
}

setup_lab() {
    vmove_setup
    if [ -e "$CACHE/lab/setup-$LAB_VERSION" ]; then
        [ "$CACHE/lab/initrd.img" -nt "$ROOT/tests/lab/host/init" ] || setup_lab_initramfs
        return 0
    fi
    with_cache_locked fetch_lab
    say "the lab's kernel and tools are in $CACHE/lab"
}

fetch_lab() {
    private_apt
    rm -rf "$CACHE/lab"
    mkdir -p "$CACHE/lab"
    setup_lab_tools
    setup_lab_kernel
    setup_lab_initramfs
    touch "$CACHE/lab/setup-$LAB_VERSION"
}

# Programs and libraries that the hosts see in addition to the machine's: a layer over its root file system, which
# has /lib and its like as links into /usr.
setup_lab_tools() {
    local debs=$CACHE/apt/debs/lab root=$CACHE/lab/root deb folder
    say "unpacking RDMA tools for the lab's hosts"
    fetch_closure "$debs" "${LAB_HOST_PACKAGES[@]}"
    mkdir -p "$root"
    for deb in "$debs"/*.deb; do dpkg -x "$deb" "$root"; done
    for folder in bin sbin lib lib64; do
        [ -d "$root/$folder" ] || continue
        mkdir -p "$root/usr/$folder"
        cp -a "$root/$folder/." "$root/usr/$folder/"
        rm -rf "${root:?}/$folder"
    done
    # kmod's own names are made by its installer.
    for folder in modprobe depmod insmod lsmod rmmod modinfo; do ln -sf ../bin/kmod "$root/usr/sbin/$folder"; done
    rm -rf "${root:?}"/usr/share/{doc,man,locale,bug,lintian} "${root:?}/var"
}

# Debian's kernel of the backports: the plain flavour, since the cloud one has no soft RoCE.
setup_lab_kernel() {
    local package
    package=$(lab_kernel_package bookworm-backports image)
    [ -n "$package" ] || die "linux-image-amd64 of the backports names no kernel image"
    unpack_lab_kernel '' "$package/bookworm-backports"
}

# A second kernel beside it, 6.15 or newer, whose soft RoCE has on-demand paging: that of the backports of Debian 13, which come in
# several packages by now.
setup_lab_next() {
    [ -e "$CACHE/lab/next-$LAB_NEXT_VERSION" ] && [ "$CACHE/lab/initrd-next.img" -nt "$ROOT/tests/lab/host/init" ] && return 0
    with_cache_locked fetch_lab_next
}

fetch_lab_next() {
    local parts=() part package
    private_apt trixie-backports
    for part in image base binary modules; do
        package=$(lab_kernel_package trixie-backports "$part")
        [ -z "$package" ] || parts+=("$package/trixie-backports")
    done
    [ ${#parts[@]} -gt 0 ] || die "linux-image-amd64 of the backports of Debian 13 names no kernel image"
    unpack_lab_kernel -next "${parts[@]}"
    setup_lab_initramfs -next
    touch "$CACHE/lab/next-$LAB_NEXT_VERSION"
}

# lab_kernel_package SUITE PART: the package linux-PART-VERSION of that suite's current kernel, if there is one.
lab_kernel_package() {
    local config=$CACHE/apt/apt.conf image
    image=$(APT_CONFIG=$config apt-cache show --no-all-versions "linux-image-amd64/$1" |
        sed -n 's/^Depends:.*\<linux-image-\([0-9][^ ,]*\).*/\1/p' | head -1)
    APT_CONFIG=$config apt-cache pkgnames "linux-$2-$image" | grep -xF "linux-$2-$image" || true
}

# unpack_lab_kernel SUFFIX PACKAGE...: a kernel for the hosts. Only the modules that the lab uses are kept.
unpack_lab_kernel() {
    local suffix=$1 debs=$CACHE/apt/debs/lab-kernel raw=$CACHE/apt/lab-kernel root=$CACHE/lab/root version module file deb
    shift
    say "unpacking $* for the lab's hosts"
    fetch_debs "$debs" "$@"
    rm -rf "$raw"
    for deb in "$debs"/*.deb; do dpkg -x "$deb" "$raw"; done
    [ -d "$raw/usr/lib/modules" ] || { mkdir -p "$raw/usr/lib" && mv "$raw/lib/modules" "$raw/usr/lib/modules"; }
    version=$(basename "$raw"/usr/lib/modules/*)
    ln -sfn usr/lib "$raw/lib.new" && rm -rf "${raw:?}/lib" && mv "$raw/lib.new" "$raw/lib"
    lab_kmod depmod -b "$raw" "$version"
    mkdir -p "$root/usr/lib/modules/$version"
    cp "$raw/usr/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$root/usr/lib/modules/$version/"
    for module in "${LAB_BOOT_MODULES[@]}" "${LAB_OLD_MODULES[@]}" "${LAB_MODULES[@]}"; do
        if [[ " ${LAB_OLD_MODULES[*]} " == *" $module "* ]]; then
            (lab_kmod modinfo -b "$raw" -k "$version" "$module") >/dev/null 2>&1 || continue
        fi
        lab_kmod modprobe -d "$raw" -S "$version" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
    done | awk '!seen[$0]++' >"$CACHE/apt/lab-modules"
    [ -s "$CACHE/apt/lab-modules" ] || die "no modules were found in $*"
    while read -r file; do
        file=${file#"$raw"}
        file=${file#/usr}
        mkdir -p "$root/usr/$(dirname "$file")"
        cp "$raw/usr$file" "$root/usr$file"
    done <"$CACHE/apt/lab-modules"
    lab_kmod depmod -b "$root/usr" "$version"
    # Below /boot, or with its modules.
    cp "$(find "$raw/boot" "$raw/usr/lib/modules" -name 'vmlinuz*' -type f 2>/dev/null | head -1)" "$CACHE/lab/vmlinuz$suffix"
    echo "$version" >"$CACHE/lab/kernel-version$suffix"
}

# kmod of the layer, run on this machine.
lab_kmod() {
    local name=$1
    shift
    (exec -a "$name" "$CACHE/lab/root/usr/bin/kmod" "$@") || die "$name $* failed"
}

# Reaches the machine's files and hands over to tests/lab/host/start. Modules are loaded in the order listed.
# setup_lab_initramfs [SUFFIX]: of which kernel.
setup_lab_initramfs() {
    local suffix=${1:-} work=$CACHE/lab/initramfs root=$CACHE/lab/root version module file
    version=$(cat "$CACHE/lab/kernel-version$suffix")
    rm -rf "$work"
    mkdir -p "$work"/{bin,modules,proc,sys,dev,machine,tools,upper,new}
    cp "$CACHE/busybox/bin/busybox" "$work/bin/busybox"
    ln -s busybox "$work/bin/sh"
    cp "$ROOT/tests/lab/host/init" "$work/init"
    chmod +x "$work/init"
    for module in "${LAB_BOOT_MODULES[@]}"; do
        lab_kmod modprobe -d "$root/usr" -S "$version" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
    done | awk '!seen[$0]++' | while read -r file; do
        case $file in
            *.xz) xz -dc "$file" >"$work/modules/$(basename "$file" .xz)" ;;
            *) cp "$file" "$work/modules/" ;;
        esac
        basename "$file" .xz >>"$work/modules/order"
    done
    (cd "$work" && find . | "$CACHE/busybox/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$CACHE/lab/initrd.new"
    mv "$CACHE/lab/initrd.new" "$CACHE/lab/initrd$suffix.img"
    rm -rf "$work"
}
