//! `vmoved`: the daemon of a node.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    // The daemon starts itself so while it moves the memory of a guest.
    if std::env::args_os().nth(1).is_some_and(|first| first == vmove_memory::STAND_BY) {
        return vmove_memory::stand_by();
    }
    vmove_daemon::server::main()
}
