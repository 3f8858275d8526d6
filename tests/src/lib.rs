//! What the end-to-end tests, the benchmark and the demo share: guests, daemons, measurements, and guards that clean up.

pub mod initramfs;
