//! Three spellings of a request, and what is wrong with bad ones.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use proptest::prelude::*;
use sched_bridge::model::{DeviceKind, MemoryMib};
use sched_bridge::place::{Affinity, Alternative, Domain, Mode, NodeCondition, NumaPolicy, Pages};
use sched_bridge::request::cluster::{Language, read};
use sched_bridge::request::{Catalog, RequestError, instance, lower, nova};

fn alternatives(text: &str) -> Result<Vec<Alternative>, RequestError> {
    lower::alternatives(&instance::parse(text, &Catalog::default())?, &Catalog::default())
}

fn count(alternative: &Alternative, kind: DeviceKind) -> u32 {
    alternative.devices.iter().filter(|need| need.filter.kind == kind).map(|need| need.count).sum()
}

#[test]
fn the_instance_type_of_the_authors() {
    let all =
        alternatives("cg1.small; xpus=2; xpu_arch=fermi; cpu_features=SSE4.2,CLMUL; hypervisor_type=kvm")
            .unwrap();
    let [one] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((one.vcpus, one.memory, count(one, DeviceKind::Gpu)), (1, MemoryMib(2048), 2));
    assert_eq!(one.devices[0].filter.archs, ["fermi".to_owned()].into());
    assert!(
        one.conditions
            .contains(&NodeCondition::CpuFeatures(["SSE4.2".to_owned(), "CLMUL".to_owned()].into()))
    );
    assert!(one.conditions.contains(&NodeCondition::Hypervisor(["kvm".to_owned()].into())));
}

#[test]
fn or_ranges_and_brackets() {
    let all =
        alternatives("m1.xlarge; (xpus>=3; xpu_arch=fermi OR xpus=1; xpu_arch=kepler); memory_mb=16K..65536")
            .unwrap();
    let gpus: Vec<u32> = all.iter().map(|one| count(one, DeviceKind::Gpu)).collect();
    assert_eq!(gpus, [3, 1]);
    assert!(all.iter().all(|one| one.memory == MemoryMib(16384) && one.vcpus == 8));
    assert_eq!(alternatives("m1.small OR m1.large").unwrap().len(), 2);
    assert_eq!(
        alternatives("m1.small; net_arch=infiniband; net_mbps>=100000").unwrap()[0].devices[0]
            .filter
            .min_rate_gbps,
        100
    );
}

#[test]
fn bad_instance_types_say_where_and_what() {
    for (text, words) in [
        ("", "column 1: a condition is missing"),
        ("m1.small; xpuss=2", "column 11: unknown key \"xpuss\""),
        ("m1.small; xpuss=2", "; did you mean \"xpus\"?"),
        ("m1.small; xpus=many", "\"many\" as xpus"),
        ("m1.small; xpus!=2", "operator != for xpus"),
        ("m1.small; cpu_arch>x86_64", "operator > for cpu_arch"),
        ("m1.small; memory_mb=5..3", "memory_mb=5..3 is an empty range"),
        ("m1.small; memory_mb=1..3; memory_mb=5..9", "memory_mb must be 1..3 and 5..9"),
        ("m1.small; cpu_arch=x86_64,ppc64", "x86_64 and ppc64 at once"),
        ("m1.small; hypervisor_type=kvm; hypervisor_type!=kvm", "must be and must not be kvm"),
        ("m1.small; m1.large", "instance types m1.small and m1.large"),
        ("m2.small", "unknown instance type \"m2.small\""),
        ("m1.smal", "; did you mean \"m1.small\"?"),
        ("m1.small; xpus=0; xpu_arch=fermi", "xpus=0 beside"),
        ("(m1.small", "not closed"),
        ("m1.small)", "without an opening one"),
        ("cpu_arch=x86_64", "no cores, no memory and no devices"),
        ("m1.small; xpus=", "xpus has no value"),
        ("m1.small; numa_policy=strict", "required, preferred"),
        ("m1.small; trait:X=required; trait:X=forbidden", "trait X is both required and forbidden"),
    ] {
        let error = alternatives(text).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn nova_flavors() {
    let json = r#"{"name": "gpu.large", "vcpus": 16, "ram": 65536, "disk": 20, "properties": {
        "gpus": "2", "gpu_arch": "<or> hopper <or> ampere", "hypervisor": "s== kvm", "pci_passthrough:alias": "hca:1",
        "trait:HW_NIC_OFFLOAD_RDMA": "required", "trait:CUSTOM_OLD": "forbidden", "hw:mem_page_size": "1GB",
        "hw:pci_numa_affinity_policy": "required", "capabilities:cpu_info:features": "<all-in> avx2 sse4_2", "hw:cpu_policy": "dedicated"}}"#;
    let flavor = nova::read(json, &Catalog::default()).unwrap();
    // The disk: that cores are dedicated, a lease says anyway.
    assert!(flavor.notes.len() == 1 && flavor.notes[0].starts_with("disk=20:"), "{:?}", flavor.notes);
    let one = lower::alternatives(&flavor.expr, &Catalog::default()).unwrap().remove(0);
    assert_eq!(
        (one.vcpus, one.memory, one.pages, one.numa),
        (16, MemoryMib(65536), Pages::Huge1G, NumaPolicy::Required)
    );
    assert_eq!((count(&one, DeviceKind::Gpu), count(&one, DeviceKind::Hca)), (2, 1));
    assert_eq!(one.devices[0].filter.archs, ["ampere".to_owned(), "hopper".to_owned()].into());
    assert!(one.conditions.contains(&NodeCondition::Trait("HW_NIC_OFFLOAD_RDMA".to_owned())));
    assert!(one.conditions.contains(&NodeCondition::TraitNot("CUSTOM_OLD".to_owned())));
    let text = r#"{"vcpus": 2, "ram": 512, "properties": "gpus='= 2', hw_video:ram_max_mb='16'"}"#;
    let flavor = nova::read(text, &Catalog::default()).unwrap();
    assert_eq!(
        count(&lower::alternatives(&flavor.expr, &Catalog::default()).unwrap()[0], DeviceKind::Gpu),
        2
    );
}

#[test]
fn bad_flavors_name_their_key() {
    for (key, value, words) in [
        ("gpuss", "2", "key gpuss: unknown key"),
        ("gpus", "<between> 1 3", "unknown operator <between>"),
        ("hypervisor", "s== ", "without a value"),
        ("hypervisor", "s>= kvm", "operator s>= for hypervisor_type"),
        ("pci_passthrough:alias", "nothing:1", "unknown alias \"nothing\""),
        ("pci_passthrough:alias", "hca:0", "COUNT from 1"),
        ("trait:X", "wanted", "required or forbidden"),
    ] {
        let json = serde_json::json!({"vcpus": 1, "ram": 1, "properties": {key: value}}).to_string();
        let read = nova::read(&json, &Catalog::default());
        let error = read
            .and_then(|flavor| lower::alternatives(&flavor.expr, &Catalog::default()))
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{key}={value}: {error}");
    }
    assert!(nova::read("{\n!", &Catalog::default()).unwrap_err().to_string().contains("line 2"));
}

const CLUSTER: &str = r#"
name = "cfd"
near = { node = "storage1", max_hops = 3 }

[compactness]
mode = "required"
level = "leaf"
max_leaf_switches = 1

[anti_affinity]
level = "node"
at_most = 8

[[vms]]
name = "worker"
count = 16
request = "m1.large; xpus=1; hcas=1; gpu_hca_affinity=root"

[[vms]]
name = "head"
extra_specs = { vcpus = "4", memory_mb = "8192", "hw_rng:allowed" = "true" }
"#;

#[test]
fn virtual_clusters_in_toml_and_yaml() {
    let cluster = read(CLUSTER, Language::of("a.toml"), &Catalog::default()).unwrap();
    let request = &cluster.request;
    assert_eq!(
        (request.count(), request.compactness.mode, request.compactness.level),
        (17, Mode::Required, Some(Domain::LEAF))
    );
    assert_eq!(request.groups[0].alternatives[0].affinity, Affinity::SameRoot);
    assert_eq!(cluster.notes.len(), 1);
    let yaml =
        "name: cfd\ncompactness: {mode: unconstrained}\nvms:\n- {name: w, count: 2, request: m1.small}\n";
    let cluster = read(yaml, Language::of("a.yaml"), &Catalog::default()).unwrap();
    assert_eq!((cluster.request.count(), cluster.request.compactness.mode), (2, Mode::Unconstrained));
}

#[test]
fn a_misspelt_key_of_a_cluster_is_named_with_its_line_and_the_nearest_one() {
    let (toml, yaml) = (Language::Toml, Language::Yaml);
    for (text, language, line, key, near) in [
        ("name = \"a\"\nvmss = []\n", toml, 2, "`vmss`", "`vms`?"),
        ("name = \"a\"\n[[vms]]\ncuont = 3\n", toml, 3, "`cuont`", "`count`?"),
        ("name = \"a\"\n[compactness]\nmax-hop = 3\n", toml, 3, "`max-hop`", "`max_hops`?"),
        ("name = \"a\"\n[compactness]\nmode = \"requird\"\n", toml, 3, "`requird`", "`required`?"),
        ("name: a\nvms:\n- {name: w}\nnaer: {}\n", yaml, 4, "`naer`", "`near`?"),
        ("name: a\nvms:\n- name: w\n  cuont: 3\n", yaml, 4, "`cuont`", "`count`?"),
        (
            "name = \"a\"\n# request\n[[vms]]\nrequest = \"m1.small; xpuss=1\"\n",
            toml,
            4,
            "\"xpuss\"",
            "\"xpus\"?",
        ),
        ("name: a\nvms:\n- name: w\n  request: m1.smal\n", yaml, 4, "\"m1.smal\"", "\"m1.small\"?"),
    ] {
        let said = read(text, language, &Catalog::default()).unwrap_err().to_string();
        assert!(said.starts_with(&format!("line {line}")), "{text}: {said}");
        assert!(said.contains(key) && said.contains(&format!("did you mean {near}")), "{text}: {said}");
        assert_eq!(said.matches("line").count(), 1, "told once: {said}");
    }
}

#[test]
fn bad_virtual_clusters_say_where() {
    for (text, words) in [
        ("name = \"a\"\nvmss = 3\n", "line 2"),
        ("name = \"a\"\n[[vms]]\nrequest = \"m1.small; x=1\"\n", "vms \"vm\", column 11"),
        ("name = \"a\"\nvms = []\n", "has no VMs"),
        (
            "name = \"a\"\n[compactness]\nmode = \"required\"\n[[vms]]\nrequest = \"m1.small\"\n",
            "neither a level nor max_hops",
        ),
        (
            "name = \"a\"\n[compactness]\nlevel = \"rack\"\n[[vms]]\nrequest = \"m1.small\"\n",
            "\"rack\" is not a level",
        ),
        ("name = \"a\"\nnear = {}\n[[vms]]\nrequest = \"m1.small\"\n", "exactly one of node and switch"),
        (
            "name = \"a\"\n[compactness]\nmode = \"required\"\nlevel = \"node\"\n[anti_affinity]\nlevel = \"node\"\n[[vms]]\ncount = 2\nrequest = \"m1.small\"\n",
            "anti-affinity allows 1",
        ),
    ] {
        let error = read(text, Language::Toml, &Catalog::default()).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

proptest! {
    #[test]
    fn instance_types_never_panic(text in "\\PC{0,60}") {
        let _ = alternatives(&text);
    }

    #[test]
    fn likely_instance_types_never_panic(text in "(m1\\.small|xpus|=|>=|<|!=|\\.\\.|;|\\(|\\)| OR |or|,|[0-9]{1,22}|cpu_arch|memory_mb|K| |é){0,16}") {
        if let Err(error) = alternatives(&text) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn extra_specs_never_panic(key in "(gpus|hypervisor|trait:A|label:b|pci_passthrough:alias|\\PC{0,10})", value in "(<or>|<in>|<all-in>|s==|=|==|[0-9]{1,20}| |,|:|[a-z]{1,4}|\\PC){0,8}") {
        let specs = [(key, value)].into();
        if let Ok((expr, _)) = nova::extra_specs(&specs, &Catalog::default()) {
            let _ = lower::alternatives(&expr, &Catalog::default());
        }
    }

    #[test]
    fn files_never_panic(cut in 0..CLUSTER.len(), insert in "[a-z\\[\\]{}=\"0-9 \n-]{0,6}") {
        let text = format!("{}{insert}{}", CLUSTER.get(..cut).unwrap_or(""), CLUSTER.get(cut..).unwrap_or(""));
        let _ = read(&text, Language::Toml, &Catalog::default());
        let _ = read(&text, Language::Yaml, &Catalog::default());
    }
}
