//! Guests that fork themselves with what vmove gives them for that: a program for shell scripts, a library for C, one for Python.
#![cfg(test)]

use std::time::Duration;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::forks::Parent;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready};
use vmove_tests::typist::{self, Done, EXAMPLES, Typist, With};

/// For a line that forks, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

struct Stage {
    node: Node,
    parent: Parent,
    typist: Typist,
    _sandbox: Sandbox,
}

fn stage(with: With) -> Stage {
    let sandbox = Sandbox::new().expect("a sandbox");
    let config = "[fork]\nfrom-guest = true\nmax-children = 6\n".to_owned();
    let node =
        Node::start(&sandbox, "a", NodeOptions { config, ..NodeOptions::default() }).expect("a daemon");
    let guest = typist::guest(sandbox.path(), 500, with).expect("its programs");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let typist = Typist::at(&node, NAME).expect("a keyboard");
    Stage { node, parent, typist, _sandbox: sandbox }
}

impl Stage {
    fn typed(&mut self, line: &str) -> Done {
        let done = self.typist.line(line, TIMEOUT);
        done.unwrap_or_else(|error| panic!("{line}: {error:#}; {}", self.node.log()))
    }

    /// What a line prints that must succeed.
    fn printed(&mut self, line: &str) -> String {
        let done = self.typed(line);
        assert_eq!(done.code, 0, "{line}: {}", done.printed);
        done.printed
    }

    fn fails(&mut self, line: &str, code: i32, words: &str) {
        let done = self.typed(line);
        assert!(done.code == code && done.printed.contains(words), "{line}: {done:?}");
    }

    /// All children have ended, and the parent is as it was.
    fn sound(&self) {
        assert_eq!(self.node.vms().expect("a list"), [NAME]);
        self.parent.sound(&self.node, NAME).expect("the parent is sound");
    }
}

#[test]
fn a_shell_script_forks_its_machine() {
    need!(ready());
    let mut stage = stage(With::Nothing);
    assert!(stage.printed(&format!("{EXAMPLES}/primes.sh 4 5000")).contains("669 prime numbers below 5000"));

    // Output in order, the largest exit code, and both as JSON.
    let own = r#"sh -c 'echo I am $VMOVE_FORK_INDEX of $VMOVE_FORK_SIZE; exit $((VMOVE_FORK_INDEX % 3))'"#;
    let done = stage.typed(&format!("vmove-fork run --count 3 -- {own}"));
    assert_eq!(done.code, 2, "{}", done.printed);
    let at = |words: &str| done.printed.find(words).unwrap_or_else(|| panic!("no {words}: {}", done.printed));
    assert!(at("I am 1 of 3") < at("I am 2 of 3") && at("I am 2 of 3") < at("I am 3 of 3"), "{done:?}");
    at("child 2 ended with exit code 2");
    let done = stage.typed("vmove-fork run --count 2 --json -- sh -c 'seq 20000'");
    let line = done.printed.lines().find(|line| line.starts_with('{')).expect("a line of JSON");
    let answer: Value = serde_json::from_str(line).expect("it is JSON");
    for child in answer["children"].as_array().expect("children") {
        let text = child["stdout"].as_str().expect("a text");
        assert!(child["truncated"] == true && text.len() > 50_000 && text.starts_with("1\n2\n"), "{child}");
    }
    assert_eq!(done.code, 0);

    // Step by step. One child is killed when the others have ended.
    let steps = "eval $(vmove-fork fork 3); \
                 if [ $VMOVE_FORK_ROLE = child ]; then \
                 [ $VMOVE_FORK_INDEX = 2 ] && sleep 1000; vmove-fork exit --result \"from $VMOVE_FORK_INDEX\"; fi; \
                 echo $VMOVE_FORK_TICKET >/ticket";
    stage.printed(steps);
    until("two children have ended", || stage.node.vms().is_ok_and(|vms| vms.len() == 2));
    let done = stage.typed("vmove-fork kill $(cat /ticket); vmove-fork join $(cat /ticket)");
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.printed.contains("1\tfrom 1\n2\tlost: killed\n3\tfrom 3\n"), "{done:?}");
    // A ticket is joined when children of a later one have long begun: none of them is taken for one of the first.
    let fork = |child: &str, file: &str| {
        format!(
            "eval $(vmove-fork fork 2); if [ $VMOVE_FORK_ROLE = child ]; then {child}; fi; echo $VMOVE_FORK_TICKET >{file}"
        )
    };
    stage.printed(&fork("vmove-fork exit --result first", "/first"));
    until("both children have ended", || stage.node.vms().is_ok_and(|vms| vms == [NAME]));
    stage.printed(&fork("sleep 1000", "/second"));
    let done = stage.printed("vmove-fork join $(cat /first)");
    assert!(done.contains("1\tfirst\n2\tfirst\n"), "{done}");
    assert_eq!(stage.node.vms().expect("a list").len(), 3, "the others live");
    let done = stage.typed("vmove-fork kill $(cat /second); vmove-fork join $(cat /second)");
    assert!(done.printed.contains("1\tlost: killed\n2\tlost: killed\n"), "{done:?}");
    // Some are killed just when they exit: each has one end, and the host's daemon goes on.
    for _ in 0..3 {
        let steps = "eval $(vmove-fork fork 4); \
                     if [ $VMOVE_FORK_ROLE = child ]; then vmove-fork exit --result here; fi; vmove-fork kill; vmove-fork join";
        let done = stage.typed(steps);
        let ends =
            done.printed.lines().filter(|line| line.ends_with("\there") || line.ends_with("\tlost: killed"));
        assert_eq!(ends.count(), 4, "{done:?}");
    }
    stage.sound();
}

#[test]
fn what_keeps_a_guest_from_forking_itself_is_told() {
    need!(ready());
    let mut stage = stage(With::Nothing);
    stage.fails(
        "vmove-fork run --count 7 -- true",
        125,
        "7 children were asked for and 0 live, 6 are allowed",
    );
    stage.fails("vmove-fork join 0123", 125, "the host refuses (bad-request): no such ticket");
    stage.fails("vmove-fork run --count none -- true", 2, "expected a number of children");
    // The kernel's own name was found until now. udev would give it another.
    stage.fails(
        "own=$(dirname $(grep -lx org.vmove.fork /sys/class/virtio-ports/*/name)); mkdir /dev/virtio-ports; \
         mv /dev/${own##*/} /dev/virtio-ports/org.vmove.fork; vmove-fork kill 0123",
        125,
        "no such ticket",
    );
    stage.fails(
        "exec 4<>/dev/virtio-ports/org.vmove.fork; vmove-fork fork 1",
        125,
        "another process has had it open for 10 s",
    );
    // More than the host takes: it is asked again until it is not busy, and each answer is one of no such ticket.
    let many = "for i in $(seq 25); do vmove-fork kill 0123 2>&1; done | grep -c 'no such ticket'";
    assert!(stage.printed(many).contains("25"));
    // The daemon goes away while children work, and comes back.
    let before = stage.typist.start("vmove-fork run --count 1 -- sleep 20").expect("a keyboard");
    let deadline = std::time::Instant::now() + TIMEOUT;
    while stage.node.vms().expect("a list").len() < 2 {
        assert!(std::time::Instant::now() < deadline, "no child: {}", stage.node.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(2));
    stage.node.crash();
    std::thread::sleep(Duration::from_secs(1));
    stage.node.run().expect("the daemon runs again");
    // Asked again; what it knows of the ticket is its own business.
    let done = stage.typist.end(before, TIMEOUT).expect("it ends");
    assert!(done.code == 0 || done.code == 125 && done.printed.contains("no such ticket"), "{done:?}");
    stage.node.crash();
    stage.fails("vmove-fork fork 1", 125, "nobody on the host has listened to the port for 10 s");
    stage.node.run().expect("the daemon runs again");
    assert!(stage.printed("vmove-fork run --count 1 -- echo again").contains("again"));
    stage.parent.sound(&stage.node, NAME).expect("the parent is sound");
}

#[test]
fn a_search_in_c_finds_the_same_with_and_without_children() {
    need!(ready());
    let mut stage = stage(With::Nothing);
    let search = "dna-search --sequences 200 --children";
    let hits = |printed: &str| -> Vec<String> {
        printed.lines().filter(|line| line.contains("score")).map(str::to_owned).collect()
    };
    let alone = stage.printed(&format!("{search} 0"));
    assert_eq!(hits(&alone).len(), 10, "{alone}");
    assert!(hits(&alone)[0].starts_with(" 1. sequence 97: score"), "{alone}");
    for children in [1, 4] {
        let shared = stage.printed(&format!("{search} {children}"));
        assert!(shared.contains(&format!("{children} children run after")), "{shared}");
        assert_eq!(hits(&shared), hits(&alone));
    }
    stage.fails("dna-search --children 9", 1, "dna-search: fork: forbidden: 9 children were asked for");
    stage.sound();
}

#[test]
fn a_map_in_python_gives_what_python_gives_alone() {
    need!(ready());
    need!(std::fs::metadata("/usr/bin/python3"));
    let mut stage = stage(With::Python);
    let render = |children: u32| format!("python3 {EXAMPLES}/render.py {children} 48");
    let alone = stage.printed(&render(0));
    assert_eq!(alone.lines().filter(|line| line.len() == 48).count(), 16, "{alone}");
    assert_eq!(stage.printed(&render(4)), alone);
    // An exception in a child, and too much of a result.
    let map = |function: &str| {
        format!(
            "cd {EXAMPLES}; python3 -c 'import vmove_fork; print(vmove_fork.map(lambda n: {function}, range(4), children=2))'"
        )
    };
    assert!(stage.printed(&map("[n, str(n)]")).contains("[[0, '0'], [1, '1'], [2, '2'], [3, '3']]"));
    stage.fails(&map("1 // (n - 3)"), 1, "ZeroDivisionError");
    stage.fails(&map("str(n) * 60000"), 1, "use more children");
    // Step by step.
    let steps = "import vmove_fork as f\\nr = f.fork(2)\\nif r.is_child: f.exit(r.ticket, r.index * 21)\\n\
                 print([e.value for e in f.join(r.ticket)])";
    assert!(
        stage
            .printed(&format!("cd {EXAMPLES}; printf '{steps}' >/steps.py; PYTHONPATH=. python3 /steps.py"))
            .contains("[21, 42]")
    );
    stage.sound();
}
