//! Which crate depends on which.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The crates of the workspace, as cargo tells of them.
#[derive(Debug, Deserialize)]
pub struct Workspace {
    workspace_root: PathBuf,
    packages: Vec<Package>,
    metadata: Metadata,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    /// From the lowest layer to the highest.
    layers: Layers,
}

#[derive(Debug, Deserialize)]
struct Layers {
    order: Vec<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
    targets: Vec<CargoTarget>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// `dev`, `build` or nothing.
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

/// A library or a program, whose root file this is.
#[derive(Debug)]
pub struct Target {
    pub name: String,
    pub root: PathBuf,
}

impl Workspace {
    /// Asks cargo.
    pub fn read(root: &Path) -> Result<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root);
        let output = command.output().context("cargo could not be started")?;
        ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout)
            .context("no layers: [workspace.metadata.layers] in Cargo.toml names every crate in its `order`")
    }

    pub fn root(&self) -> &Path {
        &self.workspace_root
    }

    /// Libraries and programs.
    pub fn targets(&self) -> impl Iterator<Item = Target> {
        let code = |target: &&CargoTarget| target.kind.iter().any(|kind| kind == "lib" || kind == "bin");
        let all = self.packages.iter().flat_map(|package| &package.targets);
        all.filter(code).map(|target| Target { name: target.name.clone(), root: target.src_path.clone() })
    }

    /// Dependencies that do not go down, and crates that are in no layer.
    pub fn wrong_dependencies(&self) -> Vec<String> {
        let layers = self.metadata.layers.order.iter().enumerate();
        let layer: HashMap<&str, usize> =
            layers.flat_map(|(at, names)| names.iter().map(move |name| (name.as_str(), at))).collect();
        let mut found = Vec::new();
        for package in &self.packages {
            let Some(own) = layer.get(package.name.as_str()) else {
                found.push(format!(
                    "{} is in no layer of [workspace.metadata.layers] in Cargo.toml",
                    package.name
                ));
                continue;
            };
            for dependency in package.dependencies.iter().filter(|d| d.name != package.name) {
                let Some(other) = layer.get(dependency.name.as_str()) else { continue };
                if other >= own {
                    let kind = dependency.kind.as_ref().map_or_else(String::new, |kind| format!(" ({kind})"));
                    let relation = if other == own { "beside" } else { "above" };
                    found.push(format!(
                        "{} depends on {}{kind}, which is {relation} it in [workspace.metadata.layers] of Cargo.toml",
                        package.name, dependency.name
                    ));
                }
            }
        }
        for name in layer.keys().filter(|name| self.packages.iter().all(|package| package.name != **name)) {
            found.push(format!(
                "[workspace.metadata.layers] in Cargo.toml names {name}, which is no crate of it"
            ));
        }
        found.sort();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_go_down_and_each_crate_has_a_layer() {
        let package = |name: &str, dependencies: &[(&str, Option<&str>)]| Package {
            name: name.to_owned(),
            dependencies: dependencies
                .iter()
                .map(|(name, kind)| Dependency { name: (*name).to_owned(), kind: kind.map(str::to_owned) })
                .collect(),
            targets: Vec::new(),
        };
        let order = [&["low", "low2"][..], &["high", "gone"]];
        let order = order.iter().map(|names| names.iter().map(|name| (*name).to_owned()).collect()).collect();
        let workspace = Workspace {
            workspace_root: PathBuf::new(),
            packages: vec![
                package("low", &[("high", Some("dev")), ("serde", None), ("low", Some("dev"))]),
                package("low2", &[("low", None)]),
                package("high", &[("low", None)]),
                package("new", &[]),
            ],
            metadata: Metadata { layers: Layers { order } },
        };
        let found = workspace.wrong_dependencies();
        assert_eq!(found.len(), 4, "{found:#?}");
        assert!(found[0].contains("names gone"), "{found:#?}");
        assert!(found[1].starts_with("low depends on high (dev), which is above"), "{found:#?}");
        assert!(found[2].starts_with("low2 depends on low, which is beside"), "{found:#?}");
        assert!(found[3].starts_with("new is in no layer"), "{found:#?}");
    }
}
