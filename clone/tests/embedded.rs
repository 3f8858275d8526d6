//! A node inside a program: what it refuses, and what it does with a QEMU that runs already.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod mounts;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use vmove_clone::embed::{EmbedError, Node};
use vmove_clone::engine::ForkPolicy;
use vmove_memory::MemoryDir;
use vmove_node::embed::GroundError;
use vmove_types::Backing;
use vmove_types::fork::ForkRequest;

use mounts::Mounts;

/// A folder for nodes.
struct Folder {
    /// First: what is mounted in the folder goes before it.
    _mounts: Mounts,
    folder: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { _mounts: Mounts(folder.path().to_owned()), folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    async fn node(&self) -> Result<Node, EmbedError> {
        Node::builder("a", self.path().join("state"), self.path().join("run")).start().await
    }
}

#[tokio::test]
async fn children_on_other_hosts_are_refused_with_what_to_use_instead() {
    vmove_skip::need!(vmove_skip::root());
    let folder = Folder::new();
    let node = folder.node().await.unwrap();
    let nodes = vec!["a".to_owned(), "b:7420".to_owned()];
    let refused =
        node.fork(ForkRequest { vm: Some("web".to_owned()), count: 2, nodes, ..ForkRequest::default() });
    let error = refused.await.unwrap_err();
    assert!(matches!(&error, EmbedError::OtherHosts { nodes } if *nodes == ["b:7420"]), "{error}");
    assert!(error.to_string().contains("vfork create"), "{error}");
    let policy =
        ForkPolicy { from_guest_to: vec!["self".to_owned(), "b".to_owned()], ..ForkPolicy::default() };
    let other = Node::builder("a", folder.path().join("state-2"), folder.path().join("run-2"));
    let error = other.policy(policy).start().await.unwrap_err();
    assert!(matches!(&error, EmbedError::OtherHosts { nodes } if *nodes == ["b"]), "{error}");
    assert!(!folder.path().join("state-2").exists(), "nothing was made");
}

#[tokio::test]
async fn folders_that_another_node_uses_or_that_have_migrations_are_refused() {
    vmove_skip::need!(vmove_skip::root());
    let folder = Folder::new();
    let node = folder.node().await.unwrap();
    let error = folder.node().await.unwrap_err();
    assert!(matches!(error, EmbedError::Ground(GroundError::Taken(_))), "{error}");
    node.close().await;
    // As a node with migrations has one for each.
    let session = folder.path().join("state/sessions/1");
    std::fs::create_dir_all(&session).unwrap();
    let error = folder.node().await.unwrap_err();
    assert!(matches!(error, EmbedError::Migrations { .. }), "{error}");
    std::fs::remove_dir(session).unwrap();
    folder.node().await.unwrap().close().await;
}

/// A QEMU whose RAM is a shared file, without a guest that does anything.
struct Qemu(Child);

impl Qemu {
    fn start(program: &str, folder: &Path) -> (Self, PathBuf) {
        let qmp = folder.join("own.sock");
        let line = format!(
            "-nodefaults -no-user-config -display none -machine pc,memory-backend=ram -accel tcg -m 16M \
             -object memory-backend-file,id=ram,share=on,size=16M,mem-path={}/ram -qmp unix:{},server=on,wait=off",
            folder.display(),
            qmp.display()
        );
        let process = Command::new(program).args(line.split_whitespace()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !qmp.exists() {
            assert!(Instant::now() < deadline, "QEMU opens no monitor");
            std::thread::sleep(Duration::from_millis(10));
        }
        (Self(process), qmp)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_qemu_whose_memory_is_elsewhere_is_refused_a_fork_with_where_it_must_be() {
    let program = vmove_skip::need!(vmove_skip::qemu());
    let folder = Folder::new();
    let elsewhere = folder.path().join("elsewhere");
    MemoryDir::prepare(&elsewhere, Backing::Thp).unwrap();
    let (mut qemu, qmp) = Qemu::start(&program, &elsewhere);
    let node = folder.node().await.unwrap();
    node.adopt("web", qmp).await.unwrap();
    let of_web = ForkRequest { vm: Some("web".to_owned()), count: 1, ..ForkRequest::default() };
    let error = node.fork(of_web).await.unwrap_err().to_string();
    for words in ["run/memory/thp", "elsewhere/ram", "mem-path="] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    assert!(qemu.0.try_wait().unwrap().is_none(), "it runs on");
    assert_eq!(node.vms().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_qemu_that_runs_is_taken_in_and_forked_and_the_next_node_knows_all_of_it() {
    let program = vmove_skip::need!(vmove_skip::qemu());
    let folder = Folder::new();
    // Its RAM must be where the node has that of its own VMs: a template of it is a second name of the file.
    let memory = folder.path().join("run/memory/thp");
    MemoryDir::prepare(&memory, Backing::Thp).unwrap();
    let (qemu, qmp) = Qemu::start(&program, &memory);
    let node = folder.node().await.unwrap();
    let adopted = node.adopt("web", qmp).await.unwrap();
    assert_eq!(adopted.summary.pid.unsigned_abs(), qemu.0.id());
    let of_web = ForkRequest { vm: Some("web".to_owned()), count: 2, verify: true, ..ForkRequest::default() };
    let report = node.fork(of_web).await.unwrap();
    assert!(report.children.iter().all(|child| child.verified == Some(true)), "{report:?}");
    node.close().await;
    let next = folder.node().await.unwrap();
    let vms = next.vms().await;
    let names: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["web", "web.1", "web.2"]);
    for vm in ["web.1", "web.2"] {
        next.stop(vm, true).await.unwrap();
    }
    assert_eq!(next.vms().await.len(), 1);
}
