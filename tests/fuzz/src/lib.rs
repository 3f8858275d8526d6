//! Feeds everything that reads what others wrote with damaged input: frames, messages, QMP, command lines, images, topologies.
//!
//! [`targets`] has a table of what is fed and how. An input is right if it is read or refused: a panic, more memory than
//! [`allocation::MOST`], or more time than [`engine::LONGEST`] is a failure, and so is a result that contradicts itself.
//!
//! The [`engine`] begins with valid input, as the real encoders write it ([`targets::Target::seeds`]), and with the files of
//! `tests/fuzz/corpus/TARGET/`, among which is each input that once failed. Then it feeds [mutations](mutate) of them, which a seed
//! decides: about a second for each target in the tests of this crate, for minutes in the program `fuzz` (`./run fuzz`).
//!
//! ```
//! use vmove_fuzz::{engine, targets};
//!
//! let greeting = targets::find("greeting").expect("there is such a target");
//! engine::feed(greeting, b"VMOVE\r\n\0 and then nothing that makes sense").expect("it is refused, without a panic");
//! ```

pub mod allocation;
pub mod corpus;
pub mod engine;
pub mod mutate;
pub mod random;
pub mod targets;
#[cfg(test)]
mod tests;
