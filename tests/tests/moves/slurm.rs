//! Slurm and the guests of its nodes: the programs of `examples/slurm`, run by a real Slurm, with the Python client of vmoved as pip installs it.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use test_servers::SlurmCluster;
use vmove_skip::{need, skip};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Accel, failures};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::pki::Pki;
use vmove_tests::sandbox::Sandbox;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const CLIENT: &str = "[[client]]\nname = \"slurm\"\nrole = \"operator\"\n";
/// For Slurm to notice: it waits 60 s for a health check that hangs before it begins the next.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(150);

/// Installs the Python client of vmoved below a folder, as pip does. Gives the Python that has what it needs.
fn python_client(folder: &Path) -> Result<PathBuf, String> {
    let python = test_servers::python_clients(folder)?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]);
    let pip = pip.arg(folder.join("site")).arg(folder.join("vmoved-client")).stdin(Stdio::null());
    let output = pip.output().expect("pip runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(python)
}

/// Two nodes of Slurm, n0 and n1, with a vmoved each.
struct Site {
    slurm: SlurmCluster,
    nodes: [Node; 2],
    _pki: Pki,
    sandbox: Sandbox,
}

impl Site {
    fn start(sandbox: Sandbox, python: &Path) -> Result<Self, String> {
        let pki = Pki::new(&["127.0.0.1".parse().expect("an address")]).expect("certificates");
        let options = NodeOptions { extra: pki.flags(), config: CLIENT.to_owned(), ..NodeOptions::default() };
        let (a, b) = Node::pair(&sandbox, &options).expect("two nodes");
        let tls = pki.client("slurm").expect("a certificate");
        let config = sandbox.path().join("vmove_slurm.toml");
        let file = |name: &str| tls.join(name).display().to_string();
        let text = format!(
            "[tls]\ncert = {:?}\nkey = {:?}\nca = {:?}\n[nodes]\nn0 = \"{}\"\nn1 = \"{}\"\n",
            file("client.pem"),
            file("client.key"),
            file("ca.pem"),
            a.listen(),
            b.listen()
        );
        std::fs::write(&config, text).expect("a configuration");
        let script = |what: &str| {
            let path = sandbox.path().join(what);
            // Where Slurm's own commands are is known when it runs.
            let text = format!(
                "#!/bin/sh\n[ -e {0}/slurm.env ] || exit 0\n. {0}/slurm.env\n\
                 PYTHONPATH={0}/site exec {1} {ROOT}/examples/slurm/vmove_slurm.py {what} {2} >>{0}/{what}.log 2>&1\n",
                sandbox.path().display(),
                python.display(),
                config.display()
            );
            std::fs::write(&path, text).expect("a script");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
            path.display().to_string()
        };
        let lines = format!(
            "PrologSlurmctld={}\nHealthCheckProgram={}\nHealthCheckInterval=2\nHealthCheckNodeState=ANY",
            script("prolog"),
            script("health")
        );
        let slurm = SlurmCluster::start_with(2, 2, 1, &lines).map_err(|missing| missing.to_string())?;
        let variables =
            slurm.environment().into_iter().map(|(name, value)| format!("export {name}='{value}'\n"));
        std::fs::write(sandbox.path().join("slurm.env"), variables.collect::<String>()).expect("a file");
        Ok(Self { slurm, nodes: [a, b], _pki: pki, sandbox })
    }

    /// Waits until a command of Slurm says this.
    fn says(&self, words: &[&str], what: &str) -> String {
        let begun = Instant::now();
        loop {
            let said = self.slurm.run(words).unwrap_or_else(|error| error.to_string());
            if said.contains(what) {
                return said;
            }
            assert!(
                begun.elapsed() < NOTICE_TIMEOUT,
                "{words:?} does not say {what:?}: {said}{}",
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn logs(&self) -> String {
        let log = |name: &str| std::fs::read_to_string(self.sandbox.path().join(name)).unwrap_or_default();
        format!("\n{}{}", log("prolog.log"), log("health.log"))
    }
}

#[test]
fn jobs_find_nodes_without_guests_and_nodes_in_trouble_get_no_jobs() {
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let python = match python_client(sandbox.path()) {
        Ok(python) => python,
        Err(missing) => return skip!("{missing}"),
    };
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
    let guest = guest.expect("a guest");
    let mut site = match Site::start(sandbox, &python) {
        Ok(site) => site,
        Err(missing) => return skip!("{missing}"),
    };
    site.nodes[0].run_guest("web", "thp", &guest).expect("it runs");

    // A job on n0: the guest is at n1 when it begins.
    let said = site.slurm.run(&["srun", "-w", "n0", "-n", "1", "true"]);
    assert!(said.is_ok(), "{said:?}{}", site.logs());
    assert!(site.nodes[0].vms().expect("a list").is_empty(), "{}", site.logs());
    let vm = site.nodes[1].vm("web").expect("it is there");
    assert_eq!((vm.status.as_str(), failures(&vm.console())), ("running", Vec::new()));
    assert!(site.logs().contains("n0: web is at "), "{}", site.logs());

    // A job on both: it has nowhere to go, and stays; the job waits.
    site.slurm
        .run(&["sbatch", "-J", "both", "-w", "n[0-1]", "-o", "/dev/null", "--wrap", "true"])
        .expect("taken");
    let begun = Instant::now();
    while !site.logs().contains("web stays: there is no other node") {
        assert!(begun.elapsed() < NOTICE_TIMEOUT, "{}", site.logs());
        std::thread::sleep(Duration::from_millis(200));
    }
    site.says(&["squeue", "-h", "-n", "both", "-o", "%T"], "PENDING");
    site.slurm.cancel("both").expect("cancelled");
    assert_eq!(site.nodes[1].vm("web").expect("it is there").status, "running");

    // A node whose vmoved is gone gets no jobs until it is back; one that somebody else has drained stays so.
    site.nodes[0].crash();
    let said = site.says(&["scontrol", "show", "node", "n0"], "DRAIN");
    assert!(said.contains("Reason=vmove: vmoved: "), "{said}");
    site.slurm.run(&["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=disk"]).expect("drained");
    site.nodes[0].run().expect("it starts again");
    let begun = Instant::now();
    loop {
        let shown = site.slurm.run(&["scontrol", "show", "node", "n0"]).expect("an answer");
        if !shown.contains("DRAIN") {
            break;
        }
        assert!(begun.elapsed() < NOTICE_TIMEOUT, "n0 is not resumed: {shown}{}", site.logs());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(site.slurm.run(&["scontrol", "show", "node", "n1"]).expect("an answer").contains("Reason=disk"));
}
