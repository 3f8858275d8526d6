//! `./run lint`: what neither the compiler nor clippy checks of how the source is built up.
//!
//! - Inside a crate no two modules know of each other, in a circle of any length, but parent and child. A module includes its children:
//!   `a::x` that uses `b` and `b::y` that uses `a` are a cycle of `a` and `b`.
//! - A crate depends on crates below it only, in the order of `[workspace.metadata.layers]` in `Cargo.toml`.
//! - No file is longer than [`lengths::LONGEST`] lines.
//! - Tests that `docs/protocol.md` names are there.
//!
//! Code under `#[cfg(test)]` is left out of the first.

mod crates;
mod cycles;
mod lengths;
mod modules;
mod named_tests;
mod references;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

fn main() -> ExitCode {
    match check() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(found) => {
            eprintln!("error: {found} found in how the source is built up");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints what is wrong; tells how much.
fn check() -> Result<usize> {
    let root = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("."), PathBuf::from);
    let workspace = crates::Workspace::read(&root)?;
    let mut found = workspace.wrong_dependencies();
    let files = lengths::written(workspace.root())?;
    found.extend(lengths::too_long(workspace.root(), &files)?);
    let sources = files.iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    found.extend(named_tests::missing(workspace.root(), sources.map(PathBuf::as_path))?);
    for target in workspace.targets() {
        let tree = modules::Tree::read(&target.root)?;
        let edges = references::all(&tree);
        found.extend(cycles::find(&edges).iter().map(|cycle| cycle.tell(&target.name, workspace.root())));
    }
    found.iter().for_each(|text| println!("{text}\n"));
    Ok(found.len())
}
