//! `vmoved`: the daemon of a node.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_daemon::server::main()
}
