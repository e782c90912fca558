//! Shared data, as the host gives it: a map from keys to values with a
//! compare-and-swap, one for all workers of the process.
//!
//! It has no delete, no listing, no expiry and no limit, so whoever writes
//! here bounds the keys. [`memory::SharedData`] copies the host's rules for
//! the tests.

pub mod memory;

use crate::telemetry::Tally;

/// The version of a value, as the host counts them.
pub type Cas = u32;

/// A CAS that no value ever has: with it a `set` inserts a key that is absent,
/// and fails on one that is there (the host ignores the CAS of an absent key).
pub const ABSENT: Cas = Cas::MAX;

/// The value has changed since its CAS was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CasMismatch;

/// A write was given up after [`MAX_TRIES`] conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaveUp;

/// How often a write is tried. At one update per request 2 % conflict once.
pub const MAX_TRIES: usize = 64;

/// What the host offers (proxy-wasm ABI 0.2.1, `proxy_get_shared_data` and
/// `proxy_set_shared_data`).
pub trait Store {
    /// The value of a key and its CAS. An empty value is there and has a CAS,
    /// but reads as none.
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>);

    /// Writes a value, whatever there is (`None`), or if its CAS still is this.
    ///
    /// # Errors
    ///
    /// The key is there, and its CAS is another.
    fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch>;
}

/// Changes the value of a key by `change`, again and again until nobody came
/// between. `change` gets the value (empty if there is none) and gives the new
/// one, or `None` where nothing is to be written, and its result.
///
/// # Errors
///
/// [`GaveUp`] after [`MAX_TRIES`] conflicts; nothing was written then.
pub fn update<T>(
    store: &impl Store,
    tally: &mut Tally,
    key: &str,
    mut change: impl FnMut(Vec<u8>, &mut Tally) -> (Option<Vec<u8>>, T),
) -> Result<T, GaveUp> {
    for _ in 0..MAX_TRIES {
        let (value, cas) = store.get(key);
        let mut attempt = Tally::default();
        let (new, result) = change(value.unwrap_or_default(), &mut attempt);
        let Some(new) = new else {
            tally.add(&attempt);
            return Ok(result);
        };
        if store.set(key, &new, Some(cas.unwrap_or(ABSENT))).is_ok() {
            tally.add(&attempt);
            return Ok(result);
        }
        tally.cas_conflicts = tally.cas_conflicts.saturating_add(1);
    }
    Err(GaveUp)
}
