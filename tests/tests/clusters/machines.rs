//! Machines of blueprints, switched on and off by Redfish: those of an emulator (sushy-tools).
#![cfg(test)]

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vmove_skip::{free_port, need};
use vmove_tests::pki::Pki;
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
        Self::start_with(None)
    }

    /// With the certificate of `pki`, it speaks https, and knows the user `vmove` with the password `secret`.
    fn start_with(pki: Option<&Pki>) -> Result<Self> {
        let python = places::redfish_python()?;
        let sandbox = Sandbox::new()?;
        let folder = sandbox.folder("redfish")?;
        let port = free_port().port();
        let mut conf = format!(
            "SUSHY_EMULATOR_STATE_DIR = {folder:?}\nSUSHY_EMULATOR_FAKE_SYSTEMS = [{{'uuid': m, 'name': m, 'power_state': 'Off', 'nics': []}} for m in ('m1', 'm2')]\n"
        );
        let (mut scheme, mut access) = ("http", String::new());
        if let Some(pki) = pki {
            let users = folder.join("users");
            let hashed =
                "import bcrypt; print('vmove:' + bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode())";
            std::fs::write(&users, Command::new(&python).args(["-c", hashed]).output()?.stdout)?;
            conf.push_str(&format!(
                "SUSHY_EMULATOR_SSL_CERT = {:?}\nSUSHY_EMULATOR_SSL_KEY = {:?}\nSUSHY_EMULATOR_AUTH_FILE = {users:?}\n",
                pki.path("node.pem"),
                pki.path("node.key")
            ));
            let password = folder.join("password");
            write_password(&password, "secret")?;
            scheme = "https";
            access =
                format!("ca = {:?}\nuser = \"vmove\"\npassword_file = {password:?}\n", pki.path("ca.pem"));
        }
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
                "[machines.{name}]\nurl = \"{scheme}://127.0.0.1:{port}\"\nsystem = \"/redfish/v1/Systems/{name}\"\n{access}"
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
    let answer = checked(&vmove, &adapter, &emulator);
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

fn write_password(file: &Path, password: &str) -> std::io::Result<()> {
    std::fs::write(file, format!("{password}\n"))?;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))
}

#[test]
fn machines_are_switched_over_https_by_controllers_with_a_certificate_that_is_trusted() {
    let adapter = need!(places::product("vmove-redfish-adapter"));
    let vmove = need!(places::product("vmove"));
    need!(places::redfish_python());
    let own = IpAddr::from(Ipv4Addr::LOCALHOST);
    let pki = Pki::new(&[own]).expect("certificates");
    let emulator = Emulator::start_with(Some(&pki)).expect("an emulator");
    let text = std::fs::read_to_string(&emulator.config).expect("its configuration");
    let status_with = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        std::fs::write(&emulator.config, text.replace(from, to)).expect("a file");
        let answer = ask(&adapter, &emulator.config, "one", "start");
        std::fs::write(&emulator.config, &text).expect("a file");
        (answer["state"].clone(), answer["message"].as_str().unwrap_or_default().to_owned())
    };
    // A certificate that the file does not vouch for, and one for another name.
    let other = Pki::new(&[own]).expect("certificates");
    let (state, why) = status_with(&pki.path("ca.pem"), &other.path("ca.pem"));
    assert!(
        state == "failed" && why.contains("does not vouch for") && why.contains(&other.path("ca.pem")),
        "{why}"
    );
    let (state, why) = status_with("//127.0.0.1:", "//localhost:");
    assert!(state == "failed" && why.contains("a certificate for another name"), "{why}");
    // Without an authority, without https, and with more than is known.
    let line = format!("ca = {:?}\n", pki.path("ca.pem"));
    let (state, why) = status_with(&line, "");
    assert!(state == "failed" && why.contains("https needs `ca`"), "{why}");
    let (state, why) = status_with("https://", "http://");
    assert_eq!(state, "failed", "{why}");
    // The password is that in the file.
    let password = emulator.sandbox.path().join("redfish/password");
    write_password(&password, "guess").expect("a file");
    let refused = ask(&adapter, &emulator.config, "one", "start");
    assert!(
        refused["message"].as_str().is_some_and(|why| why.contains("401") && why.contains("`password_file`")),
        "{refused}"
    );
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o644)).expect("a mode");
    let refused = ask(&adapter, &emulator.config, "one", "start");
    assert!(refused["message"].as_str().is_some_and(|why| why.contains("chmod 0600")), "{refused}");
    write_password(&password, "secret").expect("a file");

    let log = || std::fs::read_to_string(emulator.sandbox.path().join("redfish/log")).expect("its log");
    assert!(!log().contains("ComputerSystem.Reset"), "nothing was switched: {}", log());
    checked(&vmove, &adapter, &emulator);
    assert!(log().contains("ComputerSystem.Reset"), "it was switched: {}", log());
}

/// What `vmove adapter check` says of the adapter, which keeps its contract.
fn checked(vmove: &Path, adapter: &Path, emulator: &Emulator) -> Value {
    let program = format!("{} --config {}", adapter.display(), emulator.config.display());
    let output = Command::new(vmove)
        .args(["--json", "adapter", "check", &program, "--kind", "bare-metal", "--names", "m1", "m2"])
        .output()
        .expect("it runs");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{answer}");
    answer
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
