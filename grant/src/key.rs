//! Keys of bridges, and texts that they have signed.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

use serde::Deserialize;

use crate::{Grant, GrantError};

/// Bytes of a public key.
const PUBLIC_LEN: usize = 32;

/// What is no key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadKey {
    /// Not a public key.
    #[error("{0:?} is no public key of a bridge: expected 43 characters, as `vbridged` prints them")]
    Public(String),
    /// Not a secret key.
    #[error("it is no secret key of a bridge (Ed25519, PKCS #8 in base64)")]
    Secret,
    /// The system has no random numbers.
    #[error("no key could be made: the system gives no random numbers")]
    NoRandomness,
}

/// The secret key of a bridge.
pub struct SecretKey(Ed25519KeyPair);

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey of {}", self.public())
    }
}

impl SecretKey {
    /// A new key, and the text from which it can be read again.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate() -> Result<(Self, String), BadKey> {
        let document =
            Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| BadKey::NoRandomness)?;
        let text = URL_SAFE_NO_PAD.encode(document.as_ref());
        Ok((text.parse()?, text))
    }

    /// The key by which nodes know this bridge.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        let mut bytes = [0; PUBLIC_LEN];
        bytes.copy_from_slice(self.0.public_key().as_ref());
        PublicKey(bytes)
    }

    /// A serial number that no other grant has.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn serial() -> Result<u64, BadKey> {
        let bytes =
            ring::rand::generate::<[u8; 8]>(&SystemRandom::new()).map_err(|_| BadKey::NoRandomness)?;
        Ok(u64::from_le_bytes(bytes.expose()))
    }

    /// The text of a grant.
    ///
    /// # Errors
    /// Never, as long as a grant can be written as JSON.
    pub fn sign(&self, grant: &Grant) -> Result<String, serde_json::Error> {
        let body = serde_json::to_vec(grant)?;
        let signature = self.0.sign(&body);
        Ok(format!("{}.{}", URL_SAFE_NO_PAD.encode(&body), URL_SAFE_NO_PAD.encode(signature.as_ref())))
    }
}

impl FromStr for SecretKey {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<Self, BadKey> {
        let document = URL_SAFE_NO_PAD.decode(text.trim()).map_err(|_| BadKey::Secret)?;
        Ed25519KeyPair::from_pkcs8(&document).map(Self).map_err(|_| BadKey::Secret)
    }
}

/// The key by which nodes know a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct PublicKey([u8; PUBLIC_LEN]);

impl PublicKey {
    /// Reads a grant that this key's bridge has signed.
    ///
    /// # Errors
    /// It is no grant, or of another bridge.
    pub fn read(&self, text: &str) -> Result<Grant, GrantError> {
        let malformed = |why: &dyn fmt::Display| GrantError::Malformed(why.to_string());
        let (body, signature) = text.split_once('.').ok_or_else(|| malformed(&"no dot"))?;
        let body = URL_SAFE_NO_PAD.decode(body).map_err(|e| malformed(&e))?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|e| malformed(&e))?;
        let key = UnparsedPublicKey::new(&ED25519, &self.0);
        // Nothing of it is believed, nor parsed, before.
        key.verify(&body, &signature).map_err(|_| GrantError::OtherBridge)?;
        serde_json::from_slice(&body).map_err(|e| malformed(&e))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl TryFrom<String> for PublicKey {
    type Error = BadKey;

    fn try_from(text: String) -> Result<Self, BadKey> {
        text.parse()
    }
}

impl FromStr for PublicKey {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<Self, BadKey> {
        let bytes = URL_SAFE_NO_PAD.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| BadKey::Public(text.to_owned()))
    }
}
