//! Makes the networks of a blueprint: an adapter of `vmove`, one JSON object in, one out.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_adapter::network::main()
}
