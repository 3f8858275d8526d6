# shellcheck shell=bash
# ./run setup: what building and testing need, on Debian 12. Compilers and qemu-utils are installed with apt; the QEMUs, the guest's
# kernel and busybox are unpacked below .cache/, so the machine's own QEMU and kernel stay as they are.

# Installed on the machine. Everything else is only unpacked.
BUILD_PACKAGES=(gcc libc6-dev pkg-config libclang-14-dev libibverbs-dev librdmacm-dev python3 python3-venv iproute2 dnsmasq-base podman crun qemu-utils strace)
# Of these, what the demo needs.
DEMO_PACKAGES=(gcc libc6-dev pkg-config libclang-14-dev)
# What `./run package` needs: dpkg-shlibdeps, and the headers that the programs are built with.
PACKAGE_BUILD_PACKAGES=(gcc libc6-dev pkg-config libclang-14-dev libibverbs-dev librdmacm-dev dpkg-dev)
# Servers that the tests of sched-bridge speak with, and their libraries; unpacked, so that no service is started and no user made.
PEER_PACKAGES=(etcd-server munge slurmctld slurmd slurm-client)
PEERS_VERSION=1
# What checks renderings of GLUE 2: the schema of information systems, and the server that reads it. Unpacked, as above.
GLUE_PACKAGES=(slapd glue-schema)
# libvirt, two daemons of which tests of `virsh migrate` run in namespaces of their own. Unpacked, as above.
LIBVIRT_PACKAGES=(libvirt-daemon libvirt-clients)
# ssh and its server, by which tests reach hosts in namespaces of their own. Unpacked, as above.
SSH_PACKAGES=(openssh-server openssh-client)
# The browser that looks at the page of `vmove page`, and a font. Unpacked, as above.
BROWSER_PACKAGES=(chromium-headless-shell fonts-dejavu-core)
# Raise it when what is unpacked of QEMUs, kernel and tools changes, so that older caches are made anew.
SETUP_VERSION=2

# Taken from the machine even for the unpacked QEMUs: a C library must match the loader that starts the program.
HOST_PACKAGES='libc6|libc-bin|libgcc-s1|gcc-12-base|debconf|dpkg|perl-base|tar|passwd|adduser|libpam-modules|libpam-modules-bin'

vmove_setup() {
    check_cargo
    setup_machine "${BUILD_PACKAGES[@]}"
    # Two setups at once (a test run and a shell) would unpack into the same folder.
    with_cache_locked setup_everything
    setup_python
    setup_redfish
}

# What `./run demo` needs, and no more.
setup_demo() {
    check_cargo
    setup_machine "${DEMO_PACKAGES[@]}"
    with_cache_locked setup_guests
}

with_cache_locked() {
    mkdir -p "$CACHE"
    exec 9>"$CACHE/setup.lock"
    flock 9
    "$@"
    if [ -n "${APT_READ:-}" ]; then
        rm -rf "$CACHE/apt"
        APT_READ=
    fi
    exec 9>&-
}

setup_everything() {
    setup_guests
    setup_part 7.2 "$QEMU_7_2" setup_qemu 7.2 bookworm
    setup_part peers "$CACHE/peers/usr/sbin/slurmctld-wlm" setup_peers
    setup_part glue "$CACHE/glue/etc/ldap/schema/GLUE20.schema" setup_glue
    setup_part libvirt "$CACHE/libvirt/usr/sbin/libvirtd" setup_libvirt
    setup_part ssh "$CACHE/ssh/usr/sbin/sshd" setup_ssh
    setup_part prometheus "$CACHE/prometheus/usr/bin/promtool" setup_prometheus
    # The last one, since it reads the lists of another suite.
    # A cache that was moved has programs that look for their loader where it was.
    "$QEMU_TESTING" --version >/dev/null 2>&1 || rm -rf "$CACHE"/{qemu,libvirt}-testing
    [ -n "$(find "$CACHE/no-testing" -mtime -1 2>/dev/null)" ] || setup_part testing "$QEMU_TESTING" setup_testing
}

# What it takes to start guests.
setup_guests() {
    setup_part tools "$CACHE/busybox/bin/busybox" setup_tools
    setup_part 10.0 "$QEMU_10_0" setup_qemu 10.0 bookworm-backports
    setup_part kernel "$CACHE/kernel/modules/virtio_net.ko" setup_kernel
}

# setup_part NAME FILE COMMAND...: runs the command, unless it has been run to its end: then there is a stamp, and the file.
setup_part() {
    local name=$1 file=$2 version=$SETUP_VERSION
    shift 2
    [ "$name" = peers ] && version=$PEERS_VERSION
    if [ -e "$file" ]; then
        [ -e "$CACHE/$name-$version" ] && return 0
        # One stamp was for all but the peers.
        [ "$name" != peers ] && [ -e "$CACHE/setup-$version" ] && return 0
    fi
    # This part reads lists of its own, and the others may do without it.
    [ "$name" = testing ] || private_apt
    "$@"
    rm -f "$CACHE/$name"-[0-9]
    touch "$CACHE/$name-$version"
}

# unpack_closure NAME PACKAGE...: the packages and what they need, into .cache/NAME.new.
unpack_closure() {
    fetch_closure "$CACHE/apt/debs/$1" "${@:2}"
    unpack_debs "$1"
}

# unpack_debs NAME: what was fetched into the folder of that name, into .cache/NAME.new.
unpack_debs() {
    local into=$CACHE/$1.new deb
    rm -rf "$into"
    for deb in "$CACHE/apt/debs/$1"/*.deb; do dpkg -x "$deb" "$into"; done
}

# etcd and Slurm below .cache/peers.
setup_peers() {
    local peers=$CACHE/peers
    say "unpacking etcd, munge and Slurm"
    unpack_closure peers "${PEER_PACKAGES[@]}"
    rm -rf "${peers:?}.new"/usr/share/{doc,man,locale,bug,lintian} "${peers:?}.new"/{etc,var} "$peers"
    mv "$peers.new" "$peers"
    "$peers/usr/bin/etcd" --version >/dev/null || die "the unpacked etcd does not start"
}

# The schema of GLUE 2 and slapd below .cache/glue.
setup_glue() {
    local glue=$CACHE/glue
    say "unpacking slapd and the schema of GLUE 2"
    unpack_closure glue "${GLUE_PACKAGES[@]}"
    rm -rf "${glue:?}.new"/{bin,sbin,var} "${glue:?}.new"/usr/{share,bin,lib/x86_64-linux-gnu/perl*} "$glue"
    mv "$glue.new" "$glue"
}

# libvirtd and virsh below .cache/libvirt. What is left out: documents, and the QEMU that libvirt recommends.
setup_libvirt() {
    local libvirt=$CACHE/libvirt
    say "unpacking libvirt"
    unpack_closure libvirt "${LIBVIRT_PACKAGES[@]}"
    rm -rf "${libvirt:?}.new"/usr/share/{doc,man,locale,bug,lintian} "${libvirt:?}.new/var" "$libvirt"
    mv "$libvirt.new" "$libvirt"
}

# ssh and sshd below .cache/ssh: they find their libraries by themselves, whatever becomes of the environment.
setup_ssh() {
    local ssh=$CACHE/ssh
    say "unpacking ssh and its server"
    unpack_closure ssh "${SSH_PACKAGES[@]}"
    rm -rf "${ssh:?}.new"/{bin,sbin,etc,var} "${ssh:?}.new"/usr/{share,lib/x86_64-linux-gnu/perl*} "$ssh"
    find "$ssh.new"/usr/{bin,sbin} ! -type d ! -name ssh ! -name ssh-keygen ! -name sshd -delete
    # shellcheck disable=SC2016 # $ORIGIN is the loader's
    "$CACHE/tools/usr/bin/patchelf" --force-rpath \
        --set-rpath '$ORIGIN/../lib/x86_64-linux-gnu:$ORIGIN/../../lib/x86_64-linux-gnu' "$ssh.new"/usr/{bin/ssh,bin/ssh-keygen,sbin/sshd}
    mv "$ssh.new" "$ssh"
    "$ssh/usr/bin/ssh" -V 2>/dev/null || die "the unpacked ssh does not start"
}

# Of Prometheus only what checks metrics, alerts and configurations.
setup_prometheus() {
    local debs=$CACHE/apt/debs/prometheus new=$CACHE/prometheus.new
    say "unpacking promtool"
    fetch_debs "$debs" prometheus
    rm -rf "$new" "$CACHE/prometheus"
    dpkg -x "$debs"/prometheus_*.deb "$new"
    find "$new" -type f ! -name promtool -delete
    mv "$new" "$CACHE/prometheus"
    "$CACHE/prometheus/usr/bin/promtool" --version >/dev/null 2>&1 || die "the unpacked promtool does not start"
}

# What only the layer `page` needs.
setup_browser() {
    setup_part tools "$CACHE/busybox/bin/busybox" setup_tools
    setup_part chromium "$CACHE/chromium/fonts.conf" setup_chromium
}

# Chromium without a window below .cache/chromium, as chromium/usr/lib/chromium/chromium-headless-shell. Its fonts are its own, so that
# pictures look alike everywhere.
setup_chromium() {
    local chromium=$CACHE/chromium program=usr/lib/chromium/chromium-headless-shell patchelf=$CACHE/tools/usr/bin/patchelf
    say "unpacking Chromium"
    unpack_closure chromium "${BROWSER_PACKAGES[@]}"
    rm -rf "${chromium:?}.new"/{bin,sbin,etc,var} "${chromium:?}.new"/usr/share/{doc,man,locale,bug,lintian} "$chromium"
    # shellcheck disable=SC2016 # $ORIGIN is the loader's
    "$patchelf" --force-rpath \
        --set-rpath '$ORIGIN:$ORIGIN/../x86_64-linux-gnu:$ORIGIN/../x86_64-linux-gnu/pulseaudio:$ORIGIN/../../../lib/x86_64-linux-gnu' \
        "$chromium.new/$program"
    # It has a path of its own, and would not look into that of the program.
    "$patchelf" --remove-rpath "$chromium.new"/usr/lib/x86_64-linux-gnu/libpulse.so.0
    mv "$chromium.new" "$chromium"
    "$chromium/$program" --version >/dev/null || die "the unpacked Chromium does not start"
    cat >"$chromium/fonts.conf" <<FONTS
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir prefix="relative">usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
FONTS
}

# What makes the Python client of vbridged. Without it, one test is skipped.
setup_python() {
    "$CACHE/python/bin/openapi-python-client" --version >/dev/null 2>&1 && return 0
    say "installing the generator of Python clients"
    VMOVE_CACHE=$CACHE "$ROOT/client/python/generate.sh" --generator-only ||
        warn "the generator of Python clients could not be installed; the test that uses it will be skipped"
}

# An emulator of Redfish. Without it, one test is skipped.
setup_redfish() {
    local venv=$CACHE/redfish
    "$venv/bin/python3" -c 'import sushy_tools.emulator.main' 2>/dev/null && return 0
    say "installing the emulator of Redfish"
    { python3 -m venv --clear "$venv" && "$venv/bin/pip" -q --retries 5 install sushy-tools==2.2.0; } ||
        warn "the emulator of Redfish could not be installed; the test that uses it will be skipped"
}

# setup_machine PACKAGE...
setup_machine() {
    local missing=() package
    for package in "$@"; do
        [ -e "/var/lib/dpkg/info/$package.list" ] || [ -e "/var/lib/dpkg/info/$package:amd64.list" ] || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    command -v apt-get >/dev/null || die "this is not Debian; install these by hand: ${missing[*]}"
    say "installing ${missing[*]}"
    as_root apt-get -qq -o DPkg::Lock::Timeout=300 update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "${missing[@]}" >/dev/null || die "apt-get could not install: ${missing[*]}"
}

# An apt of our own: its sources (with backports), its lists, and a machine on which nothing is installed, so that it
# names every shared library. Nothing of it touches /etc/apt or /var/lib. Its lists are read once; an argument is one suite more.
private_apt() {
    local apt=$CACHE/apt mirror=${VMOVE_DEBIAN_MIRROR:-http://deb.debian.org} keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ "${APT_READ:-}" = "read ${1:-}" ] && return 0
    [ -e "$keys" ] || die "$keys is missing; this is not Debian, or the package debian-archive-keyring is not installed"
    say "reading the package lists of Debian 12 and its backports${1:+, and of $1}"
    rm -rf "$apt"
    mkdir -p "$apt"/{lists/partial,archives/partial,debs}
    : >"$apt/status"
    cat >"$apt/sources.list" <<SOURCES
deb [signed-by=$keys arch=amd64] $mirror/debian bookworm main
deb [signed-by=$keys arch=amd64] $mirror/debian-security bookworm-security main
deb [signed-by=$keys arch=amd64] $mirror/debian bookworm-backports main
${1:+deb [signed-by=$keys arch=amd64] $mirror/debian $1 main}
SOURCES
    cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "$apt";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Retries "3";
CONF
    APT_CONFIG=$apt/apt.conf apt-get -qq update || die "apt-get update failed; is $mirror reachable? VMOVE_DEBIAN_MIRROR names another mirror"
    APT_READ="read ${1:-}"
}

# fetch_debs FOLDER PACKAGE...: downloads exactly these packages ("name=version" or "name/suite").
fetch_debs() {
    local folder=$1
    shift
    mkdir -p "$folder"
    (cd "$folder" && APT_CONFIG=$CACHE/apt/apt.conf apt-get -qq download "$@") || die "could not download: $*"
}

# fetch_closure FOLDER PACKAGE...: downloads these packages and all that they need, less what every Debian has.
fetch_closure() {
    local folder=$1 list
    shift
    list=$(APT_CONFIG=$CACHE/apt/apt.conf apt-get -qq -y --print-uris --no-install-recommends install "$@" |
        awk '{print $2}' | sed 's/_[^_]*\.deb$//; s/%3a/:/; s/_/=/' | grep -vE "^($HOST_PACKAGES)=") || die "apt-get found no way to install: $*"
    # shellcheck disable=SC2086 # one package a word
    fetch_debs "$folder" $list
}

# Unpacked besides QEMU: busybox-static would replace an installed busybox, and the others are needed only here.
setup_tools() {
    local debs=$CACHE/apt/debs/tools
    fetch_debs "$debs" busybox-static patchelf lz4
    rm -rf "$CACHE/busybox" "$CACHE/tools"
    dpkg -x "$debs"/patchelf_*.deb "$CACHE/tools"
    dpkg -x "$debs"/lz4_*.deb "$CACHE/tools"
    dpkg -x "$debs"/busybox-static_*.deb "$CACHE/busybox"
}

# What every QEMU here comes from.
QEMU_PACKAGES=(qemu-system-x86 qemu-system-common qemu-system-data seabios)

# setup_qemu VERSION SUITE. QEMU finds its modules and firmware below a folder qemu-bundle beside itself (Debian's 10.0 is
# built to look nowhere else but in /usr/share); its libraries are found by an rpath in the program itself, so that its
# path can be used directly: no wrapper, no LD_LIBRARY_PATH that would have to survive in the environment of whoever
# starts it again.
setup_qemu() {
    local version=$1 home=$CACHE/qemu-$1
    say "unpacking QEMU $version ($2)"
    fetch_closure "$CACHE/apt/debs/qemu-$version" "${QEMU_PACKAGES[@]/%//$2}"
    unpack_qemu "qemu-$version"
    check_qemu "$home.new/usr/bin/qemu-system-x86_64" "$version"
    mv "$home.new" "$home"
}

# The newest that Debian has: QEMU (11.1 in November 2026) and libvirt of its testing suite, with the C library that they are built for.
setup_testing() {
    local own='systemd.*|libsystemd-shared|libc-gconv-modules-extra|libperl.*|perl.*|adduser|passwd|debconf|dpkg|tar'
    rm -rf "$CACHE/qemu-testing" "$CACHE/libvirt-testing"
    if ! (private_apt testing && HOST_PACKAGES=$own &&
        fetch_closure "$CACHE/apt/debs/qemu-testing" "${QEMU_PACKAGES[@]/%//testing}" &&
        fetch_closure "$CACHE/apt/debs/libvirt-testing" libvirt-{daemon,clients,daemon-driver-qemu}/testing); then
        without_testing "could not be fetched"
        return 0
    fi
    APT_READ='read testing'
    unpack_newest_libvirt
    unpack_newest_qemu
}

# The program names its loader by its path: a cache that is moved elsewhere needs it unpacked again.
unpack_newest_qemu() {
    local home=$CACHE/qemu-testing program
    say "unpacking the QEMU of Debian testing"
    unpack_qemu qemu-testing
    mv "$home.new" "$home"
    program=$home/usr/bin/qemu-system-x86_64
    "$CACHE/tools/usr/bin/patchelf" --set-interpreter "$home/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" "$program"
    (check_qemu "$program") || without_testing "do not start here"
}

# without_testing WHY. It is not tried again for a day.
without_testing() {
    warn "QEMU and libvirt of Debian testing $1; tests with them will be skipped"
    rm -rf "$CACHE"/{qemu,libvirt}-testing
    # with_cache_locked removes what was fetched.
    APT_READ='read testing'
    touch "$CACHE/no-testing"
}

# It is put over /usr in a namespace, C library and all. The QEMU that it depends on is that of unpack_newest_qemu.
unpack_newest_libvirt() {
    local libvirt=$CACHE/libvirt-testing new=$CACHE/libvirt-testing.new
    say "unpacking the libvirt of Debian testing"
    unpack_debs libvirt-testing
    rm -rf "${new:?}"/{etc,var} "${new:?}"/usr/share/{doc,man,locale,bug,lintian,qemu,seabios} "${new:?}"/usr/lib/{systemd,x86_64-linux-gnu/{qemu,systemd}}
    find "$new"/usr/{bin,sbin} ! -type d ! -name virsh ! -name libvirtd ! -name dmidecode -delete
    mv "$new" "$libvirt"
}

# unpack_qemu NAME: what was fetched into the folder of that name, into .cache/NAME.new, as a QEMU that finds its parts.
unpack_qemu() {
    local new=$CACHE/$1.new
    unpack_debs "$1"
    rm -rf "${CACHE:?}/$1"
    rm -rf "${new:?}"/usr/share/{doc,man,locale,bug,lintian} "${new:?}"/{etc,var,sbin} "${new:?}/usr/bin/qemu-system-i386"
    # RPATH, not RUNPATH: it must hold for the libraries of the libraries and for QEMU's modules too.
    # shellcheck disable=SC2016 # $ORIGIN is the loader's
    "$CACHE/tools/usr/bin/patchelf" --force-rpath \
        --set-rpath '$ORIGIN/../lib/x86_64-linux-gnu:$ORIGIN/../../lib/x86_64-linux-gnu' "$new/usr/bin/qemu-system-x86_64"
    ln -s ../.. "$new/usr/bin/qemu-bundle"
}

# check_qemu PROGRAM [VERSION]. Proves that the program starts, is the version it should be, and finds its TCG module and its BIOS.
check_qemu() {
    local qemu=$1 version=${2:-} out
    out=$("$qemu" --version) || die "$qemu does not start"
    [[ $out == *"version $version${version:+.}"* ]] || die "$qemu should be version $version but says: ${out%%$'\n'*}"
    out=$(printf '%s\n' '{"execute":"qmp_capabilities"}' '{"execute":"query-status"}' '{"execute":"quit"}' |
        timeout 30 "$qemu" -accel tcg -S -display none -nodefaults -no-user-config -qmp stdio 2>&1) ||
        die "$qemu does not start a machine: $out"
    [[ $out == *prelaunch* ]] || die "$qemu gave no status of its machine: $out"
}

# Debian's cloud kernel, whose serial console needs no module. Unpacked from its own compression: under emulation the
# kernel would take seconds to do that; QEMU starts the plain ELF file by its PVH entry.
setup_kernel() {
    local debs=$CACHE/apt/debs/kernel home=$CACHE/kernel package image
    package=$(APT_CONFIG=$CACHE/apt/apt.conf apt-cache show --no-all-versions linux-image-cloud-amd64 |
        sed -n 's/^Depends: *\(linux-image-[^ ,]*\).*/\1/p' | head -1)
    [ -n "$package" ] || die "linux-image-cloud-amd64 names no kernel image"
    say "unpacking $package"
    fetch_debs "$debs" "$package"
    rm -rf "$home" "$CACHE/apt/kernel"
    dpkg -x "$debs"/linux-image-*.deb "$CACHE/apt/kernel"
    mkdir -p "$home/modules"
    # Not needed to boot; tests of a guest with a balloon, a disk, a port or a network card load them.
    find "$CACHE/apt/kernel/lib/modules" \( -path '*/drivers/virtio/virtio*.ko' -o -name virtio_blk.ko -o -name virtio_console.ko \
        -o -name virtio_net.ko -o -name net_failover.ko -o -name failover.ko \) -exec cp {} "$home/modules/" \;
    image=$(echo "$CACHE"/apt/kernel/boot/vmlinuz-*)
    cp "$image" "$home/vmlinuz"
    unpack_kernel "$home/vmlinuz" >"$home/vmlinux.new"
    [ "$(head -c 4 "$home/vmlinux.new" | tail -c 3)" = ELF ] || die "no ELF kernel was found in $image"
    mv "$home/vmlinux.new" "$home/vmlinux"
}

# unpack_kernel BZIMAGE: the ELF file inside. The x86 boot protocol says where: sectors of setup code at 0x1f1, offset
# of the payload behind them at 0x248, its length at 0x24c. The payload's last 4 bytes are its plain length.
unpack_kernel() {
    local sectors offset length magic
    sectors=$(od -An -tu1 -j $((0x1f1)) -N1 "$1" | tr -d ' ')
    offset=$(($(od -An -tu4 -j $((0x248)) -N4 "$1") + (sectors + 1) * 512))
    length=$(od -An -tu4 -j $((0x24c)) -N4 "$1" | tr -d ' ')
    magic=$(od -An -tx4 -j "$offset" -N4 "$1" | tr -d ' ')
    [ "$magic" = 184c2102 ] || die "$1 is not compressed with LZ4 (magic $magic)"
    dd if="$1" bs=1M iflag=skip_bytes,count_bytes skip="$offset" count=$((length - 4)) status=none |
        "$CACHE/tools/usr/bin/lz4" -dc || die "the kernel in $1 could not be unpacked"
}
