//! The benchmark: the same guest moved by QEMU's own modes and by vmove's, in one run, on one machine.
//!
//! | Module | Owns |
//! |---|---|
//! | [`mover`] | what is compared: a way to move a guest, and what it tells of a move |
//! | [`qemu`] | QEMU's own modes, between two stock processes on loopback TCP |
//! | [`vmove`] | vmove's modes, through its commands |
//! | [`ballast`] | memory that the hypervisor, if there is one, has not taken back |
//! | [`cpu`] | CPU time and memory of the processes that take part |
//! | [`measure`] | one run: boot, measure the full rate, move, measure what was lost |
//! | [`goals`] | the promises, as ratios within one run |
//! | [`spread`] | what several rounds say together |
//! | [`report`], [`svg`] | tables, JSON, pictures |
//! | [`pause`] | `./run bench pause`: how long a guest stands still, by its size |
//! | [`promise`] | `./run bench promise`: what migrations promise beside what was measured |
//! | [`client`] | `./run bench client`: what a client on the network sees of moves |
//! | [`evacuate`] | `./run bench evacuate`: many guests leave a node |
//! | [`visit`] | `./run bench visit`: when a visit pays |
//! | [`fork`] | `./run bench fork`: forks, beside what QEMU alone can do |

pub mod ballast;
pub mod client;
pub mod cpu;
pub mod evacuate;
pub mod fork;
pub mod goals;
pub mod measure;
pub mod mover;
pub mod pause;
pub mod promise;
pub mod qemu;
pub mod report;
pub mod spread;
pub mod svg;
pub mod visit;
pub mod vmove;
