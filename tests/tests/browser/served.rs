//! A `vmove page` or `vmove fleet page`, and pictures of it for `docs/`.
#![cfg(test)]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use vmove_tests::bridge::Bridge;
use vmove_tests::browser::{Browser, Look, Tab};
use vmove_tests::daemon::Node;
use vmove_tests::places;
use vmove_tests::process::Guarded;

/// Dropped, it ends.
pub struct Served {
    /// Where the page is, with the secret.
    pub url: String,
    pub process: Guarded,
}

impl Served {
    /// The page of a node, by its control socket.
    pub fn of(node: &Node) -> Result<Self> {
        Self::by(&["--control", &node.control().display().to_string()])
    }

    /// The page of a node, by its peer port, with the certificate in this folder.
    pub fn over_tls(node: &Node, shown: &Path) -> Result<Self> {
        let file = |name: &str| shown.join(name).display().to_string();
        let [at, cert, key, ca] =
            [node.listen().to_string(), file("client.pem"), file("client.key"), file("ca.pem")];
        Self::by(&["--at", &at, "--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca])
    }

    /// With these arguments of `vmove`.
    pub fn by(arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(places::product("vmove")?);
        command.args(arguments).args(["--json", "page"]);
        Self::started(command)
    }

    /// By a whole command line of `vmove --json`.
    pub fn by_command(arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(places::product("vmove")?);
        command.arg("--json").args(arguments);
        Self::started(command)
    }

    /// The page of the fleet of a bridge.
    pub fn of_fleet(bridge: &Bridge) -> Result<Self> {
        Self::started(bridge.command(&["fleet", "page"])?)
    }

    fn started(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("vmove page")?;
        let url = printed(&mut child);
        let process = Guarded::from(child);
        Ok(Self { url: url?, process })
    }

    /// A view of the page, such as `migration/ID`.
    pub fn view(&self, view: &str) -> String {
        format!("{}#/{view}", self.url)
    }
}

/// The address that it prints first.
fn printed(child: &mut Child) -> Result<String> {
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("its output")?).read_line(&mut line)?;
    let said: Value = serde_json::from_str(&line).with_context(|| format!("vmove page said {line:?}"))?;
    Ok(said["url"].as_str().context("an address")?.to_owned())
}

/// What every test needs.
pub fn ready() -> Result<()> {
    places::chromium()?;
    vmove_tests::scene::ready()
}

/// Nothing was asked of others, nothing was thrown, and the policy of the page was kept.
pub fn calm(browser: &mut Browser, tab: &Tab, url: &str) -> Result<()> {
    for sent in browser.happened(tab, "Network.requestWillBeSent")? {
        let to = sent["request"]["url"].as_str().unwrap_or_default();
        ensure!(to.starts_with(url), "expected requests to {url} only, found one to {to}");
    }
    let thrown = browser.happened(tab, "Runtime.exceptionThrown")?;
    ensure!(thrown.is_empty(), "scripts threw: {thrown:#?}");
    let told = browser.happened(tab, "Log.entryAdded")?;
    let breaks = |entry: &&Value| entry["entry"]["source"] == "security";
    ensure!(!told.iter().any(|entry| breaks(&entry)), "the policy was broken: {told:#?}");
    Ok(())
}

/// Pictures of the upper part, of this height, in light and dark: in `docs/pictures/` with `VMOVE_WRITE_PICTURES`, else in a folder that is removed.
pub fn pictures(browser: &mut Browser, tab: &Tab, name: &str, height: u32) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pictures");
    let kept = std::env::var_os("VMOVE_WRITE_PICTURES").is_some();
    let into: PathBuf = if kept { docs } else { folder.path().to_owned() };
    let mut sizes = Vec::new();
    for (theme, dark) in [("light", false), ("dark", true)] {
        browser.look(tab, Look { width: 1000, height, dark })?;
        let path = into.join(format!("page-{name}-{theme}.png"));
        browser.picture(tab, &path)?;
        sizes.push(std::fs::read(&path)?);
    }
    ensure!(sizes[0].len() > 5_000 && sizes[0] != sizes[1], "expected two pictures, one light, one dark");
    Ok(())
}
