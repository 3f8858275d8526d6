//! What can be wrong with a device, and what others do meanwhile: the guest ends where it was with its function, or one command mends it.

use anyhow::{Context, Result, ensure};

use super::{DeviceMoves, MAC, NAME, function};
use crate::check::collect;

impl DeviceMoves<'_> {
    /// Wrong model, addresses that the physical function's driver does not take, and too little locked memory.
    pub(super) fn needs(&self) -> Result<()> {
        self.guest("")?;
        let other = self.moves.must(
            2,
            "for d in /sys/bus/pci/devices/*; do [ $(cat $d/device) = 0x1005 ] && basename $d && exit 0; done; exit 1",
        )?;
        let said = self.fails(3, &format!("--device net0={}", other.trim()))?;
        ensure!(said.contains("is of model 1af4:1005") || said.contains("cannot be given"), "{said}");
        let said =
            self.fails(3, &format!("--device net0={},node-guid=00:11:22:33:44:55:66:77", function(1)))?;
        ensure!(said.contains("refused") && said.contains("node GUID"), "{said}");
        self.driver_is(2, 1, "igbvf")?;
        self.works(1)?;
        // Neither vmoved may raise limits, nor does QEMU have more than this.
        self.moves.stop_daemon(2)?;
        let little = "ulimit -l 4096; setpriv --bounding-set -sys_resource,-ipc_lock --inh-caps -sys_resource,-ipc_lock";
        self.moves.start_by(2, little, "")?;
        let said = self.fails(1, &format!("--device net0={}", function(1)))?;
        ensure!(said.contains("RLIMIT_MEMLOCK") && said.contains("CAP_SYS_RESOURCE"), "{said}");
        self.moves.stop_daemon(2)?;
        self.moves.start(2, "")?;
        self.driver_is(2, 1, "igbvf").and(self.driver_is(1, 0, "vfio-pci"))?;
        self.works(1)
    }

    /// Somebody takes the function off `vfio-pci` when the guest was handed over.
    pub(super) fn mended(&self) -> Result<()> {
        self.guest("")?;
        let more = format!("--mode postcopy --bandwidth 1MiB --device net0={}", function(1));
        let moving = self.moves.moving_of(NAME, &more, "fetch")?;
        self.moves.must(
            2,
            &format!(
                "d=/sys/bus/pci/devices/{}; echo >$d/driver_override; echo {0} >$d/driver/unbind",
                function(1)
            ),
        )?;
        let done = collect(&moving).context("h1 went away")?;
        ensure!(done.status == 4, "ended with {}: {}", done.status, done.text);
        let mend = format!("devices attach {NAME} net0");
        ensure!(done.text.contains(&mend), "{}", done.text);
        println!("  {}", done.text.lines().last().unwrap_or_default());
        // Also when the daemon is another one.
        self.kill_daemon(2)?;
        self.moves.must(2, "sleep 0.3")?;
        self.moves.start(2, "")?;
        let history = self.moves.must(2, &self.moves.vmove("--json history"))?;
        ensure!(history.contains(&mend), "the history does not say what is missing: {history}");
        for _ in 0..2 {
            self.moves.must(2, &self.moves.vmove(&mend))?;
            self.driver_is(2, 1, "vfio-pci")?;
            self.works(2)?;
        }
        self.driver_is(1, 0, "igbvf")
    }

    /// By a monitor of their own.
    pub(super) fn foreign_device(&self) -> Result<()> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        let line = format!(
            "run --name {NAME} --device net0={},mac={MAC} -- {qemu} -machine q35 -accel tcg -m 64 -nodefaults -display none -kernel {guest} \
             -debugcon file:{{vmdir}}/debug -qmp unix:{{vmdir}}/other.sock,server=on,wait=off -device pcie-root-port,id=spare,chassis=77,slot=77",
            function(0)
        );
        self.moves.must(1, &self.moves.vmove(&line))?;
        self.works(1)?;
        let taken = format!(
            "d=/sys/bus/pci/devices/{}; echo vfio-pci >$d/driver_override; echo {0} >$d/driver/unbind; echo {0} >/sys/bus/pci/drivers_probe; \
             chmod 666 /dev/vfio/$(basename $(readlink $d/iommu_group))",
            function(2)
        );
        self.moves.must(1, &taken)?;
        let more = format!("--mode hybrid --bandwidth 1MiB --device net0={}", function(1));
        let moving = self.moves.moving_of(NAME, &more, "rounds")?;
        let plug = format!(
            "import json, socket\n\
             s = socket.socket(socket.AF_UNIX); s.connect('/run/vm/run/{NAME}/other.sock'); f = s.makefile('rw')\n\
             f.readline()\n\
             def ask(name, **words):\n\
             \x20   f.write(json.dumps(dict(execute=name, arguments=words))); f.flush()\n\
             \x20   while True:\n\
             \x20       said = json.loads(f.readline())\n\
             \x20       if 'return' in said or 'error' in said: return said\n\
             ask('qmp_capabilities')\n\
             print(ask('device_add', driver='vfio-pci', id='foreign', bus='spare', host='{}'))\n",
            function(2)
        );
        let plugged = self.moves.must(1, &format!("python3 -c \"{plug}\""))?;
        println!("  {}", plugged.trim());
        ensure!(plugged.contains("return"), "{plugged}");
        let during = self.moves.must(1, &self.moves.vmove("status --json"))?;
        ensure!(during.contains("\"phase\":\"rounds\""), "it came too late to disturb the move: {during}");
        let done = collect(&moving).context("h1 went away")?;
        ensure!(done.status == 1, "ended with {}: {}", done.status, done.text);
        println!("  {}", done.text.lines().last().unwrap_or_default());
        ensure!(done.text.contains("vfio") || done.text.contains("VFIO"), "{}", done.text);
        self.driver_is(1, 0, "vfio-pci").and(self.driver_is(2, 1, "igbvf"))?;
        self.moves.must(1, &self.moves.vmove(&format!("stop --force {NAME}")))?;
        let given = format!(
            "d=/sys/bus/pci/devices/{}; sleep 1; echo {0} >$d/driver/unbind; echo >$d/driver_override; echo {0} >/sys/bus/pci/drivers_probe",
            function(2)
        );
        self.moves.must(1, &given).map(drop)
    }

    /// A guest with a port for an agent.
    fn guest_with_port(&self, words: &str) -> Result<()> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        let line = format!(
            "run --name {NAME} --device net0={},mac={MAC} -- {qemu} -machine q35 -accel tcg -m 64 -nodefaults -display none -kernel {guest} \
             -append '{words}' -debugcon file:{{vmdir}}/debug -device virtio-serial \
             -chardev socket,id=qga,path={{vmdir}}/qga.sock,server=on,wait=off -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0",
            function(0)
        );
        self.moves.must(1, &self.moves.vmove(&line))?;
        self.works(1)
    }

    /// A port for an agent, and nobody in the guest who reads it.
    pub(super) fn silent_agent(&self) -> Result<()> {
        self.guest_with_port("")?;
        let words = format!("--script-timeout 4s --device net0={}", function(1));
        let said = self.fails(1, &format!("--quiesce true {words}"))?;
        ensure!(
            said.contains("could not be run in the guest") || said.contains("did not end in the guest"),
            "{said}"
        );
        self.driver_is(1, 0, "vfio-pci").and(self.driver_is(2, 1, "igbvf"))?;
        self.works(1)?;
        // The guest has moved and has its function by then: that its script was not run is in the report.
        let report = self.moves.migrate(NAME, 1, 2, &format!("--resume true {words}"))?;
        let problem = report["resume_problem"].as_str().with_context(|| report.to_string())?;
        println!("  {problem}");
        self.works(2)?;
        self.driver_is(1, 0, "igbvf").and(self.driver_is(2, 1, "vfio-pci"))
    }
    /// An agent is the guest's: what it says is a claim. One says that the script ended well, and the guest keeps the device all the same; others say
    /// what can be no answer.
    pub(super) fn lying_agent(&self) -> Result<()> {
        self.guest_with_port("stubborn")?;
        let moves = format!(
            "--quiesce unload-driver --resume load-driver --script-timeout 10s --unplug-timeout 6s --device net0={}",
            function(1)
        );
        for (lie, words) in [
            ("well", "did not release device"),
            ("garbage", "is invalid"),
            ("another", "expected exitcode or signal"),
            ("flood", "more than"),
        ] {
            let asked = self.played_agent(lie, || {
                let said = self.fails(1, &moves)?;
                ensure!(said.contains(words), "{lie}: {said}");
                Ok(())
            })?;
            // It was asked to stop the guest's work, and in the end to go on with it, whatever it had said.
            ensure!(
                asked.starts_with("unload-driver") && asked.trim_end().ends_with("load-driver"),
                "{lie}: asked for {asked:?}"
            );
            ensure!(asked.lines().any(|line| line == "load-driver"), "{lie}: asked for {asked:?}");
            self.driver_is(2, 1, "igbvf").and(self.driver_is(1, 0, "vfio-pci"))?;
            self.works(1).with_context(|| format!("after an agent that lies ({lie})"))?;
        }
        Ok(())
    }

    /// Plays the guest's agent while something is done, in place of QEMU's end of its port; the scripts that it was asked to run.
    fn played_agent(&self, lie: &str, act: impl FnOnce() -> Result<()>) -> Result<String> {
        let (agent, port) = (self.host_program("agent"), format!("/run/vm/run/{NAME}/qga.sock"));
        self.moves.must(
            1,
            &format!(
                "mv {port} {port}.qemu; setsid {agent} {port} /run/agent-asked {lie} >/run/lab/agent.log 2>&1 </dev/null & \
                 echo $! >/run/agent.pid; for i in $(seq 100); do [ -S {port} ] && exit 0; sleep 0.1; done; cat /run/lab/agent.log; exit 1"
            ),
        )?;
        let done = act();
        let asked = self.moves.must(
            1,
            &format!(
                "kill $(cat /run/agent.pid); mv {port}.qemu {port}; cat /run/agent-asked; rm /run/agent-asked"
            ),
        );
        done.and(asked)
    }
}
