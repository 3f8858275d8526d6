//! Disk images of a command line, and overlays put over them.

use super::{CommandLine, CommandLineError, Item, options::Options};

/// An image that `-drive` or `-blockdev` gives to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its file as written, with the placeholders.
    pub file: String,
    /// Its format as stated, such as `raw` or `qcow2`; `None` if QEMU is to find it out.
    pub format: Option<String>,
    /// Whether QEMU is told not to lock it.
    pub unlocked: bool,
}

/// What an image becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// The image as [`CommandLine::images`] gives it.
    pub image: String,
    /// The qcow2 file over it, which names it as its backing file. As it is to be written: absolute.
    pub file: String,
    /// Whether it is to bypass the page cache, as the image does.
    pub direct: bool,
    /// Whether the image is not there: what is below is said in the qcow2 file alone.
    pub alone: bool,
}

/// Where an image is said.
pub(super) enum Place {
    /// `-drive file=…`
    Drive,
    /// `-blockdev`: the node of this name.
    Node(String),
}

impl CommandLine {
    /// Images that can get an overlay: `-drive file=` with a plain path, and nodes of `-blockdev` that are raw or qcow2 on a
    /// plain file. Others are left out.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn images(&self) -> Result<Vec<Image>, CommandLineError> {
        let found = self.places()?;
        Ok(found.into_iter().map(|(_, image, _)| image).collect())
    }

    /// Puts an overlay over an image: the device keeps its drive, which is the overlay now. False if there is no such image.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn put_overlay(&mut self, overlay: &Overlay) -> Result<bool, CommandLineError> {
        let places = self.places()?;
        let Some((at, _, place)) = places.into_iter().find(|(_, image, _)| image.file == overlay.image)
        else {
            return Ok(false);
        };
        let mut options = self.items[at].options()?;
        match place {
            Place::Drive => {
                options.set_text("file", &overlay.file);
                options.remove("driver");
                options.set_text("format", "qcow2");
                self.items[at].set_options(&options);
            }
            Place::Node(node) if overlay.alone => {
                let direct = overlay.direct || is_direct(&options);
                let overlay = Overlay { direct, ..overlay.clone() };
                let over = node_over(&node, None, &overlay, &options);
                self.items[at] = Item::new("-blockdev", over.to_string().as_str());
                self.remove_below(&options)?;
            }
            Place::Node(node) => {
                let base = self.free_node()?;
                options.set_text("node-name", &base);
                options.remove("auto-read-only");
                options.set_flag("read-only", true);
                self.items[at].set_options(&options);
                let over = node_over(&node, Some(&base), overlay, &options);
                self.items.insert(at + 1, Item::new("-blockdev", over.to_string().as_str()));
            }
        }
        Ok(true)
    }

    /// Removes the nodes that lay below one with these options and that nothing else has.
    pub(super) fn remove_below(&mut self, node: &Options) -> Result<(), CommandLineError> {
        for below in ["file", "backing"].into_iter().filter_map(|key| node.get(key, false)) {
            if self.is_used(&below)? {
                continue;
            }
            let mut found = None;
            for (at, item) in self.items.iter().enumerate().filter(|(_, item)| item.name() == "blockdev") {
                let options = item.options()?;
                if options.get("node-name", false).as_deref() == Some(below.as_str()) {
                    found = Some((at, options));
                }
            }
            if let Some((at, options)) = found {
                self.items.remove(at);
                self.remove_below(&options)?;
            }
        }
        Ok(())
    }

    /// Whether a device or another node has this node.
    fn is_used(&self, node: &str) -> Result<bool, CommandLineError> {
        let mut used = self.attached()?.iter().any(|drive| drive == node);
        for item in self.named("blockdev") {
            let options = item.options()?;
            used |= ["file", "backing"].iter().any(|key| options.get(key, false).as_deref() == Some(node));
        }
        Ok(used)
    }

    fn places(&self) -> Result<Vec<(usize, Image, Place)>, CommandLineError> {
        self.places_by(&["file"])
    }

    /// The same, of images that one of these drivers opens.
    pub(super) fn places_by(&self, drivers: &[&str]) -> Result<Vec<(usize, Image, Place)>, CommandLineError> {
        let mut found = Vec::new();
        let attached = self.attached()?;
        for (at, item) in self.items.iter().enumerate() {
            match item.name() {
                "drive" => {
                    let options = item.options()?;
                    if options.flag("snapshot") == Some(true) {
                        continue;
                    }
                    let Some(file) = options.get("file", false).filter(|file| is_path(file)) else {
                        continue;
                    };
                    let format = ["format", "driver"].into_iter().find_map(|key| options.get(key, false));
                    let unlocked = ["locking", "file.locking"].into_iter().any(|key| off(&options, key));
                    found.push((at, Image { file, format, unlocked }, Place::Drive));
                }
                "blockdev" => {
                    let options = item.options()?;
                    let Some(node) = options.get("node-name", false) else { continue };
                    if !attached.contains(&node) {
                        continue;
                    }
                    if let Some((file, unlocked)) = self.file_of(&options, drivers)? {
                        let driver =
                            options.get("driver", true).filter(|driver| !drivers.contains(&driver.as_str()));
                        let format = Some(driver.unwrap_or_else(|| "raw".to_owned()));
                        found.push((at, Image { file, format, unlocked }, Place::Node(node)));
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Nodes that devices have as their drive.
    fn attached(&self) -> Result<Vec<String>, CommandLineError> {
        let mut found = Vec::new();
        for item in self.named("device") {
            found.extend(item.options()?.get("drive", false));
        }
        Ok(found)
    }

    /// The file of a node, through the node below it if that is where the file is; and whether it is not to be locked.
    fn file_of(&self, node: &Options, drivers: &[&str]) -> Result<Option<(String, bool)>, CommandLineError> {
        let driver = node.get("driver", true).unwrap_or_default();
        let opens = |driver: Option<String>| driver.is_some_and(|driver| drivers.contains(&driver.as_str()));
        let own = |options: &Options, key: &str, locking: &str| {
            let file = options.get(key, false).filter(|file| is_path(file));
            file.map(|file| (file, off(options, locking)))
        };
        if drivers.contains(&driver.as_str()) {
            return Ok(own(node, "filename", "locking"));
        }
        if !matches!(driver.as_str(), "raw" | "qcow2") {
            return Ok(None);
        }
        if let Options::Json(map) = node
            && let Some(serde_json::Value::Object(below)) = map.get("file")
        {
            let below = Options::Json(below.clone());
            return Ok(if opens(below.get("driver", false)) {
                own(&below, "filename", "locking")
            } else {
                None
            });
        }
        if opens(node.get("file.driver", false)) {
            return Ok(own(node, "file.filename", "file.locking"));
        }
        let Some(below) = node.get("file", false) else { return Ok(None) };
        for item in self.named("blockdev") {
            let options = item.options()?;
            let is_it = options.get("node-name", false).as_deref() == Some(below.as_str());
            if is_it && opens(options.get("driver", true)) {
                return Ok(own(&options, "filename", "locking"));
            }
        }
        Ok(None)
    }

    /// A node name that is not taken.
    fn free_node(&self) -> Result<String, CommandLineError> {
        let mut taken = Vec::new();
        for item in self.named("blockdev") {
            taken.extend(item.options()?.get("node-name", false));
        }
        let mut names = (0_u32..).map(|number| format!("vmove-base{number}"));
        Ok(names.find(|name| !taken.contains(name)).unwrap_or_default())
    }
}

/// The node `name` of an overlay, over node `base` or what its file names.
fn node_over(name: &str, base: Option<&str>, overlay: &Overlay, image: &Options) -> Options {
    let mut over = Options::parse("").unwrap_or(Options::Json(<_>::default()));
    over.set_kind("driver", "qcow2");
    let pairs = [
        ("node-name", Some(name)),
        ("backing", base),
        ("file.driver", Some("file")),
        ("file.filename", Some(overlay.file.as_str())),
    ];
    for (key, value) in pairs {
        if let Some(value) = value {
            over.set_text(key, value);
        }
    }
    if overlay.direct {
        ["cache.direct", "file.cache.direct"].into_iter().for_each(|key| over.set_flag(key, true));
    }
    for key in ["discard", "detect-zeroes"] {
        if let Some(value) = image.get(key, false) {
            over.set_text(key, &value);
        }
    }
    over
}

/// Whether a node bypasses the page cache.
fn is_direct(options: &Options) -> bool {
    options.all().iter().any(|(key, value)| key == "cache.direct" && matches!(value.as_str(), "on" | "true"))
}

fn off(options: &Options, key: &str) -> bool {
    options.get(key, false).as_deref() == Some("off")
}

/// A path, as opposed to `nbd://…`, `json:…`, `host:…`.
pub(super) fn is_path(file: &str) -> bool {
    !file.is_empty() && file.split('/').next().is_some_and(|first| !first.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(std::iter::once(&"qemu").chain(words).map(Into::into).collect()).unwrap()
    }

    fn words(line: &CommandLine) -> Vec<String> {
        line.to_argv().into_iter().skip(1).map(|w| w.into_string().unwrap()).collect()
    }

    fn overlay(image: &str) -> Overlay {
        Overlay { image: image.to_owned(), file: "/o,1".to_owned(), direct: false, alone: false }
    }

    #[test]
    fn images_are_found_wherever_they_are_said() {
        let line = line(&[
            "-drive",
            "if=none,id=a,file={vmdir}/a.img,format=raw",
            "-drive",
            "if=none,id=b,file=nbd://host/x",
            "-drive",
            "if=virtio,file=/s.img,snapshot=on",
            "-drive",
            "if=virtio,file=/l.img,file.locking=off",
            "-drive",
            "if=virtio,driver=qcow2,file=/d.img",
            "-blockdev",
            "driver=file,node-name=f0,filename=/f0.img,locking=off",
            "-blockdev",
            "driver=qcow2,node-name=q0,file=f0",
            "-blockdev",
            r#"{"driver":"raw","node-name":"r0","file":{"driver":"file","filename":"/r0.img"}}"#,
            "-blockdev",
            "driver=qcow2,node-name=q1,file.driver=file,file.filename=/q1.img",
            "-blockdev",
            "driver=file,node-name=unused,filename=/u.img",
            "-blockdev",
            "file,node-name=f1,filename=/f1.img",
            "-device",
            "virtio-blk-pci,drive=q0",
            "-device",
            r#"{"driver":"virtio-blk-pci","drive":"r0"}"#,
            "-device",
            "virtio-blk-pci,drive=q1",
            "-device",
            "virtio-blk-pci,drive=f1",
        ]);
        let image = |(file, format, unlocked): (&str, Option<&str>, bool)| Image {
            file: file.to_owned(),
            format: format.map(str::to_owned),
            unlocked,
        };
        let expected = [
            ("{vmdir}/a.img", Some("raw"), false),
            ("/l.img", None, true),
            ("/d.img", Some("qcow2"), false),
            ("/f0.img", Some("qcow2"), true),
            ("/r0.img", Some("raw"), false),
            ("/q1.img", Some("qcow2"), false),
            ("/f1.img", Some("raw"), false),
        ];
        assert_eq!(line.images().unwrap(), expected.map(image));
    }

    #[test]
    fn a_drive_is_its_overlay() {
        let mut line = line(&[
            "-drive",
            "if=none,id=a,format=raw,file=/a.img,cache=none",
            "-device",
            "virtio-blk-pci,drive=a",
        ]);
        assert!(!line.put_overlay(&overlay("/b.img")).unwrap());
        assert!(line.put_overlay(&overlay("/a.img")).unwrap());
        assert_eq!(words(&line)[1], "if=none,id=a,format=qcow2,file=/o,,1,cache=none");
        // A comma at the end says nothing, and does not join what comes to stand beside it.
        let mut trailing = self::line(&["-drive", "if=none,file=/a.img,"]);
        assert!(trailing.put_overlay(&overlay("/a.img")).unwrap());
        assert_eq!(words(&trailing)[1], "if=none,file=/o,,1,format=qcow2");
        // As often as one likes.
        let again = Overlay { image: "/o,1".to_owned(), file: "/o2".to_owned(), direct: false, alone: false };
        assert!(line.put_overlay(&again).unwrap());
        assert_eq!(words(&line)[1], "if=none,id=a,format=qcow2,file=/o2,cache=none");
    }

    #[test]
    fn a_device_keeps_the_name_of_its_node() {
        let mut line = line(&[
            "-blockdev",
            "driver=file,node-name=f0,filename=/f0.img",
            "-blockdev",
            r#"{"driver":"raw","node-name":"d0","file":"f0","discard":"unmap"}"#,
            "-device",
            "virtio-blk-pci,drive=d0",
        ]);
        assert!(line.put_overlay(&Overlay { direct: true, ..overlay("/f0.img") }).unwrap());
        let said = words(&line);
        assert_eq!(
            said[3],
            r#"{"discard":"unmap","driver":"raw","file":"f0","node-name":"vmove-base0","read-only":true}"#
        );
        assert_eq!(
            said[5],
            "qcow2,node-name=d0,backing=vmove-base0,file.driver=file,file.filename=/o,,1,cache.direct=on,\
             file.cache.direct=on,discard=unmap"
        );
        let again = Overlay { image: "/o,1".to_owned(), file: "/o2".to_owned(), direct: false, alone: false };
        assert!(line.put_overlay(&again).unwrap());
        assert!(words(&line)[5].contains("node-name=vmove-base1,backing=vmove-base0"), "{:?}", words(&line));
        assert!(words(&line)[7].contains("node-name=d0,backing=vmove-base1"), "{:?}", words(&line));
    }

    #[test]
    fn nothing_of_an_image_stays_where_it_is_not() {
        let mut line = line(&[
            "-blockdev",
            "driver=file,node-name=f0,filename=/f0.img",
            "-blockdev",
            "driver=raw,node-name=base,file=f0,read-only=on",
            "-blockdev",
            "driver=file,node-name=kept,filename=/kept.img",
            "-blockdev",
            "driver=qcow2,node-name=d0,backing=base,file.driver=file,file.filename=/q.img,discard=unmap",
            "-device",
            "virtio-blk-pci,drive=d0",
            "-device",
            "virtio-blk-pci,drive=kept",
        ]);
        assert!(line.put_overlay(&Overlay { alone: true, ..overlay("/q.img") }).unwrap());
        let expected = [
            "-blockdev",
            "driver=file,node-name=kept,filename=/kept.img",
            "-blockdev",
            "qcow2,node-name=d0,file.driver=file,file.filename=/o,,1,discard=unmap",
            "-device",
            "virtio-blk-pci,drive=d0",
            "-device",
            "virtio-blk-pci,drive=kept",
        ];
        assert_eq!(words(&line), expected);
    }
}
