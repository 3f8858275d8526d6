//! The command line with which a VM would be started at the destination.

use std::ffi::OsString;

use vmove_qmp::cmdline::{CommandLine, CommandLineError, DestinationCommand, RunLayout};

use crate::node::Node;
use crate::proto::message::Prepare;

/// The command line of the QEMU that would take this VM here, and where its files would be.
pub(crate) fn derive_command(
    node: &Node,
    prepare: &Prepare,
) -> Result<(RunLayout, DestinationCommand), CommandLineError> {
    let layout = node.layout(&prepare.vm, prepare.backing);
    let argv = prepare.command_line.iter().map(OsString::from).collect();
    let mut line = CommandLine::parse(argv)?;
    // An alias such as `q35` is another machine in another QEMU.
    line.pin_machine(&prepare.machine)?;
    let command = line.derive_destination(&layout)?;
    Ok((layout, command))
}
