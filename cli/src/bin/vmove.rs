//! `vmove`: moves running QEMU guests between nodes.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_cli::vmove::main()
}
