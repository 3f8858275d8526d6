# shellcheck shell=bash
# Machines with a Debian 12 and a systemd of their own, in namespaces of this one: their files are a clean root and what they change of it.

# A Debian 12 as it is installed, less what needs a kernel or a console; and of QEMU, AppArmor and libvirt the packages, not installed.
DEBIAN_ROOT=$CACHE/debian-12
# Raise it when the root changes, so that older caches are made anew.
DEBIAN_ROOT_VERSION=3

setup_debian_root() {
    local root=$DEBIAN_ROOT debs=$CACHE/apt/debs/mmdebstrap
    [ -e "$CACHE/debian-12-$DEBIAN_ROOT_VERSION" ] && [ -x "$root/usr/lib/systemd/systemd" ] && return 0
    private_apt
    say "making a clean Debian 12"
    fetch_debs "$debs" mmdebstrap
    rm -rf "$CACHE/mmdebstrap" "$root" "$root.new"
    dpkg -x "$debs"/mmdebstrap_*.deb "$CACHE/mmdebstrap"
    # apt finds the packages in the root's cache, so that tests need no network.
    # shellcheck disable=SC2016 # mmdebstrap expands the hook
    perl "$CACHE/mmdebstrap/usr/bin/mmdebstrap" --quiet --mode=root --variant=minbase --include=systemd-sysv,dbus,iproute2,procps,openssl \
        --skip=cleanup/apt --aptopt='APT::Sandbox::User "root"' \
        --customize-hook='APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -qq -y --download-only --no-install-recommends install qemu-system-x86 apparmor' \
        --customize-hook='cd "$1/var/cache/apt/archives" && APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -qq download libvirt-daemon-system' \
        bookworm "$root.new" "${VMOVE_DEBIAN_MIRROR:-http://deb.debian.org}/debian" || die "mmdebstrap could not make a Debian 12"
    mv "$root.new" "$root"
    rm -f "$CACHE"/debian-12-[0-9]*
    touch "$CACHE/debian-12-$DEBIAN_ROOT_VERSION"
}

# What keeps a machine from starting here; nothing if it can.
machine_lacks() {
    if [ "$(id -u)" != 0 ]; then
        echo "namespaces, mounts and control groups need root"
    elif ! findmnt -n -t cgroup2 >/dev/null; then
        echo "there is no cgroup 2"
    elif ! unshare --mount --net --pid --uts --ipc --cgroup --fork true 2>/dev/null; then
        echo "the kernel makes no namespaces here"
    fi
}

# machine_start NAME: starts it, and waits until its systemd is up. What it changes of the root is in $MACHINES/NAME, which the caller has set.
machine_start() {
    local name=$1 folder=$MACHINES/$1 group try pid
    group=$(findmnt -n -o TARGET -t cgroup2 | head -1)/vmove-machine-$$-$name
    mkdir -p "$folder"/{changes,work,root} "$group"
    echo "$group" >"$folder/group"
    (
        echo "$BASHPID" >"$group/cgroup.procs"
        exec unshare --mount --net --pid --uts --ipc --cgroup --fork --kill-child \
            bash "$ROOT/tests/scripts/machine-init.sh" "$name" "$DEBIAN_ROOT" "$folder"
    ) </dev/null >"$folder/console" 2>&1 &
    for ((try = 0; try < 300; try++)); do
        if pid=$(pgrep -P $! -x systemd); then
            echo "$pid" >"$folder/pid"
            # Degraded is up, too: some of what a real machine starts has nothing to do here.
            case $(machine "$name" systemctl is-system-running 2>/dev/null) in running | degraded) return 0 ;; esac
        fi
        sleep 0.2
    done
    warn "machine $name did not start within a minute; its console: $(tail -n 20 "$folder/console")"
    return 1
}

# machine NAME COMMAND...: runs it there, as root.
machine() {
    local name=$1
    shift
    nsenter --target "$(cat "$MACHINES/$name/pid")" --mount --net --pid --uts --ipc --cgroup --root \
        env -i -C / PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}

# machine_link A B: a network of two, 192.0.2.1 and 192.0.2.2.
machine_link() {
    local one two
    one=$(cat "$MACHINES/$1/pid")
    two=$(cat "$MACHINES/$2/pid")
    ip link add lan netns "$one" type veth peer name lan netns "$two"
    nsenter --target "$one" --net sh -c 'ip addr add 192.0.2.1/24 dev lan && ip link set lan up'
    nsenter --target "$two" --net sh -c 'ip addr add 192.0.2.2/24 dev lan && ip link set lan up'
}

# Ends all machines with everything in them.
machines_end() {
    local folder group try
    for folder in "$MACHINES"/*/group; do
        [ -e "$folder" ] || continue
        group=$(cat "$folder")
        folder=$(dirname "$folder")
        # Process 1 of a process id namespace takes all others of it along.
        [ ! -e "$folder/pid" ] || kill -KILL "$(cat "$folder/pid")" 2>/dev/null || true
        for ((try = 0; try < 100; try++)); do
            find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
            [ -d "$group" ] || break
            sleep 0.1
        done
    done
}
