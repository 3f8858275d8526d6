//! Runs the containers of a blueprint by podman: an adapter of `vmove`, one JSON object in, one out.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_adapter::podman::main()
}
