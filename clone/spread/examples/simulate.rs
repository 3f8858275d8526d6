//! The model on the command line: `cargo run --release -p vmove-spread --example simulate -- --help`.

use std::process::ExitCode;

use clap::Parser;
use vmove_spread::simulate::SimulateArguments;

/// Models how memory gets from one host to many.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    simulate: SimulateArguments,
}

fn main() -> ExitCode {
    match Arguments::parse().simulate.run() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("simulate: {error}");
            ExitCode::FAILURE
        }
    }
}
