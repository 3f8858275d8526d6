//! Servers that tests start: etcd and a Slurm cluster, from Debian's packages. `./run setup` unpacks them below `.cache`.
//!
//! A server is killed when its value is dropped, and when the test that started it is killed.
//!
//! ```
//! match test_servers::EtcdServer::start() {
//!     Ok(etcd) => assert!(etcd.url().starts_with("http://127.0.0.1:")),
//!     // In a test: `vmove_skip::need!(EtcdServer::start())`.
//!     Err(missing) => println!("{missing}"),
//! }
//! ```
#![forbid(unsafe_code)]

mod etcd;
mod packages;
mod ports;
mod python;
mod slurm;

pub use etcd::EtcdServer;
pub use packages::{Missing, killed_with_this_thread};
pub use ports::Ports;
pub use python::python_clients;
pub use slurm::{SlurmCluster, SlurmFailed};
