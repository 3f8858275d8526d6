//! Blueprints in two languages, taken apart, and bad ones.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use proptest::prelude::*;
use sched_bridge::blueprint::{Kind, Language, NetworkMode, decompose, read};
use sched_bridge::request::Catalog;

const YAML: &str = "
name: pipeline
environments:
- {name: solver, kind: vm, count: 8, request: 'm1.large; xpus=1', artifacts: [image], command: [qemu, -drive, 'file={artifact:image},if=virtio']}
- {name: head, kind: vm, request: m1.small}
- {name: viewer, kind: container, adapter: slurm, node: n7, artifacts: [app]}
- {name: store, kind: bare-metal, adapter: ironic}
- {name: lonely, kind: vm, request: m1.small}
artifacts:
- {name: image, source: 'https://example.org/solver.qcow2'}
- {name: app, source: 'https://example.org/app.sif'}
connections:
- {from: solver, to: head}
- {from: head, to: viewer, network: bridge}
";

const XML: &str = r#"<blueprint name="pipeline">
  <environment name="solver" kind="vm" count="8"><request>m1.large; xpus=1</request><artifact>image</artifact><argument>qemu</argument><argument>-drive</argument><argument>file={artifact:image},if=virtio</argument></environment>
  <environment name="head" kind="vm"><request>m1.small</request></environment>
  <environment name="viewer" kind="container" adapter="slurm" node="n7"><artifact>app</artifact></environment>
  <environment name="store" kind="bare-metal" adapter="ironic"/>
  <environment name="lonely" kind="vm"><request>m1.small</request></environment>
  <artifact name="image" source="https://example.org/solver.qcow2"/>
  <artifact name="app" source="https://example.org/app.sif"/>
  <connection from="solver" to="head"/>
  <connection from="head" to="viewer" network="bridge"/>
</blueprint>
"#;

#[test]
fn both_languages_say_the_same() {
    assert_eq!(read(YAML, Language::guess(YAML)).unwrap(), read(XML, Language::guess(XML)).unwrap());
}

#[test]
fn nothing_is_dropped() {
    let blueprint = read(YAML, Language::Yaml).unwrap();
    let parts = decompose(&blueprint, &Catalog::default()).unwrap();
    let kinds: Vec<_> = parts.groups.iter().map(|group| (group.kind, group.environments.len())).collect();
    assert_eq!(kinds, [(Kind::Vm, 3), (Kind::Container, 1), (Kind::BareMetal, 1)]);
    let members: Vec<_> = parts.together.iter().map(|own| own.environments.join("+")).collect();
    assert_eq!(members, ["solver+head+viewer", "store", "lonely"]);
    let first = &parts.together[0];
    assert_eq!(first.request.as_ref().unwrap().count(), 9);
    assert_eq!(first.started.len(), 1, "the head has no command");
    assert_eq!(
        first.started[0].command,
        ["qemu", "-drive", "file=https://example.org/solver.qcow2,if=virtio"]
    );
    assert_eq!(
        (first.handed[0].adapter.as_str(), first.handed[0].artifacts[0].name.as_str()),
        ("slurm", "app")
    );
    let viewer = &first.handed[0].environment;
    assert_eq!(
        (viewer.node.as_ref().map(ToString::to_string), viewer.instance(0)),
        (Some("n7".to_owned()), "viewer".to_owned())
    );
    assert_eq!(blueprint.environments[0].instance(3), "solver-3");
    let networks: Vec<_> = first.networks.iter().map(|own| (own.mode, own.environments.join("+"))).collect();
    assert_eq!(
        networks,
        [(NetworkMode::Private, "head+solver".to_owned()), (NetworkMode::Bridge, "head+viewer".to_owned())]
    );
    assert_eq!(parts.together[1].handed[0].adapter, "ironic");
    let mut all: Vec<String> = parts.together.iter().flat_map(|own| own.environments.clone()).collect();
    all.sort();
    assert_eq!(all, ["head", "lonely", "solver", "store", "viewer"]);
}

#[test]
fn a_misspelt_key_is_named_with_its_line_and_the_nearest_one() {
    for (text, line, key, near) in [
        (YAML.replace("environments:", "enviroments:"), "line 3 ", "`enviroments`", "`environments`?"),
        (YAML.replace("adapter: ironic", "adaptor: ironic"), "line 7 ", "`adaptor`", "`adapter`?"),
        (YAML.replace("kind: bare-metal", "kind: baremetal"), "line 7 ", "`baremetal`", "`bare-metal`?"),
        (XML.replace("adapter=\"ironic\"", "adaptor=\"ironic\""), "line 5:", "`@adaptor`", "`@adapter`?"),
        (XML.replace("kind=\"bare-metal\"", "kind=\"baremetal\""), "line 5:", "`baremetal`", "`bare-metal`?"),
        (
            XML.replace("<artifact>app</artifact>", "<artefact>app</artefact>"),
            "line 4:",
            "`artefact`",
            "`artifact`?",
        ),
        (
            XML.replace("connection from=\"head\" to=\"viewer\"", "conection from=\"head\" to=\"viewer\""),
            "line 10:",
            "`conection`",
            "`connection`?",
        ),
    ] {
        let said = read(&text, Language::guess(&text)).unwrap_err().to_string();
        assert!(said.starts_with(line), "{text}: {said}");
        assert!(said.contains(key) && said.contains(&format!("did you mean {near}")), "{text}: {said}");
        assert_eq!(said.matches("line").count(), 1, "told once: {said}");
    }
}

#[test]
fn bad_blueprints_say_what_is_wrong() {
    for (text, words) in [
        (
            YAML.replace("to: head}", "to: nobody}"),
            "connection 1 (solver to nobody): there is no environment \"nobody\"",
        ),
        (YAML.replace("artifacts: [app]", "artifacts: [ap]"), "no artifact \"ap\""),
        (YAML.replace("name: lonely", "name: head"), "is listed twice"),
        (YAML.replace(", adapter: ironic", ""), "names no adapter to start it"),
        (YAML.replace("adapter: ironic", "adapter: ironic, node: n1"), "names a node, and is no container"),
        (YAML.replace("node: n7", "node: 'n 7'"), "line 6"),
        (YAML.replace("count: 8", "count: 0"), "count is 0"),
        (YAML.replace(", request: m1.small", ""), "a VM without a request"),
        (YAML.replace("m1.large; xpus=1", "m1.large; xpuss=1"), "unknown key \"xpuss\""),
        (
            YAML.replace("m1.large; xpus=1", "m1.larg"),
            "environment \"solver\": request: column 1: unknown instance type \"m1.larg\"",
        ),
        (YAML.replace("kind: bare-metal", "kind: ghost"), "line 7"),
        (YAML.replace("environments:", "environment:"), "unknown field"),
        (
            XML.replace("</environment>\n  <environment name=\"head\"", "\n  <environment name=\"head\""),
            "line",
        ),
        (XML.replace("kind=\"container\"", "kind=\"ghost\""), "ghost"),
        ("<blueprint name=\"x\">\n<environment".to_owned(), "line 2"),
    ] {
        let result = read(&text, Language::guess(&text)).and_then(|own| decompose(&own, &Catalog::default()));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{words}\n{error}");
    }
}

proptest! {
    #[test]
    fn never_panics(cut in 0..YAML.len(), insert in "[a-z<>/\\[\\]{}:,\"0-9 \n-]{0,6}") {
        for (text, language) in [(YAML, Language::Yaml), (XML, Language::Xml)] {
            let text = format!("{}{insert}{}", text.get(..cut).unwrap_or(""), text.get(cut..).unwrap_or(""));
            if let Ok(blueprint) = read(&text, language) {
                let _ = decompose(&blueprint, &Catalog::default());
            }
        }
    }

    #[test]
    fn any_text_never_panics(text in "\\PC{0,80}") {
        let _ = read(&text, Language::Xml);
        let _ = read(&text, Language::Yaml);
    }
}
