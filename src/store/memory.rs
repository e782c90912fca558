//! The host's shared data in memory, for tests: its rules, those that surprise
//! included.
//!
//! As proxy-wasm-cpp-host's `shared_data.cc` has them: one counter for the CAS
//! of all keys; a set on an absent key inserts whatever CAS it names; CAS 0 (in
//! Rust: none) overwrites; nothing is ever deleted; an empty value stays, and
//! reads as none, with a CAS.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use super::{Cas, CasMismatch, Store};

/// Shared data of one `vm_id`.
#[derive(Debug, Default)]
pub struct SharedData {
    values: RefCell<HashMap<String, (Vec<u8>, Cas)>>,
    last_cas: Cell<Cas>,
}

impl SharedData {
    /// Keys that were ever written.
    pub fn len(&self) -> usize {
        self.values.borrow().len()
    }

    /// Whether nothing was ever written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values.
    pub fn values(&self) -> Vec<Vec<u8>> {
        self.values.borrow().values().map(|(value, _)| value.clone()).collect()
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.values.borrow().iter().fold(0, |sum, (key, (value, _))| {
            sum.saturating_add(key.len()).saturating_add(value.len())
        })
    }
}

impl Store for SharedData {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>) {
        match self.values.borrow().get(key) {
            None => (None, None),
            Some((value, cas)) => ((!value.is_empty()).then(|| value.clone()), Some(*cas)),
        }
    }

    fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch> {
        let mut values = self.values.borrow_mut();
        if let (Some((_, current)), Some(expected)) = (values.get(key), cas)
            && expected != 0
            && expected != *current
        {
            return Err(CasMismatch);
        }
        self.last_cas.set(self.last_cas.get().wrapping_add(1).max(1));
        values.insert(key.to_owned(), (value.to_vec(), self.last_cas.get()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ABSENT;

    #[test]
    fn an_absent_key_ignores_the_cas() {
        let data = SharedData::default();
        assert_eq!(data.get("a"), (None, None));
        assert_eq!(data.set("a", b"1", Some(77)), Ok(()));
        assert_eq!(data.set("a", b"2", Some(77)), Err(CasMismatch));
        assert_eq!(data.set("a", b"2", Some(ABSENT)), Err(CasMismatch));
        assert_eq!(data.get("a"), (Some(b"1".to_vec()), Some(1)));
    }

    #[test]
    fn one_counter_for_all_keys() {
        let data = SharedData::default();
        for key in ["a", "b", "a"] {
            data.set(key, b"x", None).unwrap();
        }
        assert_eq!(data.get("a").1, Some(3));
        assert_eq!(data.get("b").1, Some(2));
        assert_eq!(data.set("a", b"y", Some(3)), Ok(()));
        assert_eq!(data.set("a", b"z", Some(0)), Ok(()));
    }

    #[test]
    fn an_empty_value_is_there() {
        let data = SharedData::default();
        data.set("a", b"", None).unwrap();
        assert_eq!(data.get("a"), (None, Some(1)));
        assert_eq!(data.set("a", b"x", Some(ABSENT)), Err(CasMismatch));
    }
}
