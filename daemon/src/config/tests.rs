//! Tests of the configuration.

use clap::CommandFactory;
use vmove_skip::installed::{completions_are_current, has_every_key, is_current, man_page_is_current};
use vmove_skip::reference::settings_page;

use super::*;

/// Settings of a file, without TLS.
pub(crate) fn configured(text: &str) -> Config {
    Config::merge(flags(&["--insecure"]), file(text)).unwrap()
}

pub(crate) fn flags(args: &[&str]) -> Flags {
    Flags::try_parse_from(std::iter::once(&"vmoved").chain(args)).unwrap()
}

pub(crate) fn file(text: &str) -> ConfigFile {
    toml::from_str(text).unwrap()
}

#[test]
fn the_environment_does_not_override_the_file() {
    let path = |name: &str| Some(PathBuf::from(name));
    let set = || Some(OsString::from("/e"));
    assert_eq!(control(path("/flag"), path("/file"), set()), Path::new("/flag"));
    assert_eq!(control(None, path("/file"), set()), Path::new("/file"));
    assert_eq!(control(None, None, set()), Path::new("/e"));
    assert_eq!(control(None, None, Some(OsString::new())), Path::new(DEFAULT_CONTROL));
}

#[test]
fn flags_override_the_file_and_the_file_overrides_defaults() {
    let file =
        file("node = 'f'\nlisten = '192.0.2.1:1'\nstate-dir = '/s'\ninsecure = true\nreconnect-for = '5m'");
    let config = Config::merge(flags(&["--node", "a", "--fabric", "tcp"]), file).unwrap();
    assert_eq!(config.node, "a");
    assert_eq!(config.listen, "192.0.2.1:1".parse().unwrap());
    assert_eq!(config.memory_dir, Path::new("/s/memory"));
    assert_eq!(config.run_dir, Path::new("/s/run"));
    assert_eq!(config.fabric, FabricChoice::Tcp);
    assert_eq!(config.reconnect_for, Duration::from_secs(300));
    assert_eq!(config.control, Path::new(DEFAULT_CONTROL));
}

#[test]
fn exactly_one_way_of_protection_must_be_chosen() {
    let tls = "[tls]\ncert = '/c'\nkey = '/k'\nca = '/a'";
    let merge = |args: &[&str], text: &str| Config::merge(flags(args), file(text)).map(|c| c.security);
    assert!(matches!(merge(&[], ""), Err(ConfigError::NoSecurity)));
    assert!(matches!(merge(&["--insecure", "--tls-ca", "x"], ""), Err(ConfigError::BothSecurities)));
    assert!(matches!(merge(&[], &format!("insecure = true\n{tls}")), Err(ConfigError::BothSecurities)));
    assert!(matches!(merge(&["--tls-ca", "x"], ""), Err(ConfigError::PartialTls("--tls-cert"))));
    assert_eq!(merge(&["--insecure"], tls).unwrap(), Security::Insecure);
    let Security::MutualTls(files) = merge(&["--tls-ca", "/other"], tls).unwrap() else { panic!("no TLS") };
    assert_eq!((files.ca.as_path(), files.key.as_path()), (Path::new("/other"), Path::new("/k")));
}

#[test]
fn without_tls_only_an_address_that_was_asked_for_is_open_to_other_hosts() {
    let listen = |args: &[&str], text: &str| Config::merge(flags(args), file(text)).unwrap().listen;
    assert_eq!(listen(&["--insecure"], ""), "127.0.0.1:7420".parse().unwrap());
    assert_eq!(listen(&[], "insecure = true"), "127.0.0.1:7420".parse().unwrap());
    assert_eq!(listen(&["--insecure", "--listen", "[::]:1"], ""), "[::]:1".parse().unwrap());
    assert_eq!(listen(&["--insecure"], "listen = '0.0.0.0:1'"), "0.0.0.0:1".parse().unwrap());
    assert_eq!(listen(&[], "[tls]\ncert = '/c'\nkey = '/k'\nca = '/a'"), "[::]:7420".parse().unwrap());
}

#[test]
fn nodes_are_an_address_or_a_table() {
    let config = Config::merge(
        flags(&["--insecure"]),
        file("[nodes]\nb = '192.0.2.2:7420'\nc = { address = '[2001:db8::1]:7420', server-name = 'c.example' }"),
    )
    .unwrap();
    assert_eq!(config.nodes["b"].address, "192.0.2.2:7420");
    assert_eq!(config.nodes["c"].server_name.as_deref(), Some("c.example"));
    let error = Config::merge(flags(&["--insecure"]), file("[nodes]\nb = 'noport'")).unwrap_err();
    assert!(error.to_string().contains("found \"noport\""), "{error}");
}

#[test]
fn a_group_that_is_none_is_refused() {
    let merge = |text: &str| Config::merge(flags(&["--insecure"]), file(text));
    let config = merge("[fork]\nmulticast-group = '239.1.2.3:7421'\nleaf = 'l1'").unwrap();
    assert_eq!(config.fork.multicast_group, Some("239.1.2.3:7421".parse().unwrap()));
    for bad in ["multicast-group = '10.0.0.1:7421'", "multicast-group = '239.1.2.3:0'", "link-mbit = 0"] {
        let error = merge(&format!("[fork]\n{bad}")).unwrap_err().to_string();
        assert!(error.contains("found"), "{bad}: {error}");
    }
}

#[test]
fn children_of_guests_go_to_nodes_that_are_known() {
    let merge = |to: &str| {
        let text = format!("[fork]\nfrom-guest-to = {to}\n[nodes]\nb = '192.0.2.2:7420'");
        Config::merge(flags(&["--insecure", "--node", "a"]), file(&text))
    };
    // One file may serve all nodes: this one may be named twice.
    let config = merge("['self', 'a', 'b']").unwrap();
    assert_eq!(config.fork.from_guest_to, ["self", "a", "b"]);
    for (bad, found) in [("['self', 'c']", "found \"c\""), ("[]", "found none")] {
        let error = merge(bad).unwrap_err().to_string();
        assert!(error.contains("from-guest-to") && error.contains(found), "{bad}: {error}");
    }
}

#[test]
fn the_example_that_is_installed_can_be_used() {
    let example = include_str!("../../dist/vmoved.toml");
    let config = Config::merge(flags(&[]), file(example)).unwrap();
    let defaults = Config::merge(flags(&["--insecure"]), ConfigFile::default()).unwrap();
    assert!(matches!(&config.security, Security::MutualTls(tls) if tls.ca == Path::new("/etc/vmove/ca.pem")));
    assert_eq!(config.listen, EVERYWHERE);
    assert_eq!(
        Config { security: Security::Insecure, listen: THIS_HOST, ..config },
        defaults,
        "the example shows the defaults"
    );
    // What is commented out is valid, too.
    let uncommented = vmove_skip::installed::uncommented(example);
    assert!(file(&uncommented).nodes.contains_key("node3"), "{uncommented}");
}

#[test]
fn every_key_is_in_the_example() {
    let example = include_str!("../../dist/vmoved.toml");
    for table in [
        "",
        "tls",
        "fork",
        "rdma",
        "qemu",
        "peers",
        "control-groups",
        "tuning",
        "grants",
        "host-signals",
        "bridge",
        "traces",
        "[client]",
    ] {
        has_every_key(example, table, |text| toml::from_str::<ConfigFile>(text));
    }
}

#[test]
fn the_checked_in_page_of_settings_is_current() {
    let page = settings_page("vmoved", "/etc/vmove/vmoved.toml", include_str!("../../dist/vmoved.toml"));
    is_current("docs/reference/vmoved-settings.md", page.as_bytes(), "vmove-daemon");
}

#[test]
fn a_history_of_no_use_is_refused() {
    let merge = |text: &str| Config::merge(flags(&["--insecure"]), file(text));
    assert_eq!(merge("").unwrap().keep_migrations, 1000);
    assert_eq!(merge("keep-migrations = 10").unwrap().keep_migrations, 10);
    for bad in ["0", "9", "1000001"] {
        let error = merge(&format!("keep-migrations = {bad}")).unwrap_err().to_string();
        assert!(error.contains("expected 10 to 1000000") && error.contains(bad), "{error}");
    }
}

#[test]
fn folders_of_stopped_vms_are_kept_for_a_day_or_as_long_as_told() {
    let merge = |text: &str| Config::merge(flags(&["--insecure"]), file(text));
    let kept = |text: &str| merge(text).unwrap().keep_stopped;
    assert_eq!(kept(""), Duration::from_secs(86400));
    assert_eq!(kept("keep-stopped = '7d'"), Duration::from_secs(7 * 86400));
    assert_eq!(kept("keep-stopped = '0'"), Duration::ZERO);
    let error = merge("keep-stopped = 'a day'").unwrap_err().to_string();
    assert!(error.contains("keep-stopped") && error.contains("found \"a day\""), "{error}");
}

/// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-daemon --lib the_checked_in` writes it. `vmove man` installs it with the others.
#[test]
fn the_checked_in_man_page_is_current() {
    man_page_is_current(Flags::command(), "daemon/dist", "vmove-daemon");
}

/// Written in the same way.
#[test]
fn the_checked_in_completions_are_current() {
    completions_are_current(Flags::command(), "daemon/dist/completions", "vmove-daemon");
}

/// What is said of a file that cannot be used.
fn refused(text: &str) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vmoved.toml");
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    let error = Config::load(flags(&["--config", &path, "--insecure"])).unwrap_err();
    (vmove_types::problem::chain(&error), path)
}

#[test]
fn a_misspelt_key_is_named_with_file_line_and_the_nearest_one() {
    for (text, line, key, near) in [
        ("stat-dir = '/s'", 1, "`stat-dir`", "`state-dir`?"),
        ("\nreconect_for = '10s'", 2, "`reconect_for`", "`reconnect-for`?"),
        ("[fork]\nlink-mbits = 3", 2, "`link-mbits`", "`link-mbit`?"),
        ("[nodes]\n\nb = { addres = 'b:1' }", 3, "`addres`", "`address`?"),
        ("[nodes.b]\naddress = 'b:1'\nservername = 'b'", 3, "`servername`", "`server-name`?"),
        ("fabric = 'verb'", 1, "`verb`", "`verbs`?"),
        ("[[client]]\nname = 'a'\nrole = 'admim'", 3, "`admim`", "`admin`?"),
        ("[[hook]]\nname = 'h'\non = 'STOP'\nord = 3\ndo = 'pause'", 4, "`ord`", "`order`?"),
        ("[[hook]]\nname = 'h'\non = 'STOP'\n\ndo = 'paus'", 5, "`paus`", "`pause`?"),
    ] {
        let (said, path) = refused(text);
        assert!(said.starts_with(&path) && said.contains(&format!("line {line}, ")), "{text}: {said}");
        assert!(said.contains(key) && said.contains(&format!("did you mean {near}")), "{text}: {said}");
        assert_eq!(said.matches("did you mean").count(), 1, "told once: {said}");
    }
    // Nobody reads a list of all keys.
    let (said, _) = refused("stat-dir = '/s'");
    assert!(said.contains("unknown field `stat-dir`, expected one of 30 names; did you mean"), "{said}");
}

#[test]
fn a_value_that_cannot_be_is_named_with_file_and_line() {
    for (text, line, words) in [
        ("\nbulk-connections = 99", 2, "bulk-connections: expected 1 to 16, found 99"),
        ("\n\nreconnect-for = '10x'", 3, "reconnect-for: "),
        ("[fork]\nmulticast-group = '10.0.0.1:1'", 2, "fork.multicast-group: expected"),
        ("[nodes]\na = 'a:1'\n'b.c' = 'noport'", 3, "nodes.b.c: expected host:port, found \"noport\""),
        ("[rdma]\nservice-level = '16,0'", 2, "rdma.service-level: expected 0 to 15"),
        ("[traces]\notlp = 'c'", 2, "traces.otlp: expected"),
        ("[[hook]]\nname = 'h'\non = 'stopp'\ndo = 'pause'", 3, "hook[1] (h).on: expected"),
        ("[[hook]]\nname = 'h'\non = 'timer'\ndo = 'pause'", 1, "hook[1] (h).every: expected"),
        ("[[client]]\nrole = 'viewer'\nname = 'a/b'", 3, "client[1].name: expected"),
    ] {
        let (said, path) = refused(text);
        assert!(said.starts_with(&format!("{path}:{line}: {words}")), "{text}: {said}");
    }
    let node = "n".repeat(65);
    let (said, path) = refused(&format!("node = '{node}'"));
    assert!(said.starts_with(&format!("{path}:1: node: expected")), "{said}");
    // What a flag says is not in the file.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vmoved.toml");
    std::fs::write(&file, "node = 'a'").unwrap();
    let flags = flags(&["--config", &file.display().to_string(), "--insecure", "--node", &node]);
    let said = Config::load(flags).unwrap_err().to_string();
    assert!(said.starts_with("node: expected"), "{said}");
}
