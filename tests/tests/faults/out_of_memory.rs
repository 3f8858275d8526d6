//! A VM that the kernel kills for lack of memory: it is listed so, and others are not.
#![cfg(test)]

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmove_skip::need;
use vmove_tests::control_groups::Group;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::ready;

use crate::waits::until;

const PAGE: usize = 4096;
/// Less than the guest's memory by far.
const BOUND: u64 = 4 << 20;

/// Runs a QEMU without a guest, and gives its process.
pub(crate) fn run(node: &Node, name: &str) -> i32 {
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    let line = ["run", "--name", name, "--", &qemu];
    let options = ["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-m", "96"];
    node.ask(&[&line[..], &options].concat()).expect("it starts");
    node.vm(name).expect("it is there").pid
}

/// As if the guest wrote to all of its memory: the pages are taken by its QEMU, until that is killed.
fn fill(node: &Node, vm: &str, pid: i32) -> Result<()> {
    let ram = node.vm(vm)?.ram_files().remove(0);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let line = maps.lines().find(|line| line.contains(&*ram.to_string_lossy())).context("its memory")?;
    let (begin, end) = line.split(' ').next().and_then(|range| range.split_once('-')).context("a range")?;
    let (begin, end) = (u64::from_str_radix(begin, 16)?, u64::from_str_radix(end, 16)?);
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem"))?;
    // At the end is what the firmware uses.
    for at in (begin + (8 << 20)..end - (8 << 20)).step_by(PAGE) {
        if memory.write_at(b"full", at).is_err() {
            break;
        }
    }
    Ok(())
}

/// What the list says of a VM that has ended.
fn why(node: &Node, vm: &str) -> Result<Value> {
    let list = node.ask(&["list"])?;
    let vms = list["vms"].as_array().context("VMs")?;
    Ok(vms.iter().find(|one| one["name"] == vm).with_context(|| format!("no {vm} in {list}"))?["why"].clone())
}

#[test]
fn a_vm_that_the_kernel_kills_for_lack_of_memory_is_listed_so() {
    need!(ready());
    let group = need!(Group::with_memory("vmove-oom", BOUND));
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let (victim, other, killed) = (run(&node, "victim"), run(&node, "other"), run(&node, "killed"));
    group.set("cgroup.procs", &victim.to_string()).expect("it enters the group");
    fill(&node, "victim", victim).expect("its memory is written");
    kill(Pid::from_raw(killed), Signal::SIGKILL).expect("it is killed");
    for vm in ["victim", "killed"] {
        until("it has ended", || Ok(node.vm(vm)?.status == "ended")).expect("in time");
    }
    assert_eq!(why(&node, "victim").expect("a list"), "killed by the kernel for lack of memory");
    assert_eq!(why(&node, "killed").expect("a list"), Value::Null, "by somebody else");
    assert_eq!(node.vm("other").expect("it is there").pid, other);
    drop(node);
    drop(sandbox);
}
