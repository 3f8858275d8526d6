//! The first bytes of a connection that a fabric dialled by itself.

use super::header::part;
use crate::address::Class;
use crate::error::FabricError;
use crate::fabric::MAX_GREETING;

/// Bytes of a hello before its greeting.
pub(crate) const HELLO_LEN: usize = 12;
/// Bytes of a reply.
pub(crate) const REPLY_LEN: usize = 8;

const MAGIC: [u8; 4] = *b"vmvf";
/// Version of everything in [`super`]. Both sides must have the same.
const VERSION: u16 = 2;

/// What the dialling side says first. Layout: magic, version `u16`, class `u8`, 0 `u8`, greeting length `u32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) class: Class,
    pub(crate) greeting: usize,
}

impl Hello {
    /// Hello and greeting.
    pub(crate) fn encode(class: Class, greeting: &[u8]) -> Result<Vec<u8>, FabricError> {
        let len = u32::try_from(greeting.len()).ok().filter(|_| greeting.len() <= MAX_GREETING);
        let Some(len) = len else {
            let found = greeting.len();
            return Err(FabricError::protocol(format!(
                "a greeting of {found} bytes; at most {MAX_GREETING} fit"
            )));
        };
        let mut bytes = Vec::with_capacity(HELLO_LEN + greeting.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([class as u8, 0]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(greeting);
        Ok(bytes)
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, FabricError> {
        check_magic(bytes)?;
        let class = Class::from_wire(bytes[6])
            .ok_or_else(|| FabricError::protocol(format!("unknown connection class {}", bytes[6])))?;
        let greeting = u32::from_le_bytes(part(bytes, 8)) as usize;
        if bytes[7] != 0 || greeting > MAX_GREETING {
            return Err(FabricError::protocol(format!(
                "a greeting of {greeting} bytes; expected 0 to {MAX_GREETING}"
            )));
        }
        Ok(Self { class, greeting })
    }
}

/// What the accepting side answers. Layout: magic, version `u16`, 0 `u16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply;

impl Reply {
    pub(crate) fn encode() -> [u8; REPLY_LEN] {
        let mut bytes = [0; REPLY_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; REPLY_LEN]) -> Result<Self, FabricError> {
        check_magic(bytes)?;
        if bytes[6..] != [0, 0] {
            return Err(FabricError::protocol("a reply with unknown fields"));
        }
        Ok(Self)
    }
}

fn check_magic(bytes: &[u8]) -> Result<(), FabricError> {
    if bytes[..4] != MAGIC {
        return Err(FabricError::protocol(format!(
            "a connection that begins with {:02x?}, not a fabric",
            &bytes[..4]
        )));
    }
    match u16::from_le_bytes(part(bytes, 4)) {
        VERSION => Ok(()),
        other => Err(FabricError::protocol(format!("fabric version {other}; this side has {VERSION}"))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hello_survives_and_another_version_is_named() {
        let mut bytes = Hello::encode(Class::Bulk, b"for you").unwrap();
        let head: [u8; HELLO_LEN] = part(&bytes, 0);
        assert_eq!(Hello::decode(&head).unwrap(), Hello { class: Class::Bulk, greeting: 7 });
        assert_eq!(&bytes[HELLO_LEN..], b"for you");
        bytes[4] = 9;
        let error = Hello::decode(&part(&bytes, 0)).unwrap_err();
        assert!(error.to_string().contains("version 9"), "{error}");
        let error = Hello::encode(Class::Bulk, &[0; MAX_GREETING + 1]).unwrap_err();
        assert!(error.to_string().contains("4097"), "{error}");
        assert_eq!(Reply::decode(&Reply::encode()).unwrap(), Reply);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_or_an_error(bytes in any::<[u8; HELLO_LEN]>(), tail in any::<[u8; 6]>()) {
            let _ = Hello::decode(&bytes).is_ok();
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            bytes[6..12].copy_from_slice(&tail);
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert!(hello.greeting <= MAX_GREETING);
            }
        }
    }
}
