//! Guests that are forked on one host and to others.

mod again;
mod before_memory;
mod broken_off;
mod by_guest;
mod by_guest_hosts;
mod by_guest_library;
mod disks;
mod disks_hosts;
mod embedded;
mod example;
mod hooks;
mod hosts;
mod huge_pages;
mod joined;
mod locked;
mod one_host;
mod own_disk;
mod restore;
mod space;
mod unreadable;
mod warm;
