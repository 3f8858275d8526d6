//! What a node with a certificate may do on this one: bring guests at all, and what their command lines may have QEMU do.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use vmove_qmp::cmdline::{CommandLine, CommandLineError, Forbidden};
use vmove_qmp::confine::Confinement;
use vmove_qmp::inspect;

/// `[peers]` of the daemon's configuration. It concerns guests and children that other nodes bring, not those that are started here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PeerPolicy {
    /// Names in certificates of nodes that may bring guests; `*.example` stands for all below `example`. Without it, every node may that has a
    /// certificate of the authority.
    pub accept_from: Option<Vec<String>>,
    /// QEMU binaries that may be started for them. Without it, those in this node's `PATH`, `/usr` and `/opt`.
    pub qemu_binaries: Option<Vec<PathBuf>>,
    /// Rules for command lines that do not hold, such as `netdev.script`; `netdev.*` names all that begin so.
    pub options: Vec<String>,
    /// Environment variables that QEMU may be given; `LC_*` names all that begin so.
    pub environment: Vec<String>,
}

impl Default for PeerPolicy {
    fn default() -> Self {
        let environment =
            ["LANG", "LC_*", "MALLOC_*", "QEMU_AUDIO_DRV", "TZ", "VMOVE_*"].map(str::to_owned).into();
        Self { accept_from: None, qemu_binaries: None, options: Vec::new(), environment }
    }
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Caller {
    /// Names in its certificate: DNS names and addresses, and the common name. Empty without TLS.
    pub names: Vec<String>,
    /// The address that it connects from. `None` on a Unix socket.
    pub address: Option<IpAddr>,
}

impl Caller {
    /// The same, from this address.
    #[must_use]
    pub fn from(self, address: IpAddr) -> Self {
        Self { address: Some(address), ..self }
    }
}

/// Why what another node brings is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Objection {
    /// The node itself.
    #[error(
        "expected a guest from one of {accepted:?}, found a certificate of {names:?}: add a name to accept-from in [peers] of this node's configuration if that node may bring guests"
    )]
    Peer {
        /// Names in its certificate.
        names: Vec<String>,
        /// Who may.
        accepted: Vec<String>,
    },
    /// The program.
    #[error(
        "{program} is not among the QEMU binaries that other nodes may have started here ({known}): add its path to qemu-binaries in [peers] of this node's configuration if it is one"
    )]
    Binary {
        /// As the command line names it.
        program: String,
        /// Which are.
        known: String,
    },
    /// An option.
    #[error("{0}: leave it out, or name the rule among options in [peers] of this node's configuration")]
    Option(Forbidden),
    /// An environment variable.
    #[error(
        "other nodes may not set the environment variable {0:?} for a QEMU here: leave it out, or name it among environment in [peers] of this node's configuration"
    )]
    Environment(String),
    /// The command line cannot be read.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
}

impl PeerPolicy {
    /// The same on a node whose QEMUs run with these rights: what it does not insist on itself, others need not either.
    #[must_use]
    pub fn beside(mut self, confinement: &Confinement) -> Self {
        let lifted = [(confinement.user.is_none(), "user"), (!confinement.sandbox, "sandbox")];
        self.options
            .extend(lifted.into_iter().filter(|(lifted, _)| *lifted).map(|(_, rule)| rule.to_owned()));
        self
    }

    /// Whether a node may bring guests.
    ///
    /// # Errors
    /// [`Objection::Peer`].
    pub fn accepts(&self, caller: &Caller) -> Result<(), Objection> {
        let Some(accepted) = &self.accept_from else { return Ok(()) };
        if caller.names.iter().any(|name| accepted.iter().any(|pattern| names_node(pattern, name))) {
            return Ok(());
        }
        Err(Objection::Peer { names: caller.names.clone(), accepted: accepted.clone() })
    }

    /// Everything in a command line of another node for a VM of this name, and in the environment for it, that is not taken. Reads folders.
    #[must_use]
    pub fn objections(
        &self,
        command_line: &[String],
        vm: &str,
        environment: &[(String, String)],
    ) -> Vec<Objection> {
        let mut found: Vec<Objection> = Vec::new();
        found.extend(command_line.first().and_then(|program| self.binary(program).err()));
        // Its name may be a part of anything, also of a key.
        let words = command_line.iter().map(|word| OsString::from(word.replace("{name}", vm))).collect();
        match CommandLine::parse(words).and_then(|line| line.forbidden(&self.options)) {
            Ok(forbidden) => found.extend(forbidden.into_iter().map(Objection::Option)),
            Err(error) => found.push(error.into()),
        }
        let refused = environment.iter().map(|(name, _)| name).filter(|name| !self.may_set(name));
        found.extend(refused.map(|name| Objection::Environment(name.clone())));
        found
    }

    /// Whether this program may be started. One that is not here at all is for others to refuse.
    fn binary(&self, program: &str) -> Result<(), Objection> {
        let path = std::env::var_os("PATH");
        let Some(file) = inspect::find_program(program) else { return Ok(()) };
        let (may, known) = match &self.qemu_binaries {
            None => {
                let known = "qemu-system-* and qemu-kvm in PATH, /usr and /opt";
                (inspect::is_installed_qemu(&file, path.as_deref()), known.to_owned())
            }
            Some(binaries) => {
                let real = |path: &Path| std::fs::canonicalize(path).ok();
                let may =
                    real(&file).is_some_and(|file| binaries.iter().any(|b| real(b).as_ref() == Some(&file)));
                let known: Vec<_> = binaries.iter().map(|path| path.display().to_string()).collect();
                (may, known.join(", "))
            }
        };
        if may { Ok(()) } else { Err(Objection::Binary { program: program.to_owned(), known }) }
    }

    /// `env(1)` reads what begins with a dash as an option, so a name must be one.
    fn may_set(&self, name: &str) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_name =
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(plain);
        is_name && self.environment.iter().any(|pattern| begins(pattern, name))
    }
}

fn begins(pattern: &str, name: &str) -> bool {
    pattern == name || pattern.strip_suffix('*').is_some_and(|start| name.starts_with(start))
}

/// Names of hosts, in whatever case; `*.example` stands for one label or more before `.example`.
fn names_node(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.to_ascii_lowercase(), name.to_ascii_lowercase());
    match pattern.strip_prefix('*') {
        Some("") => true,
        Some(end) if end.starts_with('.') => name.len() > end.len() && name.ends_with(end),
        _ => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use vmove_qmp::confine::QemuUser;

    use super::*;

    #[test]
    fn nodes_are_known_by_any_name_in_their_certificate() {
        let policy = |names: &[&str]| PeerPolicy {
            accept_from: Some(names.iter().map(|name| (*name).to_owned()).collect()),
            ..PeerPolicy::default()
        };
        let caller = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Caller { names, address: None }
        };
        PeerPolicy::default().accepts(&caller(&[])).unwrap();
        policy(&["node-a", "*.rack1.example"]).accepts(&caller(&["other", "Node-A"])).unwrap();
        policy(&["*.example"]).accepts(&caller(&["n1.rack1.example"])).unwrap();
        policy(&["192.0.2.1"]).accepts(&caller(&["192.0.2.1"])).unwrap();
        for (accepted, names) in [
            (&["node-a"][..], &["node-ab", "a"][..]),
            (&["*.example"], &["example", "notexample", "x.example.org"]),
            (&["*.example"], &[".example"]),
            (&[], &["node-a"]),
            (&["node-a"], &[]),
        ] {
            let error = policy(accepted).accepts(&caller(names)).unwrap_err();
            assert!(error.to_string().contains("accept-from in [peers]"), "{error}");
        }
    }

    #[test]
    fn only_binaries_of_this_node_are_started() {
        let dir = tempfile::tempdir().unwrap();
        let (own, other) = (dir.path().join("qemu-system-x86_64"), dir.path().join("other"));
        let link = dir.path().join("link");
        for file in [&own, &other] {
            std::fs::write(file, "").unwrap();
        }
        symlink(&own, &link).unwrap();
        let objections = |policy: &PeerPolicy, program: &Path| {
            policy.objections(&[program.display().to_string()], "web", &[]).len()
        };
        let default = PeerPolicy::default();
        assert_eq!(objections(&default, &own), 1, "its folder is not in PATH");
        assert_eq!(objections(&default, Path::new("/bin/sh")), 1);
        assert_eq!(objections(&default, Path::new("sh")), 1);
        assert_eq!(objections(&default, Path::new("/not/there")), 0, "that is another refusal");
        let listed = PeerPolicy { qemu_binaries: Some(vec![own.clone()]), ..PeerPolicy::default() };
        assert_eq!(objections(&listed, &own), 0);
        assert_eq!(objections(&listed, &link), 0, "the same file");
        assert_eq!(objections(&listed, &other), 1);
    }

    #[test]
    fn a_guest_of_another_node_does_not_choose_its_user() {
        let confined = Confinement { user: QemuUser::find("60742").unwrap(), sandbox: true };
        let refused = |confinement: &Confinement, words: &[&str]| {
            let line: Vec<String> =
                ["/not/there"].iter().chain(words).map(|word| (*word).to_owned()).collect();
            PeerPolicy::default().beside(confinement).objections(&line, "web", &[]).len()
        };
        for words in [
            &["-runas", "nobody"][..],
            &["-run-with", "user=root"],
            &["-sandbox", "off"],
            &["-sandbox", "enable=off"],
        ] {
            assert_eq!(refused(&confined, words), 1, "{words:?}");
            assert_eq!(refused(&Confinement::default(), words), 0, "{words:?}");
        }
        assert_eq!(refused(&confined, &["-sandbox", "on,spawn=deny", "-run-with", "async-teardown=on"]), 0);
    }

    #[test]
    fn a_name_hides_nothing() {
        let line = ["/not/there", "-netdev", "tap,id=n,script=no,{name}=/tmp/x"].map(str::to_owned);
        let objections = |vm: &str| PeerPolicy::default().objections(&line, vm, &[]).len();
        assert_eq!((objections("web"), objections("script")), (0, 1));
    }

    #[test]
    fn the_environment_is_not_theirs_to_set() {
        let policy = PeerPolicy::default();
        let may = |name: &str| {
            let environment = [(name.to_owned(), String::new())];
            policy.objections(&["/not/there".to_owned()], "web", &environment).is_empty()
        };
        assert!(may("LANG") && may("LC_ALL") && may("VMOVE_TEST"));
        for name in ["LD_PRELOAD", "PATH", "QEMU_MODULE_DIR", "LANGUAGE", "-S", "", "VMOVE_A B", "LC_-x"] {
            assert!(!may(name), "{name}");
        }
    }
}
