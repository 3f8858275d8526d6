//! `[[hook]]`, `[host-signals]` and `[bridge]`.

use std::path::PathBuf;

use serde::Deserialize;
use vmove_hooks::action::{Action, Where};
use vmove_hooks::config::{Hook, HookEntry, HookError};
use vmove_hooks::signals::Sources;

/// Where the host tells things.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct SignalsConfig {
    edac_dir: Option<PathBuf>,
    kernel_log: Option<PathBuf>,
}

impl SignalsConfig {
    pub(super) fn sources(self) -> Sources {
        let usual = Sources::default();
        Sources {
            edac: self.edac_dir.unwrap_or(usual.edac),
            kernel_log: self.kernel_log.unwrap_or(usual.kernel_log),
        }
    }
}

/// The bridge that says where VMs go.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BridgeConfig {
    /// `unix:/path`, or `https://host:port`.
    pub at: String,
    /// Name of this node at the bridge, if not its own.
    #[serde(default)]
    pub node: Option<String>,
    /// A file with the bearer token.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// Authorities that sign the certificate of the bridge, PEM.
    #[serde(default)]
    pub ca: Option<PathBuf>,
}

/// Hooks, whose nodes are known, and that can ask the bridge.
pub(super) fn check(
    entries: Vec<HookEntry>,
    child_start: Option<PathBuf>,
    known: impl Fn(&str) -> bool,
    bridge: bool,
) -> Result<Vec<Hook>, HookError> {
    let places: Vec<String> = entries.iter().map(|entry| entry.name().to_owned()).collect();
    let hooks = vmove_hooks::config::check(entries, child_start)?;
    for hook in &hooks {
        let number = places.iter().position(|name| *name == hook.name).map_or(0, |place| place + 1);
        let bad =
            |key: &str, why: String| HookError { number, name: hook.name.clone(), key: key.to_owned(), why };
        match &hook.action {
            Action::Migrate(Where::Bridge) if !bridge => {
                return Err(bad(
                    "do.migrate.by-bridge",
                    "expected [bridge] in the configuration, found none".to_owned(),
                ));
            }
            Action::Migrate(Where::Nodes(nodes)) => {
                if let Some(node) = nodes.iter().find(|node| !known(node)) {
                    let why = format!("expected a name of [nodes], or host:port, found \"{node}\"");
                    return Err(bad("do.migrate.to", why));
                }
            }
            _ => {}
        }
    }
    Ok(hooks)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vmove_hooks::{AtMost, Own};

    use crate::config::Config;
    use crate::config::tests::{configured, file, flags};

    fn refused(text: &str) -> String {
        Config::merge(flags(&["--insecure"]), file(text)).unwrap_err().to_string()
    }

    #[test]
    fn every_example_of_a_hook_can_be_used() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/hooks"));
        let mut names = Vec::new();
        for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_none_or(|end| end != "toml") {
                continue;
            }
            let config = configured(&std::fs::read_to_string(&path).unwrap());
            assert!(!config.hooks.is_empty(), "{}", path.display());
            for hook in &config.hooks {
                // What can disturb a guest must not do so without end.
                let timer = matches!(hook.on, vmove_hooks::trigger::Trigger::Timer(_));
                assert!(
                    timer || hook.on.is_asked() || hook.at_most != AtMost::Unlimited,
                    "{}",
                    path.display()
                );
            }
            names.extend(config.hooks.iter().map(|hook| hook.name.clone()));
        }
        names.sort();
        assert_eq!(
            names,
            [
                "copy-on-panic",
                "evacuate-gpu",
                "evacuate-memory",
                "evacuate-qemu-memory",
                "hourly",
                "quota",
                "tell-bridge",
                "tell-slurm",
                "tell-slurm-before"
            ]
        );
    }

    #[test]
    fn a_hook_that_cannot_be_used_is_named_with_key_and_expectation() {
        let hook = "[[hook]]\nname = 'h'\non = 'after-migraton'\ndo = 'pause'";
        let said = refused(hook);
        for word in
            ["hook[1] (h).on: expected", "found \"after-migraton\"", "did you mean \"after-migration\"?"]
        {
            assert!(said.contains(word), "{said}");
        }
        let bridge = "[[hook]]\nname = 'h'\non = 'STOP'\ndo = { migrate = { by-bridge = true } }";
        assert!(refused(bridge).contains("expected [bridge]"), "{}", refused(bridge));
        let node = "[[hook]]\nname = 'h'\non = 'STOP'\ndo = { migrate = { to = 'nowhere' } }";
        assert!(refused(node).contains("do.migrate.to: expected"), "{}", refused(node));
    }

    #[test]
    fn child_start_is_a_hook_in_short() {
        let config = configured("[fork]\nchild-start = '/etc/vmove/child-start'");
        assert_eq!(config.hooks.len(), 1);
        assert!(matches!(config.hooks[0].on, vmove_hooks::trigger::Trigger::Own(Own::ChildStart)));
        let twice = "[fork]\nchild-start = '/x'\n[[hook]]\nname = 'child-start'\non = 'STOP'\ndo = 'pause'";
        assert!(refused(twice).contains("a name that no other hook has"));
    }
}
