//! Renderings of GLUE 2. That they are valid is tested with the schemas themselves, in `tests/tests/clusters/glue2.rs`.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use sched_bridge::glue2::{Described, Format, render};
use sched_bridge::inventory::read;
use sched_bridge::model::{Node, NodeName, NodeState};
use serde_json::{Value, json};

fn node(name: &str, manifest: &str) -> Node {
    let root = vmove_skip::tree::expand(manifest, |_| false);
    read(root.path(), NodeName::new(name).unwrap()).unwrap().node
}

fn all(nodes: &[Node], format: Format) -> String {
    let described: Vec<_> = nodes.iter().map(|node| Described { node, used: Some(true) }).collect();
    render("Site <1>", &described, format)
}

#[test]
fn all_renderings_say_the_same_of_a_fleet() {
    let mut nodes = vec![
        node("dgx", include_str!("fixtures/dgx.tree")),
        node("shares", include_str!("fixtures/shares.tree")),
    ];
    nodes[1].state = NodeState::Drained;
    let of_json: Value = serde_json::from_str(&all(&nodes, Format::Json)).unwrap();
    let manager = &of_json["ComputingManager"][0];
    assert_eq!((&manager["TotalLogicalCPUs"], &manager["Homogeneous"]), (&json!(256), &json!(false)));
    let ids: Vec<&Value> =
        of_json["ExecutionEnvironment"].as_array().unwrap().iter().map(|own| &own["ID"]).collect();
    assert_eq!(manager["Associations"]["ResourceID"], json!(ids));
    let environment = &of_json["ExecutionEnvironment"][0];
    assert_eq!(environment["Extension"]["accelerator-0"], "8 GPU NVIDIA hopper 10de:2330");
    assert_eq!((&environment["UsedInstances"], &environment["ConnectivityIn"]), (&json!(1), &Value::Null));
    assert_eq!(of_json["ExecutionEnvironment"][1]["UnavailableInstances"], 1);
    let xml = all(&nodes, Format::Xml);
    for words in [
        "<Name>Site &lt;1&gt;</Name>",
        "<ID>urn:vmove:admin-domain:Site--1-</ID>",
        "<Platform>amd64</Platform>",
        "<LogicalCPUs>224</LogicalCPUs>",
        "<CPUMultiplicity>multicpu-multicore</CPUMultiplicity>",
        "<NetworkInfo>infiniband</NetworkInfo>",
        "<Value>3 vGPU NVIDIA ampere 10de:2235 nvidia-558</Value>",
    ] {
        assert!(xml.contains(words), "{words}\n{xml}");
    }
    let ldif = all(&nodes, Format::Ldif);
    assert_eq!(ldif.split("\n\n").count(), 5, "{ldif}");
    assert!(
        ldif.contains("\nGLUE2EntityOtherInfo: accelerator=3 MIG slice NVIDIA ampere 10de:20b0\n"),
        "{ldif}"
    );
}

#[test]
fn no_text_of_a_node_breaks_a_rendering() {
    let mut odd = node("odd", include_str!("fixtures/plain.tree"));
    odd.cpu.model = "<a href='x'>&\u{1}\u{e4}\nobjectClass: evil".into();
    let nodes = [odd];
    assert!(all(&nodes, Format::Xml).contains("<CPUModel>&lt;a href="));
    assert!(!all(&nodes, Format::Xml).contains('\u{1}'));
    let of_json: Value = serde_json::from_str(&all(&nodes, Format::Json)).unwrap();
    assert_eq!(of_json["ExecutionEnvironment"][0]["CPUModel"], &*nodes[0].cpu.model);
    let ldif = all(&nodes, Format::Ldif);
    assert!(!ldif.lines().any(|line| line == "objectClass: evil"), "{ldif}");
    let refused = "yaml".parse::<Format>().unwrap_err().to_string();
    assert_eq!(refused, "\"yaml\" is no rendering of GLUE 2: expected xml, json or ldif");
}
