//! Migrations between two daemons, and the kinds of guests that can move. Run these tests one after the other: parallel tests would
//! distort some of the figures.

mod auto;
mod balloon;
mod blockers;
mod client;
mod confined;
mod demo;
mod direct_io;
mod disk_figures;
mod disk_latency;
mod disks;
mod doctor;
mod embedded;
mod events;
mod goals;
mod going_home;
mod guest;
mod history;
mod io_threads;
mod locked;
mod modes;
mod monitoring;
mod move_disk;
mod newer_qemu;
mod old_kernel;
mod pinned;
mod remote;
mod reports;
mod setup_tls;
mod slow_link;
mod slurm;
mod terminal;
mod traces;
mod tutorial;
mod visits;
mod watching;
