//! QEMU command lines: parsed without loss, rewritten so that the guest can be moved, derived for a destination.
//!
//! A command line is kept as its owner wrote it, with the placeholders `{vmdir}` and `{name}`. Each node makes its own
//! from that: [`CommandLine::rewrite_movable`] where the guest starts, [`CommandLine::derive_destination`] where it goes.

mod adopt;
mod destination;
mod fork;
mod host_device;
mod image;
mod layout;
mod movable;
mod moved_image;
mod obstacle;
mod opened;
mod options;
mod policy;
mod port;
mod ram;
mod rights;
mod size;
mod table;
#[cfg(test)]
mod tests;
mod wanted;

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

pub use destination::DestinationCommand;
pub use fork::{ChildIdentity, Nic};
pub use host_device::HostDevice;
pub use image::{Image, Overlay};
pub use layout::{RamFileSpec, RunLayout};
pub use moved_image::NewImage;
pub use obstacle::Obstacle;
pub use opened::{Opened, Tap};
pub use policy::Forbidden;
pub use ram::{RamBackend, RamKind, RamUse};
pub use rights::with_devices;
pub use wanted::Wanted;

use options::Options;

/// What can go wrong with a command line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandLineError {
    /// Nothing there.
    #[error(
        "Expected a QEMU command line, found nothing: give the program first, such as qemu-system-x86_64"
    )]
    Empty,
    /// The last option lacks its argument.
    #[error("Option {option} needs an argument, found the end of the command line")]
    NoArgument {
        /// As written.
        option: String,
    },
    /// An option that vmove must understand is not readable.
    #[error("Could not read {option} {value:?}: {expected}")]
    Unreadable {
        /// As written.
        option: String,
        /// As written.
        value: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// The guest could not be moved. All reasons at once.
    #[error("A guest with this command line cannot be moved:{}", obstacle::list(.0))]
    NotMovable(Vec<Obstacle>),
    /// A path does not fit.
    #[error("The socket path {path} has {length} bytes, the maximum is 107: use a shorter directory")]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// The command line of a running QEMU could not be read.
    #[error("Could not read the command line of process {pid} from {path}")]
    Proc {
        /// Its process id.
        pid: u32,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
}

/// A QEMU command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    program: OsString,
    items: Vec<Item>,
}

/// One option with its argument, or a bare operand (a disk image).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Item {
    /// As written, with its one or two dashes; empty for an operand.
    flag: OsString,
    /// `None` for an option without an argument.
    value: Option<OsString>,
}

impl Item {
    fn new(flag: &str, value: impl Into<OsString>) -> Self {
        Self { flag: flag.into(), value: Some(value.into()) }
    }

    fn bare(flag: &str) -> Self {
        Self { flag: flag.into(), value: None }
    }

    /// The option's name without dashes and in its main spelling; empty for an operand.
    fn name(&self) -> &str {
        table::canonical(self.flag.to_str().unwrap_or_default().trim_start_matches('-'))
    }

    fn value(&self) -> &OsStr {
        self.value.as_deref().unwrap_or_default()
    }

    /// The argument as text.
    fn text(&self) -> Result<&str, CommandLineError> {
        self.value().to_str().ok_or_else(|| self.unreadable("UTF-8 is expected here"))
    }

    fn options(&self) -> Result<Options, CommandLineError> {
        Options::parse(self.text()?).ok_or_else(|| self.unreadable("it begins like JSON, but is none"))
    }

    fn set_options(&mut self, options: &Options) {
        self.value = Some(options.to_string().into());
    }

    fn unreadable(&self, expected: &'static str) -> CommandLineError {
        CommandLineError::Unreadable {
            option: self.flag.to_string_lossy().into_owned(),
            value: self.value().to_string_lossy().into_owned(),
            expected,
        }
    }
}

impl CommandLine {
    /// Parses an argument vector, the program first.
    ///
    /// # Errors
    /// [`CommandLineError::Empty`], [`CommandLineError::NoArgument`].
    pub fn parse(argv: Vec<OsString>) -> Result<Self, CommandLineError> {
        let mut argv = argv.into_iter();
        let program = argv.next().filter(|program| !program.is_empty()).ok_or(CommandLineError::Empty)?;
        let mut items = Vec::new();
        while let Some(word) = argv.next() {
            let is_option = word.as_encoded_bytes().first() == Some(&b'-') && word.len() > 1;
            if !is_option {
                items.push(Item { flag: OsString::new(), value: Some(word) });
                continue;
            }
            let name = word.to_str().unwrap_or_default().trim_start_matches('-');
            let value = if table::takes_argument(name) {
                let option = || word.to_string_lossy().into_owned();
                Some(argv.next().ok_or_else(|| CommandLineError::NoArgument { option: option() })?)
            } else {
                None
            };
            items.push(Item { flag: word, value });
        }
        Ok(Self { program, items })
    }

    /// The argument vector, the program first; of an unchanged command line exactly what was parsed.
    #[must_use]
    pub fn to_argv(&self) -> Vec<OsString> {
        let mut argv = vec![self.program.clone()];
        for item in &self.items {
            argv.extend([Some(&item.flag), item.value.as_ref()].into_iter().flatten().cloned());
            if item.flag.is_empty() {
                // An operand has no flag.
                let last = argv.pop();
                argv.pop();
                argv.extend(last);
            }
        }
        argv
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// Pins the machine type, such as `pc-q35-7.2` for `q35`: an alias is another machine in another QEMU.
    /// [`crate::inspect::VmFacts::machine`] tells what a running QEMU has.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn pin_machine(&mut self, machine: &str) -> Result<(), CommandLineError> {
        let mut given = false;
        for item in self.items.iter_mut().filter(|item| item.name() == "machine") {
            let mut options = item.options()?;
            if options.get("type", true).is_some() {
                options.set_kind("type", machine);
                item.set_options(&options);
                given = true;
            }
        }
        if !given {
            self.items.push(Item::new("-machine", machine));
        }
        Ok(())
    }

    /// The guest's name (`-name`), if it is given.
    #[must_use]
    pub fn guest_name(&self) -> Option<String> {
        self.named("name").find_map(|item| item.options().ok()?.get("guest", true))
    }

    /// A value of `-machine`, whichever of several gives it last.
    fn machine_option(&self, key: &str) -> Option<String> {
        let given = self.named("machine").filter_map(|item| item.options().ok()?.get(key, key == "type"));
        given.last()
    }

    /// A value of option `name` by its key, which may stand first without its name; the last one counts.
    pub(crate) fn option_value(&self, name: &str, first_key: &str) -> Option<String> {
        self.named(name).filter_map(|item| item.options().ok()?.get(first_key, true)).last()
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Item> {
        self.items.iter().filter(move |item| item.name() == name)
    }
}
