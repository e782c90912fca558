//! Owners: the upstream instances that issue the events.
//!
//! With replay buffers of their own, only the instance that issued a stream's
//! events can replay them. An instance is told by its address, or by a response
//! header of its own (`owner.identity_header`), which tells a restart at the
//! same address, too.

use std::num::NonZeroU32;

use crate::config::Config;
use crate::event_id::trim;
use crate::fingerprint::{Role, Secret};
use crate::headers::Field;

/// The longest address that is kept: an IPv6 address and a port, in text.
const MAX_ADDRESS_BYTES: usize = 47;

/// Bits of an [`OwnerId`] that tell the instance; those above tell how.
const VALUE_BITS: u32 = 20;

/// The fingerprint of an instance, together with how it was told: what was told
/// in two ways (by another configuration) can't be compared. Two instances that
/// are the same by chance (one pair in a million) only make the guard miss a
/// change of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerId(NonZeroU32);

/// How an instance is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told<'a> {
    /// It isn't: it could be any.
    Not,
    ByAddress,
    ByHeader(&'a str),
}

impl OwnerId {
    /// The ways below this one have no header.
    const FIRST_HEADER: u32 = 3;

    fn new(secret: &Secret, told: Told<'_>, value: &[u8]) -> Self {
        const WAYS: u32 = (1 << (u32::BITS - VALUE_BITS)) - OwnerId::FIRST_HEADER;
        let (way, role) = match told {
            Told::Not => (1, Role::Address),
            Told::ByAddress => (2, Role::Address),
            Told::ByHeader(name) => {
                let name = secret.text(Role::Configuration, name.as_bytes()) as u32;
                (Self::FIRST_HEADER.saturating_add(name % WAYS), Role::Identity)
            }
        };
        let value = (secret.text(role, value) as u32) >> (u32::BITS - VALUE_BITS);
        OwnerId(NonZeroU32::new((way << VALUE_BITS) | value).unwrap_or(NonZeroU32::MIN))
    }

    fn way(self) -> u32 {
        self.0.get() >> VALUE_BITS
    }

    /// Whether it is told from others.
    pub fn is_told(self) -> bool {
        self.way() > 1
    }

    /// Whether these are two instances for certain.
    pub fn differs_from(self, other: OwnerId) -> bool {
        self.is_told() && self.way() == other.way() && self != other
    }

    /// As it is kept; 0 is nobody.
    pub(crate) fn encode(owner: Option<OwnerId>) -> u32 {
        owner.map_or(0, |owner| owner.0.get())
    }

    /// Reads it back.
    pub(crate) fn decode(owner: u32) -> Option<OwnerId> {
        NonZeroU32::new(owner).map(OwnerId)
    }
}

/// The instance that sent an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Who it is.
    pub id: OwnerId,
    /// Where it is, if sessions are pinned.
    pub address: Option<String>,
}

impl Instance {
    /// The instance that sent an answer with these header fields, from this
    /// address. Where an identity is configured, an answer without one, or with
    /// several, can be any instance's: an address is no identity. But it is
    /// where the session can be pinned to.
    pub fn of_answer(
        config: &Config,
        secret: &Secret,
        fields: &[Field<'_>],
        address: impl FnOnce() -> Option<Vec<u8>>,
    ) -> Option<Self> {
        let pins = config.owner.pin_header.is_some();
        let identity = config.owner.identity_header.as_ref().map(|header| {
            let mut values = fields.iter().filter(|(name, _)| *name == header.as_str().as_bytes());
            let value = values.next().map(|(_, value)| trim(value)).unwrap_or_default();
            let is_one = !value.is_empty() && values.all(|(_, other)| trim(other) == value);
            (Told::ByHeader(header.as_str()), is_one.then_some(value))
        });
        if let (Some((told, Some(value))), false) = (identity, pins) {
            return Some(Instance { id: OwnerId::new(secret, told, value), address: None });
        }
        let address = address().filter(|address| !address.is_empty())?;
        let (told, value) = match identity {
            Some((told, Some(value))) => (told, value),
            Some((_, None)) => (Told::Not, address.as_slice()),
            None => (Told::ByAddress, address.as_slice()),
        };
        Some(Instance {
            id: OwnerId::new(secret, told, value),
            address: if pins { pinnable(&address) } else { None },
        })
    }
}

/// An address that a request can be pinned to: `ip:port`, no socket's path.
fn pinnable(address: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(address).ok()?;
    let allowed = |byte: u8| byte.is_ascii_hexdigit() || b".:[]".contains(&byte);
    (text.len() <= MAX_ADDRESS_BYTES && text.bytes().all(allowed)).then(|| text.to_owned())
}

/// Addresses of one session that are kept.
pub(crate) const MAX_ADDRESSES: usize = 4;

/// The most bytes that they take.
pub(crate) const MAX_ADDRESSES_BYTES: usize = 1 + MAX_ADDRESSES * (4 + 1 + MAX_ADDRESS_BYTES);
