#!/usr/bin/env bash
# A node of a cluster of Proxmox VE, as far as vmove-pve sees one, in mount and UTS namespaces of its own:
# `unshare -m -u tests/scripts/proxmox-host.sh FOLDER NAME CLUSTER`. CLUSTER becomes /etc/pve, which all nodes share; what the node writes for itself is
# below FOLDER. Guest memory is on a tmpfs with huge=advise. Says "ready", and stays until it is ended.
set -euo pipefail
folder=$1 name=$2 cluster=$3

mount --make-rprivate /
mkdir -p "$folder"/etc/{pve,tmpfiles.d} "$folder"/lib/vmove/pve "$folder"/run/{lock,qemu-server} "$folder/tmpfiles.d"
# Mount points in /etc and /var/lib, of which nothing is left on the machine.
mount -t overlay overlay -o "lowerdir=$folder/etc:/etc" /etc
mount --bind "$cluster" /etc/pve
mount --bind "$folder/tmpfiles.d" /etc/tmpfiles.d
mount -t overlay overlay -o "lowerdir=$folder/lib:/var/lib" /var/lib
mount -t tmpfs -o huge=advise,mode=0700 tmpfs /var/lib/vmove/pve
mount --bind "$folder/run" /run
hostname "$name"
echo ready
exec sleep infinity
