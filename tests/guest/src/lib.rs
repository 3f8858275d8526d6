//! The program that runs inside a guest under test, and what the host needs to understand it.
//!
//! The guest owns a *working set* of pages, which it rewrites at a fixed rate, and *cold* pages, which it only reads.
//! Every 8-byte word of both is known in advance from the page's number, the word's place and the page's version
//! ([`pattern`]). The versions are kept in a table whose entries carry their own check ([`table`]), and the table is
//! itself checked against the order of the visits ([`order`]). So a page that a migration left stale, torn or zeroed is
//! found by the guest at its next visit, with no help from the host.
//!
//! What the guest did is counted in one page, the *beacon* ([`beacon`]), which the host finds in the guest's RAM file by
//! 64 bytes that occur nowhere else.
//!
//! Everything in this library is plain computation, used by the guest's program, by its unit tests and by the host.
//!
//! ```
//! use vmove_guest::pattern::{FILLED, WORDS, fill, visit};
//!
//! let mut page = [0_u64; WORDS];
//! fill(&mut page, 7, FILLED);
//! // A visit checks the page, then rewrites it as the next version.
//! visit(&mut page, 7, FILLED).expect("the page is as it was filled");
//! // The same version again: the page is newer than that, and the visit says so.
//! assert!(visit(&mut page, 7, FILLED).is_err());
//! ```

/// TCP port on which a guest with an address answers clients: each word of eight bytes with the word, and with how many words the connection has sent,
/// as eight bytes in little-endian order.
pub const SERVICE_PORT: u16 = 7777;

pub mod beacon;
pub mod config;
pub mod order;
pub mod pace;
pub mod pattern;
pub mod table;
