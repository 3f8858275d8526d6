//! Names of architectures and models by PCI ids, from the public PCI ID database.

use crate::model::PciId;

/// Device ids from the first to the second, both included.
type Range = (u16, u16, &'static str);

const NVIDIA: &[Range] = &[
    (0x06c0, 0x06df, "fermi"),
    (0x0dc0, 0x0e3b, "fermi"),
    (0x0fc0, 0x103f, "kepler"),
    (0x1040, 0x109b, "fermi"),
    (0x1140, 0x1140, "fermi"),
    (0x1180, 0x11ff, "kepler"),
    (0x1200, 0x1251, "fermi"),
    (0x1280, 0x12ba, "kepler"),
    (0x1340, 0x13fb, "maxwell"),
    (0x1401, 0x1436, "maxwell"),
    (0x15f0, 0x15ff, "pascal"),
    (0x1617, 0x1667, "maxwell"),
    (0x1725, 0x172f, "pascal"),
    (0x17c2, 0x17fd, "maxwell"),
    (0x1b00, 0x1d56, "pascal"),
    (0x1d81, 0x1dba, "volta"),
    (0x1db1, 0x1df6, "volta"),
    (0x1e02, 0x1ff9, "turing"),
    (0x2080, 0x20ff, "ampere"),
    (0x2182, 0x21d1, "turing"),
    (0x2200, 0x22ff, "ampere"),
    (0x2300, 0x23ff, "hopper"),
    (0x2400, 0x25ff, "ampere"),
    (0x2600, 0x28ff, "ada"),
    (0x2900, 0x31ff, "blackwell"),
];

const AMD: &[Range] = &[
    (0x66a0, 0x66af, "vega20"),
    (0x6860, 0x687f, "vega10"),
    (0x738c, 0x738e, "cdna"),
    (0x7408, 0x7410, "cdna2"),
    (0x74a0, 0x74bf, "cdna3"),
    (0x7550, 0x7590, "rdna4"),
];

const MELLANOX: &[Range] = &[
    (0x1003, 0x1006, "connectx-3"),
    (0x1007, 0x1007, "connectx-3-pro"),
    (0x1011, 0x1012, "connect-ib"),
    (0x1013, 0x1014, "connectx-4"),
    (0x1015, 0x1016, "connectx-4-lx"),
    (0x1017, 0x1018, "connectx-5"),
    (0x1019, 0x101a, "connectx-5-ex"),
    (0x101b, 0x101c, "connectx-6"),
    (0x101d, 0x101d, "connectx-6-dx"),
    // Virtual functions of all from ConnectX-6 Dx on.
    (0x101e, 0x101e, "connectx-vf"),
    (0x101f, 0x101f, "connectx-6-lx"),
    (0x1021, 0x1021, "connectx-7"),
    (0x1023, 0x1023, "connectx-8"),
    (0x1025, 0x1025, "connectx-9"),
    (0xa2d2, 0xa2d3, "bluefield"),
    (0xa2d6, 0xa2d6, "bluefield-2"),
    (0xa2dc, 0xa2dc, "bluefield-3"),
    (0xa2de, 0xa2df, "bluefield-4"),
    (0x6732, 0x673c, "connectx"),
    (0x6746, 0x6750, "connectx-2"),
];

fn find(ranges: &[Range], device: u16) -> &'static str {
    ranges.iter().find(|(from, to, _)| (*from..=*to).contains(&device)).map_or("", |(.., name)| name)
}

/// Architecture of a GPU in lower case; empty if unknown.
#[must_use]
pub fn arch_name(id: PciId) -> &'static str {
    match id.vendor {
        0x10de => find(NVIDIA, id.device),
        0x1002 => find(AMD, id.device),
        0x8086 if (0x0bd0..=0x0be5).contains(&id.device) => "ponte-vecchio",
        _ => "",
    }
}

/// Model of a network adapter in lower case; empty if unknown.
#[must_use]
pub fn model_name(id: PciId) -> &'static str {
    match id.vendor {
        0x15b3 => find(MELLANOX, id.device),
        0x8086 if matches!(id.device, 0x1592 | 0x1593 | 0x159b) => "e810",
        0x14e4 if (0x1750..=0x1760).contains(&id.device) => "thor",
        _ => "",
    }
}
