//! A node inside a program: VMs are started or taken in, and forked on this host, without a daemon.
//!
//! It does what `vmoved` does with the same journals: a program that is killed takes its forks up when it builds the node over the same folders
//! again. It has no REST, no peers, no migrations and no passed-through devices; for children on other hosts, see
//! [`EmbedError::OtherHosts`]. Needs root, or the rights that `docs/operations.md` names for `vmoved`.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use vmove_clone::embed::Node;
//! use vmove_types::fork::{ForkRequest, TemplateRequest};
//!
//! let node = Node::builder("a", "/var/lib/mine", "/run/mine").start().await?;
//! node.run("web", ["qemu-system-x86_64", "-m", "1024", "-nodefaults", "-display", "none"]).await?;
//! let fork = ForkRequest { vm: Some("web".to_owned()), count: 8, ..ForkRequest::default() };
//! let report = node.fork(fork).await?;
//! println!("the guest stood still for {:.1} ms", report.parent_pause_ms);
//! for child in &report.children {
//!     println!("{} is process {}", child.name, child.pid);
//! }
//! let (vm, name) = ("web".to_owned(), "warm".to_owned());
//! node.save_template(TemplateRequest { vm, name, ..TemplateRequest::default() }).await?;
//! node.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! | Module | Owns |
//! |---|---|
//! | `builder` | what a node is made of, and what an earlier one over the same folders left |
//! | `node` | the node, and what it can be asked |
//! | `error` | why something did not come about |
//! | `alone` | connections to other nodes, of which there are none |

mod alone;
mod builder;
mod error;
mod node;

pub use builder::Builder;
pub use error::EmbedError;
pub use node::Node;
/// For [`Builder::standby`].
pub use vmove_memory::{STAND_BY, stand_by};
