//! Tests of the configuration.

use clap::CommandFactory;
use vmove_skip::installed::{completions_are_current, has_every_key, is_current, man_page_is_current};
use vmove_skip::reference::settings_page;

use super::*;

#[test]
fn what_cannot_be_is_said() {
    for (text, wanted) in [
        ("etcd:https://a:1", "expected http://HOST:PORT"),
        ("sqlite:x", "expected redb:FILE or etcd:"),
        ("etcd:", "expected http://HOST:PORT"),
    ] {
        let error = open_store(text, 1).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, "store = \"x\"\nlisten_on = 3\n").unwrap();
    let error = format!("{:#}", read(&path).unwrap_err());
    assert!(error.contains("line 2") && error.contains("listen_on"), "{error}");
    std::fs::write(&path, "[daemons.\"-oProxyCommand=x\"]\ncontrol = \"/c\"\n").unwrap();
    let error = format!("{:#}", read(&path).unwrap_err());
    assert!(error.contains("a host name"), "{error}");
    std::fs::write(&path, "short\n").unwrap();
    read_token(&path).unwrap_err();
    let open =
        Arguments::parse_from(["vbridged", "--listen", "127.0.0.1:1", "--store", "redb:/nonexistent/x"]);
    assert!(Config::load(open).unwrap_err().to_string().contains("--token-file"));
    let key = dir.path().join("key");
    std::fs::write(&key, "0123456789abcdef\n").unwrap();
    let plain = ["vbridged", "--listen", "192.0.2.1:1", "--token-file", key.to_str().unwrap()];
    let error = Config::load(Arguments::parse_from(plain)).unwrap_err().to_string();
    assert!(error.contains("--tls-cert") && error.contains("--insecure"), "{error}");
    let files = ["--tls-cert", "/nonexistent/c.pem", "--tls-key", "/nonexistent/k.pem"];
    let error = Config::load(Arguments::parse_from(plain.into_iter().chain(files))).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/c.pem"), "{error}");
    let access = Access::new(vec![(Token::new("t"), Caller::Operator)]);
    check_listener("127.0.0.1:1".parse().unwrap(), &access, false).unwrap();
    check_listener("192.0.2.1:1".parse().unwrap(), &access, true).unwrap();
}

#[test]
fn a_misspelt_key_is_named_with_file_line_and_the_nearest_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vbridged.toml");
    for (text, line, key, near) in [
        ("\nloook-s = 3", 2, "`loook-s`", "`look-s`?"),
        ("token-fil = 'x'", 1, "`token-fil`", "`token-file`?"),
        ("[moves]\nper-nod = 3", 2, "`per-nod`", "`per-node`?"),
        ("[account]\nkep_days = 3", 2, "`kep_days`", "`keep-days`?"),
        ("[slurm]\nevery = 3", 2, "`every`", "`every-s`?"),
        ("[quota.'*']\ngpu-share = 3", 2, "`gpu-share`", "`gpu-shares`?"),
        ("[daemons.n1]\n\naddres = 'x'", 3, "`addres`", "`address`?"),
        ("[templates.t]\ncomand = []", 2, "`comand`", "`command`?"),
        ("[tokens.a]\nrole = 'tennant'", 2, "`tennant`", "`tenant`?"),
        ("[tls]\ncertt = ''", 2, "`certt`", "`cert`?"),
    ] {
        std::fs::write(&path, text).unwrap();
        let said = format!("{:#}", read(&path).unwrap_err());
        assert!(said.starts_with(&path.display().to_string()), "{said}");
        assert!(said.contains(&format!("line {line}, ")) && said.contains(key), "{text}: {said}");
        assert!(said.contains(&format!("did you mean {near}")), "{text}: {said}");
        // Each key is told in one way of the two.
        assert!(!said.contains("per_node") && !said.contains("look_s"), "{said}");
    }
    std::fs::write(&path, "[account]\nkeep-days = 0").unwrap();
    let config = path.display().to_string();
    let said =
        format!("{:#}", Config::load(Arguments::parse_from(["vbridged", "--config", &config])).unwrap_err());
    assert!(said.starts_with(&format!("{config}: [account]: keep-days must be")), "{said}");
}

#[test]
fn keys_of_older_files_are_taken() {
    let text = "token_file = 'x'\netcd_max_txn_ops = 1\nlog_format = 'json'\nlook_s = 1\ninstance_types = []\ngrant_key = 'x'\n\
        [account]\nkeep_days = 1\n[moves]\nper_node = 1\nper_uplink = 1\nlook_limit_s = 1\nstart_limit_s = 1\n\
        move_limit_s = 1\n[slurm]\nevery_s = 1\ncommand_limit_s = 1\n[quota.a]\ngpu_shares = 1\nremote_gpus = 1\nmemory_mib = 1\n";
    toml::from_str::<File>(text).unwrap();
    let new: String = text.replace('_', "-");
    toml::from_str::<File>(&new).unwrap();
    let both = toml::from_str::<File>("look_s = 1\nlook-s = 1\n").unwrap_err().to_string();
    assert!(both.contains("duplicate field `look-s`"), "{both}");
}

#[test]
fn a_store_is_not_opened_before_all_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.redb");
    let store = format!("redb:{}", file.display());
    let config = Config::load(Arguments::parse_from(["vbridged", "--store", &store])).unwrap();
    assert!(!file.exists());
    config.store.open().unwrap();
    assert!(file.exists());
}

#[test]
fn the_example_that_is_installed_can_be_used() {
    let example = include_str!("../../dist/vbridged.toml");
    let shown: File = toml::from_str(example).unwrap();
    let (moves, defaults) = (format!("{:?}", shown.moves), format!("{:?}", Moves::default()));
    assert_eq!(moves, defaults, "the example shows the defaults");
    assert_eq!((shown.look_s, shown.control), (Some(5), Some(DEFAULT_CONTROL.into())));
    assert_eq!(shown.store.as_deref(), Some(DEFAULT_STORE));
    // What is commented out is valid, too.
    let all: File = toml::from_str(&vmove_skip::installed::uncommented(example)).unwrap();
    assert!(all.slurm.is_some() && all.tls.is_some() && all.grant_key.is_some() && all.listen.is_some());
    assert!(all.tokens.contains_key("alice") && all.daemons.len() == 1 && all.moves.command.is_some());
    assert_eq!(all.account.keep_days, Some(400));
}

#[test]
fn every_key_is_in_the_example() {
    let example = include_str!("../../dist/vbridged.toml");
    for table in [
        "",
        "tls",
        "moves",
        "account",
        "slurm",
        "tokens.alice",
        "daemons.node7",
        "quota.\"*\"",
        "templates.small",
    ] {
        has_every_key(example, table, |text| toml::from_str::<File>(text));
    }
}

#[test]
fn the_checked_in_page_of_settings_is_current() {
    let page =
        settings_page("vbridged", "/etc/vbridged/vbridged.toml", include_str!("../../dist/vbridged.toml"));
    is_current("docs/reference/vbridged-settings.md", page.as_bytes(), "vmove-bridge");
}

/// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-bridge --lib the_checked_in` writes it. `vmove man` installs it with the others.
#[test]
fn the_checked_in_man_page_is_current() {
    man_page_is_current(Arguments::command(), "sched-bridge/service/dist", "vmove-bridge");
}

/// Written in the same way.
#[test]
fn the_checked_in_completions_are_current() {
    completions_are_current(Arguments::command(), "sched-bridge/service/dist/completions", "vmove-bridge");
}

#[test]
fn each_token_has_a_role_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let token = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (one, two) = (token("one", "0123456789abcdef\n"), token("two", "fedcba9876543210\n"));
    let tenants = |name: &str, file: &Path| {
        let token = TokenFile { role: Role::Tenant, file: file.to_owned() };
        BTreeMap::from([(name.to_owned(), token)])
    };
    let access = read_tokens(Some(one.clone()), &tenants("alice", &two)).unwrap();
    assert_eq!(access.caller(Some("0123456789abcdef")), Some(Caller::Operator));
    assert_eq!(access.caller(Some("fedcba9876543210")), Some(Caller::new("alice", Role::Tenant)));
    assert_eq!((access.caller(Some("other")), access.caller(None)), (None, None));
    for (wrong, wanted) in
        [(tenants("alice", &one), "another one has as well"), (tenants("slurm", &two), "jobs of Slurm")]
    {
        let error = read_tokens(Some(one.clone()), &wrong).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let path = token("c.toml", "[tokens.alice]\nrole = \"king\"\nfile = \"/f\"\n");
    let error = format!("{:#}", read(&path).unwrap_err());
    assert!(error.contains("viewer") && error.contains("tenant"), "{error}");
}

/// The examples of the operators' guide are valid.
#[test]
fn the_guide_tells_the_truth() {
    let guide = include_str!("../../../../docs/sched-bridge.md");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    for from in [
        "    store = ",
        "    [tokens.alice]",
        "    [templates.small]",
        "    [quota.alice]",
        "    [account]",
        "    [slurm]",
    ] {
        let start = guide.find(from).unwrap();
        // Up to the text behind it.
        let lines = guide[start..].lines().take_while(|line| line.is_empty() || line.starts_with("    "));
        let text: String = lines.map(|line| format!("{}\n", line.trim())).collect();
        std::fs::write(&path, &text).unwrap();
        let file = read(&path).unwrap();
        let set = file.store.is_some() || file.slurm.is_some() || file.account.keep_days.is_some();
        let templates = file.templates.len();
        Templates::new(file.templates).unwrap();
        let quotas = file.quota.of("alice").is_some();
        assert!(set || quotas || !file.tokens.is_empty() || templates > 0, "{text}");
    }
}

/// Both nodes would be asked at one socket, and the VMs of one be taken for those of the other.
#[test]
fn a_control_socket_that_the_command_does_not_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vbridged.toml");
    let load = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Config::load(Arguments::parse_from(["vbridged", "--config", path.to_str().unwrap()]))
    };
    let daemons = "[daemons.n1]\ncontrol = '/run/1.sock'\n[daemons.n2]\ncontrol = '/run/2.sock'\n";
    let said = format!("{:#}", load(&format!("moves.command = ['vmove']\n{daemons}")).unwrap_err());
    assert!(said.starts_with(&format!("{}: [daemons.n1] control: expected", path.display())), "{said}");
    assert!(said.contains(r#"Write command = ["vmove", "--control", "{control}"] in [moves]"#), "{said}");
    for fine in [
        daemons.to_owned(),
        format!("moves.command = ['vmove', '--control', '{{control}}']\n{daemons}"),
        "moves.command = ['ssh', '{node}', 'vmove']\n[daemons.n1]\naddress = '192.0.2.7:7420'\n".to_owned(),
    ] {
        load(&fine).unwrap();
    }
}
