//! Owners: the upstream instances that issue the events.
//!
//! With replay buffers of their own, only the instance that issued a stream's
//! events can replay them. An instance is told by its address, or by a response
//! header of its own (`owner.identity_header`), which tells a restart at the
//! same address, too.

use std::num::NonZeroU32;

use crate::config::Config;
use crate::fingerprint::{Role, Secret};
use crate::request::Field;

/// The longest address that is kept: an IPv6 address and a port, in text.
const MAX_ADDRESS_BYTES: usize = 47;

/// The fingerprint of an instance. Two that are the same by chance (one pair in
/// four billion) only make the guard miss a change of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerId(NonZeroU32);

impl OwnerId {
    fn new(fingerprint: u64) -> Self {
        OwnerId(NonZeroU32::new(fingerprint as u32).unwrap_or(NonZeroU32::MIN))
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
    /// address; `None` if it can't be told. Where an identity is configured,
    /// an answer without one, or with several, is nobody's: an address is none.
    pub fn of_answer(
        config: &Config,
        secret: &Secret,
        fields: &[Field],
        address: impl FnOnce() -> Option<Vec<u8>>,
    ) -> Option<Self> {
        let pins = config.owner.pin_header.is_some();
        match &config.owner.identity_header {
            Some(header) => {
                let mut values = fields.iter().filter(|(name, _)| name == header.as_str());
                let (_, identity) = values.next()?;
                if identity.is_empty() || values.any(|(_, other)| other != identity) {
                    return None;
                }
                let address = if pins { address() } else { None };
                Some(Instance {
                    id: OwnerId::new(secret.text(Role::Identity, identity)),
                    address: address.and_then(pinnable),
                })
            }
            None => {
                let address = address().filter(|address| !address.is_empty())?;
                Some(Instance {
                    id: OwnerId::new(secret.text(Role::Address, &address)),
                    address: if pins { pinnable(address) } else { None },
                })
            }
        }
    }
}

/// An address that a request can be pinned to: `ip:port`, no socket's path.
fn pinnable(address: Vec<u8>) -> Option<String> {
    let text = String::from_utf8(address).ok()?;
    let allowed = |byte: u8| byte.is_ascii_hexdigit() || b".:[]".contains(&byte);
    (text.len() <= MAX_ADDRESS_BYTES && text.bytes().all(allowed)).then_some(text)
}

/// Addresses of one session that are kept.
pub(crate) const MAX_ADDRESSES: usize = 4;

/// The most bytes that they take.
pub(crate) const MAX_ADDRESSES_BYTES: usize = 1 + MAX_ADDRESSES * (4 + 1 + MAX_ADDRESS_BYTES);
