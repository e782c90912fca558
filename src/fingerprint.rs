//! Keyed fingerprints: what the ledger keeps instead of session ids and event
//! ids.
//!
//! Ids are secrets of the session they belong to, so none is ever stored or
//! logged in clear. The key is drawn once per Envoy process; a fingerprint
//! says nothing outside it. Sessions have 128 bits, everything else 64. The
//! function is SipHash-1-3, the one of Rust's and Python's own tables.

use std::fmt;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;
use siphasher::sip128::{Hasher128 as _, SipHasher13 as SipHasher13x128};

/// The key of all fingerprints of one Envoy process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; Secret::LEN]);

/// What a text is fingerprinted as: the same bytes in two roles are two
/// different fingerprints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// A whole event id.
    EventId = 1,
    /// What stands before an index at the end of an event id.
    Prefix = 2,
    /// What stands behind an index at the start of an event id.
    Suffix = 3,
    /// A JSON-RPC id that is a string.
    RpcString = 4,
    /// A JSON-RPC id that is a number.
    RpcNumber = 5,
    /// A writer's nonce.
    Nonce = 6,
    /// A configuration.
    Configuration = 7,
    /// The address of an upstream instance.
    Address = 8,
    /// What an upstream instance calls itself.
    Identity = 9,
}

/// The fingerprint of an `Mcp-Session-Id`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionFingerprint(pub(crate) u128);

impl Secret {
    /// Length of the key in bytes.
    pub const LEN: usize = 16;

    /// A key of these bytes, which must come from a cryptographic source.
    pub const fn new(bytes: [u8; Secret::LEN]) -> Self {
        Secret(bytes)
    }

    pub(crate) const fn bytes(&self) -> &[u8; Secret::LEN] {
        &self.0
    }

    /// The fingerprint of a session id.
    pub fn session(&self, id: &[u8]) -> SessionFingerprint {
        let mut hasher = SipHasher13x128::new_with_key(&self.0);
        hasher.write(id);
        SessionFingerprint(hasher.finish128().as_u128())
    }

    /// The fingerprint of a text in a role.
    pub fn text(&self, role: Role, text: &[u8]) -> u64 {
        // Each role has a key of its own.
        let key = u128::from_le_bytes(self.0) ^ (role as u128);
        let mut hasher = SipHasher13::new_with_key(&key.to_le_bytes());
        hasher.write(text);
        hasher.finish()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl SessionFingerprint {
    /// The half that index and kinship keep.
    pub(crate) const fn short(self) -> u64 {
        self.0 as u64
    }
}

/// Sixteen hexadecimal digits, as they stand in the log.
impl fmt::Display for SessionFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.short())
    }
}

impl fmt::Debug for SessionFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionFingerprint({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_and_keys_separate() {
        let a = Secret::new([1; 16]);
        let b = Secret::new([2; 16]);
        assert_ne!(a.text(Role::EventId, b"x"), b.text(Role::EventId, b"x"));
        assert_ne!(a.text(Role::EventId, b"x"), a.text(Role::Prefix, b"x"));
        assert_eq!(a.session(b"s"), a.session(b"s"));
        assert_ne!(a.session(b"s"), a.session(b"t"));
    }

    #[test]
    fn nothing_prints_the_key() {
        assert_eq!(format!("{:?}", Secret::new([7; 16])), "Secret(..)");
    }
}
