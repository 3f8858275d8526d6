//! Requests as operators and users write them: instance types of the site, flavors, what would fit, and quotas; from `vmove place` to the
//! answer of a real bridge.
#![cfg(test)]

use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, until};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

use crate::commands::{fleet, ready, refused};

const TYPES: &str = "[types.\"site.large\"]
description = \"half a node\"
request = \"m1.large; memory_mb=2048; accelerators=1; where=here\"
[keys.accelerators]
key = \"xpus\"
[keys.where]
values = { here = \"label:zone=a\", there = \"label:zone=b\" }
";

/// Exit code, and what was printed for people.
fn printed(bridge: &Bridge, arguments: &[&str]) -> (Option<i32>, String) {
    let command = bridge.command(&[]).expect("vmove");
    let socket = command.get_envs().find(|(name, _)| *name == "VBRIDGE").and_then(|(_, value)| value);
    let mut plain = Command::new(command.get_program());
    plain.env("VBRIDGE", socket.expect("a socket")).args(arguments).stdin(Stdio::null());
    let output = plain.output().expect("it runs");
    let said = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    (output.status.code(), said.concat())
}

/// The one line that `vmove --json` prints, for a request that is refused.
fn problem(bridge: &Bridge, arguments: &[&str]) -> Value {
    let output = bridge.command(arguments).expect("vmove").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("expected one JSON object, {error}: {text}"))
}

/// Has n1 and n2 say where they are.
fn label(bridge: &Bridge) {
    for (name, zone) in [("n1", "a"), ("n2", "b")] {
        let shown = bridge.ask(&["fleet", "show", name]).expect("a node");
        let mut node = shown["node"].clone();
        node["labels"] = json!({ "zone": zone });
        let file = bridge.write("labelled.json", &node.to_string()).expect("a file");
        bridge.ask(&["fleet", "publish", &file]).expect("published");
    }
}

#[test]
fn a_site_has_its_own_instance_types() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("types.d").expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("a file");
    write("site.toml", TYPES);
    let more = format!("instance_types = [\"{}/*.toml\"]\n", folder.display());
    let mut bridge = fleet(&sandbox, &more);
    label(&bridge);

    let listed = bridge.ask(&["place", "--types"]).expect("a list");
    let known = |listed: &Value, name: &str| -> Option<Value> {
        listed["types"].as_array().expect("types").iter().find(|own| own["name"] == name).cloned()
    };
    let own = known(&listed, "site.large").expect("it is listed");
    assert_eq!(
        (&own["alternatives"][0]["vcpus"], &own["alternatives"][0]["memory"]),
        (&json!(4), &json!(2048))
    );
    assert!(own["file"].as_str().is_some_and(|file| file.ends_with("types.d/site.toml")), "{own}");
    let (code, table) = printed(&bridge, &["place", "--types"]);
    let line = table.lines().find(|line| line.starts_with("site.large")).unwrap_or_default();
    assert!(code == Some(0) && line.contains("  2048 MiB  ") && line.contains("1 GPU"), "{table}");
    assert!(table.contains("p7f.grande") && table.contains("cg1.small"), "{table}");

    let place = |text: &'static str| ["place", "--cluster", "c", "--what-if", "--text", text];
    let placed = bridge.ask(&place("site.large")).expect("placed");
    assert_eq!(placed["placement"]["assignments"][0]["node"], "n1", "zone a");
    assert_eq!(placed["placement"]["assignments"][0]["devices"].as_array().map(Vec::len), Some(1));
    let placed = bridge.ask(&place("site.large; where=there; accelerators=2")).expect("placed");
    assert_eq!(placed["placement"]["assignments"][0]["node"], "n2", "the request overrides the type");
    // No GPU here is of Fermi, but two are there.
    let placed =
        bridge.ask(&place("m1.small; xpu_arch=fermi; xpus>=3 OR cg1.small; xpus=2")).expect("placed");
    assert_eq!(placed["placement"]["assignments"][0]["devices"].as_array().map(Vec::len), Some(2));
    let (code, said) = refused(&bridge, &place("cg1.small; cpu_info=SSE4.2"));
    assert!(code == Some(3) && said.contains("lacks CPU features SSE4.2"), "{said}");
    for (text, words) in [
        ("site.huge", "unknown instance type \"site.huge\"; expected one of cg1.4xlarge"),
        ("site.large; where=nowhere", "column 13: where = nowhere; expected where=here, where=there"),
        ("m1.small; colour=red", "unknown key \"colour\""),
        ("m1.small; memory_mb=5..3", "empty range"),
        ("vcpus>=4; vcpus<=2; memory_mb=1", "vcpus must be"),
    ] {
        let (code, said) = refused(&bridge, &place(text));
        assert!(code == Some(2) && said.contains(words), "{text}: {code:?} {said}");
    }
    // The same types in files of clusters and in blueprints.
    let cluster =
        bridge.write("c.toml", "name = \"c\"\n[[vms]]\nrequest = \"site.large\"\n").expect("a file");
    let placed = bridge.ask(&["place", &cluster, "--what-if"]).expect("placed");
    assert_eq!(placed["placement"]["assignments"][0]["node"], "n1");
    let blueprint = "name: app\nenvironments:\n- {name: solver, kind: vm, request: site.large}\n";
    let blueprint = bridge.write("app.yaml", blueprint).expect("a file");
    bridge.ask(&["blueprint", &blueprint]).expect("taken apart");

    // Read again without a restart; what is wrong changes nothing.
    let again = |bridge: &Bridge| bridge.signal(Signal::SIGHUP).expect("it runs");
    write("more.toml", "[types.small]\nrequest = \"vcpus=1; memory_mb=64\"\n");
    again(&bridge);
    until("the new type is known", || {
        known(&bridge.ask(&["place", "--types"]).expect("a list"), "small").is_some()
    });
    write(
        "more.toml",
        "[types.a]\nrequest = \"b\"\n[types.b]\nrequest = \"a\"\n[types.\"site.large\"]\nrequest = \"m1.tiny; x=1\"\n",
    );
    again(&bridge);
    let log = || std::fs::read_to_string(sandbox.path().join("bridge/log")).expect("a log");
    until("the mistakes are in the log", || log().contains("instance types stay as they were"));
    for words in [
        "more.toml:1: type \"a\": it stands for itself: a -> b -> a",
        "site.toml:1: type \"site.large\" is defined in",
    ] {
        assert!(log().contains(words), "{words}: {}", log());
    }
    assert!(known(&bridge.ask(&["place", "--types"]).expect("a list"), "small").is_some());

    // A bridge does not start with mistakes, and names them all.
    bridge.kill();
    let output = Command::new(places::product("vbridged").expect("it is built"))
        .arg("--config")
        .arg(sandbox.path().join("bridge/vbridged.toml"))
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("more.toml:3: ") && said.contains("more.toml:5: "),
        "{said}"
    );
}

#[test]
fn flavors_of_nova_are_kept_noted_or_refused() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let place = |properties: Value| -> (Option<i32>, Value, String) {
        let flavor = json!({ "name": "f", "vcpus": 2, "ram": 512, "disk": 20, "properties": properties });
        let file = bridge.write("flavor.json", &flavor.to_string()).expect("a file");
        let output =
            bridge.command(&["place", &file, "--cluster", "f", "--what-if"]).expect("vmove").output();
        let output = output.expect("it runs");
        let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), answer, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, answer, said) = place(json!({
        "pci_passthrough:alias": "gpu:2", "hw:numa_nodes": "1", "hw:cpu_policy": "dedicated", "trait:CUSTOM_OLD": "forbidden",
        "hw_video:ram_max_mb": "16"
    }));
    assert_eq!(
        (code, &answer["placement"]["assignments"][0]["devices"][1]["kind"]),
        (Some(0), &json!("gpu")),
        "{said}"
    );
    let notes = answer["notes"].to_string();
    assert!(notes.contains("disk=20") && notes.contains("hw_video:ram_max_mb=16"), "{notes}");
    let (code, _, said) = place(json!({ "trait:CUSTOM_NEW": "required" }));
    assert!(code == Some(3) && said.contains("lacks trait CUSTOM_NEW"), "{said}");
    for (key, value) in [("hw:numa_nodes", "2"), ("hw:mem_encryption", "true"), ("quota:cpu_shares", "10")] {
        let (code, _, said) = place(json!({ key: value }));
        assert!(code == Some(2) && said.contains(&format!("key {key}: ")), "{key}: {said}");
    }
}

/// Divides the first GPU of n1 into two vGPUs, and lists a remote GPU.
fn divide(bridge: &Bridge) {
    let shown = bridge.ask(&["fleet", "show", "n1"]).expect("a node");
    let mut node = shown["node"].clone();
    let devices = node["devices"].as_array_mut().expect("devices");
    let gpu = devices[0]["address"].as_str().expect("an address").to_owned();
    for number in 1..3 {
        let address = format!("83b8f4f2-509f-382f-3c1e-e6bfe0fa100{number}");
        devices.push(json!({ "address": address, "kind": "vgpu", "id": "10de:2235", "parent": gpu, "model": "nvidia-558", "traits": ["CUSTOM_NVIDIA_558"] }));
    }
    devices.push(json!({ "address": "remote:10.0.0.9:8308/0", "kind": "remote-gpu", "id": "0000:0000", "model": "a100" }));
    let file = bridge.write("divided.json", &node.to_string()).expect("a file");
    bridge.ask(&["fleet", "publish", &file]).expect("published");
}

#[test]
fn shares_of_gpus_are_leased_and_vms_with_them_stay() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    divide(&bridge);
    let flavor = json!({ "name": "f", "vcpus": 1, "ram": 64, "disk": 0,
        "properties": { "resources:VGPU": "2", "trait:CUSTOM_NVIDIA_558": "required" } });
    let flavor = bridge.write("vgpus.json", &flavor.to_string()).expect("a file");
    let answer = bridge.ask(&["place", &flavor, "--cluster", "desk", "--id", "desk"]).expect("leased");
    let devices = &answer["lease"]["held"][0]["devices"];
    assert_eq!((devices[0]["kind"].as_str(), devices.as_array().map(Vec::len)), (Some("vgpu"), Some(2)));
    assert!(answer["notes"].to_string().contains("does not move: its vGPU cannot be unplugged"), "{answer}");
    // The last one is gone, and the GPU is not leased as a whole.
    let text = "vcpus=1; memory_mb=64; vgpu_type=nvidia-558";
    let (code, said) =
        printed(&bridge, &["place", "--text", text, "--cluster", "c", "--what-if", "--explain"]);
    assert!(code == Some(3) && said.contains("needs 1 vGPU (nvidia-558), has 0 free of 2"), "{said}");
    let shown = bridge.ask(&["fleet", "show", "n1"]).expect("a node");
    assert!(
        shown["node"]["devices"][0]["shares"] == 2
            && shown["held_devices"].as_array().map(Vec::len) == Some(2),
        "{shown}"
    );
    let (_, table) = printed(&bridge, &["fleet", "list"]);
    assert!(table.lines().any(|line| line.starts_with("n1 ") && line.contains("  0/2  ")), "{table}");
    // No daemon starts it: that is said before anything runs, and the lease is given back.
    bridge.ask(&["lease", "release", "desk"]).expect("released");
    let run =
        ["place", "--text", text, "--cluster", "desk", "--id", "desk", "--run", "--", "qemu-system-x86_64"];
    let (code, said) = printed(&bridge, &run);
    assert!(code != Some(0) && said.contains("VM desk-vm-0 is not started: its vGPU"), "{said}");
    assert!(said.contains("lease desk is given back"), "{said}");
    // A remote GPU is for VMs of all nodes, once; it goes on with its VM.
    bridge.ask(&["place", "--text", text, "--cluster", "desk", "--id", "desk"]).expect("leased");
    let far = ["place", "--text", "vcpus=1; memory_mb=64; remote_gpu_model=a100", "--cluster"];
    let first = bridge.ask(&[&far[..], &["far", "--id", "far"]].concat()).expect("leased");
    assert_eq!(first["lease"]["held"][0]["devices"][0]["address"], "remote:10.0.0.9:8308/0", "{first}");
    let (code, said) = printed(&bridge, &[&far[..], &["far2"]].concat());
    assert!(
        code == Some(3) && said.contains("needs 1 remote GPU (a100), and of 1 in the fleet 0 are free"),
        "{said}"
    );
    let on_n1 = first["lease"]["held"][0]["node"] == "n1";
    let plan = bridge.ask(&["plan", "evacuate", "n1"]).expect("a plan");
    assert!(plan["notes"].to_string().contains("VM desk-vm-0 stays on n1: its vGPU"), "{plan}");
    assert_eq!(plan["steps"].as_array().map(Vec::len), Some(usize::from(on_n1)), "{plan}");
}

#[test]
fn what_would_fit_is_told() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    bridge.ask(&["fleet", "drain", "n4"]).expect("drained");
    let text = "vcpus=2; memory_mb=512; gpus=2";
    let place = ["place", "--text", text, "--count", "4", "--cluster", "c"];
    let (code, said) = printed(&bridge, &[&place[..], &["--what-if", "--explain"]].concat());
    assert_eq!(code, Some(3), "{said}");
    for words in [
        "n4    rejected  is drained",
        "nearest: fits 3 of 4 VMs on n1, n2, n3\n",
        "nearest: fits with 1 GPU instead of 2 on n1, n2\n",
        "nearest: fits if n4 were not drained: on n1, n2, n3, n4\n",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    for asked in [&["--explain"][..], &["--what-if", "--explain"]] {
        let told = problem(&bridge, &[&place[..], asked].concat());
        assert_eq!((&told["code"], &told["exit_code"]), (&json!("no-room"), &json!(3)), "{told}");
        let (nearest, nodes) = (&told["details"]["nearest"], &told["details"]["explanation"]["nodes"]);
        let fits = &nearest["fits"];
        assert_eq!(
            (&fits[0]["change"], &fits[0]["to"], &nearest["complete"]),
            (&json!("vms"), &json!(3), &json!(true))
        );
        let drained = nodes.as_array().and_then(|nodes| nodes.iter().find(|node| node["node"] == "n4"));
        assert_eq!(drained.map(|node| &node["verdict"]), Some(&json!("rejected")), "{told}");
    }

    // A refused lease tells the same: to people in the message, to programs in the details of the problem.
    let told = problem(&bridge, &place);
    assert_eq!(told["code"], "no-room");
    let message = told["error"].as_str().expect("a message");
    assert!(
        message.contains(". It fits 3 of 4 VMs on n1, n2, n3; or fits with 1 GPU instead of 2"),
        "{message}"
    );
    assert_eq!(told["details"]["nearest"]["fits"][2]["names"], json!(["n4"]), "{told}");

    // It is true.
    bridge.ask(&["fleet", "resume", "n4"]).expect("resumed");
    bridge.ask(&[&place[..], &["--id", "c"]].concat()).expect("it fits now");
    let near = bridge.write("near.toml", "name = \"d\"\n[compactness]\nmax_hops = 1\n[[vms]]\ncount = 4\nrequest = \"vcpus=4; memory_mb=64\"\n").expect("a file");
    let told = problem(&bridge, &["place", &near]);
    let message = told["error"].as_str().expect("a message");
    assert!(message.contains("fits with max_hops 3 instead of max_hops 1"), "{message}");
    assert_eq!(bridge.ask(&["lease", "list"]).expect("a list")["leases"].as_array().map(Vec::len), Some(1));
}

#[test]
fn what_was_used_is_told_for_each_vm_and_to_apel() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let place =
        ["place", "--text", "vcpus=2; memory_mb=64; gpus=1", "--count", "2", "--cluster", "c", "--id", "c"];
    bridge
        .ask(&[&place[..], &["--holder", "alice", "--project", "p1", "--ttl", "10m"]].concat())
        .expect("placed");
    std::thread::sleep(std::time::Duration::from_millis(1200));
    bridge.ask(&["lease", "release", "c"]).expect("released");
    let record = bridge.ask(&["account"]).expect("one record");
    let (all, one) = (&record["usage"], &record["vms"]["c-vm-0"]);
    let held = one["held_ms"].as_u64().expect("a number");
    assert!(held >= 1200 && all["held_ms"] == held, "{record}");
    assert_eq!((one["gpu_ms"].as_u64(), all["gpu_ms"].as_u64()), (Some(held), Some(2 * held)));
    assert_eq!((&record["vms"]["c-vm-1"], &record["adapter_hours"]), (one, &json!(0.0)));

    let (code, message) = printed(&bridge, &["account", "--apel", "--site", "MY-SITE"]);
    assert!(code == Some(0) && message.starts_with("APEL-cloud-message: v0.4\n"), "{message}");
    let records: Vec<&str> = message.split("%%\n").filter(|record| !record.trim().is_empty()).collect();
    assert_eq!(records.len(), 2, "{message}");
    let wall = held / 1000;
    for line in [
        "VMUUID: c/c-vm-1".to_owned(),
        "SiteName: MY-SITE".to_owned(),
        "LocalUserId: alice".to_owned(),
        "LocalGroupId: p1".to_owned(),
        "Status: completed".to_owned(),
        format!("WallDuration: {wall}"),
        format!("CpuDuration: {}", held * 2 / 1000),
        "CpuCount: 2.000".to_owned(),
        "Memory: 64".to_owned(),
    ] {
        assert!(records[1].lines().any(|own| own == line), "{line}: {message}");
    }
    for (by, name, vms) in [("holder", "alice", 2), ("project", "p1", 2), ("vm", "c-vm-1", 1)] {
        let sums = bridge.ask(&["account", "--sum", by]).expect("sums");
        let hours = sums[name]["gpu_hours"].as_f64().expect("hours");
        let wanted = f64::from(u32::try_from(held * vms).expect("a second")) / 3_600_000.0;
        assert!((hours - wanted).abs() < 1e-9, "{by}: {sums}");
        let (_, table) = printed(&bridge, &["account", "--sum", by]);
        assert!(table.lines().any(|line| line.starts_with(name)), "{table}");
    }
    let (code, said) = printed(&bridge, &["account", "--apel"]);
    assert!(code == Some(2) && said.contains("--site"), "{said}");
}

#[test]
fn a_tenant_has_no_more_than_its_quota() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "[quota.alice]\ngpus = 3\nleases = 3\n[quota.\"*\"]\ncores = 1\n");
    let place = |id: &'static str, holder: &'static str, text: &'static str| {
        ["place", "--cluster", id, "--id", id, "--ttl", "10m", "--holder", holder, "--text", text]
    };
    bridge.ask(&place("a1", "alice", "vcpus=1; memory_mb=64; gpus=2")).expect("placed");
    bridge.ask(&place("a2", "alice", "vcpus=1; memory_mb=64")).expect("placed");
    let two = place("a3", "alice", "vcpus=1; memory_mb=64; gpus=2");
    let (code, said) = refused(&bridge, &two);
    assert_eq!(code, Some(3), "{said}");
    let words = "alice would exceed its quota: limit 3 GPUs, used 2, asked 2: release lease a1, or ask for at most 1; nothing was leased";
    assert!(said.contains(words), "{said}");
    let told = problem(&bridge, &two);
    let exceeded = json!([{ "resource": "gpus", "limit": 3, "used": 2, "asked": 2, "release": ["a1"] }]);
    assert_eq!((&told["code"], &told["details"]["quota"]), (&json!("over-quota"), &exceeded));
    let tried = bridge.ask(&[&two[..], &["--what-if"]].concat()).expect("placed");
    assert!(tried["notes"][0].as_str().is_some_and(|note| note.contains("limit 3 GPUs")), "{tried}");
    bridge.ask(&place("a4", "alice", "vcpus=1; memory_mb=64; gpus=1")).expect("placed");
    let (code, said) = refused(&bridge, &place("a5", "alice", "vcpus=1; memory_mb=64"));
    assert!(code == Some(3) && said.contains("limit 3 leases, used 3, asked 1"), "{said}");
    // Everybody else has the quota of all others.
    let (code, said) = refused(&bridge, &place("b1", "bob", "vcpus=2; memory_mb=64"));
    assert!(code == Some(3) && said.contains("limit 1 cores, used 0, asked 2: ask for at most 1"), "{said}");
    bridge.ask(&["lease", "release", "a1"]).expect("released");
    bridge.ask(&two).expect("there is room in the quota again");
}
