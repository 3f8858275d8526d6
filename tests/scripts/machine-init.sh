#!/usr/bin/env bash
# machine-init.sh NAME ROOT FOLDER: in new namespaces, becomes the systemd of a machine. Called by machine.sh.
set -euo pipefail
name=$1 lower=$2 folder=$3
root=$folder/root

hostname "$name"
# Nothing that is mounted here is seen elsewhere, and all of it goes with the namespace.
mount --make-rprivate /
mount -t overlay -o "lowerdir=$lower,upperdir=$folder/changes,workdir=$folder/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for device in null zero full random urandom tty kvm userfaultfd; do
    [ -e "/dev/$device" ] || continue
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
echo "$name" >"$root/etc/hostname"
printf '127.0.0.1 localhost %s\n192.0.2.1 a\n192.0.2.2 b\n' "$name" >"$root/etc/hosts"
ip link set lo up

cd "$root"
pivot_root . mnt
umount --lazy /mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=console --show-status=no
