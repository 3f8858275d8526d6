# shellcheck shell=bash
# The layer `package` of ./run test: the packages are built, installed on two machines with a clean Debian 12, used, upgraded and removed.

# How exposed the units may be, in tenths of what systemd-analyze counts; docs/operations.md and docs/sched-bridge.md name the figures.
VMOVED_EXPOSURE=65
VBRIDGED_EXPOSURE=22
# The version that is upgraded to. Its programs are the same, since there are no packages of an earlier release: what this shows is the work of
# apt, of maintainer scripts and of systemd, and no difference between programs.
NEWER=99.0.0
# Time of the watchdog in its steps, in seconds: long enough for a daemon on a busy machine.
WATCHDOG_S=6

test_package() {
    local lacks
    # shellcheck source=tests/scripts/package.sh
    source "$ROOT/tests/scripts/package.sh"
    # shellcheck source=tests/scripts/machine.sh
    source "$ROOT/tests/scripts/machine.sh"
    lacks=$(machine_lacks)
    if [ -n "$lacks" ]; then
        skipped packages "$lacks"
        return
    fi
    setup_machine "${PACKAGE_BUILD_PACKAGES[@]}"
    if ! (with_cache_locked setup_package_test); then
        skipped packages "what they are tested with could not be fetched, as said above"
        return
    fi
    MACHINES=$(target_dir)/package-test.$$
    trap 'machines_end; rm -rf "$MACHINES"' EXIT
    mkdir -p "$MACHINES"
    # Each needs the one before; one that fails ends the layer.
    step 'the packages are built, in two versions' build_both_versions
    step 'two machines start' two_machines
    step 'the packages install' packages_install
    step 'what is installed is whole' installed_is_whole
    step 'units are valid and hardened' units_are_hardened
    step 'the second command moves a guest' second_command_moves
    step 'a guest moves between two machines' guest_moves
    step 'a restart of vmoved leaves the guest alone' restart_keeps_the_guest
    step 'the watchdog replaces a vmoved that hangs' watchdog_keeps_the_guest
    step 'an upgrade leaves the guest alone' upgrade_keeps_the_guest
    step 'a guest moves between packages of two versions' guest_moves_between_versions
    step 'the package is not removed while a guest runs' removal_is_refused
    step 'a purge waits for the memory of guests' purge_waits
    step 'a purge leaves nothing' purge_leaves_nothing
    step 'the bridge runs from its package' bridge_runs
    step 'leases outlive a restart, a hang and an upgrade of the bridge' bridge_is_replaced
    step 'a purge of the bridge leaves nothing' bridge_leaves_nothing
}

setup_package_test() {
    setup_cargo_deb
    setup_debian_root
}

# step NAME COMMAND: a check whose first failing command makes it fail, unlike in `checked` itself, whose condition hides it.
step() {
    local status
    say "$1"
    set +e
    (
        set -eo pipefail
        "$2"
    )
    status=$?
    set -e
    checked "$1" [ $status -eq 0 ]
}

# on MACHINE LINE: a command line as an operator types it.
on() {
    echo "$1# $2"
    machine "$1" sh -c "$2"
}

# fails COMMAND...: `!` before a command would not end a step.
fails() {
    if "$@"; then
        warn "should have failed: $*"
        return 1
    fi
}

# refused MACHINE LINE WORDS: the command fails, and says so.
refused() {
    local said
    if said=$(on "$1" "$2" 2>&1); then
        warn "'$2' should have failed: $said"
        return 1
    fi
    echo "$said"
    grep -qF "$3" <<<"$said"
}

build_both_versions() {
    export VMOVE_PROFILE=${VMOVE_PROFILE:-debug}
    build_packages "$MACHINES/new" --deb-version $NEWER
    build_packages "$MACHINES/old"
    dpkg-deb --field "$MACHINES"/old/vmove_*.deb Depends | grep 'libc6 (>='
}

two_machines() {
    local name
    for name in a b; do
        machine_start "$name"
        # Progress bars are for terminals.
        machine "$name" tee /etc/apt/apt.conf.d/90plain <<<'Dpkg::Use-Pty "0"; Dpkg::Progress-Fancy "0";' >/dev/null
        tar -C "$MACHINES" -c old new | machine "$name" tar -C /root -x
    done
    machine_link a b
}

packages_install() {
    local name
    for name in a b; do
        on $name 'apt-get install -qq -y --no-install-recommends qemu-system-x86 /root/old/vmove_*.deb' >"$MACHINES/said"
        grep 'vmove: ' "$MACHINES/said"
        # Until an operator says so.
        fails machine $name systemctl is-enabled vmoved
        fails machine $name systemctl is-active vmoved
        [ "$(machine $name id -u vmove-qemu)" = 60742 ]
    done
}

# completes COMMAND: bash offers `COMMAND --help`, and there are files for the other shells.
completes() {
    machine a bash -c "source /usr/share/bash-completion/completions/$1
        function=\$(complete -p $1 | sed 's/.* -F \([^ ]*\) .*/\1/')
        COMP_WORDS=($1 --h) COMP_CWORD=1
        \$function $1 --h $1
        echo \"\${COMPREPLY[@]}\"" | grep -w -e --help
    machine a test -s "/usr/share/zsh/vendor-completions/_$1" -a -s "/usr/share/fish/vendor_completions.d/$1.fish"
}

installed_is_whole() {
    local command page
    [ -z "$(machine a dpkg --verify vmove)" ]
    machine a sh -c 'gzip -t /usr/share/man/man1/vmove*.gz /usr/share/man/man1/vfork*.gz'
    for command in run migrate completions; do machine a test -e /usr/share/man/man1/vmove-$command.1.gz; done
    for command in vmove vfork vmove-pve vmoved; do completes "$command"; done
    for page in tutorial/one-machine reference/vmoved-settings decisions/0001-crate-tree guides/tls operations; do
        machine a test -s /usr/share/doc/vmove/$page.md
    done
    # The clean root has it; on others first-move needs it.
    machine a dpkg-query -W -f '${Depends}' vmove | grep -w iproute2
    # Compiled, not loaded: the kernel need not have AppArmor.
    on a 'apt-get install -qq -y --no-install-recommends apparmor' >/dev/null
    machine a apparmor_parser -QK /usr/share/doc/vmove/examples/apparmor/qemu-of-vmove
    rules_for_libvirt_compile
    machine a /usr/share/vmove/guest/vmove-fork --version | grep '^vmove-fork '
    machine a test -s /usr/share/vmove/guest/c/vmove_fork.h -a -s /usr/share/vmove/guest/python/vmove_fork.py
    machine a dpkg-query -W -f '${Conffiles}' vmove | grep '^ /etc/vmove/vmoved.toml '
    [ "$(machine a stat -c %a /etc/vmove /etc/vmove/vmoved.toml | xargs)" = '700 600' ]
    [ "$(machine a vmove --version)" = "vmove $(machine a dpkg-query -W -f '${Version}' vmove)" ]
}

# The rules that docs/libvirt.md gives for domains, within libvirt's template of a profile: each guest's has its own monitor in it.
rules_for_libvirt_compile() {
    local profile=libvirt-6f0f5d4e-3c1a-4d0b-9d59-0a1b2c3d4e5f
    machine a sh -euc "cd /tmp; dpkg-deb -x /var/cache/apt/archives/libvirt-daemon-system_*.deb libvirt
        cp -a /etc/apparmor.d/. libvirt/etc/apparmor.d; cd libvirt/etc/apparmor.d; mkdir -p local/abstractions
        awk '/^# \/etc\/apparmor.d\/local\/abstractions\/libvirt-qemu/ { on = 1 } /^\`\`\`/ { on = 0 } on' /usr/share/doc/vmove/libvirt.md >local/abstractions/libvirt-qemu
        sed s/LIBVIRT_TEMPLATE/$profile/ libvirt/TEMPLATE.qemu >libvirt/$profile
        apparmor_parser -QK -D rule-exprs --base . libvirt/$profile" 2>&1 | grep -F "/run/libvirt/vmove/$profile\.qmp"
}

units_are_hardened() {
    unit_is_hardened vmoved $VMOVED_EXPOSURE
}

# unit_is_hardened NAME TENTHS
unit_is_hardened() {
    # Systemd of Debian 12 does not know one key of vmoved's, as the unit says.
    machine a systemd-analyze verify --man=no "/usr/lib/systemd/system/$1.service" 2>&1 | tee "$MACHINES/said"
    fails grep -v DelegateSubgroup "$MACHINES/said"
    machine a systemd-analyze security --no-pager --offline=true --threshold="$2" "/usr/lib/systemd/system/$1.service" | tail -n 1
}

second_command_moves() {
    on a /usr/lib/vmove/first-move
    fails machine a pgrep -l '^(vmoved|qemu)'
}

# Certificates by openssl, and the guest that counts, on both machines.
nodes_are_ready() {
    local name
    machine a sh -ec '
        cd /root
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \
            -subj "/CN=vmove authority" -keyout ca.key -out ca.pem
        for node in a b; do
            names="DNS:$node"
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$node" -keyout $node.key -out $node.csr
            printf "subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n" "$names" > $node.ext
            openssl x509 -req -in $node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile $node.ext -out $node.pem
        done' 2>/dev/null
    for name in a b; do
        machine a tar -C /root -c ca.pem $name.pem $name.key | machine $name tar -C /etc/vmove -x --no-same-owner
        machine $name sh -ec "cd /etc/vmove && mv $name.pem node.pem && mv $name.key node.key && chmod 0600 node.key
            /usr/lib/vmove/first-move --guest /srv/guest.img"
        # Two machines of one kernel are one host to vmoved: it would read the other's memory directly, which namespaces forbid.
        machine $name sed -i 's/^fabric = .*/fabric = "tcp"/' /etc/vmove/vmoved.toml
        on $name 'systemctl enable --now vmoved'
        machine $name systemctl is-active vmoved
    done
}

guest_moves() {
    nodes_are_ready
    on a "vmove run --name web -- qemu-system-x86_64 -accel tcg -m 256 -nodefaults -display none \
        -drive file=/srv/guest.img,format=raw,if=floppy,readonly=on -serial 'file:{vmdir}/console'"
    guest_counts a 1
    : >"$MACHINES/counted"
    move_guest a b hybrid
    fails machine a pgrep -l '^qemu'
}

# move_guest FROM TO MODE. The guest has counted on, and left nothing out, here and there.
move_guest() {
    machine "$1" sh -ec "exec 3</var/lib/vmove/run/web/console
        vmove migrate web --to $2:7420 --mode $3 --verify >&2
        cat <&3" >>"$MACHINES/counted"
    guest_counts "$2" 1
    machine "$2" cat /var/lib/vmove/run/web/console | cat "$MACHINES/counted" - >"$MACHINES/all"
    head -n "$(wc -l <"$MACHINES/all")" "$MACHINES/all" >"$MACHINES/whole"
    seq 1 "$(wc -l <"$MACHINES/whole")" | xargs printf '%08X\n' | cmp - "$MACHINES/whole"
    machine "$2" vmove list | grep -E '^web +[0-9]+ +running'
}

# guest_counts MACHINE LINES: so many more, within 20 s.
guest_counts() {
    machine "$1" timeout 20 sh -c 'cd /var/lib/vmove/run/web
        until [ -s console ]; do sleep 0.1; done
        enough=$(($(wc -l <console) + $1))
        until [ "$(wc -l <console)" -ge $enough ]; do sleep 0.1; done' count "$2"
}

# The process ids of QEMU and of vmoved on b.
pids() { echo "$(machine b pgrep -x qemu-system-x86) $(machine b systemctl show -P MainPID vmoved)"; }

# unharmed COMMAND: on b it replaces vmoved, and the guest does not notice.
unharmed() {
    local qemu vmoved qemu_then vmoved_then
    read -r qemu vmoved < <(pids)
    on b "$1"
    read -r qemu_then vmoved_then < <(pids)
    [ "$qemu" = "$qemu_then" ]
    [ "$vmoved" != "$vmoved_then" ]
    guest_counts b 10
    machine b vmove list | grep -E "^web +$qemu +running"
}

restart_keeps_the_guest() { unharmed 'systemctl restart vmoved'; }

# watched MACHINE UNIT: has a watchdog by its package; one of a few seconds from the next start on.
watched() {
    [ "$(machine "$1" systemctl show -P WatchdogUSec "$2")" = 1min ]
    machine "$1" mkdir -p "/etc/systemd/system/$2.service.d"
    printf '[Service]\nWatchdogSec=%s\n' $WATCHDOG_S | machine "$1" tee "/etc/systemd/system/$2.service.d/watchdog.conf"
    machine "$1" systemctl daemon-reload
    machine "$1" tee /root/hang >/dev/null <<'HANG'
# sh hang UNIT: its daemon stands still, and systemd puts another in its place, within a minute.
set -e
pid() { systemctl show -P MainPID "$1"; }
hung=$(pid "$1")
kill -STOP "$hung"
for try in $(seq 600); do
    [ "$(pid "$1")" = "$hung" ] || ! systemctl -q is-active "$1" || exit 0
    sleep 0.1
done
kill -CONT "$hung"
echo "$1 was not replaced within a minute" >&2
exit 1
HANG
}

# stays MACHINE UNIT: one that answers is left alone for thrice the time of the watchdog.
stays() {
    local pid
    pid=$(machine "$1" systemctl show -P MainPID "$2")
    sleep $((3 * WATCHDOG_S))
    [ "$pid" = "$(machine "$1" systemctl show -P MainPID "$2")" ]
}

# was_hung MACHINE UNIT: systemd has started it anew by itself; no core dump is left, and the watchdog is that of its package again.
was_hung() {
    [ "$(machine "$1" systemctl show -P NRestarts "$2")" = 1 ]
    [ -z "$(machine "$1" find / -xdev -name 'core*' -size +1M ! -path '/usr/*' ! -path '/root/*')" ]
    machine "$1" rm -r "/etc/systemd/system/$2.service.d" /root/hang
    machine "$1" systemctl daemon-reload
}

watchdog_keeps_the_guest() {
    watched b vmoved
    unharmed 'systemctl restart vmoved'
    stays b vmoved
    unharmed 'sh /root/hang vmoved'
    was_hung b vmoved
}

upgrade_keeps_the_guest() {
    unharmed 'apt-get install -qq -y --no-install-recommends /root/new/vmove_*.deb'
    [ "$(machine b dpkg-query -W -f '${Version}' vmove)" = $NEWER ]
    # What the operator has written there.
    machine b grep -q '^fabric = "tcp"' /etc/vmove/vmoved.toml
}

# Only the packages are of two versions: the programs, and so the protocol, are the same. Daemons that take each other for one of another
# protocol are in tests/tests/faults/versions.rs, records of earlier releases in tests/formats.
guest_moves_between_versions() {
    move_guest b a postcopy
}

removal_is_refused() {
    refused a 'apt-get remove -qq -y vmove' 'web, process'
    machine a systemctl is-active vmoved
    [ "$(machine a dpkg-query -W -f '${db:Status-Status}' vmove)" = installed ]
    guest_counts a 10
    # Without vmoved's help, too.
    machine a systemctl stop vmoved
    refused a 'apt-get purge -qq -y vmove' 'web, process'
    guest_counts a 10
    machine a systemctl start vmoved
}

purge_waits() {
    machine b sh -c 'cd /var/lib/vmove/memory/thp && exec sleep 600' &
    until machine b pgrep -x sleep >/dev/null; do sleep 0.1; done
    refused b 'apt-get purge -qq -y vmove' 'a guest still has memory in /var/lib/vmove/memory/thp'
    machine b pkill -x sleep
    wait $! || true
    on b 'apt-get purge -qq -y vmove'
    nothing_is_left b
}

purge_leaves_nothing() {
    on a 'vmove stop --force web'
    on a 'apt-get purge -qq -y vmove'
    nothing_is_left a
}

# But for certificates, and the user to whom disks belong.
nothing_is_left() {
    local left
    left=$(machine "$1" find / -xdev \( -iname '*vmove*' -o -name '*vfork*' -o -name '*vbridge*' \) \
        ! -path '/root/*' ! -path '/var/log/*' ! -path '/var/cache/apt/*' ! -path '/etc/vmove')
    left+=$(machine "$1" find /etc/vmove -type f ! -name '*.pem' ! -name '*.key')
    left+=$(machine "$1" grep vmove /proc/self/mounts || true)
    left+=$(machine "$1" pgrep -l '^(vmo|vbr|qemu)' || true)
    if [ -n "$left" ]; then
        warn "left: $left"
        return 1
    fi
    fails machine "$1" systemctl cat vmoved 2>/dev/null
    [ "$(machine "$1" id -u vmove-qemu)" = 60742 ]
}

bridge_runs() {
    local command
    on a 'apt-get install -qq -y --no-install-recommends /root/old/vmove_*.deb /root/old/vmove-bridge_*.deb' >/dev/null
    [ -z "$(machine a dpkg --verify vmove-bridge)" ]
    machine a dpkg-query -W -f '${Depends}' vmove-bridge | grep -F "vmove (>= $(machine a dpkg-query -W -f '${Version}' vmove))"
    for command in vbridged vmove-{slurm,network,podman,redfish}-adapter; do
        machine a sh -c "gzip -dc /usr/share/man/man1/$command.1.gz" | grep "^\.TH $command 1"
        machine a $command --version | grep "^$command "
    done
    completes vbridged
    unit_is_hardened vbridged $VBRIDGED_EXPOSURE
    on a 'systemctl enable --now vmoved vbridged'
    on a 'vmove inventory --publish'
    on a 'vmove fleet list'
    machine a tee /root/cluster.yaml <<<'{name: web, vms: [{name: vm, count: 2, request: "vcpus=1; memory_mb=128"}]}' >/dev/null
    on a 'vmove place /root/cluster.yaml --id web --run -- \
        qemu-system-x86_64 -accel tcg -smp {vcpus} -m {memory_mib} -nodefaults -display none'
    [ "$(machine a vmove list | grep -c running)" = 2 ]
}

# Who has what; not until when, which changes.
lease_of_web() { machine a vmove lease show web | grep -Ev '^(ends|kept) '; }

# leases COMMAND: it replaces vbridged, whose lease is what it was, and whose VMs run on.
leases() {
    local before vms bridge
    bridge=$(machine a systemctl show -P MainPID vbridged)
    before=$(lease_of_web)
    grep -w web-vm-1 <<<"$before"
    vms=$(machine a pgrep -x qemu-system-x86)
    on a "$1"
    machine a systemctl is-active vbridged
    [ "$bridge" != "$(machine a systemctl show -P MainPID vbridged)" ]
    [ "$before" = "$(lease_of_web)" ]
    [ "$vms" = "$(machine a pgrep -x qemu-system-x86)" ]
    [ "$(machine a vmove list | grep -c running)" = 2 ]
}

bridge_is_replaced() {
    leases 'systemctl restart vbridged'
    watched a vbridged
    leases 'systemctl restart vbridged'
    stays a vbridged
    leases 'sh /root/hang vbridged'
    was_hung a vbridged
    # vmoved is replaced as well, whose VMs these are.
    leases 'apt-get install -qq -y --no-install-recommends /root/new/vmove_*.deb /root/new/vmove-bridge_*.deb'
    [ "$(machine a dpkg-query -W -f '${Version}' vmove-bridge)" = $NEWER ]
}

bridge_leaves_nothing() {
    on a 'vmove lease stop web && vmove lease release web'
    on a 'apt-get purge -qq -y vmove-bridge vmove'
    nothing_is_left a
    fails machine a test -e /etc/vbridged
}
