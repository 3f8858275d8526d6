//! What must be known of QEMU's options to find where one ends, and how its argument is written.

/// Options without an argument, of QEMU 7.2 to 10.0 (and older ones that scripts still carry).
const BARE: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "s",
    "sdl",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// Options whose argument is taken as it is: no commas to double in it.
const PLAIN: &[&str] = &[
    "D",
    "L",
    "append",
    "bios",
    "cdrom",
    "dtb",
    "dump-vmstate",
    "fda",
    "fdb",
    "hda",
    "hdb",
    "hdc",
    "hdd",
    "incoming",
    "initrd",
    "k",
    "kernel",
    "loadvm",
    "mem-path",
    "mtdblock",
    "pflash",
    "pidfile",
    "readconfig",
    "sd",
    "shim",
    "uuid",
    "chroot",
    "runas",
    "T",
    "",
];

/// Whether `name` (without dashes) is followed by an argument. Unknown ones are, as nearly all of QEMU's are.
pub(super) fn takes_argument(name: &str) -> bool {
    !BARE.contains(&name)
}

/// Whether the argument is a plain text, as opposed to comma-separated options.
pub(super) fn is_plain(name: &str, value: &[u8]) -> bool {
    let is_chardev = matches!(name, "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon");
    // The short forms of character devices: what follows these is a path to its end.
    let is_path = [&b"file:"[..], b"pipe:", b"/"].iter().any(|prefix| value.starts_with(prefix));
    PLAIN.contains(&name) || (is_chardev && is_path)
}

/// The main spelling of an option.
pub(super) fn canonical(name: &str) -> &str {
    match name {
        "M" => "machine",
        "nodefconfig" => "no-user-config",
        other => other,
    }
}
