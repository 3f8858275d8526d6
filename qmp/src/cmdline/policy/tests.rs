use super::*;

fn forbidden(words: &[&str], lifted: &[&str]) -> Vec<Forbidden> {
    let words = std::iter::once(&"qemu-system-x86_64").chain(words).map(Into::into).collect();
    let lifted: Vec<String> = lifted.iter().map(|rule| (*rule).to_owned()).collect();
    CommandLine::parse(words).unwrap().forbidden(&lifted).unwrap()
}

fn rules(words: &[&str]) -> Vec<String> {
    forbidden(words, &[]).into_iter().map(|one| one.rule).collect()
}

#[test]
fn ordinary_guests_are_taken() {
    let lines: &[&[&str]] = &[
        &[
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35,accel=kvm",
            "-m",
            "4G",
            "-smp",
            "4",
        ],
        &[
            "-M",
            "pc",
            "-cpu",
            "host",
            "-accel",
            "tcg,thread=single",
            "-name",
            "{name},debug-threads=on",
            "-uuid",
            "x",
        ],
        &[
            "-kernel",
            "/boot/vmlinuz",
            "-initrd",
            "/boot/initrd",
            "-append",
            "console=ttyS0,115200 init=/bin/sh",
        ],
        &["-bios", "/usr/share/ovmf/OVMF.fd", "-L", "/usr/share/qemu"],
        &[
            "-serial",
            "unix:{vmdir}/console.sock,server=on,wait=off",
            "-monitor",
            "none",
            "-serial",
            "mon:stdio",
        ],
        &["-serial", "file:{vmdir}/console.log", "-parallel", "null", "-debugcon", "file:debug.log"],
        &["-chardev", "socket,id=q,path={vmdir}/q.sock,server=on,wait=off", "-mon", "chardev=q,mode=control"],
        &["-chardev", "socket,id=s,host=127.0.0.1,port=4000,server=on,wait=off", "-serial", "chardev:s"],
        &["-qmp", "unix:{vmdir}/two.sock,server=on,wait=off"],
        &[
            "-drive",
            "file=/srv/vm/a:b.qcow2,if=virtio,format=qcow2,cache=none",
            "-cdrom",
            "/iso/x.iso",
            "/srv/disk.img",
        ],
        &[
            "-blockdev",
            "driver=file,node-name=f,filename=/dev/vg/disk",
            "-blockdev",
            "qcow2,node-name=q,file=f",
        ],
        &[
            "-blockdev",
            r#"{"driver":"raw","node-name":"r","file":{"driver":"host_device","filename":"/dev/sdb"}}"#,
        ],
        &[
            "-device",
            "virtio-blk-pci,drive=q",
            "-global",
            "virtio-net-pci.romfile=",
            "-device",
            "e1000,romfile=efi-e1000.rom",
        ],
        &["-netdev", "tap,id=n,ifname=tap0,script=no,downscript=no", "-device", "virtio-net-pci,netdev=n"],
        &["-netdev", "bridge,id=n,br=br0", "-nic", "user,model=virtio,hostfwd=tcp::2222-:22", "-nic", "none"],
        &["-netdev", r#"{"type":"tap","id":"n","ifname":"tap0","script":"no"}"#, "-net", "none"],
        &["-netdev", "stream,id=s,server=on,addr.type=unix,addr.path={vmdir}/net.sock"],
        &["-netdev", "tap,id=n,script=/etc/qemu-ifup,helper=/usr/lib/qemu/qemu-bridge-helper"],
        &["-netdev", "user,id=u,tftp=/srv/tftp"],
        // As hand-written scripts and Proxmox have them.
        &["-qmp", "unix:/run/not-there.sock,server=on,wait=off", "-vnc", "unix:/run/not-there.vnc"],
        &["-monitor", "unix:/run/not-there.sock,server,nowait", "-spice", "unix=on,addr=/run/not-there"],
        &["-chardev", "socket,id=q,path=/run/not-there.sock,server=on,wait=off", "-mon", "q"],
        &["-serial", "file:/tmp/not-there.log", "-D", "/tmp/not-there.log", "-vnc", ":1"],
        &["-chardev", "file,id=f,path=/tmp/not-there.log,logfile=/tmp/not-there.too"],
        &["-fw_cfg", "name=opt/com.coreos/config,file=/srv/x.ign", "-smbios", "file=/srv/x", "-dfilter", "0"],
        &["-object", "secret,id=s,file=/etc/vm/key", "-object", "tls-creds-x509,id=t,dir=/etc/pki/qemu"],
        &[
            "-drive",
            "file=nbd://host/disk,format=raw",
            "-drive",
            "file=nbd:host:10809",
            "-cdrom",
            "http://x/y.iso",
        ],
        &["-drive", r"file=rbd:vms/disk:id=a:conf=/etc/ceph/ceph.conf:mon_host=h\:6789", "-iscsi", "user=x"],
        &["-blockdev", "driver=rbd,node-name=r,pool=p,image=i,conf=/etc/ceph/ceph.conf"],
        &["-blockdev", r#"{"driver":"raw","file":{"driver":"iscsi","portal":"h","target":"t"}}"#],
        &[
            "-object",
            "memory-backend-file,id=m,mem-path=/dev/shm/x,size=1G,share=on",
            "-object",
            "iothread,id=i",
        ],
        &["-object", "rng-random,id=r,filename=/dev/urandom", "-object", "secret,id=s,data=x"],
        &["-fw_cfg", "name=opt/x,string=y", "-smbios", "type=1,serial=7", "-boot", "order=c,menu=on"],
        &[
            "-vnc",
            ":0",
            "-spice",
            "port=5900,disable-ticketing=on",
            "-vga",
            "std",
            "-usb",
            "-usbdevice",
            "tablet",
        ],
        &[
            "-sandbox",
            "on",
            "-run-with",
            "async-teardown=on",
            "-overcommit",
            "mem-lock=on",
            "-rtc",
            "base=utc",
            "-no-reboot",
        ],
        &["-pidfile", "/run/x.pid", "-D", "{vmdir}/trace.log", "-d", "guest_errors", "-incoming", "defer"],
    ];
    for line in lines {
        assert_eq!(forbidden(line, &[]), [], "{line:?}");
    }
}

#[test]
fn what_gives_this_node_away_is_refused() {
    let lines: &[(&[&str], &str)] = &[
        (&["-netdev", "tap,id=n,script=/tmp/x"], "netdev.script"),
        (&["-netdev", "script=/tmp/x,type=tap,id=n,script=no"], "netdev.script"),
        (&["-netdev", "tap,id=n,noscript"], "netdev.script"),
        (&["-netdev", r#"{"type":"tap","id":"n","script":"/tmp/x"}"#], "netdev.script"),
        (&["-net", "tap,downscript=/tmp/x"], "netdev.downscript"),
        (&["--nic", "tap,helper=/tmp/x"], "netdev.helper"),
        (&["-nic", "user,smb=/etc"], "netdev.smb"),
        (&["-netdev", "tap,id=n,script=/etc/qemu/../x"], "netdev.script"),
        (&["-netdev", "vde,id=v,sock=cmd://sh"], "netdev.sock"),
        (&["-netdev", "user,id=u,guestfwd=tcp:10.0.2.100:1-cmd:sh"], "netdev.guestfwd"),
        (
            &["-netdev", r#"{"type":"user","id":"u","guestfwd":[{"str":"tcp:1.2.3.4:1-cmd:sh"}]}"#],
            "netdev.guestfwd",
        ),
        (&["-netdev", "passt,id=p,path=/tmp/x"], "netdev.type"),
        (&["-netdev", "stream,id=s,addr.type=unix,addr.path=/run/docker.sock"], "netdev.path"),
        // A guest that talks to the monitor of its own QEMU.
        (&["-chardev", "socket,id=c,path={vmdir}/qmp.sock"], "chardev.path"),
        (&["-chardev", "socket,id=c,path={vmdir}/qmp.sock,server=on,server=off"], "chardev.path"),
        (&["-serial", "unix:{vmdir}/qmp.sock"], "chardev.path"),
        (&["-netdev", "stream,id=s,addr.type=unix,addr.path={vmdir}/qmp.sock"], "netdev.path"),
        (&["-chardev", "socket,id=c,path=x,server=on,abstract=on"], "chardev.abstract"),
        (&["-serial", "unix:x,server=on,abstract=on"], "chardev.path"),
        (&["-netdev", "dgram,id=d,local.type=unix,local.path=/run/x"], "netdev.path"),
        // It would be removed.
        (&["-chardev", "socket,id=c,path=/etc/passwd,server=on"], "chardev.path"),
        (&["-chardev", "file,id=c,path=/etc/passwd"], "chardev.path"),
        (&["-chardev", "file,id=c,path={vmdir}/../../etc/passwd"], "chardev.path"),
        (&["-chardev", "file,id=c,path=../x"], "chardev.path"),
        (&["-chardev", "socket,id=c,path=/run/docker.sock"], "chardev.path"),
        (&["-chardev", "pipe,id=c,path=/tmp/x"], "chardev.path"),
        (&["-chardev", "null,id=c,logfile=/etc/cron.d/x"], "chardev.logfile"),
        (&["-chardev", "exec,id=c"], "chardev.backend"),
        (&["-serial", "file:/etc/passwd"], "chardev.path"),
        (&["-serial", "unix:/etc/passwd,server=on"], "chardev.path"),
        (&["-serial", "unix:/run/not-there.sock"], "chardev.path"),
        (&["-serial", "/dev/ttyS0"], "chardev.path"),
        (&["-parallel", "pipe:/tmp/x"], "chardev.path"),
        (&["-monitor", "tcp::4444,server=on,wait=off"], "monitor.network"),
        (&["-qmp", "telnet:0.0.0.0:4444,server=on"], "monitor.network"),
        (&["-serial", "mon:tcp::4444,server=on"], "monitor.network"),
        (&["-chardev", "socket,id=m,port=4444,server=on", "-mon", "m"], "monitor.network"),
        (&["-monitor", "chardev:m", "-chardev", "socket,id=m,host=x,port=1"], "monitor.network"),
        (&["-monitor", "vc"], "monitor.network"),
        (&["-serial", "mon:vc"], "monitor.network"),
        (&["-chardev", "vc,id=m", "-mon", "m"], "monitor.network"),
        (&["-chardev", "spiceport,id=m,name=x", "-mon", "m"], "monitor.network"),
        (&["-gdb", "tcp::1234"], "gdb"),
        (&["-s"], "s"),
        (&["-incoming", "exec:sh"], "incoming"),
        (&["-drive", "file=rbd:p/i:log_file=/etc/cron.d/x"], "drive.remote"),
        (&["-drive", "file=gluster://h/v/i?logfile=/etc/cron.d/x"], "drive.remote"),
        (&["-drive", "driver=gluster,volume=v,path=i,logfile=/etc/cron.d/x"], "drive.logfile"),
        (&["-blockdev", "driver=rbd,node-name=r,pool=p,image=i,conf=/tmp/x"], "drive.conf"),
        (&["-drive", "file=ssh://x/y,if=virtio"], "drive.remote"),
        (&["-drive", "file=fat:rw:/etc"], "drive.remote"),
        (&["-drive", r#"file=json:{"driver":"nbd"},if=none"#], "drive.remote"),
        (&["-drive", "file.driver=vvfat,file.dir=/etc,if=virtio"], "drive.driver"),
        (&["-hda", "fat:/etc"], "drive.remote"),
        (&["ssh://x/y"], "drive.remote"),
        (&["-blockdev", "driver=nvme,node-name=n,device=0000:01:00.0,namespace=1"], "drive.driver"),
        (&["-blockdev", r#"{"driver":"raw","file":{"driver":"ssh","path":"x"}}"#], "drive.driver"),
        (&["-plugin", "/tmp/x.so"], "plugin"),
        (&["-readconfig", "/tmp/x"], "readconfig"),
        (&["-writeconfig", "/etc/x"], "writeconfig"),
        (&["-set", "netdev.n.script=/tmp/x"], "set"),
        (&["-trace", "enable=*,file=/etc/x"], "trace.file"),
        (&["-D", "/etc/cron.d/x"], "D"),
        (&["-pidfile", "../x"], "pidfile"),
        (&["-object", "filter-dump,id=f,netdev=n,file=/etc/x"], "object.filter-dump"),
        (&["-object", "input-linux,id=i,evdev=/dev/input/event0"], "object.input-linux"),
        (&["-object", "rng-random,id=r,filename=/etc/shadow"], "object.filename"),
        (&["-virtfs", "local,path=/,mount_tag=x,security_model=none"], "virtfs"),
        (&["-fsdev", "local,id=f,path=/"], "fsdev"),
        (&["-device", "usb-mtp,rootdir=/etc"], "device.usb-mtp"),
        (&["-device", "usb-host,hostbus=1,hostaddr=2"], "device.usb-host"),
        (&["-global", "usb-mtp.rootdir=/etc"], "device.rootdir"),
        (&["-global", "driver=usb-mtp,property=rootdir,value=/etc"], "device.rootdir"),
        (&["-machine", "virt,dumpdtb=/etc/x"], "machine.dumpdtb"),
        (&["-audiodev", "wav,id=a,path=/etc/x"], "audiodev.path"),
        (&["-tpmdev", "passthrough,id=t,path=/dev/tpm0"], "tpmdev.path"),
        (&["-audio", "wav,path=/etc/cron.d/x"], "audiodev.path"),
        (&["-object", "tls-creds-x509,id=t,dir=/root"], "object.dir"),
        (&["-vnc", "unix:/etc/passwd"], "chardev.path"),
        (&["-vnc", "unix:/run/not-there,reverse=on"], "chardev.path"),
        (&["-spice", "unix=on,addr=/etc/passwd"], "chardev.path"),
        (&["-display", "vnc=unix:/etc/passwd"], "chardev.path"),
        (&["-semihosting"], "semihosting"),
        (&["-option-of-tomorrow", "x"], "option-of-tomorrow"),
    ];
    for (line, rule) in lines {
        let found = rules(line);
        assert!(found.iter().any(|one| one == rule), "{line:?}: expected {rule}, found {found:?}");
    }
}

#[test]
fn a_rule_is_lifted_by_its_name() {
    let line = ["-netdev", "tap,id=n,script=/x,downscript=/y", "-plugin", "/x.so"];
    let left = |lifted: &[&str]| -> Vec<String> {
        forbidden(&line, lifted).into_iter().map(|one| one.rule).collect()
    };
    assert_eq!(left(&[]), ["netdev.script", "netdev.downscript", "plugin"]);
    assert_eq!(left(&["netdev.script"]), ["netdev.downscript", "plugin"]);
    assert_eq!(left(&["netdev.*"]), ["plugin"]);
    assert!(left(&["*"]).is_empty());
    assert_eq!(left(&["net", "plug"]).len(), 3, "a part of a name lifts nothing");
}

#[test]
fn a_refusal_names_the_option_what_it_does_and_the_rule() {
    let found = forbidden(&["-netdev", "tap,id=n,script=/tmp/x"], &[]);
    assert_eq!(
        found[0].to_string(),
        "-netdev tap,id=n,script=/tmp/x: it runs a program on this node (rule netdev.script)"
    );
    assert_eq!(forbidden(&["ssh://x"], &[])[0].option, "ssh://x");
}
