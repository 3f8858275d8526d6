//! Headers of disk images.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use vmove_clone::fuzzing;
use vmove_node::qcow2::Empty;

use super::Target;

pub const IMAGE_HEADERS: Target = Target {
    name: "image-headers",
    what: "the first bytes of a disk image: what it lies over",
    feed: fuzzing::image,
    seeds,
    words: &[],
    mutations: 900_000,
};

/// Bytes of an image that say something.
const HEAD: usize = 512;

fn seeds() -> Vec<Vec<u8>> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("vmove-fuzz-{}-{number}", std::process::id()));
    let image = |backing: &str, format| {
        Empty::over(1 << 30, Path::new(backing), format)
            .create(&path)
            .expect("a file in the temporary folder");
        let mut bytes = std::fs::read(&path).expect("it was written");
        let _ = std::fs::remove_file(&path);
        bytes.truncate(HEAD);
        bytes
    };
    vec![image("/vm/base.img", "raw"), image("json:{\"driver\":\"nbd\"}", "qcow2")]
}
