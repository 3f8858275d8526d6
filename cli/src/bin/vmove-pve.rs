//! `vmove-pve`: moves running VMs of Proxmox VE between its nodes.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_cli::pve::main()
}
