//! Virtual hosts with RDMA, on one machine that has none.
//!
//! Each host is a QEMU virtual machine (emulated, no KVM needed) that boots Debian's own kernel and sees this machine's
//! files read-only under a layer of memory. In it runs the kernel's soft RoCE (`rdma_rxe`). The hosts are joined by a
//! user-space [`switch`] that can drop, delay, reorder, cut and slow down frames by [`switch::rules`].
//!
//! | part | what it does |
//! |---|---|
//! | [`supervisor`] | owns the QEMUs and the switch; ends them all when it ends, however it ends |
//! | [`agent`] | runs in a host and executes commands that arrive on a virtio serial port |
//! | [`client`] | asks a supervisor to run something in a host, or to change the switch |
//! | [`mod@bench`] | READs through the fabric beside those of perftest |
//! | [`sides`] | READ by the destination beside WRITE by the source |
//! | [`compare`] | migrations by vmove beside QEMU's own |
//! | [`check`] | self-test: do RDMA reads work between the hosts, and how fast |
//! | [`faults`] | cuts, losses, killed peers and missing devices under a transfer |
//! | [`moves`] | real daemons move guests, also with wrong addresses and keys, ports that are down, and killed daemons |
//! | [`forks`] | the same daemons fork it to other hosts |
//! | [`devices`] | guests that own virtual functions of a card |
//! | [`device_forks`] | the same for forks: each child gets a function of a card |
//! | [`smoke`] | the least of both, for every test run |
//! | [`mod@multicast`] | datagrams from one host to two |
//!
//! What a client asks of the lab is one line of JSON:
//!
//! ```
//! use vmove_lab::switch::rules::Rule;
//! use vmove_lab::wire::Request;
//!
//! let rule = Rule::parse(&["drop=10%".to_owned()]).expect("a rule of the switch");
//! // A tenth of the frames from host 1 to host 2 is lost from now on.
//! let line = serde_json::to_string(&Request::Rule { from: Some(1), to: Some(2), rule }).unwrap();
//! assert!(line.starts_with(r#"{"rule":{"from":1,"to":2"#));
//! ```

pub mod agent;
pub mod bench;
pub mod check;
pub mod client;
pub mod compare;
pub mod device_forks;
pub mod device_moves;
pub mod devices;
pub mod faults;
pub mod forks;
pub mod host;
pub mod moves;
pub mod multicast;
pub mod shell;
pub mod sides;
pub mod smoke;
pub mod supervisor;
pub mod switch;
pub mod wire;
