//! QEMU: what it says, and its command lines.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use vmove_qmp::cmdline::{ChildIdentity, CommandLineError, Overlay};
use vmove_qmp::confine::Confinement;
use vmove_qmp::{CommandLine, RunLayout, fuzzing};
use vmove_types::Backing;

use super::{Target, text};

pub const QMP: Target = Target {
    name: "qmp",
    what: "what QEMU says on its monitor, in pieces of any length (the first byte)",
    feed: fuzzing::stream,
    seeds: || {
        text(&[
            "\x05{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n{\"return\": {}, \"id\": 1}\r\n",
            "\x01{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}, \"id\": 2}\r\n",
            "\x40{\"timestamp\": {\"seconds\": 5, \"microseconds\": 7}, \"event\": \"STOP\", \"data\": {\"a\": [1]}}\r\n",
            "\x09{\r\n    \"return\": {\r\n        \"a\": \"}{\\\"\"\r\n    },\r\n    \"id\": 3\r\n}\r\n",
        ])
    },
    words: &[
        "{\"return\":",
        "{\"event\":",
        "\"error\":",
        "\"QMP\":",
        "\"id\":",
        "\"timestamp\":",
        "{\r\n",
        "}\r\n",
        "}",
        "\r\n",
        "\"",
        "\\u0000",
        "\\ud800",
        "1e400",
        "null",
    ],
    mutations: 225_000,
};

pub const COMMAND_LINES: Target = Target {
    name: "command-lines",
    what: "command lines of QEMU, one word a line, and all that is derived from them",
    feed: command_line,
    seeds: || text(&LINES),
    words: &[
        "\n-m\n",
        "\n-object\n",
        "\n-device\n",
        "\n-drive\n",
        "\n-blockdev\n",
        "\n-machine\n",
        "\n-name\n",
        "\n-chardev\n",
        "\n-numa\n",
        "\n-overcommit\nmem-lock=on",
        ",",
        ",,",
        "=",
        "{\"driver\":\"",
        "\"}",
        "{vmdir}",
        "{name}",
        "memory-backend-file,",
        "memory-backend-ram,",
        "id=",
        "size=",
        "share=on",
        "mem-path=",
        "file=",
        "node-name=",
        "drive=",
        "netdev=",
        "1G",
        "0x",
        "k",
        "memory-backend=",
        "file.filename=",
        "file.driver=file",
        "qcow2",
        "backing=",
        "vmgenid",
        "unix:",
        "server=on",
        "fd=3",
    ],
    mutations: 22_500,
};

const LINES: [&str; 4] = [
    "qemu-system-x86_64\n-machine\nq35\n-m\n1G\n-name\nvm1,debug-threads=on\n-smp\n2\n-nographic",
    "qemu\n-object\nmemory-backend-file,id=ram0,size=64M,mem-path=/dev/shm/x,share=on\n-machine\npc,memory-backend=ram0\n-device\n\
     virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01\n-netdev\nuser,id=n0\n-device\nvmgenid,guid=auto\n-uuid\nu",
    "qemu\n-drive\nif=none,id=a,file={vmdir}/a.img,format=raw\n-blockdev\ndriver=file,node-name=f0,filename=/f0.img,locking=off\n\
     -blockdev\n{\"driver\":\"qcow2\",\"node-name\":\"q0\",\"file\":\"f0\"}\n-device\nvirtio-blk-pci,drive=q0\n-device\n\
     virtio-blk-pci,drive=a",
    "qemu\n-chardev\nsocket,id=f,path={vmdir}/fork.sock,server=on,wait=off\n-device\nvirtserialport,chardev=f,name=org.vmove.fork\n\
     -overcommit\nmem-lock=on\n-mem-prealloc\n-run-with\nuser=nobody\n-numa\nnode,memdev=m0\n-object\n\
     memory-backend-memfd,id=m0,size=2M,hugetlb=on\n-qmp\nunix:/q.sock,server=on\ndisk.img",
];

fn command_line(bytes: &[u8]) {
    let words: Vec<OsString> =
        bytes.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec())).collect();
    let Ok(line) = CommandLine::parse(words.clone()) else { return };
    assert_eq!(line.to_argv(), words, "an unchanged command line is what was parsed");
    let _ = (line.guest_name(), line.ram_backends(), line.nics(), line.locks_memory(), line.gives_up_root());
    let _ = line.port_socket("org.vmove.fork");
    // What cannot be read is an error of each.
    let _ = start(line.clone()).map_err(|error| error.to_string());
    let _ = fork(line.clone()).map_err(|error| error.to_string());
    for backing in [Backing::Thp, Backing::Hugetlb2M] {
        let Ok(there) = line.derive_destination(&layout(backing)) else { continue };
        assert!(there.argv.ends_with(&["-incoming".into(), "defer".into(), "-S".into()]));
        assert!(there.ram.iter().all(|ram| ram.size > 0 && ram.path.starts_with("/no-memory")));
        let again = CommandLine::parse(there.argv.clone()).expect("it was made of a command line");
        assert_eq!(again.to_argv(), there.argv);
    }
}

fn layout(backing: Backing) -> RunLayout {
    RunLayout {
        qmp_socket: "/no-folder/vm/qmp".into(),
        vm_dir: "/no-folder/vm".into(),
        memory_dir: "/no-memory".into(),
        backing,
        name: "a,b \"c\" ä".to_owned(),
        confinement: Confinement::default(),
    }
}

/// On the node where the guest starts.
fn start(mut line: CommandLine) -> Result<(), CommandLineError> {
    line.pin_machine("pc-q35-10.0")?;
    line.remove_monitor(Path::new("/q.sock"))?;
    let ram = line.rewrite_movable(&layout(Backing::Thp))?;
    let found = line.ram_backends()?;
    let known = |id: &str| found.iter().any(|backend| backend.id == id);
    assert!(ram.iter().all(|file| known(&file.id)), "{ram:?} are files of {found:?}");
    Ok(())
}

/// Of a copy of the guest.
fn fork(mut line: CommandLine) -> Result<(), CommandLineError> {
    for image in line.images()?.into_iter().take(4) {
        for alone in [false, true] {
            let mut line = line.clone();
            let overlay = Overlay { image: image.file.clone(), file: "/o,1".to_owned(), direct: true, alone };
            assert!(line.put_overlay(&overlay)?, "{image:?} is there");
            let found = line.images()?;
            assert!(found.iter().any(|image| image.file == "/o,1"), "{found:?} have no overlay");
        }
    }
    let macs = line.nics()?.iter().map(|_| "52:00:00:00:00:01".to_owned()).collect();
    let (name, uuid, generation) = ("child, 1".to_owned(), Some("u".to_owned()), "g".to_owned());
    line.give_identity(&ChildIdentity { name, uuid, generation, macs })?;
    line.reserve_nothing()?;
    line.lock_nothing()?;
    assert!(!line.locks_memory()?);
    assert!(line.to_argv().iter().any(|word| word.as_bytes() == b"-uuid"));
    Ok(())
}
