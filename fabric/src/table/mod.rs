//! Which memory is registered, under which keys, and a way to end every use of it.
//!
//! A key names a slot of the table (its low bits) and proves knowledge (its random bits), so a look-up is one
//! index and one comparison. Whoever touches registered memory does so inside a [`Section`]; deregistration
//! clears the key and then waits until every section that might have seen it has ended:
//!
//! ```text
//! user:        busy = odd (release);  fence;  read key, use memory;  busy = even (release)
//! deregister:  key = 0;               fence;  wait until each busy is even or has changed (acquire)
//! ```
//!
//! The two fences (both `SeqCst`) make it impossible that the user misses the cleared key *and* the deregistering thread
//! misses the odd number. The releases make what was done in a section happen before what follows the wait, whichever
//! later number the wait reads: also the odd one of a section that began since.
//!
//! The table can lie in shared memory: then users in other processes look into it ([`PeerTable`]) while their own table
//! holds their busy numbers. Such a user also asks, inside its section, whether the connection is still open (the seat's
//! token), and deregistration waits for it through its table ([`PeerUser`]). Closing a connection follows the same scheme,
//! with the token in place of the key.
//!
//! `loom_tests` runs this code, not a model of it, in every order that loom knows. What that shows and what it cannot
//! show stands there.

#[cfg(test)]
#[cfg(not(loom))]
mod bounds_tests;
mod layout;
mod regions;
mod section;
mod sync;
mod watch;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;

#[cfg(feature = "verbs")]
pub(crate) use layout::SLOTS;
pub(crate) use layout::{Need, PARTICIPANTS, PeerTable};
pub(crate) use regions::RegionTable;
#[cfg(feature = "verbs")]
pub(crate) use regions::{Entry, slot};
pub(crate) use section::{Participant, Section};
pub(crate) use watch::{PeerUser, PeerWatch};
