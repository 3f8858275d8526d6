//! What the kernel makes of it: this process's threads, and files on tmpfs.
#![cfg(test)]

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use vmove_skip::need;
use vmove_tuning::policy::{StartsThere, bind_file, unbind_file};
use vmove_tuning::threads;

/// A file on tmpfs, 2 MiB long and without memory.
fn file() -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
    file.set_len(2 << 20).expect("room");
    file
}

/// The policy that a fresh mapping of a file shows in `/proc/self/numa_maps`; none: the kernel knows no NUMA.
fn policy_of(file: &File) -> Option<String> {
    // A child maps the file by its descriptor, and tells what the kernel says of that mapping.
    let script = "import mmap,os,sys\nf=int(sys.argv[1]);m=mmap.mmap(f,0)\nm[0]\nprint([l for l in open('/proc/self/numa_maps') if 'deleted' in l][0].split()[1])";
    // It is inherited, unlike the one that it is made of.
    let fd = rustix::io::dup(file).expect("a descriptor");
    let out = std::process::Command::new("python3")
        .args(["-c", script, &fd.as_raw_fd().to_string()])
        .output()
        .ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    (!text.trim().is_empty()).then(|| text.trim().to_owned())
}

#[test]
fn a_bound_file_says_so_to_whoever_maps_it_until_it_is_unbound() {
    let mut file = file();
    need!(policy_of(&file).ok_or("this kernel has no numa_maps, or python3 is missing"));
    assert_eq!(policy_of(&file).as_deref(), Some("default"));
    bind_file(&file, &[0]).expect("node 0 has memory");
    assert_eq!(policy_of(&file).as_deref(), Some("bind:0"));
    unbind_file(&file).expect("it was bound");
    assert_eq!(policy_of(&file).as_deref(), Some("default"));
    file.write_all(b"still writable").expect("memory");
    bind_file(&file, &[1000]).expect_err("there is no node 1000");
}

#[test]
fn what_a_thread_starts_is_where_it_was_told_and_the_thread_is_back_afterwards() {
    let before = threads::of(None).expect("this thread");
    let one = before.iter().take(1).collect();
    let there = StartsThere::begin(&one, &[0]).expect("its own processor, and node 0");
    let script = "grep Cpus_allowed_list /proc/self/status; grep -m1 heap /proc/self/numa_maps";
    let out = std::process::Command::new("sh").args(["-c", script]).output().expect("a shell");
    drop(there);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.lines().next().is_some_and(|line| line.ends_with(&format!("\t{one}"))), "{text}");
    if let Some(heap) = text.lines().nth(1) {
        assert!(heap.contains("prefer") && heap.contains(":0"), "{text}");
    }
    assert_eq!(threads::of(None).expect("this thread"), before);
    assert!(StartsThere::begin(&"4000".parse().expect("a set"), &[]).is_err(), "there is no processor 4000");
}
