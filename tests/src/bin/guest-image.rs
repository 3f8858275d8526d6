//! Writes the guest's initramfs; called by `./run build`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use vmove_tests::initramfs::{self, Parts};

/// Writes the guest's initramfs.
#[derive(Debug, Parser)]
struct Args {
    /// A statically linked busybox.
    #[arg(long)]
    busybox: PathBuf,
    /// The statically linked guest program.
    #[arg(long)]
    program: PathBuf,
    /// A folder with kernel modules.
    #[arg(long)]
    modules: PathBuf,
    /// Where to write the initramfs.
    #[arg(long)]
    output: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mut modules = std::fs::read_dir(&args.modules)
        .with_context(|| format!("could not list {}", args.modules.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    modules.sort();
    let image = initramfs::build(&Parts { busybox: &args.busybox, program: &args.program, modules })?;
    // Written under another name first: a guest that starts must not see an incomplete image.
    let new = args.output.with_extension("new");
    std::fs::write(&new, image).with_context(|| format!("could not write {}", new.display()))?;
    std::fs::rename(&new, &args.output)
        .with_context(|| format!("could not write {}", args.output.display()))?;
    Ok(())
}
