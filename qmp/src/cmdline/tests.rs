//! Command lines as people, scripts and libvirt write them.

use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};
use vmove_types::Backing;

use proptest::prelude::*;

use super::*;
use crate::confine::Confinement;

fn layout() -> RunLayout {
    RunLayout {
        qmp_socket: "/run/vmove/vm/qmp.sock".into(),
        vm_dir: "/run/vmove/vm".into(),
        memory_dir: "/dev/shm/vmove".into(),
        backing: Backing::Thp,
        name: "web 1".to_owned(),
        confinement: Confinement::default(),
    }
}

/// Split at blanks, `'…'` kept together.
fn words(text: &str) -> Vec<OsString> {
    let mut words = Vec::new();
    for (at, part) in text.split('\'').enumerate() {
        if at % 2 == 1 {
            words.push(part.into());
        } else {
            words.extend(part.split_whitespace().map(OsString::from));
        }
    }
    words
}

fn parse(text: &str) -> CommandLine {
    CommandLine::parse(words(text)).unwrap()
}

fn joined(argv: &[OsString]) -> String {
    argv.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

fn movable(text: &str) -> (String, Vec<RamFileSpec>) {
    let mut line = parse(text);
    let ram = line.rewrite_movable(&layout()).unwrap();
    (joined(&line.to_argv()), ram)
}

fn refused(text: &str) -> Vec<Obstacle> {
    match parse(text).rewrite_movable(&layout()) {
        Err(CommandLineError::NotMovable(obstacles)) => obstacles,
        other => panic!("{other:?}"),
    }
}

fn spec(id: &str, size: u64) -> RamFileSpec {
    let path = format!("/dev/shm/vmove/web 1.{}", id.replace('.', "%2E")).into();
    RamFileSpec { id: id.to_owned(), path, size }
}

const MIB: u64 = 1 << 20;
const OWN: &str = "-name guest=web 1 -qmp unix:/run/vmove/vm/qmp.sock,server=on,wait=off";

/// What virt-manager makes of a small guest (libvirt 9, shortened).
const LIBVIRT: &str = r#"/usr/bin/qemu-system-x86_64 -name guest=debian12,debug-threads=on -S
    -object '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-1-debian12/master-key.aes"}'
    -machine pc-q35-7.2,usb=off,vmport=off,dump-guest-core=off,memory-backend=pc.ram -accel kvm -cpu host,migratable=on
    -m size=1048576k -object '{"qom-type":"memory-backend-ram","id":"pc.ram","size":1073741824}'
    -overcommit mem-lock=off -smp 2,sockets=2,cores=1,threads=1 -uuid 5ee7c0d1-0000-4000-8000-000000000000
    -no-user-config -nodefaults -chardev socket,id=charmonitor,fd=30,server=on,wait=off
    -mon chardev=charmonitor,id=monitor,mode=control -rtc base=utc,driftfix=slew -no-shutdown -boot strict=on
    -device '{"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0","multifunction":true,"addr":"0x2"}'
    -blockdev '{"driver":"file","filename":"/srv/debian12.qcow2","node-name":"libvirt-1-storage","auto-read-only":true,"discard":"unmap"}'
    -chardev pty,id=charserial0 -device '{"driver":"isa-serial","chardev":"charserial0","id":"serial0","index":0}'
    -msg timestamp=on"#;

#[test]
fn an_unchanged_command_line_is_given_back_exactly() {
    let mut odd = words(LIBVIRT);
    odd.extend(words("--enable-kvm disk.img -append 'a,,b c' -x-unknown y --preconfig -"));
    odd.push(OsString::from_vec(b"latin1-\xe4.img".to_vec()));
    assert_eq!(CommandLine::parse(odd.clone()).unwrap().to_argv(), odd);
}

#[test]
fn options_without_argument_do_not_eat_the_next_word() {
    let line = parse("qemu -enable-kvm -m 1G -nographic -snapshot -S -s -no-reboot disk.img");
    let names: Vec<&str> = line.items.iter().map(Item::name).collect();
    assert_eq!(names, ["enable-kvm", "m", "nographic", "snapshot", "S", "s", "no-reboot", ""]);
}

#[test]
fn nothing_and_half_an_option_are_errors() {
    assert!(matches!(CommandLine::parse(vec![]), Err(CommandLineError::Empty)));
    assert!(matches!(CommandLine::parse(words("qemu -m")), Err(CommandLineError::NoArgument { .. })));
}

#[test]
fn ram_by_size_alone_becomes_a_file() {
    let (line, ram) = movable("qemu -M q35 -m 1G");
    let object = "-object memory-backend-file,id=vmove-ram0,size=1073741824,\
                  mem-path=/dev/shm/vmove/web 1.vmove-ram0,share=on,align=2M -machine memory-backend=vmove-ram0";
    assert_eq!(line, format!("qemu -M q35 -m 1G {object} {OWN}"));
    assert_eq!(ram, [spec("vmove-ram0", 1024 * MIB)]);
}

#[test]
fn sizes_are_read_as_qemu_reads_them() {
    let cases = [
        ("qemu", 128),
        ("qemu -m 512", 512),
        ("qemu -m 1.5G", 1536),
        ("qemu -m size=1048576k", 1024),
        ("qemu -m 2G,slots=4,maxmem=16G", 2048),
        ("qemu -m slots=4,maxmem=16G,size=3G", 3072),
        ("qemu -m 1G -m 2G", 2048),
    ];
    for (line, mib) in cases {
        assert_eq!(movable(line).1, [spec("vmove-ram0", mib * MIB)], "{line}");
    }
    let mut bad = parse("qemu -m lots");
    assert!(matches!(bad.rewrite_movable(&layout()), Err(CommandLineError::Unreadable { .. })));
}

#[test]
fn libvirts_ram_object_becomes_a_file_under_its_own_id() {
    let (line, ram) = movable(LIBVIRT);
    assert_eq!(ram, [spec("pc.ram", 1024 * MIB)]);
    let object = r#"{"id":"pc.ram","mem-path":"/dev/shm/vmove/web 1.pc%2Eram","qom-type":"memory-backend-file","share":true,"size":1073741824}"#;
    assert!(line.contains(object), "{line}");
    assert!(!line.contains("vmove-ram0") && !line.contains("guest=web"), "{line}");
    assert_eq!(parse(LIBVIRT).guest_name().as_deref(), Some("debian12"));
    assert_eq!(parse(LIBVIRT).machine_option("type").as_deref(), Some("pc-q35-7.2"));
    assert_eq!(parse(LIBVIRT).option_value("cpu", "model").as_deref(), Some("host"));
}

#[test]
fn memory_backend_of_any_kind_keeps_its_id() {
    for (object, left) in [
        ("memory-backend-ram,id=x,size=1G", ""),
        ("memory-backend-memfd,id=x,size=1G,hugetlb=on,hugetlbsize=2M,seal=off", ""),
        ("memory-backend-memfd,id=x,size=1G,share=on,prealloc=on", ",prealloc=on"),
        ("qom-type=memory-backend-shm,id=x,size=1024M", ""),
    ] {
        let (line, ram) = movable(&format!("qemu -machine pc,memory-backend=x -m 1G -object {object}"));
        assert_eq!(ram, [spec("x", 1024 * MIB)], "{object}");
        assert!(line.contains("memory-backend-file,id=x"), "{line}");
        assert!(line.contains("mem-path=/dev/shm/vmove/web 1.x") && line.contains("share=on"), "{line}");
        assert!(line.contains(left) && !line.contains("hugetlb") && !line.contains("seal"), "{line}");
    }
}

#[test]
fn a_shared_named_file_stays_where_it_is() {
    let text = "qemu -machine q35,memory-backend=m -m 1G \
                -object memory-backend-file,id=m,share=on,mem-path=/dev/shm/vmove-no-such-file,size=1G";
    let (line, ram) = movable(text);
    assert_eq!(ram[0].path, PathBuf::from("/dev/shm/vmove-no-such-file"));
    assert_eq!(line, format!("{},align=2M {OWN}", joined(&words(text))));
}

#[test]
fn a_private_file_or_a_directory_gets_a_name() {
    let private = "qemu -machine q35,memory-backend=m -m 1G \
                   -object memory-backend-file,id=m,mem-path=/dev/shm/vmove-no-such-file,size=1G";
    assert_eq!(movable(private).1, [spec("m", 1024 * MIB)]);
    let directory = "qemu -machine q35,memory-backend=m -m 1G \
                     -object memory-backend-file,id=m,share,mem-path=/tmp,size=1G,discard-data=on";
    let (line, ram) = movable(directory);
    assert_eq!(ram, [spec("m", 1024 * MIB)]);
    assert!(line.contains("share=on") && line.contains("discard-data=off"), "{line}");
}

#[test]
fn every_numa_node_and_dimm_gets_a_file() {
    let text = "qemu -M q35 -m 3G,slots=2,maxmem=8G -smp 2 \
                -object memory-backend-ram,id=a,size=1G,host-nodes=0,policy=bind -numa node,nodeid=0,memdev=a \
                -object memory-backend-memfd,id=b,size=2G -numa node,nodeid=1,cpus=1,memdev=b \
                -object memory-backend-ram,id=hot,size=512M -device pc-dimm,id=d,memdev=hot";
    let (line, ram) = movable(text);
    assert_eq!(ram, [spec("a", 1024 * MIB), spec("b", 2048 * MIB), spec("hot", 512 * MIB)]);
    assert!(line.contains("host-nodes=0,policy=bind") && !line.contains("vmove-ram0"), "{line}");
    let uses: Vec<RamUse> =
        parse(text).ram_backends().unwrap().into_iter().map(|backend| backend.used_by).collect();
    assert_eq!(uses, [RamUse::Node, RamUse::Node, RamUse::Device("pc-dimm".to_owned())]);
}

#[test]
fn a_dimm_beside_plain_ram_leaves_the_machine_its_own() {
    let text = "qemu -m 1G,slots=1,maxmem=2G -object memory-backend-ram,id=hot,size=512M \
                -device pc-dimm,memdev=hot";
    assert_eq!(movable(text).1, [spec("hot", 512 * MIB), spec("vmove-ram0", 1024 * MIB)]);
}

#[test]
fn huge_pages_need_whole_pages() {
    let mut line = parse("qemu -m 1023M");
    let mut huge = layout();
    huge.backing = Backing::Hugetlb2M;
    let error = line.rewrite_movable(&huge).unwrap_err();
    assert!(error.to_string().contains("no multiple of the page size"), "{error}");
    parse("qemu -m 1024M").rewrite_movable(&huge).unwrap();
    huge.backing = Backing::Hugetlb1G;
    parse("qemu -m 1G").rewrite_movable(&huge).unwrap();
}

#[test]
fn all_obstacles_are_named_at_once() {
    let found = refused(
        "qemu -m 1G -snapshot -daemonize -incoming defer -mem-path /dev/hugepages -preconfig -readconfig f \
         -chardev socket,id=c,path=/x -netdev vhost-user,id=n,chardev=c -device virtio-net-pci,netdev=n \
         -device vhost-user-fs-pci,chardev=c -device '{\"driver\":\"vfio-pci\",\"host\":\"01:00.0\"}' \
         -device ivshmem-plain,memdev=s -object memory-backend-file,id=s,share=on,mem-path=/y,size=1M \
         -numa node,mem=512M",
    );
    let mut options: Vec<&str> = found.iter().map(|one| one.option.split(',').next().unwrap()).collect();
    options.sort_unstable();
    assert_eq!(
        options,
        [
            "-daemonize",
            "-device ivshmem-plain",
            "-device vhost-user-fs-pci",
            "-device {\"driver\":\"vfio-pci\"",
            "-incoming defer",
            "-mem-path /dev/hugepages",
            "-netdev vhost-user",
            "-numa node",
            "-preconfig",
            "-readconfig f",
            "-snapshot",
        ]
    );
    let text = CommandLineError::NotMovable(found).to_string();
    assert_eq!(text.lines().count(), 12, "{text}");
}

#[test]
fn an_own_socket_that_is_taken_is_an_obstacle() {
    for taken in [
        "-qmp unix:{vmdir}/qmp.sock,server=on,wait=off",
        "-chardev socket,id=m,path=/run/vmove/vm/qmp.sock,server=on,wait=off -mon m",
        "-qmp unix:qmp.sock,server=on,wait=off",
    ] {
        assert_eq!(refused(&format!("qemu -m 1G {taken}")).len(), 1, "{taken}");
    }
    movable("qemu -m 1G -qmp unix:{vmdir}/mine.sock,server=on,wait=off");
}

#[test]
fn placeholders_follow_the_rules_of_their_place() {
    let mut odd = layout();
    odd.name = r#"a,b "c""#.to_owned();
    odd.vm_dir = "/run/v,m".into();
    odd.qmp_socket = "/run/v,m/q".into();
    let mut line = CommandLine::parse(words(
        "qemu -name guest={name},debug-threads=on -kernel {vmdir}/vmlinuz -append name={name} \
         -serial file:{vmdir}/serial.log -monitor unix:{vmdir}/mon,server=on,wait=off \
         -drive file={vmdir}/a.img,if=virtio -blockdev '{\"driver\":\"file\",\"filename\":\"{vmdir}/{name}\"}'",
    ))
    .unwrap();
    line.rewrite_movable(&odd).unwrap();
    let line = joined(&line.to_argv());
    for part in [
        r#"-name guest=a,,b "c",debug-threads=on"#,
        "-kernel /run/v,m/vmlinuz",
        r#"-append name=a,b "c""#,
        "-serial file:/run/v,m/serial.log",
        "-monitor unix:/run/v,,m/mon,server=on",
        "-drive file=/run/v,,m/a.img,if=virtio",
        r#""filename":"/run/v,m/a,b \"c\"""#,
        r#"mem-path=/dev/shm/vmove/a,,b "c".vmove-ram0"#,
        "-qmp unix:/run/v,,m/q,server=on,wait=off",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

/// QEMU takes what stands before the first equals sign for the name of an option.
#[test]
fn a_socket_may_have_an_equals_sign_in_its_path() {
    let mut odd = layout();
    (odd.name, odd.vm_dir, odd.qmp_socket) = ("a=b".to_owned(), "/run/a=b".into(), "/run/a=b/q".into());
    let line = "qemu -m 1G -monitor unix:{vmdir}/mon,server=on,wait=off -serial file:{vmdir}/s.log";
    let mut line = CommandLine::parse(words(line)).unwrap();
    line.rewrite_movable(&odd).unwrap();
    let found = joined(&line.to_argv());
    for part in [
        "-monitor unix:path=/run/a=b/mon,server=on,wait=off",
        "-serial file:/run/a=b/s.log",
        "-qmp unix:path=/run/a=b/q,server=on,wait=off",
    ] {
        assert!(found.contains(part), "{part} is not in {found}");
    }
    line.remove_monitor("/run/a=b/q".as_ref()).unwrap();
    assert!(!joined(&line.to_argv()).contains("-qmp"), "{line:?}");
}

#[test]
fn names_cannot_leave_the_memory_directory() {
    let mut odd = layout();
    odd.name = "../../etc/pass%wd".to_owned();
    let path = odd.ram_file("x/y");
    assert_eq!(path, PathBuf::from("/dev/shm/vmove/%2E.%2F..%2Fetc%2Fpass%25wd.x%2Fy"));
}

/// Names and ids as users choose them, each with its own file: no two may share memory.
#[test]
fn different_names_and_ids_never_have_the_same_ram_file() {
    let names =
        ["a", "a.b", "a.b.c", "A", "a%2Eb", "a%b", ".a", "%2Ea", &"%".repeat(64), &("%".repeat(63) + "x")];
    let ids = [
        "c",
        "b.c",
        "b.c.c",
        "vmove-ram0",
        "24.vmove-ram0",
        "b%2Ec",
        &"i".repeat(120),
        &("i".repeat(119) + "j"),
    ];
    let mut files = std::collections::HashMap::new();
    for name in names {
        for id in ids {
            let own = RunLayout { name: name.to_owned(), ..layout() };
            let other = files.insert(own.ram_file(id), (name, id));
            assert_eq!(other, None, "the file of {name:?} with {id:?}");
        }
    }
    let usual = RunLayout { name: "guest.24".to_owned(), ..layout() };
    assert!(usual.ram_file("vmove-ram0").ends_with("guest.24.vmove-ram0"));
}

#[test]
fn a_socket_path_that_is_too_long_is_given_relative_to_the_directory() {
    let mut long = layout();
    long.vm_dir = PathBuf::from(format!("/run/{}", "d".repeat(120)));
    long.qmp_socket = long.vm_dir.join("qmp.sock");
    let mut line = parse("qemu -m 1G");
    line.rewrite_movable(&long).unwrap();
    assert!(joined(&line.to_argv()).ends_with("-qmp unix:qmp.sock,server=on,wait=off"));
    long.vm_dir = "/run/elsewhere".into();
    let error = parse("qemu -m 1G").rewrite_movable(&long).unwrap_err();
    assert!(matches!(error, CommandLineError::SocketPath { length: 134, .. }), "{error:?}");
}

fn there() -> RunLayout {
    RunLayout {
        qmp_socket: "/b/vm/qmp.sock".into(),
        vm_dir: "/b/vm".into(),
        memory_dir: "/b/mem".into(),
        ..layout()
    }
}

#[test]
fn a_destination_waits_and_has_its_files_at_home() {
    let original = parse(
        "qemu -M q35 -m 1G -S -loadvm x -mem-prealloc -pidfile /run/x.pid -pidfile {vmdir}/pid \
         -serial file:{vmdir}/s.log -qmp unix:/tmp/user.sock,server,nowait -D /var/log/q.log \
         -chardev socket,id=c,path=/tmp/c.sock,server=on,wait=off",
    );
    let derived = original.derive_destination(&there()).unwrap();
    let line = joined(&derived.argv);
    assert_eq!(
        line,
        "qemu -M q35 -m 1G -pidfile /b/vm/pid -serial file:/b/vm/s.log \
         -qmp unix:/tmp/user.sock,server,nowait -D /var/log/q.log \
         -chardev socket,id=c,path=/tmp/c.sock,server=on,wait=off \
         -object memory-backend-file,id=vmove-ram0,size=1073741824,mem-path=/b/mem/web 1.vmove-ram0,share=on,align=2M \
         -machine memory-backend=vmove-ram0 -name guest=web 1 \
         -qmp unix:/b/vm/qmp.sock,server=on,wait=off -incoming defer -S"
    );
    assert_eq!(derived.ram[0].path, PathBuf::from("/b/mem/web 1.vmove-ram0"));
    let same: Vec<_> = derived.same_paths.iter().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(same, ["/tmp/user.sock", "/var/log/q.log", "/tmp/c.sock"]);
}

#[test]
fn source_and_destination_have_the_same_ram_blocks() {
    for text in [
        "qemu -m 1G",
        LIBVIRT,
        "qemu -m 2G -object memory-backend-ram,id=a,size=1G -object memory-backend-ram,id=b,size=1G \
         -numa node,memdev=a -numa node,memdev=b",
        "qemu -m 1G -machine memory-backend=m \
         -object memory-backend-file,id=m,share=on,mem-path=/dev/shm/vmove-no-such,size=1G,prealloc=on",
    ] {
        let here = movable(text).1;
        let derived = parse(text).derive_destination(&there()).unwrap();
        let blocks =
            |ram: &[RamFileSpec]| ram.iter().map(|ram| (ram.id.clone(), ram.size)).collect::<Vec<_>>();
        assert_eq!(blocks(&here), blocks(&derived.ram), "{text}");
        assert!(derived.ram.iter().all(|ram| ram.path.starts_with("/b/mem")), "{derived:?}");
        assert!(!joined(&derived.argv).contains("prealloc=on"), "{derived:?}");
    }
}

#[test]
fn libvirts_monitor_on_a_descriptor_is_left_behind() {
    let derived = parse(LIBVIRT).derive_destination(&there()).unwrap();
    let line = joined(&derived.argv);
    assert!(!line.contains("charmonitor") && line.contains("-chardev pty,id=charserial0"), "{line}");
    assert_eq!(derived.argv.iter().filter(|word| *word == "-S").count(), 1);
}

#[test]
fn descriptors_of_the_launcher_are_obstacles() {
    for option in [
        "-netdev tap,fd=30,id=n",
        "-netdev '{\"type\":\"tap\",\"fds\":\"31:32\",\"vhost\":true,\"vhostfds\":\"33:34\",\"id\":\"n\"}'",
        "-add-fd set=0,fd=24",
        "-chardev file,id=l,path=/dev/fdset/0",
        "-chardev socket,id=x,fd=9",
    ] {
        let error = parse(&format!("qemu -m 1G {option}")).derive_destination(&there()).unwrap_err();
        let CommandLineError::NotMovable(found) = &error else { panic!("{error:?}") };
        assert_eq!(found.len(), 1, "{option}: {found:?}");
        assert!(found[0].reason.contains("launcher"), "{found:?}");
    }
}

#[test]
fn an_adopted_monitor_is_replaced_by_our_own() {
    for monitor in [
        "-qmp unix:/tmp/adopted.sock,server=on,wait=off",
        "-chardev socket,id=m,path=/tmp/adopted.sock,server=on,wait=off -mon chardev=m,mode=control",
        "-chardev '{\"backend\":\"socket\",\"id\":\"m\",\"path\":\"/tmp/adopted.sock\"}' -mon m,mode=control",
    ] {
        let mut line = parse(&format!("qemu -m 1G {monitor} -monitor unix:/tmp/other.sock,server=on"));
        line.remove_monitor(std::path::Path::new("/tmp/adopted.sock")).unwrap();
        assert_eq!(
            joined(&line.to_argv()),
            "qemu -m 1G -monitor unix:/tmp/other.sock,server=on",
            "{monitor}"
        );
    }
}

#[test]
fn a_machine_alias_can_be_pinned() {
    for (before, after) in [
        ("qemu -M q35,usb=off", "qemu -M pc-q35-7.2,usb=off"),
        ("qemu -machine type=q35", "qemu -machine type=pc-q35-7.2"),
        ("qemu -machine usb=off", "qemu -machine usb=off -machine pc-q35-7.2"),
        ("qemu", "qemu -machine pc-q35-7.2"),
    ] {
        let mut line = parse(before);
        line.pin_machine("pc-q35-7.2").unwrap();
        assert_eq!(joined(&line.to_argv()), after);
    }
}

#[test]
fn relative_paths_of_a_running_qemu_are_found_where_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk a.img"), b"").unwrap();
    std::fs::write(folder.path().join("vmlinuz"), b"").unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").current_dir(folder.path()).spawn().unwrap();
    // execve(2) lets go of spawn's pipe before the kernel shows the new arguments.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let read = loop {
        match CommandLine::from_proc(child.id()) {
            Err(CommandLineError::Empty) if std::time::Instant::now() < deadline => std::thread::yield_now(),
            read => break read,
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let read = read.unwrap();
    assert!(std::path::Path::new(read.program()).is_absolute(), "{read:?}");

    let mut line = parse(
        "qemu -kernel vmlinuz -initrd gone -drive 'file=disk a.img,if=virtio' \
         -blockdev '{\"driver\":\"file\",\"filename\":\"disk a.img\"}' 'disk a.img'",
    );
    line.make_absolute(folder.path());
    let (line, folder) = (joined(&line.to_argv()), folder.path().display());
    assert_eq!(
        line,
        format!(
            "qemu -kernel {folder}/vmlinuz -initrd gone -drive file={folder}/disk a.img,if=virtio \
             -blockdev {{\"driver\":\"file\",\"filename\":\"{folder}/disk a.img\"}} {folder}/disk a.img"
        )
    );
    assert!(matches!(CommandLine::from_proc(u32::MAX - 1), Err(CommandLineError::Proc { .. })));
}

proptest! {
    /// Whatever the words are, they come back.
    #[test]
    fn parsing_loses_nothing(tail in prop::collection::vec(prop_oneof![
        "-[a-z]{1,6}", "--[a-z]{1,6}", "[ -~]{0,12}", Just("-m".to_owned()), Just("-S".to_owned()), Just(String::new()),
    ], 0..12)) {
        let mut argv: Vec<OsString> = vec!["qemu".into()];
        argv.extend(tail.into_iter().map(OsString::from));
        if let Ok(line) = CommandLine::parse(argv.clone()) {
            prop_assert_eq!(line.to_argv(), argv);
        }
    }

    /// A value with commas, equals signs and quotes survives being set, written and read again.
    #[test]
    fn option_values_survive(value in "[ -~äß]{0,20}", other in "[a-z]{1,5}") {
        let mut options = Options::parse(&format!("kind,{other}=1")).unwrap();
        options.set_text("key9", &value);
        let again = Options::parse(&options.to_string()).unwrap();
        prop_assert_eq!(again.get("key9", false), Some(value));
        prop_assert_eq!(again.get("kind", true), Some("kind".to_owned()));
        prop_assert_eq!(again.get(&other, false), Some("1".to_owned()));
    }

    /// No command line makes the rewriting panic.
    #[test]
    fn rewriting_never_panics(tail in prop::collection::vec(prop_oneof![
        Just("-object".to_owned()), Just("-m".to_owned()), Just("-numa".to_owned()), Just("-machine".to_owned()),
        Just("-chardev".to_owned()), "[a-z{}\",:=-]{0,20}", "memory-backend-[a-z]{3},[a-z=,]{0,10}",
    ], 0..10)) {
        let mut argv: Vec<OsString> = vec!["qemu".into()];
        argv.extend(tail.into_iter().map(OsString::from));
        if let Ok(line) = CommandLine::parse(argv) {
            let _ = line.clone().rewrite_movable(&layout());
            let _ = line.derive_destination(&there());
        }
    }
}

#[test]
fn a_size_that_cannot_be_rounded_is_no_size() {
    let error = parse("qemu -m 18446744073709551615b").rewrite_movable(&layout()).unwrap_err();
    assert!(matches!(error, CommandLineError::Unreadable { .. }), "{error}");
}
