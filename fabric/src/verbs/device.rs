//! Which device, port and address to use, out of what the kernel lists in `/sys/class/infiniband`.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

use super::VerbsOptions;
use crate::error::FabricError;

/// Where the kernel lists RDMA devices.
const LIST: &str = "/sys/class/infiniband";

/// A port that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    pub(super) pkey_index: u16,
    /// RoCE, not InfiniBand.
    pub(super) ethernet: bool,
}

impl Choice {
    /// The best port that the options allow.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`] says what was found and why none of it will do.
    pub(super) fn find(options: &VerbsOptions) -> Result<Self, FabricError> {
        Self::find_in(Path::new(LIST), options)
    }

    fn find_in(list: &Path, options: &VerbsOptions) -> Result<Self, FabricError> {
        let mut refused = Vec::new();
        let mut usable = Vec::new();
        for device in names(list) {
            if options.device.as_ref().is_some_and(|wanted| *wanted != device) {
                continue;
            }
            for port in names(&list.join(&device).join("ports")) {
                match look_at(list, &device, &port, options) {
                    Ok(choice) => usable.push(choice),
                    Err(why) => refused.push(format!("{device} port {port}: {why}")),
                }
            }
        }
        // `names` sorts, and a stable sort keeps that order within each kind.
        usable.sort_by_key(|choice| !choice.ethernet);
        if let Some(choice) = usable.into_iter().next() {
            return Ok(choice);
        }
        let why = match (&options.device, refused.is_empty()) {
            (_, false) => refused.join("; "),
            (Some(device), true) => format!("there is no device {device}"),
            (None, true) => "this host has none; 'rdma link' lists them".to_owned(),
        };
        Err(FabricError::NoDevice { why })
    }
}

/// The RDMA ports of this host, one line for people each: state, network, addresses with their index and kind.
#[must_use]
pub fn ports() -> Vec<String> {
    ports_in(Path::new(LIST))
}

fn ports_in(list: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for device in names(list) {
        for port in names(&list.join(&device).join("ports")) {
            let folder = list.join(&device).join("ports").join(&port);
            let read =
                |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default().trim().to_owned();
            let gids: Vec<String> = (0..=u8::MAX)
                .filter_map(|index| {
                    let gid = Ipv6Addr::from(parse(&read(&format!("gids/{index}")))?).to_canonical();
                    Some(format!("{index} = {gid} ({})", read(&format!("gid_attrs/types/{index}"))))
                })
                .collect();
            let (state, layer, rate) = (read("state"), read("link_layer"), read("rate"));
            let gids = if gids.is_empty() { "no addresses".to_owned() } else { gids.join(", ") };
            lines.push(format!("{device} port {port}: {state}, {layer}, {rate}; GIDs {gids}"));
        }
    }
    lines
}

/// The names in a folder, sorted; none if it is not there.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn look_at(list: &Path, device: &str, port: &str, options: &VerbsOptions) -> Result<Choice, String> {
    let number: u8 = port.parse().map_err(|_| "not a number".to_owned())?;
    if options.port.is_some_and(|wanted| wanted != number) {
        return Err("another port was asked for".to_owned());
    }
    let folder = list.join(device).join("ports").join(port);
    let read = |name: &str| fs::read_to_string(folder.join(name)).map(|text| text.trim().to_owned());
    let state = read("state").map_err(|error| format!("its state cannot be read: {error}"))?;
    if !state.ends_with("ACTIVE") {
        return Err(format!("its state is {state}; expected ACTIVE ('ip link' shows its network device)"));
    }
    let ethernet = read("link_layer").is_ok_and(|layer| layer == "Ethernet");
    let gid = |index: u8| read(&format!("gids/{index}")).ok().and_then(|text| parse(&text));
    let index = match options.gid_index {
        Some(index) => index,
        None if !ethernet => 0,
        None => {
            let v2 = |index: &u8| {
                read(&format!("gid_attrs/types/{index}")).is_ok_and(|kind| kind == "RoCE v2")
                    && gid(*index).is_some()
            };
            let all: Vec<u8> = (0..=u8::MAX).filter(v2).collect();
            let mapped =
                |index: &&u8| gid(**index).is_some_and(|gid| Ipv6Addr::from(gid).to_ipv4_mapped().is_some());
            let best = all.iter().find(mapped).or(all.first());
            *best.ok_or("it has no RoCE v2 address; give its network device an IP address")?
        }
    };
    let gid = gid(index).ok_or_else(|| format!("there is no address at index {index}"))?;
    let pkey_index = options.pkey_index;
    let key = read(&format!("pkeys/{pkey_index}")).unwrap_or_default();
    // The highest bit says what kind of member; an empty place of the table has none of the others.
    let is_key = |text: &str| u16::from_str_radix(text, 16).is_ok_and(|key| key & 0x7fff != 0);
    if !is_key(key.trim_start_matches("0x")) {
        return Err(format!("there is no partition key (P_Key) at index {pkey_index}"));
    }
    Ok(Choice { device: device.to_owned(), port: number, gid_index: index, gid, pkey_index, ethernet })
}

/// An address as the kernel writes it; `None` for an empty place of the table.
fn parse(text: &str) -> Option<[u8; 16]> {
    let gid = text.parse::<Ipv6Addr>().ok()?;
    // On InfiniBand an unset address still has its subnet's prefix.
    if gid.segments()[4..] == [0; 4] { None } else { Some(gid.octets()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder like the kernel's, with one port each: name, link layer, state, addresses with their kinds.
    type Port<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, &'a str)]);

    fn kernel(ports: &[Port<'_>]) -> tempfile::TempDir {
        let list = tempfile::tempdir().unwrap();
        for (device, layer, state, gids) in ports {
            let folder = list.path().join(device).join("ports/1");
            fs::create_dir_all(folder.join("gids")).unwrap();
            fs::create_dir_all(folder.join("gid_attrs/types")).unwrap();
            fs::create_dir_all(folder.join("pkeys")).unwrap();
            for (index, key) in ["0xffff", "0x0000"].iter().enumerate() {
                fs::write(folder.join("pkeys").join(index.to_string()), format!("{key}\n")).unwrap();
            }
            fs::write(folder.join("link_layer"), format!("{layer}\n")).unwrap();
            fs::write(folder.join("state"), format!("{state}\n")).unwrap();
            for (index, (gid, kind)) in gids.iter().enumerate() {
                fs::write(folder.join("gids").join(index.to_string()), format!("{gid}\n")).unwrap();
                fs::write(folder.join("gid_attrs/types").join(index.to_string()), format!("{kind}\n"))
                    .unwrap();
            }
        }
        list
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe77:0001";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
    const ROCE: Port<'static> = (
        "rxe0",
        "Ethernet",
        "4: ACTIVE",
        &[(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")],
    );
    const INFINIBAND: Port<'static> =
        ("mlx5_0", "InfiniBand", "4: ACTIVE", &[("fe80:0000:0000:0000:0002:c903:0000:0001", "IB/RoCE v1")]);

    fn find(ports: &[Port<'_>], options: &VerbsOptions) -> Result<Choice, String> {
        Choice::find_in(kernel(ports).path(), options).map_err(|error| {
            assert_eq!(error.remedy(), crate::Remedy::OtherFabric);
            error.to_string()
        })
    }

    #[test]
    fn roce_v2_with_an_ipv4_number_comes_first() {
        let found = find(&[INFINIBAND, ROCE], &VerbsOptions::default()).unwrap();
        assert_eq!(
            (found.device.as_str(), found.port, found.gid_index, found.ethernet),
            ("rxe0", 1, 3, true)
        );
        assert_eq!(found.gid[12..], [10, 77, 0, 1]);
    }

    #[test]
    fn options_override_the_choice() {
        let options = VerbsOptions { device: Some("mlx5_0".into()), ..VerbsOptions::default() };
        let found = find(&[INFINIBAND, ROCE], &options).unwrap();
        assert_eq!((found.device.as_str(), found.gid_index, found.ethernet), ("mlx5_0", 0, false));
        let options = VerbsOptions { gid_index: Some(1), ..VerbsOptions::default() };
        assert_eq!(find(&[ROCE], &options).unwrap().gid_index, 1);
    }

    #[test]
    fn what_cannot_be_used_is_named_with_the_reason() {
        let default = VerbsOptions::default();
        assert!(find(&[], &default).unwrap_err().contains("this host has none"));
        let down = ("rxe0", "Ethernet", "1: DOWN", ROCE.3);
        let error = find(&[down], &default).unwrap_err();
        assert!(error.contains("rxe0 port 1") && error.contains("1: DOWN"), "{error}");
        let v1 = ("rxe0", "Ethernet", "4: ACTIVE", &ROCE.3[..1]);
        assert!(find(&[v1], &default).unwrap_err().contains("no RoCE v2 address"));
        let options = VerbsOptions { device: Some("mlx5_9".into()), ..VerbsOptions::default() };
        assert!(find(&[ROCE], &options).unwrap_err().contains("no device mlx5_9"));
        let options = VerbsOptions { gid_index: Some(77), ..VerbsOptions::default() };
        assert!(find(&[ROCE], &options).unwrap_err().contains("index 77"));
        for pkey_index in [1, 2] {
            let options = VerbsOptions { pkey_index, ..VerbsOptions::default() };
            let error = find(&[ROCE], &options).unwrap_err();
            assert!(error.contains(&format!("(P_Key) at index {pkey_index}")), "{error}");
        }
        let options = VerbsOptions { port: Some(2), ..VerbsOptions::default() };
        assert!(find(&[ROCE], &options).unwrap_err().contains("another port"));
    }
}
