//! Formats of topologies, in and out, and what is wrong with bad ones.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use sched_bridge::model::NodeName;
use sched_bridge::topology::{Format, Topology, TopologyError, import, labels, slurm_conf, slurm_yaml};

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

fn hops(topology: &Topology, a: &str, b: &str) -> Option<u32> {
    topology.hops(&name(a), &name(b))
}

const CONF: &str = "
# the example of Slurm's guide
switchname=s0 NODES=tux[0-3] LinkSpeed=900   # a comment
SwitchName=s1 Nodes=tux[4-7]
SwitchName=s2 Nodes=tux[8-11]
SwitchName=s3 Nodes=tux12,tux[13-15]
SwitchName=s4 \\
  Switches=s[0-1]
SwitchName=s5 Switches=s[2-3]
SwitchName=s6 Switches=s[4-5]
";

#[test]
fn topology_conf_in_and_out() {
    let topology = slurm_conf::read(CONF).unwrap();
    assert_eq!(topology.height(), 3);
    let expected = [("tux0", "tux0", 0), ("tux0", "tux3", 1), ("tux0", "tux4", 3), ("tux0", "tux15", 5)];
    for (a, b, distance) in expected {
        assert_eq!(hops(&topology, a, b), Some(distance), "{a} {b}");
    }
    assert_eq!(hops(&topology, "tux0", "nobody"), None);
    let written = slurm_conf::write(&topology);
    assert!(written.contains("SwitchName=s0 Nodes=tux[0-3] LinkSpeed=900"), "{written}");
    assert!(written.contains("SwitchName=s6 Switches=s[4-5]"), "{written}");
    assert_eq!(slurm_conf::write(&slurm_conf::read(&written).unwrap()), written);
    let way: Vec<_> =
        topology.path(&name("tux9")).iter().map(|id| topology.switch(*id).name.to_string()).collect();
    assert_eq!(way, ["s6", "s5", "s2"]);
}

#[test]
fn blocks_become_a_tree_by_their_sizes() {
    let text = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockName=b3 Nodes=n[5-6]\nBlockName=b4 Nodes=n[7-8]\nBlockSizes=2,4\n";
    let topology = slurm_conf::read(text).unwrap();
    for (a, b, distance) in [("n1", "n2", 1), ("n1", "n3", 3), ("n1", "n5", 5)] {
        assert_eq!(hops(&topology, a, b), Some(distance), "{a} {b}");
    }
    assert!(slurm_conf::write(&topology).ends_with(text));
    let yaml = slurm_yaml::write(&topology, "blocks").unwrap();
    assert_eq!(slurm_yaml::read(&yaml, None, &[]).unwrap(), topology);
}

const YAML: &str = "
- topology: topo-switch
  cluster_default: true
  tree:
    switches:
      - {switch: sw_root, children: \"s[1-2]\"}
      - {switch: s1, nodes: \"node[1-2]\"}
      - {switch: s2, nodes: \"node[3-4]\"}
- topology: topo-block
  cluster_default: false
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: \"node[1-2]\"}
      - {block: b2, nodes: \"node[3-4]\"}
- topology: topo-flat
  flat: true
";

#[test]
fn topology_yaml_has_several_topologies() {
    let tree = slurm_yaml::read(YAML, None, &[]).unwrap();
    assert_eq!(hops(&tree, "node1", "node3"), Some(3));
    let block = slurm_yaml::read(YAML, Some("topo-block"), &[]).unwrap();
    assert_eq!(hops(&block, "node1", "node2"), Some(1));
    let flat = slurm_yaml::read(YAML, Some("topo-flat"), &[name("a"), name("b")]).unwrap();
    assert_eq!(hops(&flat, "a", "b"), Some(1));
    let again = slurm_yaml::write(&tree, "t").unwrap();
    assert_eq!(slurm_yaml::read(&again, None, &[]).unwrap(), tree);
    let error = slurm_yaml::read(YAML, Some("other"), &[]).unwrap_err();
    assert!(error.to_string().contains("topo-flat"), "{error}");
    let error =
        slurm_yaml::read("- topology: x\n  tree:\n    switches: []\n  flat: true\n", None, &[]).unwrap_err();
    assert!(error.to_string().contains("exactly one of"), "{error}");
    let error = slurm_yaml::read("- topology: x\n  trees: {}\n", None, &[]).unwrap_err();
    assert!(error.line() > 0, "{error}");
}

const IBNET: &str = include_str!("fixtures/ibnetdiscover-new.txt");
const IBNET_OLD: &str = include_str!("fixtures/ibnetdiscover-old.txt");

#[test]
fn ibnetdiscover_new_and_old() {
    for (text, rails) in [(IBNET, true), (IBNET_OLD, false)] {
        let imported = import(text, Format::guess("fabric.txt", text), &[]).unwrap();
        let topology = &imported.topology;
        assert_eq!(hops(topology, "node001", "node002"), Some(1));
        assert_eq!(hops(topology, "node001", "node003"), Some(3), "{:?}", imported.topology);
        assert_eq!(topology.roots().count(), 1);
        assert_eq!(imported.notes.iter().any(|note| note.contains("rails")), rails, "{:?}", imported.notes);
        assert!(!imported.notes.iter().any(|note| note.contains("not a fat tree")), "{:?}", imported.notes);
    }
}

#[test]
fn labels_in_and_out() {
    let json = r#"{"items":[
        {"metadata":{"name":"a","labels":{"network.topology.nvidia.com/leaf":"l1","network.topology.nvidia.com/spine":"sp"}}},
        {"metadata":{"name":"b","labels":{"network.topology.nvidia.com/leaf":"l1","network.topology.nvidia.com/spine":"sp"}}},
        {"metadata":{"name":"c","labels":{"network.topology.nvidia.com/leaf":"l2","network.topology.nvidia.com/spine":"sp"}}}]}"#;
    let topology = import(json, Format::Labels, &[]).unwrap().topology;
    assert_eq!((hops(&topology, "a", "b"), hops(&topology, "a", "c")), (Some(1), Some(3)));
    let again = labels::read(&labels::labels(&topology).into_iter().collect::<Vec<_>>()).unwrap();
    assert_eq!((hops(&again, "a", "b"), hops(&again, "a", "c")), (Some(1), Some(3)));
    assert!(
        labels::write(&topology)
            .contains("kubectl label node --overwrite a network.topology.nvidia.com/leaf=leaf-l1")
    );
    let error = labels::read(&[(name("a"), BTreeMap::new())]).unwrap_err();
    assert!(error.to_string().contains("network.topology.nvidia.com/leaf"), "{error}");
}

#[test]
fn plain_toml() {
    let text = "[[switches]]\nname = \"l1\"\nnodes = [\"a\", \"b\"]\n[[switches]]\nname = \"top\"\nswitches = [\"l1\"]\n";
    let topology = import(text, Format::guess("t.toml", text), &[]).unwrap().topology;
    assert_eq!(hops(&topology, "a", "b"), Some(1));
    let error = import("[[switches]]\nname = 3\n", Format::Toml, &[]).unwrap_err();
    assert!(error.line() >= 1, "{error}");
}

#[test]
fn a_misspelt_key_is_named_with_its_line_and_the_nearest_one() {
    let (toml, yaml, conf) = (Format::Toml, Format::SlurmYaml, Format::SlurmConf);
    for (text, format, line, key, near) in [
        ("\n[[switchs]]\nname = \"l1\"\n", toml, 2, "`switchs`", "`switches`?"),
        ("[[switches]]\nname = \"l1\"\nnode = [\"a\"]\n", toml, 3, "`node`", "`nodes`?"),
        ("[[switches]]\nname = \"l1\"\nlink-speed = \"1\"\n", toml, 3, "`link-speed`", "`link_speed`?"),
        ("- topology: t\n  tre: {}\n", yaml, 2, "`tre`", "`tree`?"),
        (
            "- topology: t\n  tree:\n    switches:\n    - switch: s\n      node: a\n",
            yaml,
            5,
            "`node`",
            "`nodes`?",
        ),
        ("SwitchName=a Nodes=n1\nSwitchNam=b\n", conf, 2, "\"switchnam\"", "SwitchName?"),
        ("SwitchName=a Node=n1\n", conf, 1, "\"node\"", "Nodes?"),
        ("BlockName=a Node=n1\n", conf, 1, "\"node\"", "Nodes?"),
    ] {
        let error = import(text, format, &[]).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(key) && said.contains(&format!("did you mean {near}")), "{text}: {said}");
        assert_eq!(error.line(), line, "{said}");
        assert_eq!(said.matches(&format!("line {line}")).count(), 1, "told once: {said}");
    }
}

#[test]
fn a_file_without_switches_does_not_become_a_topology() {
    for (text, format) in [
        ("", Format::Toml),
        ("style = \"flat\"\n", Format::Toml),
        ("switches = []\n", Format::Toml),
        ("\n# SwitchName=a Nodes=n1\n", Format::SlurmConf),
        ("- topology: t\n  tree: {switches: []}\n", Format::SlurmYaml),
        ("{\"items\": []}", Format::Labels),
        ("", Format::IbNetDiscover),
    ] {
        let error = import(text, format, &[]).unwrap_err();
        assert!(error.to_string().contains("expected"), "{text}: {error}");
    }
    // A flat network has one switch.
    let flat = "style = \"flat\"\n[[switches]]\nname = \"flat\"\nnodes = [\"a\", \"b\"]\n";
    assert_eq!(hops(&import(flat, Format::Toml, &[]).unwrap().topology, "a", "b"), Some(1));
}

#[test]
fn bad_topologies_are_refused_with_their_line() {
    for (text, line, words) in [
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", 2, "node n1 is below switch b, but also below a"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, "cycle: a > b > a"),
        (
            "SwitchName=t Switches=a\nSwitchName=a Switches=b\nSwitchName=b Switches=c\nSwitchName=c Switches=c\n",
            4,
            "switch c is below switch c, but also below b",
        ),
        ("SwitchName=a Switches=b\n", 1, "SwitchName=b"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", 2, "second time"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=t Switches=a\nSwitchName=u Switches=a\n",
            3,
            "is below switch u, but also below t",
        ),
        ("\n\nSwitchName=a Nodes=n[3-1]\n", 3, "is empty"),
        ("SwitchName=a Knots=n1\n", 1, "unknown key \"knots\""),
        ("Switch=a Nodes=n1\n", 1, "unknown key \"switch\""),
        ("SwitchName=a\n", 1, "nothing below it"),
        ("SwitchName=a Nodes\n", 1, "not KEY=VALUE"),
        ("BlockName=a Nodes=n1\nSwitchName=b Nodes=n2\n", 1, "both blocks and switches"),
        ("BlockName=a Nodes=n1\nBlockSizes=3\n", 1, "at least 3"),
        ("BlockName=a Nodes=n[1-9]\nBlockSizes=2,3\n", 2, "power of two"),
    ] {
        let error: TopologyError = slurm_conf::read(text).unwrap_err();
        assert!(error.to_string().contains(words), "{text}: {error}");
        assert_eq!(error.line(), line, "{text}: {error}");
        assert!(error.to_string().contains("expected"), "{error}");
    }
    let error = import("Switch\t36 \"S-1\"\n[1]\t\"H-1\"[1]\nrubbish here\n", Format::IbNetDiscover, &[])
        .unwrap_err();
    assert_eq!(error.line(), 3);
}

proptest! {
    #[test]
    fn conf_never_panics(text in "(?i)(switchname=|nodes=|switches=|blockname=|blocksizes=|[a-c0-9\\[\\], \n#\\\\-]){0,24}") {
        if let Ok(topology) = slurm_conf::read(&text) {
            let again = slurm_conf::read(&slurm_conf::write(&topology)).unwrap();
            prop_assert_eq!(again.nodes().count(), topology.nodes().count());
        }
    }

    #[test]
    fn any_text_never_panics(text in "\\PC{0,80}") {
        for format in [Format::SlurmConf, Format::SlurmYaml, Format::IbNetDiscover, Format::Labels, Format::Toml] {
            let _ = import(&text, format, &[]);
        }
        let _ = Format::guess(&text, &text);
    }

    #[test]
    fn bits_of_ibnetdiscover_never_panic(lines in proptest::collection::vec(0..IBNET.lines().count(), 0..30), cut in 0_usize..60) {
        let text: Vec<&str> = lines.iter().map(|at| {
            let line = IBNET.lines().nth(*at).unwrap();
            line.get(..line.len().saturating_sub(cut % 7)).unwrap_or(line)
        }).collect();
        let _ = import(&text.join("\n"), Format::IbNetDiscover, &[]);
    }

    #[test]
    fn bits_of_yaml_never_panic(cut in 0..YAML.len(), insert in "[a-z\\[\\]{}:,0-9 \n-]{0,6}") {
        let text = format!("{}{insert}{}", YAML.get(..cut).unwrap_or(""), YAML.get(cut..).unwrap_or(""));
        let _ = import(&text, Format::SlurmYaml, &[]);
    }
}
