//! The commands for virtual clusters, as an operator types them.
#![cfg(test)]

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use anyhow::Result;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::Bridge;
use vmove_tests::pki::Pki;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

pub(crate) fn ready() -> Result<()> {
    for program in ["vmove", "vbridged"] {
        places::product(program)?;
    }
    Ok(())
}

/// Four nodes of two GPUs below two leaves, and a bridge that knows them and has more in its configuration.
pub(crate) fn fleet(sandbox: &Sandbox, more: &str) -> Bridge {
    Bridge::of_four_nodes(sandbox, more).expect("a bridge")
}

/// Exit code and messages.
pub(crate) fn refused(bridge: &Bridge, arguments: &[&str]) -> (Option<i32>, String) {
    let output = bridge.command(arguments).expect("vmove").output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn this_machine_is_read_published_and_placed_on() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = Bridge::start(&sandbox, &[]).expect("a bridge");
    let node = bridge.ask(&["inventory", "--publish", "--name", "here"]).expect("an inventory");
    assert_eq!(node["name"], "here");
    assert!(node["numa"][0]["cores"].as_u64() > Some(0), "{node}");
    let listed = bridge.ask(&["fleet", "list"]).expect("a list");
    assert_eq!(listed["nodes"][0]["name"], "here");
    let glue = bridge.command(&["inventory", "--glue2", "--name", "here"]).expect("vmove").output();
    let glue = String::from_utf8(glue.expect("it runs").stdout).expect("text");
    assert!(glue.contains("GLUE2"), "{glue}");
    let one = ["place", "--text", "vcpus=1; memory_mb=16", "--cluster", "one"];
    let placed = bridge.ask(&[&one[..], &["--what-if"]].concat()).expect("placed");
    assert_eq!(placed["placement"]["assignments"][0]["node"], "here");
    assert_eq!(bridge.ask(&["lease", "list"]).expect("a list")["leases"], json!([]), "nothing was taken");
    // A folder that is not the root of a Linux system.
    let (code, said) = refused(&bridge, &["inventory", "--root", "/proc/self/fd"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("expected the root of a Linux system"), "{said}");
}

#[test]
fn why_a_node_is_chosen_or_not_is_explained() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    bridge.ask(&["fleet", "drain", "n3"]).expect("drained");
    let text = ["--text", "vcpus=2; memory_mb=512; gpus=2", "--cluster", "c"];
    let told = bridge
        .ask(&[&["place"], &text[..], &["--count", "2", "--explain"]].concat())
        .expect("an explanation");
    let nodes = told["explanation"]["nodes"].as_array().expect("nodes").clone();
    let verdict = |name: &str| {
        nodes
            .iter()
            .find(|node| node["node"] == name)
            .map(|node| node["verdict"].clone())
            .expect("it is told")
    };
    assert_eq!(
        (verdict("n1"), verdict("n2"), verdict("n3")),
        ("chosen".into(), "chosen".into(), "rejected".into())
    );
    assert_eq!(told["placement"]["score"]["max_hops"], 1);
    let (code, said) = refused(&bridge, &[&["place"], &text[..], &["--count", "4"]].concat());
    assert_eq!(code, Some(3), "it does not fit: {said}");
    let (code, said) = refused(&bridge, &["place", "--text", "vcpus=2; colour=red", "--cluster", "c"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("colour"), "{said}");
    for format in ["topology.conf", "topology.yaml", "labels"] {
        let out =
            bridge.command(&["topology", "--export", format]).expect("vmove").output().expect("it runs");
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && (text.contains("n4") || text.contains("n[3-4]")), "{format}: {text}");
    }
}

#[test]
fn a_blueprint_is_placed_and_handed_over_or_undone() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let blueprint = "name: app
environments:
- {name: solver, kind: vm, count: 2, request: 'vcpus=2; memory_mb=512; gpus=2'}
- {name: view, kind: container, adapter: fake, request: 'vcpus=1; memory_mb=64', artifacts: [image]}
artifacts:
- {name: image, source: view.sif}
connections:
- {from: solver, to: view}
";
    let file = bridge.write("app.yaml", blueprint).expect("a file");
    let parts = bridge.ask(&["blueprint", &file]).expect("taken apart");
    assert_eq!(parts["together"][0]["environments"], json!(["solver", "view"]));

    // It records its requests and answers with the given state.
    let adapter = |state: &str| {
        let script = format!(
            "#!/bin/sh\nread -r asked\necho \"$asked\" >>\"$0.log\"\necho '{{\"version\":1,\"environments\":[{{\"name\":\"view\",\"state\":\"{state}\"}}]}}'\n"
        );
        let path = bridge.write(state, &script).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
        path
    };
    let asked = |program: &str| -> Vec<Value> {
        let log = std::fs::read_to_string(format!("{program}.log")).expect("it was asked");
        log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let run = |program: &str| {
        let adapter = format!("fake={program}");
        refused(&bridge, &["blueprint", &file, "--run", "--holder", "test", "--adapter", &adapter])
    };
    let leases = || bridge.ask(&["lease", "list"]).expect("a list")["leases"].as_array().map(Vec::len);

    let (code, said) = refused(&bridge, &["blueprint", &file, "--run"]);
    assert_eq!((code, leases()), (Some(2), Some(0)), "nobody is there for it: {said}");
    assert!(said.contains("fake"), "{said}");

    let failing = adapter("failed");
    let (code, said) = run(&failing);
    assert_eq!((code, leases()), (Some(1), Some(0)), "{said}");
    assert!(said.contains("undone"), "{said}");
    let told: Vec<Value> = asked(&failing).iter().map(|asked| asked["action"].clone()).collect();
    // What was there before is not stopped, and what is left is asked for after the stop.
    assert_eq!(told[..3], ["status", "start", "stop"]);
    assert!(told[3..].iter().all(|action| action == "status"), "{told:?}");

    let working = adapter("running");
    let (code, said) = run(&working);
    assert_eq!((code, leases()), (Some(0), Some(1)), "{said}");
    let asked_to = |action: &str| asked(&working).into_iter().find(|asked| asked["action"] == action);
    let started = asked_to("start").expect("it was asked to start");
    let environment = &started["environments"][0];
    assert_eq!((&environment["artifact"], &environment["memory_mib"]), (&json!("view.sif"), &json!(64)));
    assert_eq!(environment["near"], json!(["n1", "n2"]), "the nodes of the VMs that it talks to");

    // A value that adapters cannot be given is refused before anything is begun.
    let odd = blueprint.replace("memory_mb=64", "memory_mb=64; cpu_features=avx512f").replace("app", "odd");
    let odd = bridge.write("odd.yaml", &odd).expect("a file");
    let (code, said) =
        refused(&bridge, &["blueprint", &odd, "--run", "--adapter", &format!("fake={working}")]);
    assert_eq!((code, leases()), (Some(2), Some(1)), "{said}");
}

/// A port that nobody listens on.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its number").port()
}

#[test]
fn a_tenant_works_over_tls_and_only_with_what_is_its_own() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let pki = Pki::new(&["127.0.0.1".parse().expect("an address")]).expect("certificates");
    let token = sandbox.folder("tokens").expect("a folder").join("alice");
    std::fs::write(&token, "0123456789abcdef").expect("a file");
    let (port, cert, key) = (free_port(), pki.path("node.pem"), pki.path("node.key"));
    let more = format!(
        "listen = \"127.0.0.1:{port}\"\n[tls]\ncert = {cert:?}\nkey = {key:?}\n[tokens.alice]\nrole = \"tenant\"\nfile = {token:?}\n[templates.small]\ncommand = [\"qemu\", \"-hda\", \"/s/{{disk}}\"]\nfields.disk = {{ is = \"name\" }}\n"
    );
    let bridge = Bridge::start_with(&sandbox, &[], &more).expect("a bridge");
    let numa = json!([{ "id": 0, "socket": 0, "cores": 8, "memory": 4096 }]);
    let node = bridge.write("n1.json", &json!({ "name": "n1", "numa": numa }).to_string()).expect("a file");
    bridge.ask(&["fleet", "publish", &node]).expect("published");
    let place = |cluster: &'static str, holder: &'static str| {
        let text = "vcpus=1; memory_mb=16";
        ["place", "--text", text, "--cluster", cluster, "--id", cluster, "--ttl", "10m", "--holder", holder]
    };
    bridge.ask(&place("others", "bob")).expect("placed");

    let alice = |arguments: &[&str], authority: Option<&str>| {
        let mut command = bridge.command(arguments).expect("vmove");
        command.env("VBRIDGE", format!("https://127.0.0.1:{port}")).env("VBRIDGE_TOKEN_FILE", &token);
        command.envs(authority.map(|file| ("VBRIDGE_CA_FILE", file)));
        let output = command.output().expect("it runs");
        let said = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        (output.status.code(), said.concat())
    };
    let authority = pki.path("ca.pem");
    let (code, said) = alice(&["fleet", "list"], None);
    assert!(code == Some(2) && said.contains("--ca-file"), "{said}");
    for (arguments, wanted, words) in [
        (&["fleet", "list"][..], 0, "n1"),
        (&place("hers", "alice"), 0, "hers-vm-0"),
        (&place("not-hers", "bob"), 2, "expected the holder"),
        (&["lease", "show", "hers"], 0, "alice"),
        (&["lease", "release", "others"], 1, "there is no lease others"),
        (&["fleet", "drain", "n1"], 2, "use a token with the role operator"),
        (&["lease", "start", "hers", "--template", "small", "--field", "disk=a,b"], 2, "expected 1 to 64 of"),
        (&["lease", "stop", "hers", "--vm", "-x"], 2, "-x"),
        (&["lease", "release", "hers"], 0, "hers"),
    ] {
        let (code, said) = alice(arguments, Some(&authority));
        assert!(code == Some(wanted) && said.contains(words), "{arguments:?}: {code:?} {said}");
    }
    assert_eq!(bridge.ask(&["lease", "list"]).expect("a list")["leases"][0]["id"], "others");
}
