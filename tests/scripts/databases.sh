# shellcheck shell=bash
# A disk with Debian 12, PostgreSQL, SQLite and fio on it, for guests whose disks move: setup_databases. Needs setup.sh.

# shellcheck source=tests/scripts/machine.sh
source "$ROOT/tests/scripts/machine.sh"

# Counts whenever what is on the disk changes.
DATABASES_VERSION=3
DATABASES=$CACHE/databases

setup_databases() {
    local root=$DATABASES/root image=$DATABASES/disk.raw
    [ -e "$DATABASES/version-$DATABASES_VERSION" ] && return 0
    # It brings mmdebstrap.
    setup_debian_root
    [ -e "$CACHE/mmdebstrap/usr/bin/mmdebstrap" ] || die "mmdebstrap is not in $CACHE: remove $DEBIAN_ROOT, and run this again"
    say "making a disk with PostgreSQL, SQLite and fio"
    rm -rf "$DATABASES"
    mkdir -p "$DATABASES"
    # A block that was written halfway, or of another moment, is found by its checksum.
    perl "$CACHE/mmdebstrap/usr/bin/mmdebstrap" --quiet --mode=root --variant=minbase --include=postgresql-15,sqlite3,fio \
        --aptopt='APT::Sandbox::User "root"' --aptopt='APT::Install-Recommends "false"' \
        --essential-hook='mkdir -p "$1/etc/postgresql-common" && echo "initdb_options = '"'--data-checksums --locale=C'"'" >"$1/etc/postgresql-common/createcluster.conf"' \
        bookworm "$root" "${VMOVE_DEBIAN_MIRROR:-http://deb.debian.org}/debian" || die "mmdebstrap could not make a Debian 12 with databases"
    install -m 755 "$ROOT"/tests/databases/* "$root/usr/local/sbin/"
    rm -rf "$root"/usr/share/{doc,man,locale} "$root"/var/cache/apt/archives/*.deb
    truncate -s 3G "$image"
    mkfs.ext4 -q -F -d "$root" "$image"
    rm -rf "$root"
    touch "$DATABASES/version-$DATABASES_VERSION"
}
