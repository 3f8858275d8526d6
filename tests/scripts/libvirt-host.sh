#!/usr/bin/env bash
# A host of libvirt, in mount and UTS namespaces of its own: `unshare -m -u tests/scripts/libvirt-host.sh FOLDER NAME UUID`.
# libvirt comes from the folder VMOVE_LIBVIRT; what it writes is below FOLDER. Guest memory is on a tmpfs with huge=advise, or on hugetlbfs if
# VMOVE_MEMORY is that; <hugepages/> have a hugetlbfs of their own. QEMU runs as libvirt-qemu. Says "ready" when libvirtd answers, and stays until it is
# ended; libvirtd ends with `kill $(cat FOLDER/libvirtd.pid)`.
set -euo pipefail
folder=$1 name=$2 uuid=$3
: "${VMOVE_LIBVIRT:?}"

mount --make-rprivate /
mkdir -p "$folder"/{var,run,etc/hooks,log/qemu,cached,mem,huge,files,dev/pts,dev/shm,dev/net}
chmod 755 "$folder" "$folder"/{log,mem,files}
mount -t overlay overlay -o "lowerdir=$VMOVE_LIBVIRT/usr:/usr" /usr
for pair in var/lib/libvirt:var run/libvirt:run etc/libvirt:etc var/log/libvirt:log var/cache/libvirt:cached; do
    mkdir -p "/${pair%:*}"
    mount --bind "$folder/${pair#*:}" "/${pair%:*}"
done
# libvirt looks for its QEMU's user by name.
cp /etc/passwd /etc/group "$folder/files"
echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >>"$folder/files/passwd"
printf 'libvirt-qemu:x:64055:\nlibvirt:x:64056:\n' >>"$folder/files/group"
mount --bind "$folder/files/passwd" /etc/passwd
mount --bind "$folder/files/group" /etc/group
if [ "${VMOVE_MEMORY:-tmpfs}" = hugetlbfs ]; then
    mount -t hugetlbfs -o pagesize=2M,mode=0755 hugetlbfs "$folder/mem"
else
    mount -t tmpfs -o huge=advise,mode=0755 tmpfs "$folder/mem"
fi
if grep -qw hugetlbfs /proc/filesystems; then
    mount -t hugetlbfs -o pagesize=2M,mode=0755 hugetlbfs "$folder/huge"
fi
# Without /dev/kvm, which QEMU's user may not open: libvirt would ask QEMU anew what it is each time, which takes seconds.
mount -t tmpfs -o mode=0755 tmpfs "$folder/dev"
mkdir -p "$folder"/dev/{pts,shm}
for node in null zero full random urandom tty userfaultfd; do
    [ -e "/dev/$node" ] && cp -a "/dev/$node" "$folder/dev/"
done
ln -s /proc/self/fd "$folder/dev/fd"
ln -s pts/ptmx "$folder/dev/ptmx"
mount --bind /dev/pts "$folder/dev/pts"
mount --bind /dev/shm "$folder/dev/shm"
mount --bind "$folder/dev" /dev
hostname "$name"

cat >/etc/libvirt/libvirtd.conf <<CONF
host_uuid = "$uuid"
auth_unix_rw = "none"
unix_sock_rw_perms = "0700"
log_outputs = "2:file:$folder/libvirtd.log"
CONF
# security_driver: there is neither AppArmor nor SELinux in a namespace; namespaces and cgroup_controllers: nor are there control groups;
# remember_owner: in files that all tests have, such as the guest's kernel, libvirt would note who has them until nobody knows of it any more.
cat >/etc/libvirt/qemu.conf <<CONF
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
remember_owner = 0
memory_backing_dir = "$folder/mem"
hugetlbfs_mount = "$(mountpoint -q "$folder/huge" && echo "$folder/huge")"
${VMOVE_QEMU_CONF:-}
CONF
# It closes every descriptor that there may be in each child: with a limit of a billion that takes seconds.
ulimit -n 4096
libvirtd -d -p "$folder/libvirtd.pid"
for _ in $(seq 100); do
    virsh -c qemu:///system list >/dev/null 2>&1 && break
    sleep 0.1
done
echo ready
exec sleep infinity
