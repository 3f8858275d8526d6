//! A fleet as GLUE 2, checked by the schemas themselves: LDIF by slapd with the schema of Debian's glue-schema; XML and JSON by those of OGF's
//! working group, which no package has: `VMOVE_GLUE2_XSD` names the file glue2.xsd, `VMOVE_GLUE2_JSON` the folder of the JSON schemas.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use vmove_skip::{need, skip};
use vmove_tests::bridge::Bridge;
use vmove_tests::sandbox::Sandbox;

use crate::commands::{fleet, ready};

/// Validates its input by the schemas in a folder; exit code 7 without the library.
const BY_JSON_SCHEMA: &str = r#"
import json, pathlib, sys
try:
    import jsonschema
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT4
except ImportError as error:
    print(error)
    sys.exit(7)
schemas = [json.loads(path.read_text()) for path in pathlib.Path(sys.argv[1]).glob("*.json")]
registry = Registry().with_resources((own["id"], Resource(own, DRAFT4)) for own in schemas)
root = next(own for own in schemas if own["id"].endswith("/Glue2.json"))
errors = list(jsonschema.Draft4Validator(root, registry=registry).iter_errors(json.load(open(sys.argv[2]))))
print("\\n".join(f"{list(error.path)}: {error.message}" for error in errors))
sys.exit(bool(errors))
"#;

fn cache() -> PathBuf {
    std::env::var_os("VMOVE_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache"), PathBuf::from)
}

/// slapadd, and the folder that its schemas and libraries are below.
fn slapd() -> Result<(PathBuf, PathBuf)> {
    for root in [cache().join("glue"), PathBuf::from("/")] {
        let program = root.join("usr/sbin/slapadd");
        if program.exists() && root.join("etc/ldap/schema/GLUE20.schema").exists() {
            return Ok((program, root));
        }
    }
    bail!("no slapd with the schema of GLUE 2: `./run setup` unpacks slapd and glue-schema")
}

/// What a bridge says of its fleet.
fn rendered(bridge: &Bridge, format: &str) -> String {
    let command = bridge.command(&[]).expect("vmove");
    let socket = command.get_envs().find(|(name, _)| *name == "VBRIDGE").and_then(|(_, value)| value);
    let mut plain = Command::new(command.get_program());
    plain
        .env("VBRIDGE", socket.expect("a socket"))
        .args(["fleet", "glue2", "--site", "Site 1", "--format", format]);
    let output = plain.stdin(Stdio::null()).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn add_to_slapd(folder: &Path, (program, root): &(PathBuf, PathBuf), ldif: &str) -> Result<Output> {
    let database = folder.join("database");
    let _ = std::fs::remove_dir_all(&database);
    std::fs::create_dir(&database)?;
    let schema = |name: &str| format!("include {}/etc/ldap/schema/{name}.schema\n", root.display());
    let schemas: String = ["core", "cosine", "GLUE20"].map(schema).concat();
    let text = format!("{schemas}database ldif\nsuffix \"o=glue\"\ndirectory {}\n", database.display());
    let (configuration, entries) = (folder.join("slapd.conf"), folder.join("all.ldif"));
    std::fs::write(&configuration, text)?;
    std::fs::write(&entries, format!("dn: o=glue\nobjectClass: organization\no: glue\n\n{ldif}"))?;
    let mut command = Command::new(program);
    if root != Path::new("/") {
        let lib = root.join("usr/lib/x86_64-linux-gnu");
        let old = root.join("lib/x86_64-linux-gnu");
        command.env("LD_LIBRARY_PATH", format!("{}:{}", lib.display(), old.display()));
    }
    command.arg("-f").arg(configuration).arg("-l").arg(entries);
    command.output().context("slapadd does not run")
}

#[test]
fn an_information_system_takes_a_fleet() {
    need!(ready());
    let slapd = need!(slapd());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    bridge.ask(&["place", "--text", "vcpus=1; memory_mb=64; gpus=1", "--cluster", "c"]).expect("leased");
    let ldif = rendered(&bridge, "ldif");
    assert_eq!(ldif.matches("objectClass: GLUE2ExecutionEnvironment").count(), 4, "{ldif}");
    assert_eq!(ldif.matches("UsedInstances: 1").count(), 1, "{ldif}");
    let folder = sandbox.folder("slapd").expect("a folder");
    let added = add_to_slapd(&folder, &slapd, &ldif).expect("slapadd");
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    // It does look at what an entry must have.
    let kept = ldif.lines().filter(|line| !line.contains("ConnectivityIn"));
    let lacks = kept.collect::<Vec<_>>().join("\n") + "\n";
    let refused = add_to_slapd(&folder, &slapd, &lacks).expect("slapadd");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("requires attribute"), "{said}");
}

#[test]
fn the_xml_of_a_fleet_is_that_of_its_schema() {
    let Some(schema) = std::env::var_os("VMOVE_GLUE2_XSD") else {
        return skip!("VMOVE_GLUE2_XSD does not name glue2.xsd of github.com/OGF-GLUE/XSD");
    };
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let folder = sandbox.folder("xml").expect("a folder");
    let check = |text: &str| {
        let file = folder.join("fleet.xml");
        std::fs::write(&file, text).expect("a file");
        Command::new("xmllint").arg("--noout").arg("--schema").arg(&schema).arg(file).output()
    };
    let text = rendered(&bridge, "xml");
    let found = need!(check(&text));
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let wrong = text.replace("<QualityLevel>production<", "<QualityLevel>good<");
    assert!(!check(&wrong).expect("xmllint").status.success(), "it does look at the words");
}

#[test]
fn the_json_of_a_fleet_is_that_of_its_schema() {
    let Some(schemas) = std::env::var_os("VMOVE_GLUE2_JSON") else {
        return skip!("VMOVE_GLUE2_JSON does not name the folder schema of github.com/OGF-GLUE/JSON");
    };
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let folder = sandbox.folder("json").expect("a folder");
    let check = |text: &str| {
        let file = folder.join("fleet.json");
        std::fs::write(&file, text).expect("a file");
        Command::new("python3")
            .args(["-c", BY_JSON_SCHEMA])
            .arg(&schemas)
            .arg(file)
            .output()
            .expect("python3")
    };
    let text = rendered(&bridge, "json");
    let found = check(&text);
    let said = String::from_utf8_lossy(&found.stdout).into_owned();
    if found.status.code() == Some(7) {
        return skip!("Python has no jsonschema: {said}");
    }
    assert!(found.status.success(), "{said}");
    let wrong = text.replace("\"QualityLevel\": \"production\"", "\"QualityLevel\": \"good\"");
    assert!(!check(&wrong).status.success(), "it does look at the words");
}
