//! `vfork`: forks running QEMU guests.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_cli::vfork::main()
}
