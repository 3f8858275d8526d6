//! Containers of blueprints, run by podman through the adapter that ships.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vmove_guest::config::{Address, Config};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::guest::{Guest, VIRTIO, failures};
use vmove_tests::hosts::Host;
use vmove_tests::lan;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

use crate::commands::ready;
use crate::ssh::{self, Site};

/// A podman with its own storage and an image `tiny` of a busybox. What runs in it ends when this is dropped.
struct Podman {
    program: String,
    // Dropped last.
    sandbox: Sandbox,
}

impl Podman {
    fn start() -> Result<Self> {
        places::root()?;
        let (busybox, sandbox) = (places::busybox()?, Sandbox::new()?);
        let folder = sandbox.folder("podman")?;
        // crun runs nothing without control groups beside those of version 1 that have some of version 2.
        let script = format!(
            "#!/bin/sh\nexec unshare --mount sh -c '! [ -d /sys/fs/cgroup/unified ] || umount /sys/fs/cgroup/unified; exec podman --root {0}/storage --runroot {0}/run --storage-driver vfs \"$@\"' podman \"$@\"\n",
            folder.display()
        );
        let program = folder.join("podman");
        std::fs::write(&program, script)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        let podman = Self { program: program.display().to_string(), sandbox };
        let root = podman.sandbox.folder("image/bin")?;
        std::fs::copy(busybox, root.join("busybox"))?;
        let file = folder.join("image.tar");
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(podman.sandbox.folder("image")?).arg("-cf").arg(&file).arg(".");
        if !tar.status()?.success() {
            bail!("tar made no image");
        }
        let imported = match podman.run(&["import", "--quiet", &file.display().to_string(), "tiny:1"]) {
            Err(error) => bail!("there is no podman (Debian: podman): {error}"),
            Ok(output) => output,
        };
        if !imported.status.success() {
            bail!(
                "podman does not work here (Debian: podman, crun): {}",
                String::from_utf8_lossy(&imported.stderr).trim()
            );
        }
        let tried = podman.run_busybox(&["--rm"], &["true"])?;
        if !tried.status.success() {
            bail!("podman runs no container here: {}", String::from_utf8_lossy(&tried.stderr).trim());
        }
        Ok(podman)
    }

    /// Runs a command of busybox in a container with these options.
    fn run_busybox(&self, options: &[&str], command: &[&str]) -> Result<Output> {
        let limits =
            ["--cgroups=disabled", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"];
        self.run(&[&["run"], options, &limits, &["tiny:1", "/bin/busybox"], command].concat())
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        Ok(Command::new(&self.program).args(arguments).output()?)
    }

    /// Names of the containers that run.
    fn running(&self) -> String {
        let output = self.run(&["ps", "--format", "{{.Names}}"]).expect("podman");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// The adapter as an executable in a folder: gives the folder.
    fn adapters(&self, options: &str) -> String {
        let adapter = places::product("vmove-podman-adapter").expect("the adapter");
        let line = format!(
            "{} --podman {} --no-limits --stop-s 0 --options '--cgroups=disabled {options} --ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024'",
            adapter.display(),
            self.program
        );
        let folder = self.sandbox.folder("adapters").expect("a folder");
        write_program(&folder.join("podman"), &line);
        folder.display().to_string()
    }
}

fn write_program(path: &Path, line: &str) {
    std::fs::write(path, format!("#!/bin/sh\nexec {line}\n")).expect("a file");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Also after a failed test, nothing runs on.
        let _ = self.run(&["rm", "--all", "--force", "--time", "0"]);
    }
}

fn answered(command: &mut Command) -> (Option<i32>, Value) {
    let output = command.output().expect("it runs");
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default())
}

#[test]
fn containers_run_by_podman_until_the_blueprint_is_stopped() {
    need!(ready());
    need!(places::product("vmove-podman-adapter"));
    let podman = need!(Podman::start());
    let adapters = podman.adapters("--network=none");
    let bridge = Bridge::start(&podman.sandbox, &[]).expect("a bridge");

    let check = [
        "adapter",
        "check",
        "podman",
        "--adapter-dir",
        &adapters,
        "--artifact",
        "tiny:1 /bin/busybox sleep 600",
    ];
    let (code, answer) = answered(&mut bridge.command(&check).expect("vmove"));
    assert_eq!((code, podman.running().as_str()), (Some(0), ""), "{answer}");

    let environment = |name: &str, artifact: &str| json!({ "name": name, "kind": "container", "adapter": "podman", "artifacts": [artifact] });
    let text = json!({
        "name": "app",
        "environments": [environment("view", "image"), environment("log", "image")],
        "artifacts": [{ "name": "image", "source": "tiny:1 /bin/busybox sleep 600" }],
    });
    let file = bridge.write("blueprint.yaml", &text.to_string()).expect("a file");
    let ask = |arguments: &[&str]| {
        let arguments = [&["blueprint"], arguments, &[&file, "--adapter-dir", &adapters]].concat();
        answered(&mut bridge.command(&arguments).expect("vmove"))
    };
    // Somebody else's container has one of the names: the other environment does not run either.
    let other = podman.run_busybox(&["--detach", "--name=app.log"], &["sleep", "600"]);
    assert!(other.expect("podman").status.success());
    let (code, answer) = ask(&["--run"]);
    let why = answer["details"]["failed"]["log"].as_str().unwrap_or_default();
    assert!(code == Some(1) && why.contains("the name app.log is taken"), "{answer}");
    assert_eq!(podman.running(), "app.log");
    podman.run(&["rm", "--force", "--time", "0", "app.log"]).expect("podman");

    let (code, answer) = ask(&["--run"]);
    assert_eq!(code, Some(0), "{answer}");
    assert_eq!(podman.running().lines().count(), 2);
    assert_eq!(ask(&["status"]).1["state"], "running");
    // One ends: it is told, and runs again.
    podman.run(&["kill", "app.view"]).expect("podman");
    let (_, status) = ask(&["status"]);
    let view = &status["elements"][0];
    assert_eq!(
        (&status["state"], &view["name"], &view["message"]),
        (&json!("partial"), &json!("view"), &json!("exit code 137"))
    );
    assert_eq!(ask(&["--run"]).0, Some(0));
    assert_eq!(ask(&["status"]).1["state"], "running");
    for _ in 0..2 {
        let (code, answer) = ask(&["stop"]);
        assert_eq!(
            (code, &answer["state"], podman.running().as_str()),
            (Some(0), &json!("stopped"), ""),
            "{answer}"
        );
    }
}

/// Containers on a host, which end when this is dropped.
struct Contained<'a> {
    host: &'a Host,
    program: &'a str,
}

impl Contained<'_> {
    fn run(&self, line: &str) -> Result<String> {
        self.host.run(&format!("{} {line}", self.program))
    }
}

impl Drop for Contained<'_> {
    fn drop(&mut self) {
        let _ = self.run("rm --all --force --time 0");
    }
}

#[test]
fn a_container_is_on_the_network_of_its_group_and_reaches_a_vm_on_another_host_by_name() {
    need!(ready_for_guests());
    need!(ssh::ready());
    need!(places::product("vmove-podman-adapter"));
    let podman = need!(Podman::start());
    let mut site = Site::start(2);
    site.start_daemons();
    // The VM has its place on the first host, and podman runs on the second.
    site.on_first("vmove fleet drain node2");
    let contained = Contained { host: &site.hosts[1], program: &podman.program };
    let on_second = podman.adapters("");
    let adapters = podman.sandbox.folder("of-first").expect("a folder");
    write_program(&adapters.join("podman"), &format!("ssh -o BatchMode=yes node2 {on_second}/podman"));
    write_program(&adapters.join("network"), "vmove-network-adapter");

    let config = Config { working_set_mib: 16, address: Some(Address::Dhcp), ..Config::default() };
    let mut guest = Guest::new(192, config).expect("a QEMU");
    guest.modules = [&VIRTIO[..], &lan::MODULES].concat();
    guest.neighbour = Some("view".to_owned());
    let mut command = guest.command_line("{vmdir}/serial.log").expect("a command line");
    command.extend(ssh::card().map(str::to_owned));
    let text = json!({
        "name": "app",
        "environments": [
            { "name": "web", "kind": "vm", "request": "vcpus=1; memory_mb=192", "command": command },
            { "name": "view", "kind": "container", "adapter": "podman", "node": "node2", "artifacts": ["image"] },
        ],
        "artifacts": [{ "name": "image", "source": "tiny:1 /bin/busybox nc -ll -p 7777 -e /bin/busybox cat" }],
        "connections": [{ "from": "web", "to": "view" }],
    });
    let file = site.file("app.yaml", &text.to_string());
    let ask = |action: &str| {
        site.answer(&format!("vmove --json blueprint {action} {file} --adapter-dir {}", adapters.display()))
    };
    let (code, answer) = ask("--run");
    assert_eq!(code, Some(0), "{answer}");
    // The container to the VM, and the VM to the container, each by its name.
    until("the container has reached the VM", || {
        // The image has no right to send ICMP.
        let asks = "printf 12345678 | /bin/busybox nc -w 5 web 7777 | /bin/busybox head -c 8";
        contained
            .run(&format!("exec app.view /bin/busybox sh -c '{asks}'"))
            .is_ok_and(|answer| answer == "12345678")
    });
    let addresses =
        contained.run("exec app.view /bin/busybox ip -4 address show dev eth0").expect("addresses");
    assert!(addresses.contains("inet 10.213.0.2/16") && addresses.contains("mtu 1450"), "{addresses}");
    until("the VM has reached the container", || {
        site.console(1, "app-0-web-0").contains("VMOVE-GUEST REACHED")
    });
    let console = site.console(1, "app-0-web-0");
    assert!(console.contains("REACHED PING view (10.213.0.2)"), "{console}");
    assert_eq!(failures(&console), Vec::<String>::new());
    let (_, status) = ask("status");
    assert_eq!(status["state"], "running", "{status}");

    // Where the namespace is not, no container runs in another one.
    let request = json!({ "version": 1, "action": "start", "cluster": "app", "environments": [
        { "name": "view", "kind": "container", "artifact": "tiny:1", "nodes": ["node2"], "namespace": "vmove-0+view" }] });
    let request = site.file("request.json", &request.to_string());
    let (_, refused) = site.answer(&format!("vmove-podman-adapter --podman {} <{request}", podman.program));
    let why = refused["environments"][0]["message"].as_str().unwrap_or_default();
    assert!(why.contains("no network namespace vmove-0+view here") && why.contains("node2"), "{refused}");

    let (code, stopped) = ask("stop");
    assert_eq!((code, &stopped["state"]), (Some(0), &json!("stopped")), "{stopped}");
    assert_eq!((site.made(1), site.made(2)), (String::new(), String::new()));
    assert_eq!(contained.host.run("ls /etc/netns 2>/dev/null || true").expect("a shell"), "");
    assert_eq!(contained.run("ps --all --quiet").expect("podman"), "");
}
