//! `vbridged`: keeps leases of virtual clusters and runs move plans.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_bridge::server::main()
}
