//! Machines of blueprints, switched on and off by Redfish: those of an emulator (sushy-tools).
#![cfg(test)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vmove_skip::{free_port, need};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

/// An emulator of two machines that are off.
struct Emulator {
    process: std::cell::RefCell<Child>,
    config: PathBuf,
    sandbox: Sandbox,
}

impl Emulator {
    fn start() -> Result<Self> {
        let python = places::redfish_python()?;
        let sandbox = Sandbox::new()?;
        let folder = sandbox.folder("redfish")?;
        let port = free_port().port();
        let conf = format!(
            "SUSHY_EMULATOR_STATE_DIR = {folder:?}\nSUSHY_EMULATOR_FAKE_SYSTEMS = [{{'uuid': m, 'name': m, 'power_state': 'Off', 'nics': []}} for m in ('m1', 'm2')]\n"
        );
        std::fs::write(folder.join("emulator.conf"), conf)?;
        // Its machines take a second to switch, and not up to eleven.
        let run = "import random, sys; random.randint = lambda a, b: 1; from sushy_tools.emulator.main import main; sys.exit(main())";
        let process = Command::new(python)
            .args(["-c", run, "--fake", "-i", "127.0.0.1", "-p", &port.to_string(), "--config"])
            .arg(folder.join("emulator.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("log"))?)
            .spawn()?;
        let machine = |name: &str| {
            format!(
                "[machines.{name}]\nurl = \"http://127.0.0.1:{port}\"\nsystem = \"/redfish/v1/Systems/{name}\"\n"
            )
        };
        let config = folder.join("adapter.toml");
        std::fs::write(
            &config,
            format!("state = {:?}\n{}{}", folder.join("state"), machine("m1"), machine("m2")),
        )?;
        let emulator = Self { process: process.into(), config, sandbox };
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if start.elapsed() > Duration::from_secs(60) {
                bail!(
                    "the emulator does not answer: {}",
                    std::fs::read_to_string(emulator.sandbox.path().join("redfish/log"))?
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(emulator)
    }

    fn stop(&self) {
        let mut process = self.process.borrow_mut();
        let _ = process.kill();
        let _ = process.wait();
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stop();
    }
}

#[test]
fn machines_are_switched_on_and_off_by_redfish() {
    let adapter = need!(places::product("vmove-redfish-adapter"));
    let vmove = need!(places::product("vmove"));
    need!(places::redfish_python());
    let emulator = Emulator::start().expect("an emulator");
    let program = format!("{} --config {}", adapter.display(), emulator.config.display());
    let output = Command::new(vmove)
        .args(["--json", "adapter", "check", &program, "--kind", "bare-metal", "--names", "m1", "m2"])
        .output()
        .expect("it runs");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{answer}");
    assert_eq!(answer["lines"].as_array().map(Vec::len), Some(15));

    // One that is on already is somebody's: it is not given away, and not switched off.
    let ask = |cluster: &str, action: &str| ask(&adapter, &emulator.config, cluster, action);
    assert_eq!(ask("one", "start")["state"], "running");
    let refused = ask("other", "start");
    assert!(refused["message"].as_str().is_some_and(|why| why.contains("belongs to m1 of one")), "{refused}");
    assert_eq!(
        (&ask("other", "stop")["state"], &ask("one", "status")["state"]),
        (&json!("absent"), &json!("running"))
    );
    std::fs::remove_file(emulator.sandbox.path().join("redfish/state/m1.json"))
        .expect("its owner is forgotten");
    let refused = ask("other", "start");
    assert!(
        refused["message"].as_str().is_some_and(|why| why.contains("is on, and not by a blueprint")),
        "{refused}"
    );
    // A controller that does not answer is told.
    emulator.stop();
    let failed = ask("one", "start");
    assert_eq!(failed["state"], "failed");
    assert!(failed["message"].as_str().is_some_and(|why| why.contains("machine m1")), "{failed}");
}

/// The answer of the adapter for the machine m1.
fn ask(adapter: &Path, config: &Path, cluster: &str, action: &str) -> Value {
    let mut child = Command::new(adapter)
        .arg("--config")
        .arg(config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let request = json!({ "version": 1, "action": action, "cluster": cluster, "environments": [{ "name": "m1", "kind": "bare-metal" }] });
    child.stdin.take().expect("its input").write_all(request.to_string().as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    answer["environments"][0].clone()
}
