//! `virsh migrate` carried by vmove, between two real libvirt daemons in namespaces of their own.
#![cfg(test)]

mod blows;
mod disks;
mod huge_pages;
mod moves;
mod refused;
mod steps;
mod twice;
