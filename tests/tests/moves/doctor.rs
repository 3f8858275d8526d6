//! `vmove doctor` on this host, and where parts of it are really missing: without devices, rights, programs, on an older kernel, and
//! beside peers that are away.
#![cfg(test)]

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::old_kernel::{self, Before, spawn_before};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

/// What was found, and the exit code.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    answer: Value,
}

impl Said {
    fn of(command: &mut Command) -> Self {
        let output = command.env("PATH", path()).stdin(Stdio::null()).output().expect("it runs");
        let answer = serde_json::from_slice(&output.stdout);
        let answer = answer.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        Self { code: output.status.code(), answer }
    }

    #[track_caller]
    fn finding(&self, topic: &str) -> &Value {
        let all = self.answer["findings"].as_array().expect("findings");
        all.iter().find(|finding| finding["topic"] == topic).unwrap_or_else(|| panic!("{topic}: {all:#?}"))
    }

    /// Checks the state of a finding, and that it says these words; one that is not well must say how to mend it.
    #[track_caller]
    fn expect(&self, topic: &str, state: &str, words: &[&str]) {
        let finding = self.finding(topic);
        assert_eq!(finding["state"], state, "{finding:#}");
        for word in words {
            assert!(finding.to_string().contains(word), "{word}: {finding:#}");
        }
        let mends = finding["mend"].is_string() && finding["expected"].is_string();
        assert_eq!(mends, state != "ok", "{finding:#}");
    }

    #[track_caller]
    fn can_move(&self, can: bool) {
        assert_eq!(
            (self.code, &self.answer["moving"]),
            (Some(i32::from(!can)), &can.into()),
            "{:#}",
            self.answer
        );
    }
}

fn path() -> OsString {
    places::path_with(places::booted_guests().as_deref())
}

fn program(name: &str) -> String {
    places::product(name).expect("the program").display().to_string()
}

/// `vmove --json doctor`, and what else is in the line.
fn doctor(words: &[&str]) -> Said {
    Said::of(Command::new(program("vmove")).args(["--json", "doctor"]).args(words))
}

/// The same behind a program that takes something away.
fn behind(words: &[&str]) -> Said {
    Said::of(Command::new(words[0]).args(&words[1..]).arg(program("vmove")).args(["--json", "doctor"]))
}

fn ready() -> anyhow::Result<()> {
    places::root()?;
    places::product("vmoved")?;
    places::product("vmove")?;
    places::Qemu::under_test().map(drop)
}

#[test]
fn this_host_moves_guests_and_nothing_is_left_behind() {
    need!(ready());
    let mounts =
        || std::fs::read_to_string("/proc/self/mounts").expect("mounts").matches("vmove-doctor").count();
    let said = doctor(&[]);
    said.can_move(true);
    for topic in ["root", "kernel", "page-faults", "attach", "memory-folder", "thp", "programs", "qemu"] {
        said.expect(topic, "ok", &[]);
    }
    assert_eq!(mounts(), 0);
    let left = std::fs::read_dir("/tmp").expect("a folder").flatten();
    let left: Vec<_> =
        left.filter(|entry| entry.file_name().to_string_lossy().starts_with("vmove-doctor")).collect();
    assert!(left.is_empty(), "{left:?}");
    // The pool of 1 GiB pages, as the kernel counts it.
    let pages = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages");
    if pages.is_ok_and(|pages| pages.trim() == "0") {
        said.expect("hugetlb-1g", "missing", &["hugepagesz=1G", "0 of 0 pages"]);
    }
    if !Path::new("/sys/class/infiniband").exists() {
        said.expect("device", "missing", &["this host has none", "rdma_rxe"]);
    }
    // Only an area: the exit code is about moving all the same.
    let said = doctor(&["--area", "network", "--area", "forks"]);
    said.can_move(true);
    let areas = said.answer["findings"].as_array().expect("findings").iter();
    assert!(
        areas
            .map(|finding| finding["area"].as_str().expect("an area"))
            .all(|area| ["network", "forks"].contains(&area))
    );
    let (code, shown) = text(&["doctor", "--area", "moving"]);
    assert!(
        code == Some(0) && shown.starts_with("moving\n") && shown.contains("Guests can be moved"),
        "{shown}"
    );
    assert_eq!(text(&["doctor", "--area", "everything"]).0, Some(2));
}

fn text(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(program("vmove")).env("PATH", path()).args(words).output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_host_without_devices_says_which_and_cannot_move() {
    need!(ready());
    // A /dev with nothing but what every program needs.
    let bare = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && exec \"$@\"";
    let said = behind(&["unshare", "-m", "sh", "-c", bare, "sh"]);
    said.expect("kvm", "limited", &["no /dev/kvm", "modprobe kvm"]);
    said.expect("tap", "missing", &["modprobe tun"]);
    said.expect("vhost", "limited", &["modprobe vhost_net"]);
    let forbidden =
        std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|word| word.trim() == "0");
    if forbidden {
        said.expect("attach", "missing", &["/dev/userfaultfd", "sysctl vm.unprivileged_userfaultfd=1"]);
        said.can_move(false);
    }
}

#[test]
fn what_the_rights_of_vmoved_do_not_allow_is_told() {
    need!(ready());
    let without = |right: &str| {
        behind(&["setpriv", &format!("--bounding-set=-{right}"), &format!("--inh-caps=-{right}")])
    };
    let said = without("sys_ptrace");
    said.expect("attach", "missing", &["CAP_SYS_PTRACE"]);
    said.can_move(false);
    let said = without("sys_admin");
    said.expect("memory-folder", "missing", &["CAP_SYS_ADMIN", "huge=advise"]);
    said.can_move(false);
    // An operator can have mounted it beforehand.
    let sandbox = Sandbox::new().expect("a sandbox");
    sandbox.folder("mem").expect("a folder");
    let thp = sandbox.mount_thp("mem/thp").expect("a mount");
    let settings = sandbox.path().join("vmoved.toml");
    let text = format!("insecure = true\nmemory-dir = \"{}\"\n", sandbox.path().join("mem").display());
    std::fs::write(&settings, text).expect("a file");
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set=-sys_admin",
        "--inh-caps=-sys_admin",
        &program("vmove"),
        "--json",
        "doctor",
    ]);
    let said = Said::of(command.arg("--config").arg(&settings));
    said.expect("memory-folder", "ok", &[&thp.display().to_string()]);
    let said = without("net_raw");
    said.expect("frames", "limited", &["CAP_NET_RAW"]);
    said.can_move(true);
    let said = behind(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    said.expect("root", "missing", &["sudo vmove doctor", "65534"]);
    said.can_move(false);
}

#[test]
fn programs_that_are_not_there_are_named() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    // Nothing but what this test itself runs by.
    let said = behind(&["env", &format!("PATH={}", sandbox.path().display())]);
    said.expect("programs", "missing", &["setsid", "setpriv", "util-linux"]);
    said.expect("qemu-user", "missing", &["setpriv"]);
    said.expect("attach", "missing", &["could not start a program"]);
    said.expect("qemu-nbd", "limited", &["qemu-utils"]);
    said.can_move(false);
    // QEMUs in /usr are found without PATH.
    if std::fs::read_dir("/usr/bin").is_ok_and(|names| {
        names.flatten().all(|name| !name.file_name().to_string_lossy().starts_with("qemu-system-"))
    }) {
        said.expect("qemu", "missing", &["7.2", "apt-get install"]);
    }
}

#[test]
fn an_older_kernel_limits_what_can_be_moved() {
    need!(ready());
    need!(old_kernel::possible());
    let on = |kernel| {
        let mut command = Command::new(program("vmove"));
        command.env("PATH", path()).args(["--json", "doctor"]).stdout(Stdio::piped());
        let output = spawn_before(kernel, command).expect("it starts").wait_with_output().expect("it ends");
        let answer = serde_json::from_slice(&output.stdout).expect("findings");
        Said { code: output.status.code(), answer }
    };
    let said = on(Before::V6_7);
    said.expect("kernel", "limited", &["PAGEMAP_SCAN", "post-copy"]);
    said.can_move(true);
    let said = on(Before::V5_18);
    said.expect("locked-memory", "limited", &["5.18"]);
    said.can_move(true);
}

/// Passes requests on to a daemon, and answers as if it were of the protocol version before. With a blank for a digit that it lacks, since the length of the answer stays.
fn of_the_version_before(daemon: SocketAddr, protocol: u64) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut from in listener.incoming().flatten() {
            let mut to = TcpStream::connect(daemon).expect("the daemon");
            let mut asked = [0; 4096];
            let length = from.read(&mut asked).unwrap_or(0);
            to.write_all(&asked[..length]).expect("a request");
            let mut answer = Vec::new();
            let mut part = [0; 4096];
            while !answer.ends_with(b"}") {
                match to.read(&mut part) {
                    Ok(length @ 1..) => answer.extend_from_slice(&part[..length]),
                    _ => break,
                }
            }
            let (ours, before) = (
                format!("\"protocol\":{protocol}"),
                format!("\"protocol\":{:>digits$}", protocol - 1, digits = protocol.to_string().len()),
            );
            let answer = String::from_utf8_lossy(&answer).replace(&ours, &before);
            let _ = from.write_all(answer.as_bytes());
        }
    });
    address
}

#[test]
fn the_daemon_its_settings_and_its_peers_are_asked() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let options = NodeOptions { config: "insecure = true\n".to_owned(), ..NodeOptions::default() };
    let mut b = Node::start(&sandbox, "b", options.clone()).expect("it starts");
    let protocol = b.ask(&["node"]).expect("an answer")["protocol"].as_u64().expect("a number");
    let c = of_the_version_before(b.listen(), protocol);
    let peers = vec![("b".to_owned(), b.listen()), ("c".to_owned(), c)];
    let (ours, before) = (format!("protocol {protocol}"), format!("speaks protocol {}", protocol - 1));
    let mut a = Node::start(&sandbox, "a", NodeOptions { peers, ..options }).expect("it starts");
    let ask = |a: &Node| {
        let (file, control) = (a.folder().join("vmoved.toml"), a.control());
        doctor(&["--config", &file.display().to_string(), "--control", &control.display().to_string()])
    };
    let said = ask(&a);
    said.can_move(true);
    said.expect("vmoved", "ok", &["node a answers", &ours]);
    said.expect("settings", "ok", &["vmoved.toml"]);
    said.expect("peer b", "ok", &["b answers at", &ours]);
    said.expect("peer c", "missing", &[&before, "install the same version"]);
    // As the daemon itself sees this host.
    let node = a.ask(&["node"]).expect("an answer");
    assert_eq!(node["no_dirty_tracking"].is_string(), said.finding("kernel")["state"] != "ok");

    b.stop().expect("it ends");
    a.stop().expect("it ends");
    let said = ask(&a);
    said.expect("peer b", "missing", &["no answer", &b.listen().to_string(), "vmove doctor there"]);
    said.expect("vmoved", "missing", &["no answer", "systemctl enable --now vmoved"]);
    said.can_move(true);
    std::fs::write(a.folder().join("vmoved.toml"), "insecure = true\nnonsense = 1\n").expect("a file");
    ask(&a).expect("settings", "missing", &["nonsense", "vmove setup tls"]);
}
