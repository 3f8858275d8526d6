//! Runs the containers and bare-metal environments of a blueprint as jobs of Slurm: an adapter of `vbridged`, one JSON object in, one
//! out.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_bridge::slurm_adapter::main()
}
