//! Why the images of a guest's disks cannot be used by children on other hosts.

use std::io;
use std::path::PathBuf;

use vmove_node::blocking::TaskFailed;
use vmove_node::image_server::ServeError;
use vmove_qmp::cmdline::CommandLineError;

/// Why an image is not reached, or not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// An act on a file or folder.
    #[error("{path} cannot be {act}: {source}")]
    Io {
        /// What was tried.
        act: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// What lies below the image is not a file.
    #[error("{image} lies over {below}")]
    NotOfFiles {
        /// The image.
        image: PathBuf,
        /// What is below it.
        below: String,
    },
    /// The parent's node could not make a proof for this image.
    #[error("{0}")]
    NotProved(String),
    /// The path is not there.
    #[error("{path} is not seen: {source}")]
    NotSeen {
        /// The image.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The second name of the image is not there.
    #[error("{path} is not known to be the same file: {link}: {source}")]
    NotKnown {
        /// The image.
        path: PathBuf,
        /// Its second name.
        link: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Another file has this path.
    #[error("{0} is another file there")]
    OtherFile(PathBuf),
    /// Overlays cannot be made in the folder.
    #[error(
        "no overlays can be made in {folder}{} ({source}): `overlay-dir` in [fork] names another folder",
        if *.direct { " without the page cache, as the disk is" } else { "" }
    )]
    NoOverlays {
        /// The folder.
        folder: PathBuf,
        /// Without the page cache.
        direct: bool,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The images are not shared, and they cannot be served either.
    #[error("{not_shared}; {not_served}")]
    Neither {
        /// Why they are not seen here.
        not_shared: Box<ImageError>,
        /// Why they cannot be served.
        not_served: Box<ImageError>,
    },
    /// What the parent's node says of why it cannot serve them.
    #[error("{0}")]
    NotServed(String),
    /// A QEMU that gives up root cannot connect to the sockets again.
    #[error(
        "served images need a QEMU that stays root, since it connects anew to a socket that only root reaches; found {0}: start the \
         guest without that, or put the images on storage that both nodes see under the same path"
    )]
    NotRoot(String),
    /// The command line of the guest.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// A socket's path would be too long.
    #[error(
        "a socket would have a path of {len} bytes ({path}), {most} are possible: choose a shorter state-dir"
    )]
    LongPath {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
        /// The kernel's limit.
        most: usize,
    },
    /// More disks than a greeting can number.
    #[error("more than 256 disks")]
    TooMany,
    /// No program to serve them.
    #[error(
        "{node} would have to serve them, and {program} is not installed there: install it (package qemu-utils of Debian and Ubuntu, \
         qemu-img of Fedora and RHEL), or put the images on storage that both nodes see under the same path"
    )]
    NoServer {
        /// The parent's node.
        node: String,
        /// The program.
        program: &'static str,
    },
    /// A server failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl ImageError {
    pub(in crate::engine) fn io(act: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { act, path, source }
    }
}
