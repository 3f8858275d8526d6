//! The files of `examples` that the bridge reads.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::path::{Path, PathBuf};

use sched_bridge::blueprint;
use sched_bridge::request::{Catalog, cluster};

/// The files of one folder of the examples.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(folder);
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn every_cluster_can_be_read() {
    let files = files("cluster");
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let read = cluster::read(&text, cluster::Language::Yaml, &Catalog::default())
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(read.notes.is_empty(), "{}: {:?}", file.display(), read.notes);
        assert_eq!(
            file.file_stem().unwrap().to_str(),
            Some(read.request.name.as_str()),
            "its name is its file's"
        );
    }
}

#[test]
fn every_blueprint_can_be_taken_apart() {
    let files = files("blueprint");
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let parts = blueprint::read(&text, blueprint::Language::guess(&text))
            .map_err(|error| error.to_string())
            .and_then(|read| {
                blueprint::decompose(&read, &Catalog::default()).map_err(|error| error.to_string())
            })
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(parts.together.len(), 1, "{}", file.display());
    }
}
