//! Instance types and keys of operators: what they mean, and every mistake in them.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use proptest::prelude::*;
use sched_bridge::model::{DeviceKind, MemoryMib};
use sched_bridge::place::{Alternative, NodeCondition, NumaPolicy};
use sched_bridge::request::{Catalog, LARGEST_FILE, RequestError, Source, instance, lower, nova};

fn source(name: &str, text: &str) -> Source {
    Source { name: Some(name.to_owned()), text: text.to_owned() }
}

fn read(text: &str) -> Result<Catalog, String> {
    Catalog::read(&[source("site.toml", text)]).map_err(|mistakes| mistakes.to_string())
}

fn alternatives(text: &str, catalog: &Catalog) -> Result<Vec<Alternative>, RequestError> {
    lower::alternatives(&instance::parse(text, catalog)?, catalog)
}

fn gpus(alternative: &Alternative) -> u32 {
    let gpus = alternative.devices.iter().filter(|need| need.filter.kind == DeviceKind::Gpu);
    gpus.map(|need| need.count).sum()
}

const SITE: &str = r#"
[types."g1.large"]
description = "Two GPUs, each with an adapter below its PCIe root"
request = "m1.large; xpus=2; hcas=2; gpu_hca_affinity=root; cpu_features=avx2"
[types."g1.either"]
request = "(xpu_arch=hopper OR xpu_arch=ampere); m1.large; xpus=2"
[types."m1.small"]
request = "vcpus=2; memory_mb=3K"

[keys.rack]
label = "rack"
[keys.nvlink]
trait = "CUSTOM_NVLINK"
[keys.accelerators]
key = "xpus"
[keys.network]
values = { fast = "net_arch=infiniband; net_mbps>=100000", slow = "net_mbps>=10000" }

[aliases.l40]
counts = "xpus"
with = "xpu_vendor=nvidia; xpu_arch=ada"
"#;

/// The strings of the heterogeneous OpenStack, with the types that ship.
#[test]
fn the_strings_of_the_heterogeneous_openstack() {
    let catalog = Catalog::default();
    let all = |text: &str| alternatives(text, &catalog).unwrap_or_else(|error| panic!("{text}: {error}"));
    let one = all("cg1.small; cpu_info=SSE4.2");
    assert_eq!((one[0].vcpus, one[0].memory, gpus(&one[0])), (1, MemoryMib(2048), 1));
    assert_eq!(one[0].conditions, [NodeCondition::CpuFeatures(["SSE4.2".to_owned()].into())]);
    assert_eq!((all("t1.small; xpus=1")[0].vcpus, gpus(&all("t1.small; xpus=1")[0])), (1, 1));

    let either = all("m1.xlarge; xpu_arch=fermi; xpus>=3 OR p7f.grande");
    // POWER7 is big-endian or little-endian.
    assert_eq!(either.iter().map(gpus).collect::<Vec<_>>(), [3, 1, 1]);
    assert_eq!(either[1].conditions[0], NodeCondition::CpuArch(["ppc64".to_owned()].into()));
    assert!(either[2].conditions.contains(&NodeCondition::CpuModel("POWER7".to_owned())));
    assert!(either.iter().all(|one| one.devices[0].filter.archs == ["fermi".to_owned()].into()));

    let table = all(r#"m1.large; cpu_info={"model":"Nehalem", "features":["tdtscp", "xtpr"]}"#);
    assert_eq!(table[0].conditions.len(), 2, "{:?}", table[0].conditions);
    // What the request says takes the place of what the type says.
    let more = all("cg1.4xlarge; xpus=4; memory_mb=32K..64K");
    assert_eq!((gpus(&more[0]), more[0].memory, more[0].vcpus), (4, MemoryMib(32768), 8));
    assert_eq!(more[0].devices[0].filter.archs, ["fermi".to_owned()].into());
}

#[test]
fn operators_define_types_keys_and_aliases() {
    let catalog = read(SITE).unwrap();
    let one =
        |text: &str| alternatives(text, &catalog).unwrap_or_else(|error| panic!("{text}: {error}")).remove(0);
    let large = one("g1.large; cpu_features=sse4_2");
    assert_eq!((large.vcpus, gpus(&large), large.devices.len()), (4, 2, 2));
    // Features are added.
    assert_eq!(large.conditions.len(), 2, "{:?}", large.conditions);
    assert_eq!(one("m1.small").vcpus, 2, "the site's own takes the place of what ships");
    assert_eq!(one("cg1.small").memory, MemoryMib(3072), "also in types that ship");
    let both = alternatives("g1.either; memory_mb=1K", &catalog).unwrap();
    assert_eq!(both.len(), 2);
    assert_eq!(
        one("m1.small; rack=r7; nvlink=yes").conditions,
        [
            NodeCondition::Label("rack".to_owned(), ["r7".to_owned()].into()),
            NodeCondition::Trait("CUSTOM_NVLINK".to_owned())
        ]
    );
    assert_eq!(one("m1.small; nvlink=no").conditions, [NodeCondition::TraitNot("CUSTOM_NVLINK".to_owned())]);
    assert_eq!(gpus(&one("m1.small; Accelerators>=2")), 2);
    assert_eq!(one("m1.small; network=fast").devices[0].filter.min_rate_gbps, 100);
    for (text, words) in [
        ("m1.small; network=medium", "column 11: network = medium; expected network=fast, network=slow"),
        ("m1.small; network>=fast", "expected network=fast"),
        ("m1.small; nvlink=perhaps", "expected nvlink=yes or nvlink=no"),
        ("m1.small; colour=red", "unknown key \"colour\"; expected one of instance_type"),
        ("m1.small; colour=red", "accelerators, network, nvlink, rack"),
        ("g2.large", "unknown instance type \"g2.large\"; expected one of cg1.4xlarge"),
        ("g1.large; g1.either", "instance types g1.large and g1.either"),
    ] {
        let error = alternatives(text, &catalog).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    // The same in flavors.
    let json = r#"{"vcpus": 1, "ram": 64, "properties": {"pci_passthrough:alias": "l40:2", "nvlink": "yes",
        "rack": "s== r7", "network": "slow", "aggregate_instance_extra_specs:pool": "hpc"}}"#;
    let flavor = nova::read(json, &catalog).unwrap();
    let flavor = lower::alternatives(&flavor.expr, &catalog).unwrap().remove(0);
    assert_eq!((gpus(&flavor), flavor.conditions.len()), (2, 3), "{flavor:?}");
    assert_eq!(flavor.devices[0].filter.archs, ["ada".to_owned()].into());
    // What one process has read, another one reads from it.
    let texts = |catalog: &Catalog| {
        let types = catalog.types().iter().map(|(name, own)| (name.clone(), own.text.clone())).collect();
        let keys = catalog.keys().map(|(name, text, _)| (name.to_owned(), text.clone())).collect();
        let aliases = catalog.aliases().map(|(name, text, _)| (name.to_owned(), text.clone())).collect();
        (types, keys, aliases)
    };
    let (types, keys, aliases) = texts(&catalog);
    let again = Catalog::of(types, keys, aliases).unwrap();
    assert_eq!(texts(&again), texts(&catalog));
}

#[test]
fn every_mistake_is_named_with_its_place() {
    let first = "[types.a]\nrequest = \"vcpus=1; memory_mb=1\"\n[types.b]\nrequest = \"a; xpuss=1\"\n";
    let second = "[types.a]\nrequest = \"m1.small\"\n\n[keys.xpus]\nlabel = \"x\"\n[keys.k]\nlabel = \"a\"\ntrait = \"b\"\n[aliases.q]\ncounts = \"vcpus\"\n";
    let third = "\n[tipes.a]\n";
    let files = [source("1.toml", first), source("2.toml", second), source("3.toml", third)];
    let mistakes = Catalog::read(&files).unwrap_err();
    let said: Vec<String> = mistakes.0.iter().map(ToString::to_string).collect();
    for (start, words) in [
        ("1.toml:3: type \"b\": ", "column 4: unknown key \"xpuss\""),
        ("2.toml:1: type \"a\" is defined in 1.toml:1 as well", "expected it once"),
        ("2.toml:4: key \"xpus\": ", "a built-in key has this name"),
        ("2.toml:6: key \"k\": ", "2 of key, label, trait and values are given; expected exactly one"),
        ("2.toml:9: alias \"q\": ", "expected xpus, hcas or vfs"),
        (
            "3.toml:2: unknown field `tipes`",
            "expected one of `types`, `keys`, `aliases`; did you mean `types`?",
        ),
    ] {
        let found = said.iter().any(|text| text.starts_with(start) && text.contains(words));
        assert!(found, "{start}…{words}:\n{}", said.join("\n"));
    }
    assert_eq!(said.len(), 6, "{said:#?}");
}

#[test]
fn bad_definitions() {
    let huge = "#".repeat(LARGEST_FILE + 1);
    let chain: String = (0..40)
        .map(|n| format!("[types.c{n}]\nrequest = \"c{}\"\n", n + 1))
        .chain(["[types.c40]\nrequest = \"m1.small\"\n".to_owned()])
        .collect();
    let nested = format!("x = {}1{}", "[".repeat(5000), "]".repeat(5000));
    let brackets = format!("[types.a]\nrequest = \"{}m1.small{}\"", "(".repeat(500), ")".repeat(500));
    // Each of 20 types has two ways of the one before: a million in all.
    let wide: String = (1..20)
        .map(|n| format!("[types.w{n}]\nrequest = \"w{}; (xpus=1 OR xpus=2)\"\n", n - 1))
        .chain(["[types.w0]\nrequest = \"m1.small\"\n".to_owned()])
        .collect();
    let long = format!("[types.a]\nrequest = \"{}\"", "m1.small OR ".repeat(5000));
    for (text, words) in [
        (
            "[types.a]\nrequest = \"b\"\n[types.b]\nrequest = \"c\"\n[types.c]\nrequest = \"a; vcpus=2\"\n",
            "it stands for itself: a -> b -> c -> a; expected no circle",
        ),
        ("[types.a]\nrequest = \"a\"\n", "a -> a"),
        ("[types.\"m1.tiny\"]\nrequest = \"cg1.tiny\"\n", "m1.tiny -> cg1.tiny -> m1.tiny"),
        (
            "[types.a]\nrequest = \"nothing\"\n",
            "site.toml:1: type \"a\": instance type a, column 1: unknown instance type \"nothing\"",
        ),
        ("[types.a]\nrequest = \"xpu_arch!=fermi\"\n", "no cores, no memory and no devices"),
        ("[types.a]\nrequest = \"vcpus=4..2; memory_mb=1\"\n", "vcpus=4..2 is an empty range"),
        (
            "[types.a]\nrequest = \"vcpus>=4; vcpus<=2; memory_mb=1\"\n",
            "must be 4..18446744073709551615 and 0..2",
        ),
        ("[types.a]\nrequest = 3\n", "site.toml:1: type \"a\": invalid type: integer"),
        (
            "[types.a]\n\nrequests = \"m1.small\"\n",
            "site.toml:3: type \"a\": unknown field `requests`, expected `request` or `description`; did you mean `request`?",
        ),
        ("[types]\na = { requests = \"m1.small\" }\n", "site.toml:2: type \"a\": unknown field `requests`"),
        (
            "[aliases.a]\ncounts = \"xpus\"\nwiht = \"\"\n",
            "site.toml:3: alias \"a\": unknown field `wiht`, expected one of `counts`, `with`, `description`; did you mean `with`?",
        ),
        ("[types.a]\nrequest = \"m1.smal\"\n", "did you mean \"m1.small\"?"),
        ("[types.a]\n", "missing field `request`"),
        ("[types.\"a b\"]\nrequest = \"m1.small\"\n", "not a name"),
        ("[types.or]\nrequest = \"m1.small\"\n", "not a name"),
        ("[keys.a]\n", "0 of key, label, trait and values"),
        ("[keys.a]\nkey = \"colour\"\n", "key = \"colour\"; expected one of instance_type"),
        ("[keys.a]\nkey = \"flavor\"\n", "key = \"flavor\""),
        (
            "[keys.a]\nvalues = { x = \"m1.small\" }\n",
            "value \"x\", definition: \"m1.small\", which is no condition",
        ),
        ("[keys.a]\nvalues = { x = \"b=1\" }\n", "unknown key \"b\""),
        ("[keys.a]\nvalues = { \"x y\" = \"xpus=1\" }\n", "a word without spaces"),
        ("[keys.a]\nlabel = \"\"\n", "a name without spaces"),
        ("[aliases.a]\ncounts = \"xpus\"\nwith = \"m1.small\"\n", "which is no condition"),
        ("[types", "site.toml:1: "),
        (&huge, "site.toml: 1048577 bytes; expected at most 1048576"),
        (&chain, "expected at most 16 types, one for the other"),
        (&nested, "site.toml:1: "),
        (&brackets, "too many brackets within each other"),
        (&wide, "too many combinations of OR"),
        (&long, "expected at most 16384"),
    ] {
        let error = read(text).expect_err(&text[..text.len().min(200)]);
        assert!(
            error.contains(words),
            "{}: {}",
            &text[..text.len().min(200)],
            &error[..error.len().min(2000)]
        );
    }
}

#[test]
fn what_flavors_ask_for_is_kept_or_refused_by_name() {
    let catalog = Catalog::default();
    let flavor = |specs: serde_json::Value| {
        let json = serde_json::json!({ "vcpus": 2, "ram": 512, "properties": specs }).to_string();
        let flavor = nova::read(&json, &catalog)?;
        Ok::<_, RequestError>((lower::alternatives(&flavor.expr, &catalog)?.remove(0), flavor.notes))
    };
    let (one, notes) = flavor(serde_json::json!({
        "hw:numa_nodes": "1", "hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "prefer", "resources:PCPU": "8",
        "resources:MEMORY_MB": "4096", "pci_passthrough:alias": "h100:2,ib:1"
    }))
    .unwrap();
    assert_eq!(notes, Vec::<String>::new());
    assert_eq!((one.numa, one.vcpus, one.memory, gpus(&one)), (NumaPolicy::Required, 8, MemoryMib(4096), 2));
    assert_eq!(one.devices[0].filter.archs, ["hopper".to_owned()].into());
    let (_, notes) = flavor(serde_json::json!({ "hw:cpu_policy": "shared", "hw:cpu_sockets": "2" })).unwrap();
    assert_eq!(notes.len(), 2, "{notes:?}");
    // A trait of the site is that of the vGPU, another one may be the node's.
    let (one, _) = flavor(serde_json::json!({
        "resources:VGPU": "2", "trait:CUSTOM_NVIDIA_63": "required", "trait:HW_CPU_X86_AVX2": "required"
    }))
    .unwrap();
    let vgpus = &one.devices[0];
    assert_eq!((vgpus.count, vgpus.filter.kind), (2, DeviceKind::Vgpu));
    assert_eq!(vgpus.filter.traits, ["CUSTOM_NVIDIA_63".to_owned()].into());
    assert_eq!(one.conditions.len(), 2, "{one:?}");
    for (key, value, words) in [
        ("resources:CUSTOM_FPGA", "1", "a resource class that leases do not have"),
        ("resources1:VGPU", "1", "a group of resources"),
        ("trait_1:X", "required", "a group of traits"),
        ("hw:numa_nodes", "2", "a guest of several NUMA nodes"),
        ("hw:numa_cpus.0", "0-3", "a guest of several NUMA nodes"),
        ("hw:cpu_policy", "mixed", "\"mixed\"; expected dedicated or shared"),
        ("hw:cpu_thread_policy", "isolate", "siblings"),
        ("hw:cpu_realtime", "yes", "real-time"),
        ("hw:mem_page_size", "16MB", "\"16mb\" as page_size"),
        ("hw:mem_encryption", "true", "encrypted memory"),
        ("hw:something_new", "1", "not known here"),
        ("quota:disk_read_iops_sec", "100", "a limit on a rate"),
        ("accel:device_profile", "fpga", "Cyborg"),
        ("pci_passthrough:alias", "a100:1,h100:1", "no value of xpu_arch meets all conditions"),
        ("pci_passthrough:alias", "v100:1", "unknown alias \"v100\"; expected one of a100"),
    ] {
        let error = flavor(serde_json::json!({ key: value })).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(key), "{key}: {error}");
    }
}

proptest! {
    #[test]
    fn files_never_panic(cut in 0..SITE.len(), insert in "[a-z\\[\\]{}=\"0-9 \n.;-]{0,8}") {
        let text = format!("{}{insert}{}", SITE.get(..cut).unwrap_or(""), SITE.get(cut..).unwrap_or(""));
        if let Err(error) = read(&text) {
            prop_assert!(error.starts_with("site.toml") || error.starts_with("shipped.toml"), "{error}");
        }
    }

    /// Types that stand for others at random: whatever is accepted can be used, and whatever is not is told in time.
    #[test]
    fn types_that_name_others(names in proptest::collection::vec((0..12_usize, 0..12_usize), 1..12)) {
        let text: String = names.iter().enumerate()
            .map(|(at, (a, b))| format!("[types.t{at}]\nrequest = \"(t{a} OR t{b} OR m1.small); vcpus={}\"\n", at + 1))
            .collect();
        match read(&text) {
            Ok(catalog) => for at in 0..names.len() {
                let all = alternatives(&format!("t{at}"), &catalog).unwrap();
                prop_assert!(all.iter().all(|one| one.vcpus as usize == at + 1));
            },
            Err(error) => prop_assert!(error.contains("stands for") || error.contains("unknown instance type") || error.contains("too many"), "{error}"),
        }
    }
}
