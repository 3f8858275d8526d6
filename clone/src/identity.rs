//! What a child must not share with its parent and its siblings.

use rand::Rng;
use uuid::Uuid;
use vmove_qmp::cmdline::ChildIdentity;

/// A fresh identity for a child with `nics` NICs.
#[must_use]
pub fn fresh(name: &str, nics: usize) -> ChildIdentity {
    ChildIdentity {
        name: name.to_owned(),
        uuid: Some(Uuid::new_v4().to_string()),
        generation: Uuid::new_v4().to_string(),
        macs: (0..nics).map(|_| mac()).collect(),
    }
}

/// The identity of a guest that goes back to an earlier moment: its own, but for the VM Generation ID, which tells it so (Virtual Machine Generation
/// ID specification: it changes when a snapshot is applied).
#[must_use]
pub fn kept(name: &str) -> ChildIdentity {
    ChildIdentity {
        name: name.to_owned(),
        uuid: None,
        generation: Uuid::new_v4().to_string(),
        macs: Vec::new(),
    }
}

/// A random unicast address that no vendor owns: 40 bits, so that a million of them on one network still have less than one
/// chance in two of a pair alike.
fn mac() -> String {
    let [a, b, c, d, e] = rand::rng().random::<[u8; 5]>();
    format!("52:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}")
}

/// The name of a child: `PARENT.N`.
#[must_use]
pub fn child_name(parent: &str, index: u32) -> String {
    format!("{parent}.{index}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_children_are_alike() {
        let (a, b) = (fresh("a", 2), fresh("a", 2));
        assert_ne!(a.uuid, b.uuid);
        assert_ne!(a.generation, b.generation);
        assert_ne!(a.uuid.as_ref(), Some(&a.generation));
        assert_ne!(a.macs[0], a.macs[1]);
        for mac in &a.macs {
            assert_eq!(mac.len(), 17);
            let first = u8::from_str_radix(&mac[..2], 16).unwrap();
            assert_eq!(first & 3, 2, "{mac}: locally administered, unicast");
        }
    }
}
