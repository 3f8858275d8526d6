//! Switches the machines of a blueprint on and off by Redfish: an adapter of `vmove`, one JSON object in, one out.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    vmove_adapter::redfish::main()
}
