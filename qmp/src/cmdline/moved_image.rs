//! Images of a command line that are elsewhere on the node where the guest goes.

use serde_json::Value;

use super::image::Place;
use super::{CommandLine, CommandLineError, Image, RunLayout, options::Options};

/// What opens an image that can move.
const DRIVERS: [&str; 2] = ["file", "host_device"];

/// What stands in for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The image as [`CommandLine::movable_images`] gives it.
    pub image: String,
    /// Where it is there: absolute. `None` where the command line says it.
    pub file: Option<String>,
    /// Its format, such as `raw` or `qcow2`. It is stated: QEMU would look for it in what the guest has written.
    pub format: String,
    /// It is a block device there.
    pub is_device: bool,
}

impl CommandLine {
    /// Images that devices have, on files and block devices, as written.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn movable_images(&self) -> Result<Vec<Image>, CommandLineError> {
        Ok(self.places_by(&DRIVERS)?.into_iter().map(|(_, image, _)| image).collect())
    }

    /// The names of the images of [`Self::movable_images`]: ids of drives, names of nodes.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn image_names(&self) -> Result<Vec<Option<String>>, CommandLineError> {
        let named = |(at, _, place): (usize, Image, Place)| match place {
            Place::Drive => Ok(self.items[at].options()?.get("id", false)),
            Place::Node(name) => Ok(Some(name)),
        };
        self.places_by(&DRIVERS)?.into_iter().map(named).collect()
    }

    /// The images of [`Self::movable_images`] as their QEMU opens them: with the placeholders replaced.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn opened_images(&self, layout: &RunLayout) -> Result<Vec<Image>, CommandLineError> {
        let mut line = self.clone();
        line.substitute(layout);
        line.movable_images()
    }

    /// Puts another image in the place of one, without anything below it. False if there is no such image.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn move_image(&mut self, new: &NewImage) -> Result<bool, CommandLineError> {
        let places = self.places_by(&DRIVERS)?;
        let Some((at, _, place)) = places.into_iter().find(|(_, image, _)| image.file == new.image) else {
            return Ok(false);
        };
        let file = new.file.as_deref().unwrap_or(&new.image);
        let driver = if new.is_device { "host_device" } else { "file" };
        let mut options = self.items[at].options()?;
        if let Place::Drive = place {
            options.set_text("file", file);
            options.remove("driver");
            if options.get("file.driver", false).is_some() {
                options.set_text("file.driver", driver);
            }
            options.set_text("format", &new.format);
            self.items[at].set_options(&options);
            return Ok(true);
        }
        let alone = drop_backing(&mut options);
        if !set_file(&mut options, driver, file)
            && let Some(below) = options.get("file", false)
        {
            for item in self.items.iter_mut().filter(|item| item.name() == "blockdev") {
                let mut node = item.options()?;
                if node.get("node-name", false).as_deref() == Some(below.as_str()) {
                    set_file(&mut node, driver, file);
                    item.set_options(&node);
                }
            }
        }
        self.items[at].set_options(&options);
        if let Some(backing) = alone {
            self.remove_below(&backing)?;
        }
        Ok(true)
    }
}

/// Sets the file where these options name it themselves.
fn set_file(options: &mut Options, driver: &str, file: &str) -> bool {
    if DRIVERS.iter().any(|known| options.get("driver", true).as_deref() == Some(known)) {
        options.set_kind("driver", driver);
        options.set_text("filename", file);
        return true;
    }
    if let Options::Json(map) = options
        && let Some(Value::Object(below)) = map.get_mut("file")
    {
        below.insert("driver".to_owned(), driver.into());
        below.insert("filename".to_owned(), file.into());
        return true;
    }
    let has_own = options.get("file.filename", false).is_some();
    if has_own {
        options.set_text("file.driver", driver);
        options.set_text("file.filename", file);
    }
    has_own
}

/// Forgets what lies below an image. A node that was named there is given: nothing else may need it.
fn drop_backing(options: &mut Options) -> Option<Options> {
    let named = options.get("backing", false).filter(
        |_| !matches!(options, Options::Json(map) if map.get("backing").is_some_and(|b| !b.is_string())),
    );
    options.remove("backing");
    let below: Vec<String> =
        options.all().into_iter().map(|(key, _)| key).filter(|key| key.starts_with("backing.")).collect();
    for key in below {
        options.remove(&key);
    }
    let mut alone = Options::parse("")?;
    alone.set_text("backing", &named?);
    Some(alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(std::iter::once(&"qemu").chain(words).map(Into::into).collect()).unwrap()
    }

    fn moved(words: &[&str], new: &NewImage) -> Vec<String> {
        let mut line = line(words);
        assert!(line.move_image(new).unwrap());
        line.to_argv().into_iter().skip(1).map(|word| word.into_string().unwrap()).collect()
    }

    fn to(image: &str, file: &str) -> NewImage {
        NewImage {
            image: image.to_owned(),
            file: Some(file.to_owned()),
            format: "qcow2".to_owned(),
            is_device: false,
        }
    }

    #[test]
    fn a_drive_states_its_format() {
        let new = to("{vmdir}/a.img", "/new,1");
        assert_eq!(
            moved(&["-drive", "if=virtio,file={vmdir}/a.img"], &new)[1],
            "if=virtio,file=/new,,1,format=qcow2"
        );
        let stays = NewImage { file: None, ..new };
        assert_eq!(
            moved(&["-drive", "if=virtio,file={vmdir}/a.img"], &stays)[1],
            "if=virtio,file={vmdir}/a.img,format=qcow2"
        );
        assert!(!line(&["-drive", "if=virtio,file=/b"]).move_image(&stays).unwrap());
    }

    #[test]
    fn a_node_changes_where_it_names_its_file() {
        let device = ["-device", "virtio-blk-pci,drive=d0"];
        let two = [
            "-blockdev",
            "driver=file,node-name=f0,filename=/a",
            "-blockdev",
            "driver=qcow2,node-name=d0,file=f0",
        ];
        let words = moved(&[&two[..], &device].concat(), &to("/a", "/b"));
        assert_eq!(words[1], "driver=file,node-name=f0,filename=/b");
        let dotted = ["-blockdev", "qcow2,node-name=d0,file.driver=file,file.filename=/a"];
        let on_device = NewImage { is_device: true, ..to("/a", "/dev/x") };
        let words = moved(&[&dotted[..], &device].concat(), &on_device);
        assert_eq!(words[1], "qcow2,node-name=d0,file.driver=host_device,file.filename=/dev/x");
        let json = [
            "-blockdev",
            r#"{"driver":"raw","node-name":"d0","file":{"driver":"host_device","filename":"/dev/y"}}"#,
        ];
        let words = moved(&[&json[..], &device].concat(), &to("/dev/y", "/b"));
        assert_eq!(words[1], r#"{"driver":"raw","file":{"driver":"file","filename":"/b"},"node-name":"d0"}"#);
    }

    #[test]
    fn what_lay_below_is_gone() {
        let words = [
            "-blockdev",
            "driver=file,node-name=base,filename=/base",
            "-blockdev",
            "driver=qcow2,node-name=d0,backing=base,file.driver=file,file.filename=/a",
            "-device",
            "virtio-blk-pci,drive=d0",
        ];
        let words = moved(&words, &to("/a", "/b"));
        assert_eq!(words[1], "driver=qcow2,node-name=d0,file.driver=file,file.filename=/b");
        assert_eq!(words.len(), 4, "{words:?}");
    }
}
