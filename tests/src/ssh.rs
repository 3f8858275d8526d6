//! Real ssh between the hosts of a test: a server on each, whose host key the others know, and a key by which root logs in.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::hosts::Host;
use crate::places;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

/// For so long a server may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Keys and configuration, shared by all hosts of a test.
#[derive(Debug)]
pub struct Ssh {
    programs: PathBuf,
    folder: PathBuf,
}

/// The server of a host. It ends when this is dropped; a session that it serves goes on.
#[derive(Debug)]
pub struct Server {
    process: Guarded,
}

impl Ssh {
    /// Makes the key of root.
    ///
    /// # Errors
    /// ssh is not unpacked.
    pub fn new(sandbox: &Sandbox) -> Result<Self> {
        let (programs, folder) = (places::ssh()?, sandbox.folder("ssh")?);
        let ssh = Self { programs, folder };
        ssh.make_key("id")?;
        std::fs::copy(ssh.path("id.pub"), ssh.path("authorized_keys"))?;
        Ok(ssh)
    }

    /// Path of `known_hosts` or `authorized_keys`, which every host reads, or of the key `id`.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Lets a host reach these others by ssh, with its defaults: their names resolve, and it has the key.
    ///
    /// # Errors
    /// Its `/etc` cannot be written.
    pub fn set_up(&self, host: &mut Host, all: &[(&str, IpAddr)]) -> Result<()> {
        host.prefer(&self.programs.join("bin"))?;
        let file = self.path(&format!("{}.config", host.name()));
        let config = format!(
            "IdentityFile {}\nUserKnownHostsFile {}\nConnectTimeout 5\n",
            self.path("id").display(),
            self.path("known_hosts").display()
        );
        std::fs::write(&file, config)?;
        let names: String = all.iter().map(|(name, address)| format!("{address} {name}\\n")).collect();
        host.run(&format!(
            "mkdir -p /etc/ssh && cp {} /etc/ssh/ssh_config && printf '{names}' >>/etc/hosts",
            file.display()
        ))?;
        Ok(())
    }

    /// Starts the server of a host at this address. The others know its key, which is made at the first start.
    ///
    /// # Errors
    /// It does not listen.
    pub fn serve(&self, host: &Host, address: IpAddr) -> Result<Server> {
        let (name, key) = (host.name(), format!("{}.key", host.name()));
        if !self.path(&key).exists() {
            self.make_key(&key)?;
            let public = std::fs::read_to_string(self.path(&format!("{key}.pub")))?;
            let known = std::fs::read_to_string(self.path("known_hosts")).unwrap_or_default();
            std::fs::write(self.path("known_hosts"), format!("{known}{name},{address} {public}"))?;
        }
        let config = self.path(&format!("{name}.sshd"));
        // What vmove is told over ssh needs the programs that were built.
        let text = format!(
            "ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPidFile none\nSetEnv PATH={}\n",
            self.path(&key).display(),
            self.path("authorized_keys").display(),
            host.search_path().display()
        );
        std::fs::write(&config, text)?;
        // The folder and the user that sshd insists on, in the host's own /run and /etc; root may have no password there, but is not locked.
        host.run(
            "mkdir -p -m 0755 /run/sshd; grep -q ^sshd: /etc/passwd || echo 'sshd:x:64054:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd; sed -i 's/^root:[^:]*:/root:*:/' /etc/shadow",
        )?;
        let program = self.programs.join("sbin/sshd");
        let process = host.spawn(&format!("{} -D -e -f {}", program.display(), config.display()))?;
        let mut server = Server { process };
        let deadline = Instant::now() + START_TIMEOUT;
        while host.run(&format!("ss -Hltn src {address}:22 | grep -q .")).is_err() {
            ensure!(server.process.ended()?.is_none(), "sshd of {name} ended: {}", host.log());
            if Instant::now() > deadline {
                bail!("sshd of {name} does not listen after {START_TIMEOUT:?}: {}", host.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn make_key(&self, name: &str) -> Result<()> {
        make_key(&self.programs, &self.path(name))
    }

    /// Makes a key that nobody knows.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn strange_key(&self, name: &str) -> Result<String> {
        self.make_key(name)?;
        Ok(std::fs::read_to_string(self.path(&format!("{name}.pub")))?)
    }
}

fn make_key(programs: &Path, file: &Path) -> Result<()> {
    let keygen = programs.join("bin/ssh-keygen");
    let output = Command::new(&keygen)
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"])
        .arg(file)
        .output()
        .with_context(|| format!("could not run {}", keygen.display()))?;
    ensure!(output.status.success(), "ssh-keygen: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
