//! A Chromium without a window, spoken with by the [DevTools protocol](https://chromedevtools.github.io/devtools-protocol/): JSON over a pipe, each
//! message ended by a zero byte (`--remote-debugging-pipe`). No port is open, and no library is needed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::places;
use crate::process::Guarded;

/// On a machine that compiles meanwhile, a browser starts slowly.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a page is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(30);

/// A browser. Dropped, it ends, and its profile is removed.
#[derive(Debug)]
pub struct Browser {
    to: ChildStdin,
    from: Receiver<Value>,
    events: VecDeque<Value>,
    last_id: u64,
    log: PathBuf,
    _process: Guarded,
    _profile: tempfile::TempDir,
}

/// A page that is open in a browser.
#[derive(Debug, Clone)]
pub struct Tab(String);

/// How a page is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Of the window. Unit: CSS pixels.
    pub width: u32,
    /// Of the window. Unit: CSS pixels.
    pub height: u32,
    /// With light text on dark ground.
    pub dark: bool,
}

impl Browser {
    /// Starts it.
    ///
    /// # Errors
    /// When it is not there, or does not answer.
    pub fn start() -> Result<Self> {
        let program = places::chromium()?;
        let profile = tempfile::Builder::new().prefix("browser").tempdir()?;
        let log = profile.path().join("log");
        // The browser reads from 3 and writes to 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>&2"#]).arg(&program);
        command.args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]);
        command.args(["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]);
        command.args(["--force-color-profile=srgb", "--hide-scrollbars", "--window-size=1000,900"]);
        command.arg(format!("--user-data-dir={}", profile.path().join("profile").display()));
        // Fonts of its own: pictures look alike everywhere.
        if let Some(fonts) = program.ancestors().nth(4).map(|cache| cache.join("fonts.conf")) {
            command.env("FONTCONFIG_FILE", fonts);
        }
        command.env("XDG_CACHE_HOME", profile.path().join("cache"));
        command.arg("about:blank").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut process =
            command.spawn().with_context(|| format!("could not start {}", program.display()))?;
        let to = process.stdin.take().context("its input")?;
        let output = BufReader::new(process.stdout.take().context("its output")?);
        let (tell, from) = channel();
        std::thread::spawn(move || {
            for message in output.split(0) {
                let Some(message) = message.ok().and_then(|text| serde_json::from_slice(&text).ok()) else {
                    return;
                };
                if tell.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            to,
            from,
            events: VecDeque::new(),
            last_id: 0,
            log,
            _process: process.into(),
            _profile: profile,
        };
        browser.call("Browser.getVersion", &json!({}))?;
        Ok(browser)
    }

    /// Opens an address, and waits until it is loaded.
    ///
    /// # Errors
    /// When it cannot be loaded.
    pub fn open(&mut self, url: &str) -> Result<Tab> {
        let tab = self.blank()?;
        self.go(&tab, url)?;
        Ok(tab)
    }

    /// Opens an empty page.
    ///
    /// # Errors
    /// When the browser does not answer.
    pub fn blank(&mut self) -> Result<Tab> {
        let made = self.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attached =
            self.call("Target.attachToTarget", &json!({ "targetId": made["targetId"], "flatten": true }))?;
        let tab = Tab(attached["sessionId"].as_str().context("a session")?.to_owned());
        for domain in ["Page", "Runtime", "Network", "Log"] {
            self.ask(&tab, &format!("{domain}.enable"), &json!({}))?;
        }
        Ok(tab)
    }

    /// Leads a page to an address, and waits until it is loaded.
    ///
    /// # Errors
    /// When it cannot be loaded.
    pub fn go(&mut self, tab: &Tab, url: &str) -> Result<()> {
        let answer = self.ask(tab, "Page.navigate", &json!({ "url": url }))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("{url}: {error}");
        }
        self.wait(tab, "document.readyState === 'complete' && location.href !== 'about:blank'")
    }

    /// The value of an expression in the page; a promise is waited for.
    ///
    /// # Errors
    /// When it throws.
    pub fn value(&mut self, tab: &Tab, expression: &str) -> Result<Value> {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.ask(tab, "Runtime.evaluate", &asked)?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!("{expression}: {}", thrown["exception"]["description"].as_str().unwrap_or("it threw"));
        }
        Ok(answer["result"]["value"].clone())
    }

    /// The text of what this selector finds, as people see it; empty if there is nothing.
    ///
    /// # Errors
    /// When the browser does not answer.
    pub fn text(&mut self, tab: &Tab, selector: &str) -> Result<String> {
        let found = self.value(tab, &format!("document.querySelector({selector:?})?.innerText ?? ''"))?;
        Ok(found.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until an expression is true.
    ///
    /// # Errors
    /// When it is not within a minute; the error has the text of the page.
    pub fn wait(&mut self, tab: &Tab, expression: &str) -> Result<()> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        // While a page is being loaded there may be nothing to ask.
        while !self.value(tab, expression).is_ok_and(|value| value == true) {
            if Instant::now() > deadline {
                bail!(
                    "not so within {ANSWER_TIMEOUT:?}: {expression}; the page: {}",
                    self.text(tab, "body")?
                );
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Waits until what a selector finds has this text in it.
    ///
    /// # Errors
    /// As [`Browser::wait`].
    pub fn wait_for_text(&mut self, tab: &Tab, selector: &str, text: &str) -> Result<()> {
        self.wait(
            tab,
            &format!("document.querySelector({selector:?})?.innerText.includes({text:?}) ?? false"),
        )
    }

    /// Changes how a page is looked at.
    ///
    /// # Errors
    /// When the browser does not answer.
    pub fn look(&mut self, tab: &Tab, look: Look) -> Result<()> {
        let Look { width, height, dark } = look;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.ask(tab, "Emulation.setEmulatedMedia", &json!({ "features": features }))?;
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask(tab, "Emulation.setDeviceMetricsOverride", &size).map(drop)
    }

    /// Presses and releases a key.
    ///
    /// # Errors
    /// When the browser does not answer.
    pub fn press(&mut self, tab: &Tab, key: &str) -> Result<()> {
        let code = if key == "Enter" { 13 } else { 9 };
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let event =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
            self.ask(tab, "Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Writes a picture of a page, as PNG.
    ///
    /// # Errors
    /// When it cannot be made or written.
    pub fn picture(&mut self, tab: &Tab, path: &Path) -> Result<()> {
        let made = self.ask(tab, "Page.captureScreenshot", &json!({ "format": "png" }))?;
        let data = made["data"].as_str().context("a picture")?;
        std::fs::write(path, BASE64.decode(data)?).with_context(|| path.display().to_string())
    }

    /// Sends a command to a page.
    ///
    /// # Errors
    /// When it is refused, or not answered.
    pub fn ask(&mut self, tab: &Tab, method: &str, params: &Value) -> Result<Value> {
        self.send(json!({ "method": method, "params": params, "sessionId": tab.0 }))
    }

    fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.send(json!({ "method": method, "params": params }))
    }

    fn send(&mut self, mut message: Value) -> Result<Value> {
        self.last_id += 1;
        message["id"] = self.last_id.into();
        self.to.write_all(message.to_string().as_bytes())?;
        self.to.write_all(&[0])?;
        loop {
            let answer = self.from.recv_timeout(ANSWER_TIMEOUT).with_context(|| {
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                format!("the browser does not answer {}: {log}", message["method"])
            })?;
            if answer["id"] != message["id"] {
                self.events.push_back(answer);
            } else if let Some(error) = answer.get("error") {
                bail!("{}: {error}", message["method"]);
            } else {
                return Ok(answer["result"].clone());
            }
        }
    }

    /// What has happened in a page since it was asked last, by the name of the event.
    ///
    /// # Errors
    /// When the browser does not answer.
    pub fn happened(&mut self, tab: &Tab, event: &str) -> Result<Vec<Value>> {
        // Whatever came before the answer is here after it.
        self.value(tab, "0")?;
        let of_it = |message: &Value| message["method"] == event && message["sessionId"] == tab.0.as_str();
        let (found, others): (VecDeque<_>, _) = self.events.drain(..).partition(of_it);
        self.events = others;
        Ok(found.into_iter().map(|message| message["params"].clone()).collect())
    }
}

/// The body of an answer, as the protocol wants it.
#[must_use]
pub fn base64(text: &str) -> String {
    BASE64.encode(text)
}
