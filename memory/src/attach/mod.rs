//! System calls run inside another process, and what is built on them.

mod injector;
mod remote_uffd;

pub use injector::Injector;
pub use remote_uffd::{Keep, RemoteUffd, close_in_qemu, create_uffd, discard_in_qemu, reopen_uffd};
