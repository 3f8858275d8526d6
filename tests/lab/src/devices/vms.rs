//! Functions of VMs that the daemon starts: given, worked with, given back, whoever is killed meanwhile.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Devices, function, mac};
use crate::host::address;

/// Guest memory, in MiB.
const MEMORY: usize = 64;
/// How often the daemon is killed while it starts, and while it stops a VM.
const KILLS: usize = 8;

impl Devices<'_> {
    fn vmove(&self, words: &str) -> String {
        let folder = self.parts.programs.parent().unwrap_or(&self.parts.programs).display();
        format!("{folder}/vmove --control /run/vm/c.sock {words}")
    }

    /// Starts the daemon of a host, and waits until it answers.
    fn daemon(&self, host: usize) -> Result<()> {
        let folder = self.parts.programs.parent().unwrap_or(&self.parts.programs).display();
        let ready = self.vmove("node");
        self.must(
            host,
            &format!(
                "mkdir -p /run/vm; setsid {folder}/vmoved --node h{host} --listen 0.0.0.0:7700 --control /run/vm/c.sock \
                 --state-dir /run/vm --insecure >>/run/lab/vmoved.log 2>&1 </dev/null & \
                 echo $! >/run/vmoved.pid; for i in $(seq 300); do {ready} >/dev/null 2>&1 && exit 0; sleep 0.1; done; \
                 tail -5 /run/lab/vmoved.log; exit 1"
            ),
        )
        .map(drop)
    }

    fn end_daemon(&self, host: usize) -> Result<()> {
        self.must(
            host,
            &format!(
                "{}; {}; kill $(cat /run/vmoved.pid); for i in $(seq 100); do kill -0 $(cat /run/vmoved.pid) 2>/dev/null || break; \
                 sleep 0.1; done; grep ' /run/vm/' /proc/mounts | cut -d' ' -f2 | xargs -r umount -l; rm -rf /run/vm /dev/shm/web",
                self.vmove("stop --force web >/dev/null 2>&1"),
                self.vmove("stop --force partner >/dev/null 2>&1")
            ),
        )
        .map(drop)
    }

    /// A case between a daemon's start and its end.
    fn with_daemon(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        self.daemon(1)?;
        let done = act();
        done.and(self.end_daemon(1))
    }

    /// The command of a guest that drives functions.
    fn line(&self) -> String {
        let (qemu, guest) = (self.parts.qemu.display(), self.parts.guest.display());
        format!(
            "{qemu} -machine q35 -accel tcg -m {MEMORY} -kernel {guest} -nodefaults -no-user-config -display none \
             -debugcon file:{{vmdir}}/debug"
        )
    }

    /// Starts VM `web` with this.
    fn run_words(&self, devices: &str, more: &str) -> String {
        self.vmove(&format!("run --name web {devices} -- {} {more}", self.line()))
    }

    fn device_words(index: usize) -> String {
        format!("--device net0={},mac={}", function(index), mac(1, index))
    }

    /// `vmove devices` of a function.
    fn told(&self, index: usize) -> Result<Value> {
        let said: Value = serde_json::from_str(self.must(1, &self.vmove("--json devices"))?.trim())?;
        let all = said["devices"].as_array().context("no devices")?;
        let found = all.iter().find(|device| device["address"] == function(index));
        found.cloned().with_context(|| said.to_string())
    }

    fn shown(&self) -> Result<Value> {
        Ok(serde_json::from_str(self.must(1, &self.vmove("--json show web"))?.trim())?)
    }

    /// Function `index` is the VM's alone, works, and only QEMU's user may open it.
    fn is_given(&self, index: usize) -> Result<()> {
        let told = self.told(index)?;
        ensure!(
            told["driver"] == "vfio-pci" && told["owner"]["vm"] == "web" && told["owner"]["held"] == true,
            "{told}"
        );
        // Where the other cases have their guests.
        let shown = self.shown()?;
        let ram = shown["ram"][0]["path"].as_str().context("no RAM file")?;
        let dir = shown["dir"].as_str().context("no folder")?;
        self.must(
            1,
            &format!(
                "mkdir -p /dev/shm/web; ln -sf {ram} /dev/shm/web/ram; ln -sf {dir}/debug /dev/shm/web/debug; touch /dev/shm/web/log"
            ),
        )?;
        self.says(1, "web", "card up", 60)?;
        let found = self.works(1, "web")?;
        let seen = found.mac.map(|byte| format!("{byte:02x}")).join(":");
        ensure!(seen == mac(1, index), "{seen}");
        Ok(())
    }

    /// Function `index` is the host's again, as soon as the daemon has noticed.
    fn is_back(&self, index: usize) -> Result<()> {
        let begun = Instant::now();
        loop {
            let told = self.told(index)?;
            if told["driver"] == "igbvf" && told["owner"].is_null() {
                return Ok(());
            }
            ensure!(begun.elapsed() < Duration::from_secs(60), "not back: {told}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Another VM, whose function sends to that of the VM.
    fn partner(&self) -> Result<()> {
        let device = format!("--device net0={},mac={}", function(1), mac(1, 1));
        self.must(1, &self.vmove(&format!("run --name partner {device} -- {}", self.line()))).map(drop)
    }

    /// What `vmove check` says of the VM's function, without one of the other host and with one.
    fn checks(&self) -> Result<()> {
        let check = self.vmove(&format!("check web --to {}:7700", address(2)));
        let said = self.must(1, &format!("{check} 2>&1; echo ended $?"))?;
        ensure!(said.contains("free on h2: ") && said.contains("ended 3"), "{said}");
        let said = self.must(1, &format!("{check} --device net0={} 2>&1; echo ended $?", function(2)))?;
        ensure!(
            said.contains("unplug") && said.contains("without it for about") && said.contains("ended 0"),
            "{said}"
        );
        Ok(())
    }

    pub(super) fn run_and_stop(&self) -> Result<()> {
        self.with_daemon(|| {
            self.partner()?;
            let begun = Instant::now();
            self.must(1, &self.run_words(&Self::device_words(0), ""))?;
            println!("  started after {:.0} ms", begun.elapsed().as_secs_f64() * 1000.0);
            self.is_given(0)?;
            let pid = self.shown()?["pid"].clone();
            let said = self.must(
                1,
                &format!(
                    "{}; grep 'locked memory' /proc/{pid}/limits; ls -ln /dev/vfio",
                    self.vmove("show web")
                ),
            )?;
            println!("  {}", said.trim().replace('\n', "\n  "));
            // Twice is refused, and nothing is changed by that.
            let said = self.must(
                1,
                &format!(
                    "{} 2>&1 | cat",
                    self.vmove(&format!("run --name other {} -- {}", Self::device_words(0), self.line()))
                ),
            )?;
            ensure!(said.contains("VM \"web\" has it as \"net0\""), "{said}");
            // To move it, one of the other host is needed: which are free there is said, and with one what the guest will feel.
            self.daemon(2)?;
            let said = self.checks();
            self.end_daemon(2)?;
            said?;
            self.is_given(0)?;
            self.must(1, &self.vmove("stop web"))?;
            self.is_back(0)?;
            // QEMU's death, too.
            self.must(1, &self.run_words(&Self::device_words(0), ""))?;
            self.is_given(0)?;
            self.must(1, &format!("kill -KILL {}", self.shown()?["pid"]))?;
            self.is_back(0)
        })
    }

    pub(super) fn killed_daemon(&self) -> Result<()> {
        self.with_daemon(|| {
            self.partner()?;
            // While it starts the VM.
            let (mut before, mut there) = (0, 0);
            for kill in 0..KILLS {
                let run = self.run_words(&Self::device_words(0), "");
                let wait = format!("0.{:03}", 10 + kill * 60);
                self.must(1, &format!("({run} >/dev/null 2>&1 &); sleep {wait}; kill -KILL $(cat /run/vmoved.pid); sleep 0.2"))?;
                self.daemon(1)?;
                // The start may not have begun, was undone, or was finished.
                let said = self.must(1, &format!("sleep 3; {} 2>&1 | cat", self.vmove("list")))?;
                if said.contains("web") {
                    there += 1;
                    self.is_given(0).with_context(|| format!("killed after {wait} s"))?;
                    self.must(1, &self.vmove("stop --force web"))?;
                } else {
                    before += 1;
                }
                self.is_back(0).with_context(|| format!("killed after {wait} s"))?;
            }
            println!("  killed while it started a VM: {before} undone, {there} finished before");
            // While the VM runs, and while it stops.
            for kill in 0..KILLS {
                self.must(1, &self.run_words(&Self::device_words(0), ""))?;
                self.must(1, "kill -KILL $(cat /run/vmoved.pid); sleep 0.2")?;
                self.daemon(1)?;
                self.is_given(0)?;
                let wait = format!("0.{:03}", 5 + kill * 40);
                let stop = self.vmove("stop web");
                self.must(1, &format!("({stop} >/dev/null 2>&1 &); sleep {wait}; kill -KILL $(cat /run/vmoved.pid); sleep 0.2"))?;
                self.daemon(1)?;
                self.must(1, &self.vmove("stop --force web >/dev/null 2>&1; true"))?;
                self.is_back(0).with_context(|| format!("killed after {wait} s"))?;
            }
            Ok(())
        })
    }

    pub(super) fn foreign(&self) -> Result<()> {
        // Its address is what the operator gave it.
        self.must(1, &format!("ip link set eth1 vf 0 mac {}", mac(1, 0)))?;
        self.with_daemon(|| {
            self.partner()?;
            self.must(1, &self.run_words("", &format!("-device vfio-pci,host={},id=hostdev0", function(0))))?;
            self.is_given(0)?;
            let told = self.told(0)?;
            ensure!(told["owner"]["role"] == "hostdev0", "{told}");
            self.must(1, &self.vmove("stop web"))?;
            self.is_back(0)
        })
    }

    pub(super) fn refused(&self) -> Result<()> {
        self.with_daemon(|| {
            let vfio = format!("-device vfio-pci,host={}", function(0));
            for (devices, more, words) in [
                (String::new(), format!("{vfio},bus=pcie.0"), "cannot be unplugged"),
                (String::new(), "-device vfio-pci,sysfsdev=/sys/bus/mdev/devices/c8b3".to_owned(), "vGPU"),
                (format!("--device card={}", super::CARD), String::new(), "virtual functions are in use"),
                ("--device net0=0000:77:00.0".to_owned(), String::new(), "no such PCI device"),
            ] {
                let said =
                    self.must(1, &format!("{} 2>&1; echo ended $?", self.run_words(&devices, &more)))?;
                println!("  {}", said.trim().replace('\n', "\n  "));
                ensure!(said.contains(words) && said.contains("ended 3"), "{words}: {said}");
                self.is_back(0)?;
            }
            Ok(())
        })
    }
}
