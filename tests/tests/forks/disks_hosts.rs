//! Guests that write to disks are forked to other hosts: their children find the images by a path that both see, or are served by
//! the parent's node.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::disks::{all_work, drive, lines, node, overlays, qemu_img, task, works};
use vmove_tests::fleet::{Fleet, Setup, SetupDisk, fleet_with, host, plain, qemus, ready, until};
use vmove_tests::forks::{at_once, done, names, vfork};
use vmove_tests::scene::NAME;

const RAW: SetupDisk = SetupDisk { format: "raw", attach: |image| drive(image, "raw", "") };
const DIRECT: SetupDisk = SetupDisk { format: "raw", attach: |image| drive(image, "raw", ",cache=none") };
const QCOW2: SetupDisk = SetupDisk { format: "qcow2", attach: |image| node(image, "qcow2") };

fn tools() -> Result<()> {
    ready()?;
    qemu_img()?;
    std::process::Command::new("qemu-nbd").arg("--version").output()?;
    Ok(())
}

fn setup(disk: SetupDisk, unseen: bool) -> Setup {
    Setup { config: Some(task(1)), disk: Some(disk), unseen, ..Setup::default() }
}

/// Everything below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// What a node has of images that are served, or served to it.
fn served(node: &Node) -> Vec<PathBuf> {
    files(&node.folder().join("state/forks/disks"))
}

/// Servers of images on sockets of a node.
fn servers(node: &Node) -> Vec<i32> {
    let folder = format!("--socket={}/", node.folder().join("state/forks/disks").display());
    let entries = std::fs::read_dir("/proc").expect("it is there").flatten();
    let serves = |e: &std::fs::DirEntry| {
        std::fs::read_to_string(e.path().join("cmdline")).is_ok_and(|line| line.contains(&folder))
    };
    entries.filter(serves).filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Overlays and links beside the images.
fn beside(fleet: &Fleet) -> Vec<PathBuf> {
    let image = fleet.images.join("disk");
    files(&fleet.images).into_iter().filter(|path| *path != image).collect()
}

/// Nothing is served any more, at no node.
fn nothing_is_served(fleet: &Fleet) {
    until("nothing is served any more", || {
        fleet.nodes.iter().all(|node| servers(node).is_empty() && served(node).is_empty())
    });
}

/// All of an answer's children and their parent go on with what they wrote, and see nothing else.
fn family_works(fleet: &Fleet, answer: &serde_json::Value) {
    let family = fleet.family(answer);
    at_once(&family, |node, name| works(node, name).and_then(|()| fleet.parent.sound(node, name).map(drop)))
        .unwrap_or_else(|error| panic!("{error:#}"));
}

/// Children on a host that sees the images, as often as the guest is forked.
fn on_a_shared_path(disk: SetupDisk) {
    let fleet = fleet_with(2, &setup(disk, false), plain);
    let (a, b) = (&fleet.nodes[0], &fleet.nodes[1]);
    works(a, NAME).expect("the guest works on its disk");
    let before = std::fs::metadata(fleet.images.join("disk")).expect("the image");
    for round in 1..=2 {
        let answer =
            done(a, &["create", NAME, "--count", "3", "--here", "1", "--node", "n2"]).expect("children");
        assert_eq!(host(&answer, "n2")["disks"], "shared path", "{answer}");
        assert_eq!(answer["disks"].as_array().map(Vec::len), Some(1), "{answer}");
        family_works(&fleet, &answer);
        for child in names(&answer) {
            assert_eq!(overlays(&fleet.images, &child).len(), 1, "{child}");
        }
        assert_eq!(overlays(&fleet.images, NAME).len(), round);
    }
    // A child is forked where it is, and to its parent's node.
    let child = b.vms().expect("a list").into_iter().next().expect("a child");
    let answer = done(b, &["create", &child, "--count", "1", "--node", "n1"]).expect("a grandchild");
    assert_eq!(host(&answer, "n1")["disks"], "shared path", "{answer}");
    works(a, &names(&answer)[0]).expect("it works on its disk");
    fleet.clean();
    assert!(fleet.nodes.iter().all(|node| servers(node).is_empty() && served(node).is_empty()));
    let frozen = std::fs::metadata(fleet.images.join("disk")).expect("the image");
    use std::os::unix::fs::MetadataExt;
    assert_eq!((frozen.ino(), frozen.nlink()), (before.ino(), 1), "a second name is left");
    for (node, vms) in fleet.nodes.iter().map(|node| (node, node.vms().expect("a list"))) {
        for vm in vms.iter().filter(|vm| *vm != NAME) {
            done(node, &["kill", vm]).expect("it ends");
        }
    }
    // A layer that others read stays: those of the parent, and that of the child that was forked.
    let left = beside(&fleet);
    assert_eq!(left.len(), 3, "{left:?}");
    assert_eq!(overlays(&fleet.images, NAME).len(), 2, "{left:?}");
}

#[test]
fn on_a_shared_path_a_raw_image_without_the_page_cache() {
    need!(tools());
    on_a_shared_path(DIRECT);
}

#[test]
fn on_a_shared_path_a_qcow2_image_given_by_blockdev() {
    need!(tools());
    on_a_shared_path(QCOW2);
}

/// One host sees the images, the other one has another file under the same path: a copy, as large, of some moments ago.
fn where_a_host_has_a_stale_copy(disk: SetupDisk, tls: bool) {
    let fleet = fleet_with(3, &Setup { tls, ..setup(disk, true) }, plain);
    let (a, b) = (&fleet.nodes[0], &fleet.nodes[1]);
    works(a, NAME).expect("the guest works on its disk");
    let unseen = fleet.unseen.as_ref().expect("a mount namespace");
    unseen.put("disk", &fleet.images.join("disk")).expect("a copy");
    works(a, NAME).expect("the guest works on its disk");
    let to = ["--count", "4", "--here", "1", "--node", "n2", "--node", "n3"];
    let answer = done(a, &[&["create", NAME], &to[..]].concat()).expect("children");
    assert_eq!(host(&answer, "n2")["disks"], "nbd", "{answer}");
    let why = host(&answer, "n2")["disks_reason"].as_str().unwrap_or_default();
    assert!(why.contains("not known to be the same file"), "{answer}");
    assert_eq!(host(&answer, "n3")["disks"], "shared path", "{answer}");
    let frozen = std::fs::read(fleet.images.join("disk")).expect("the image");
    family_works(&fleet, &answer);
    assert_eq!(servers(a).len(), 1);
    // Child of a child, there and at the node of the images; the child that they came from is not needed any more.
    let child = b.vms().expect("a list").into_iter().next().expect("a child");
    let there = done(b, &["create", &child, "--count", "1"]).expect("a grandchild");
    let back = done(b, &["create", &child, "--count", "1", "--node", "n1"]).expect("a grandchild");
    assert_eq!(host(&back, "n1")["disks"], "nbd", "{back}");
    assert!(
        host(&back, "n1")["disks_reason"].as_str().is_some_and(|why| why.contains("lies over")),
        "{back}"
    );
    let checked = b.vmove(&["check", &child, "--to", "n3"]).expect("an answer");
    assert!(String::from_utf8_lossy(&checked.stdout).contains("socket"), "{checked:?}");
    let others: Vec<String> =
        b.vms().expect("a list").into_iter().filter(|vm| *vm != names(&there)[0]).collect();
    for vm in others {
        done(b, &["kill", &vm]).expect("it ends");
    }
    all_work(&[(b, &names(&there)[0]), (a, &names(&back)[0])]).expect("they work on their disks");
    // What it was forked from is a layer that stays, although its VM has ended.
    let deeper = done(b, &["create", &names(&there)[0], "--count", "1"]).expect("a child of that");
    works(b, &names(&deeper)[0]).expect("it works on its disk");
    done(b, &["kill", &names(&deeper)[0]]).expect("it ends");
    // The parent's end is none of the export.
    a.ask(&["stop", NAME, "--force"]).expect("it ends");
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(servers(a).len(), 1, "somebody reads still");
    all_work(&[(b, &names(&there)[0]), (a, &names(&back)[0])]).expect("they work on their disks");
    assert!(std::fs::read(fleet.images.join("disk")).expect("the image") == frozen, "the image was written");
    done(b, &["kill", &names(&there)[0]]).expect("it ends");
    done(a, &["kill", &names(&back)[0]]).expect("it ends");
    nothing_is_served(&fleet);
    assert_eq!(qemus(b), 0);
}

#[test]
fn a_stale_copy_of_a_qcow2_image_is_not_taken_for_it() {
    need!(tools());
    where_a_host_has_a_stale_copy(QCOW2, true);
}

#[test]
fn a_stale_copy_of_a_raw_image_is_not_taken_for_it() {
    need!(tools());
    where_a_host_has_a_stale_copy(RAW, false);
}

/// Whichever daemon is killed, and the server of the image: a child waits, and goes on without an error.
#[test]
fn daemons_that_are_killed_only_delay_what_is_read() {
    need!(tools());
    // So much that some of it is not yet in the overlay by then.
    let config = task(60);
    let mut fleet = fleet_with(2, &Setup { config: Some(config), ..setup(QCOW2, true) }, plain);
    let wrote = |fleet: &Fleet, child: &str| lines(&fleet.nodes[1], child).expect("its disk is sound");
    works(&fleet.nodes[0], NAME).expect("the guest works on its disk");
    let answer = done(&fleet.nodes[0], &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    let child = names(&answer)[0].clone();
    fleet.nodes[0].crash();
    // It comes upon a block that it has not yet.
    until("the child waits", || {
        let before = wrote(&fleet, &child);
        std::thread::sleep(Duration::from_secs(2));
        wrote(&fleet, &child) == before
    });
    fleet.nodes[0].run().expect("the daemon starts again");
    let stood = wrote(&fleet, &child);
    until("the child goes on", || wrote(&fleet, &child) > stood + 2);
    // The other side, and the server itself.
    fleet.nodes[1].crash();
    fleet.nodes[1].run().expect("the daemon starts again");
    works(&fleet.nodes[1], &child).expect("it works on its disk");
    let [server] = servers(&fleet.nodes[0])[..] else { panic!("{:?}", servers(&fleet.nodes[0])) };
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL)
        .expect("killed");
    for _ in 0..4 {
        works(&fleet.nodes[1], &child).expect("it works on its disk");
    }
    until("there is a server again", || servers(&fleet.nodes[0]).len() == 1);
    fleet.parent.sound(&fleet.nodes[1], &child).expect("it is sound");
    // What both have taken up from their records ends as well.
    done(&fleet.nodes[0], &["kill", &child]).expect("it ends");
    nothing_is_served(&fleet);
    fleet.clean();
}

/// A host's next life can neither listen for its child nor read the record of it at once: the image stays served.
#[test]
fn what_a_host_cannot_take_up_at_once_is_not_given_up() {
    need!(tools());
    let config = task(60);
    let mut fleet = fleet_with(2, &Setup { config: Some(config), ..setup(QCOW2, true) }, plain);
    works(&fleet.nodes[0], NAME).expect("the guest works on its disk");
    let answer = done(&fleet.nodes[0], &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    let child = names(&answer)[0].clone();
    let find = |name: &str| served(&fleet.nodes[1]).into_iter().find(|path| path.ends_with(name));
    let (socket, record) = (find("0.sock").expect("a socket"), find("record.json").expect("a record"));
    let text = std::fs::read(&record).expect("a record");
    for unreadable in [false, true] {
        fleet.nodes[1].crash();
        if unreadable {
            std::fs::write(&record, &text[..text.len() / 2]).expect("half a record");
        } else {
            std::fs::remove_file(&socket).expect("it is there");
            std::fs::create_dir(&socket).expect("a folder in its place");
        }
        fleet.nodes[1].run().expect("the daemon starts again");
        // The parent's node has asked meanwhile.
        std::thread::sleep(Duration::from_secs(10));
        assert_eq!(servers(&fleet.nodes[0]).len(), 1, "the child reads still");
        if unreadable {
            std::fs::write(&record, &text).expect("the record");
        } else {
            std::fs::remove_dir(&socket).expect("nothing in its place");
        }
        until("it is listened on again", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        works(&fleet.nodes[1], &child).expect("it works on its disk");
    }
    fleet.parent.sound(&fleet.nodes[1], &child).expect("it is sound");
    done(&fleet.nodes[0], &["kill", &child]).expect("it ends");
    nothing_is_served(&fleet);
    fleet.clean();
}

/// The server of the image is killed while a child is made that has begun to read.
#[test]
fn a_server_is_started_again_while_children_are_made() {
    need!(tools());
    let folder = tempfile::tempdir().expect("a folder");
    let (hook, loaded, go) =
        (folder.path().join("hook"), folder.path().join("loaded"), folder.path().join("go"));
    let script = format!(
        "#!/bin/sh\n: >'{}'\nwhile [ ! -e '{}' ]; do sleep 0.1; done\n",
        loaded.display(),
        go.display()
    );
    std::fs::write(&hook, script).expect("a hook");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).expect("a hook");
    let fork =
        |n| if n == 2 { format!("child-start = {:?}\n", hook.display().to_string()) } else { String::new() };
    let fleet = fleet_with(2, &setup(RAW, true), fork);
    let (a, b) = (&fleet.nodes[0], &fleet.nodes[1]);
    works(a, NAME).expect("the guest works on its disk");
    std::thread::scope(|scope| {
        let forked = scope.spawn(|| done(a, &["create", NAME, "--count", "1", "--node", "n2"]));
        until("the child is loaded", || loaded.exists());
        let [server] = servers(a)[..] else { panic!("{:?}", servers(a)) };
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL)
            .expect("killed");
        // It is looked at every 3 s. A hook may take 30 s.
        std::thread::sleep(Duration::from_secs(10));
        let again = servers(a);
        std::fs::write(&go, "").expect("a file");
        let answer = forked.join().expect("no panic").expect("a child");
        assert!(again.len() == 1 && again[0] != server, "{server} before, {again:?} now");
        works(b, &names(&answer)[0]).expect("it works on its disk");
    });
    fleet.clean();
}

/// A `PATH` with everything but the server.
fn without_server(folder: &Path) -> Result<String> {
    std::fs::create_dir_all(folder)?;
    for dir in std::env::var("PATH")?.split(':').rev() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let link = folder.join(entry.file_name());
            let _ = std::fs::remove_file(&link);
            if entry.file_name() != "qemu-nbd" {
                std::os::unix::fs::symlink(entry.path(), link)?;
            }
        }
    }
    Ok(folder.display().to_string())
}

#[test]
fn without_qemu_nbd_a_host_that_does_not_see_the_image_is_refused() {
    need!(tools());
    let bin = tempfile::tempdir().expect("a folder");
    let path = Some(without_server(bin.path()).expect("programs"));
    let fleet = fleet_with(3, &Setup { path, ..setup(RAW, true) }, plain);
    let (a, b) = (&fleet.nodes[0], &fleet.nodes[1]);
    works(a, NAME).expect("the guest works on its disk");
    let end = vfork(a, &["create", NAME, "--count", "1", "--node", "n2"]).expect("an answer");
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    for word in ["n2", "qemu-nbd is not installed", "qemu-utils", "same path"] {
        assert!(end.said.contains(word), "{word}: {}", end.said);
    }
    // Nothing was done to the guest.
    assert_eq!((beside(&fleet), qemus(b)), (Vec::new(), 0));
    works(a, NAME).expect("the guest works on its disk");
    // Where the image is seen, nothing has to be served.
    let end = vfork(a, &["create", NAME, "--count", "2", "--node", "n2", "--node", "n3"]).expect("an answer");
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert!(
        host(&end.answer, "n2")["error"].as_str().is_some_and(|e| e.contains("qemu-nbd")),
        "{}",
        end.answer
    );
    assert_eq!(host(&end.answer, "n3")["disks"], "shared path", "{}", end.answer);
    family_works(&fleet, &end.answer);
    fleet.clean();
}

/// Children that never come to be leave nothing served.
#[test]
fn a_fork_that_fails_leaves_nothing_served() {
    need!(tools());
    let hook = tempfile::tempdir().expect("a folder");
    let hook = hook.path().join("gone");
    let fork =
        |n| if n == 2 { format!("child-start = {:?}\n", hook.display().to_string()) } else { String::new() };
    let fleet = fleet_with(2, &setup(QCOW2, true), fork);
    let a = &fleet.nodes[0];
    works(a, NAME).expect("the guest works on its disk");
    let end = vfork(a, &["create", NAME, "--count", "2", "--node", "n2"]).expect("an answer");
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    nothing_is_served(&fleet);
    assert_eq!(qemus(&fleet.nodes[1]), 0);
    works(a, NAME).expect("the guest works on its disk");
    fleet.clean();
}
