//! Hooks between real daemons: a guest that panics is copied, memory that fails is left, and a hook forbids.
#![cfg(test)]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::ready;

/// A boot sector that waits for a byte on its serial port, and then writes to the port of pvpanic, as a kernel that panics does:
/// `mov dx, 0x3fd; in al, dx; test al, 1; jz; mov dx, 0x505; mov al, 1; out dx, al; hlt`.
const PANICS_WHEN_TOLD: [u8; 17] =
    [0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xfb, 0xba, 0x05, 0x05, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd];

fn boot_disk(sandbox: &Sandbox) -> String {
    let mut image = vec![0; 1 << 20];
    image[..PANICS_WHEN_TOLD.len()].copy_from_slice(&PANICS_WHEN_TOLD);
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = sandbox.path().join("boot.img");
    std::fs::write(&path, image).expect("an image");
    path.display().to_string()
}

fn start(node: &Node, name: &str, disk: &str, labels: &[&str]) {
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    let drive = format!("file={disk},format=raw,if=virtio,readonly=on");
    let mut words = vec!["run", "--name", name];
    labels.iter().for_each(|label| words.extend(["--label", label]));
    words.extend([
        "--",
        &qemu,
        "-machine",
        "q35",
        "-accel",
        "tcg",
        "-m",
        "64M",
        "-nodefaults",
        "-display",
        "none",
    ]);
    words.extend(["-drive", &drive, "-serial", "unix:{vmdir}/console.sock,server=on,wait=off"]);
    words.extend(["-device", "pvpanic", "-action", "panic=pause"]);
    node.ask(&words).expect("the guest starts");
}

fn hook(node: &Node, name: &str) -> Value {
    let (_, list) = node.rest("GET", "/v1/hooks", &Value::Null).expect("hooks");
    list["hooks"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|hook| hook["name"] == name)
        .expect("the hook")
        .clone()
}

fn status(node: &Node, name: &str) -> Value {
    node.ask(&["show", name]).expect("the VM")["status"].clone()
}

/// Tells the guest to panic until it has: it may not have come to its boot sector.
fn panic(node: &Node, name: &str) {
    let socket = node.folder().join("run").join(name).join("console.sock");
    until("it has panicked", || {
        UnixStream::connect(&socket).and_then(|mut line| line.write_all(b"x")).expect("its console");
        std::thread::sleep(Duration::from_millis(200));
        status(node, name) != "running"
    });
}

#[test]
fn a_guest_that_panics_is_copied_and_its_copy_is_kept_as_it_was() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let config = "[[hook]]\nname = 'copy'\non = 'GUEST_PANICKED'\ndo = { fork = {} }\n".to_owned();
    let node =
        Node::start(&sandbox, "a", NodeOptions { config, ..NodeOptions::default() }).expect("a daemon");
    start(&node, "web", &boot_disk(&sandbox), &[]);
    panic(&node, "web");
    until("the hook has run", || hook(&node, "copy")["last"].is_object());
    let run = hook(&node, "copy")["last"].clone();
    assert_eq!(run["outcome"], "done", "{run}");
    assert!(run["said"].as_str().is_some_and(|said| said.starts_with("forked web.1, kept paused")), "{run}");
    eprintln!("from the event to its action {} ms, copied within {} ms", run["waited_ms"], run["took_ms"]);
    assert_ne!(status(&node, "web.1"), "running", "it is kept as it was");
    let (_, tree) = node.rest("GET", "/v1/vms/web/tree", &Value::Null).expect("a tree");
    assert_eq!(tree["children"][0]["name"], "web.1", "{tree}");
}

fn count(edac: &Path, kind: &str, count: u32) {
    let dir = edac.join("mc/mc0");
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join(kind), format!("{count}\n")).expect("a count");
}

#[test]
fn memory_errors_of_the_host_move_a_guest_and_a_hook_forbids_another() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (edac, told) = (sandbox.path().join("edac"), sandbox.path().join("told"));
    count(&edac, "ce_count", 3);
    count(&edac, "ue_count", 0);
    let config = format!(
        "[host-signals]\nedac-dir = '{}'\n\
         [[hook]]\nname = 'evacuate'\non = 'memory-error'\nwhere = {{ kind = 'uncorrected' }}\nlabels = {{ moves = 'yes' }}\ndo = {{ migrate = {{ to = 'b' }} }}\n\
         [[hook]]\nname = 'stays'\non = 'before-migration'\nlabels = {{ moves = 'no' }}\ndo = {{ run = ['/bin/sh', '-c', 'echo $VMOVE_VM stays here; exit 1'] }}\n\
         [[hook]]\nname = 'tell'\non = 'after-migration'\ndo = {{ run = ['/bin/sh', '-c', 'echo $VMOVE_VM $VMOVE_ROLE $VMOVE_OUTCOME >> {}'] }}\n\
         [nodes.b]\naddress = '{{b}}'\n",
        edac.display(),
        told.display()
    );
    let b = Node::start(&sandbox, "b", NodeOptions::default()).expect("a daemon");
    let (_, info) = b.rest("GET", "/v1/node", &Value::Null).expect("a node");
    let config = config.replace("{b}", info["listen"].as_str().expect("an address"));
    let a = Node::start(&sandbox, "a", NodeOptions { config, ..NodeOptions::default() }).expect("a daemon");
    let disk = boot_disk(&sandbox);
    start(&a, "goes", &disk, &["moves=yes"]);
    start(&a, "stays", &disk, &["moves=no"]);
    std::thread::sleep(Duration::from_millis(600));
    count(&edac, "ce_count", 4);
    let begun = Instant::now();
    count(&edac, "ue_count", 1);
    until("it is at the other node", || hook(&a, "evacuate")["last"].is_object());
    let run = hook(&a, "evacuate")["last"].clone();
    assert_eq!(run["outcome"], "done", "{run}");
    eprintln!("from the memory error to the end of the migration {} ms", begun.elapsed().as_millis());
    assert_eq!(b.vms().expect("a list"), ["goes"]);
    assert_eq!(a.vms().expect("a list"), ["stays"]);
    let refused = a.vmove(&["migrate", "stays", "--to", "b"]).expect("an answer");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("hook \"stays\" forbids it: stays stays here"), "{said}");
    until("it is told", || std::fs::read_to_string(&told).is_ok_and(|text| text == "goes source done\n"));
    let (code, test) = a.rest("POST", "/v1/hooks/evacuate/test", &json!({"vm": "stays"})).expect("an answer");
    assert_eq!((code, test["why_not"].is_string()), (200, true), "{test}");
}
