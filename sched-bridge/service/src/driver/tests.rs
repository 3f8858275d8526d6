//! What `vmove` is told, and what is made of its answers.

use super::*;

fn grant() -> Grant {
    Grant {
        lease: "l".to_owned(),
        holder: "alice".to_owned(),
        node: "n1".to_owned(),
        vm: "v".to_owned(),
        serial: 0,
        expires_ms: 0,
        cores: 1,
        memory_mib: 64,
        huge_2m_mib: 0,
        huge_1g_mib: 0,
        devices: Vec::new(),
        numa: Vec::new(),
    }
}

#[test]
fn leased_devices_are_given_by_their_roles_where_the_command_line_asks_for_them() {
    let device = |role: &str, address: &str| vmove_grant::GrantedDevice {
        role: role.to_owned(),
        address: address.to_owned(),
    };
    let devices = vec![device("gpu0", "0000:17:00.0"), device("nic1", "0000:18:00.2")];
    let grant = Grant { devices, ..grant() };
    let told = |words: &[&str]| {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        let vm = StartVm::by_command_line(VmName::new("v").unwrap(), words);
        run_arguments(&vm, &grant, Some("--grant=g".to_owned())).join(" ")
    };
    let given = "--device=gpu0=0000:17:00.0 --device=nic1=0000:18:00.2";
    assert_eq!(
        told(&["qemu", "{devices}", "-S"]),
        format!("run --name=v --memory=thp {given} --grant=g -- qemu -S")
    );
    assert_eq!(told(&["qemu", "-S"]), "run --name=v --memory=thp --grant=g -- qemu -S");
}

#[test]
fn each_start_has_a_grant_of_its_own_if_the_bridge_has_a_key() {
    let driver = VmoveCommand::new(None, Vec::new(), BTreeMap::new(), TimeLimits::default());
    assert_eq!(driver.signed(&grant()), Ok(None));
    let (key, _) = SecretKey::generate().unwrap();
    let public = key.public();
    let driver = driver.with_key(Some(Arc::new(key)));
    let signed = || public.read(&driver.signed(&grant()).unwrap().unwrap()).unwrap();
    let (one, two) = (signed(), signed());
    assert_ne!(one.serial, two.serial);
    assert!(one.expires_ms > 0);
    assert_eq!(Grant { serial: 0, expires_ms: 0, ..one }, grant());
}

#[test]
fn several_vms_are_told_apart_and_what_is_said_of_each_is_heard() {
    let device = GrantedDevice { role: "net0".to_owned(), address: "0000:09:00.5".to_owned() };
    let moves = [("a", "n2", vec![device]), ("b", "n3", Vec::new())].map(|(vm, to, devices)| VmMove {
        vm: VmName::new(vm).unwrap(),
        to: NodeName::new(to).unwrap(),
        grant: Grant { vm: vm.to_owned(), node: to.to_owned(), devices, ..grant() },
    });
    let driver = VmoveCommand::new(None, vec!["--verify".to_owned()], BTreeMap::new(), TimeLimits::default());
    assert_eq!(
        driver.migrate_arguments(&moves).unwrap().join(" "),
        "migrate --to=n2 --to-of=a=n2 --device=a:net0=0000:09:00.5 --to-of=b=n3 --verify -- a b"
    );
    assert_eq!(
        driver.migrate_arguments(&moves[..1]).unwrap().join(" "),
        "migrate --to=n2 --device=net0=0000:09:00.5 --verify -- a"
    );
    // With a key each has a grant of its own for where it goes.
    let (key, _) = SecretKey::generate().unwrap();
    let public = key.public();
    let words = driver.clone().with_key(Some(Arc::new(key))).migrate_arguments(&moves).unwrap();
    let grants = words.iter().filter_map(|word| word.strip_prefix("--grant=")?.split_once(':'));
    let read = |(vm, text): (&str, &str)| (vm.to_owned(), public.read(text).unwrap().node);
    let told: Vec<_> = grants.map(read).collect();
    assert_eq!(told, [("a".to_owned(), "n2".to_owned()), ("b".to_owned(), "n3".to_owned())]);
    let members = serde_json::json!([
        { "vm": "b", "exit_code": 1 }, { "vm": "a", "exit_code": 0, "total_ms": 9.6, "downtime_ms": 2.5 },
    ]);
    let answer = |error: &str| serde_json::json!({ "group": { "error": error }, "members": members });
    let arrived = MigrationEnd::Arrived { total_ms: 10, downtime_us: 2500 };
    let stayed = |why: &str| MigrationEnd::Stayed(why.to_owned());
    assert_eq!(ends_of_group(&moves, Some(0), &answer(""), "")[0], arrived);
    assert_eq!(ends_of_group(&moves, Some(1), &answer("b: cut"), ""), [stayed("b: cut"), stayed("b: cut")]);
    assert_eq!(
        ends_of_group(&moves, Some(4), &answer("b is at the source"), ""),
        [arrived, stayed("b is at the source")]
    );
    let lost = ends_of_group(&moves, None, &Value::Null, "killed");
    assert_eq!(lost, vec![MigrationEnd::Unknown("killed".to_owned()); 2]);
}

#[tokio::test]
async fn arguments_pass_through_a_shell_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    // Like ssh: passes all arguments but `--` and the host to a shell, as one line.
    let ssh = dir.path().join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nshift 2\nexec sh -c \"$*\"\n").unwrap();
    let mut mode = std::fs::metadata(&ssh).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&ssh, mode).unwrap();
    let out = dir.path().join("out");
    let script = dir.path().join("vmove");
    std::fs::write(&script, format!("for word; do printf '%s\\n' \"$word\"; done >{}\n", out.display()))
        .unwrap();
    let command =
        [ssh.to_str().unwrap(), "{node}", "sh", script.to_str().unwrap()].map(str::to_owned).to_vec();
    let driver = VmoveCommand::new(Some(command), Vec::new(), BTreeMap::new(), TimeLimits::default());
    let words = ["qemu", "-append", "a b 'c' $HOME; \"d\"", "", "x=1,y=2"];
    let vm = StartVm::by_command_line(VmName::new("v").unwrap(), words.map(str::to_owned).to_vec());
    driver.start(&NodeName::new("n1").unwrap(), &vm, &grant()).await.unwrap();
    let told = std::fs::read_to_string(out).unwrap();
    let wanted = ["--json", "run", "--name=v", "--memory=thp", "--"].into_iter().chain(words);
    assert_eq!(told.lines().collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
}

#[test]
fn the_host_is_no_option_of_ssh() {
    for (command, wanted) in [
        ("ssh {node} vmove", "ssh -- {node} vmove"),
        ("/usr/bin/ssh -p 22 -v root@{node} vmove -x", "/usr/bin/ssh -p 22 -v -- root@{node} vmove -x"),
        ("ssh -p22 -o BatchMode=yes {node} vmove", "ssh -p22 -o BatchMode=yes -- {node} vmove"),
        ("ssh -- {node} vmove", "ssh -- {node} vmove"),
        ("vmove --control {control}", "vmove --control {control}"),
    ] {
        let words = command.split(' ').map(str::to_owned).collect();
        assert_eq!(with_end_of_options(words).join(" "), wanted);
    }
}

#[tokio::test]
async fn a_node_without_a_daemon_is_not_taken_for_this_host() {
    let command = ["true", "{control}"].map(str::to_owned).to_vec();
    let daemons = BTreeMap::from([(NodeName::new("n1").unwrap(), DaemonAddress::default())]);
    let driver = VmoveCommand::new(Some(command), Vec::new(), daemons, TimeLimits::default());
    let reach = |node: &str| driver.reach(&NodeName::new(node).unwrap());
    assert_eq!([reach("n1"), reach(&host_name()), reach("n2")], [Reach::Known, Reach::Known, Reach::Not]);
    let vm = StartVm::by_command_line(VmName::new("v").unwrap(), vec!["qemu".to_owned()]);
    let refused = driver.start(&NodeName::new("n2").unwrap(), &vm, &grant()).await.unwrap_err().to_string();
    assert!(refused.contains("[daemons.n2]"), "{refused}");
    // Unless configured otherwise, others are reached by ssh.
    let driver = VmoveCommand::new(None, Vec::new(), BTreeMap::new(), TimeLimits::default());
    let reach = |node: &str| driver.reach(&NodeName::new(node).unwrap());
    assert_eq!([reach(&host_name()), reach("n2")], [Reach::Known, Reach::ByName]);
    assert_eq!((driver.here[0].as_str(), driver.elsewhere[3].as_str()), ("vmove", "--"));
}

#[tokio::test]
async fn what_hangs_ends_in_time_and_is_not_taken_for_an_answer() {
    let short = Duration::from_millis(200);
    let limits = TimeLimits { look: short, act: short, migrate: short };
    // `sh -c SCRIPT` takes the arguments of `vmove` as its own.
    let command = ["sh", "-c", "sleep 1000 # {node}"].map(str::to_owned).to_vec();
    let driver = VmoveCommand::new(Some(command), Vec::new(), BTreeMap::new(), limits);
    let (n1, n2) = (NodeName::new("n1").unwrap(), NodeName::new("n2").unwrap());
    let vm = VmName::new("v").unwrap();
    let message = driver.list(&n1).await.unwrap_err();
    assert_eq!(message, "sh for node n1 has not ended within 0.2 s and was killed");
    let end = driver.migrate(&n1, &[VmMove { vm: vm.clone(), to: n2, grant: grant() }]).await;
    let [MigrationEnd::Unknown(reason)] = &end[..] else { panic!("{end:?}") };
    assert!(reason.contains("was killed"), "{reason}");
    let vm = StartVm::by_command_line(vm, vec!["qemu".to_owned()]);
    let error = driver.start(&n1, &vm, &grant()).await.unwrap_err();
    assert!(matches!(&error, NotStarted::Unknown(_)), "{error}");
}

/// Both nodes are reached in the same way, and so are one daemon.
#[tokio::test]
async fn a_node_that_answers_for_another_is_not_taken_for_that() {
    let dir = tempfile::tempdir().unwrap();
    let acted = dir.path().join("acted");
    let script = r#"case " $* " in *" list "*) echo '{"node": "n1", "vms": [{"name": "v", "status": "running"}]}' ;; *) echo "$0 $*" >>ACTED ;; esac"#;
    let script = script.replace("ACTED", &acted.display().to_string());
    let command = ["sh", "-c", &script, "{node}"].map(str::to_owned).to_vec();
    let driver = VmoveCommand::new(Some(command), Vec::new(), BTreeMap::new(), TimeLimits::default());
    let (n1, n2) = (NodeName::new("n1").unwrap(), NodeName::new("n2").unwrap());
    let vm = VmName::new("v").unwrap();
    let is_refusal = |why: &str| why.contains("expected the daemon of n2, found that of n1");
    // Before anybody has looked at that node, too.
    let start = StartVm::by_command_line(vm.clone(), vec!["qemu".to_owned()]);
    let refused = driver.start(&n2, &start, &grant()).await.unwrap_err();
    assert!(matches!(&refused, NotStarted::Refused(why) if is_refusal(why)), "{refused}");
    let listed = driver.list(&n2).await.unwrap_err();
    assert!(listed.starts_with("node n2 does not answer") && is_refusal(&listed), "{listed}");
    assert!(is_refusal(&driver.stop(&n2, &vm).await.unwrap_err()));
    assert!(is_refusal(&driver.pause(&n2, &vm, Duration::from_secs(1)).await.unwrap_err()));
    let end = driver.migrate(&n2, &[VmMove { vm: vm.clone(), to: n1.clone(), grant: grant() }]).await;
    assert!(matches!(&end[..], [MigrationEnd::Stayed(why)] if is_refusal(why)), "{end:?}");
    assert!(!acted.exists(), "{:?}", std::fs::read_to_string(&acted));

    assert_eq!(driver.list(&n1).await.unwrap().len(), 1);
    driver.stop(&n1, &vm).await.unwrap();
    assert_eq!(std::fs::read_to_string(&acted).unwrap(), "n1 --json stop -- v\n");
}
