//! Containers of blueprints, run by podman through the adapter that ships.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::Bridge;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

use crate::commands::ready;

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
    fn adapters(&self) -> String {
        let folder = self.sandbox.folder("adapters").expect("a folder");
        let adapter = places::product("vmove-podman-adapter").expect("the adapter");
        let script = format!(
            "#!/bin/sh\nexec {} --podman {} --no-limits --stop-s 0 --options '--cgroups=disabled --network=none --ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024'\n",
            adapter.display(),
            self.program
        );
        let program = folder.join("podman");
        std::fs::write(&program, script).expect("a file");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
        folder.display().to_string()
    }
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
    let adapters = podman.adapters();
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
