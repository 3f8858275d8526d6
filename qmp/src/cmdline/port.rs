//! Virtio-serial ports of a command line.

use super::{CommandLine, CommandLineError};

impl CommandLine {
    /// The unix socket behind the virtio-serial port of this name, as written, placeholders included; `None` without such a port,
    /// or if something else is behind it.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn port_socket(&self, name: &str) -> Result<Option<String>, CommandLineError> {
        let mut chardev = None;
        for item in self.named("device") {
            let options = item.options()?;
            let is_port = options.get("driver", true).as_deref() == Some("virtserialport");
            if is_port && options.get("name", false).as_deref() == Some(name) {
                chardev = options.get("chardev", false);
            }
        }
        let Some(chardev) = chardev else { return Ok(None) };
        for item in self.named("chardev") {
            let options = item.options()?;
            let is_it = options.get("id", false).as_deref() == Some(chardev.as_str());
            if is_it && options.get("backend", true).as_deref() == Some("socket") {
                return Ok(options.get("path", false));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_port_is_found_by_its_name() {
        let words = [
            "qemu",
            "-chardev",
            "socket,id=a,path=/a.sock,server=on,wait=off",
            "-chardev",
            "socket,id=f,path={vmdir}/fork.sock,server=on,wait=off",
            "-chardev",
            "null,id=n",
            "-device",
            "virtserialport,chardev=a,name=org.qemu.guest_agent.0",
            "-device",
            "virtserialport,chardev=f,name=org.vmove.fork",
            "-device",
            "virtserialport,chardev=n,name=nowhere",
        ];
        let line = CommandLine::parse(words.map(Into::into).to_vec()).unwrap();
        let socket = |name| line.port_socket(name).unwrap();
        assert_eq!(socket("org.vmove.fork").as_deref(), Some("{vmdir}/fork.sock"));
        assert_eq!(socket("nowhere"), None);
        assert_eq!(socket("other"), None);
    }
}
