//! The index of distinctive ids: which session was sent one.
//!
//! Buckets of a fixed size; the oldest entry leaves a full one. What has left
//! is not known to be foreign any more, nothing else follows from it.

use crate::codec::{Reader, Writer};

const VERSION: u8 = 1;

/// Entries of a bucket.
const ENTRIES: usize = 32;

/// Who was sent a distinctive id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    key: u64,
    /// The session that was sent it first.
    pub session: u64,
    /// Another one was sent it, too: it is not distinctive after all.
    pub shared: bool,
}

/// What noting an id found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noted {
    /// Nobody else was sent it.
    Own,
    /// One other session was.
    SharedWith(u64),
    /// Several others were.
    Shared,
}

/// A bucket of the index.
#[derive(Debug, Default)]
pub struct Bucket(Vec<Entry>);

impl Bucket {
    /// The most bytes of an encoded bucket.
    pub const MAX_BYTES: u64 = 2 + ENTRIES as u64 * 17;

    /// Reads a bucket; what is none is an empty one.
    pub fn decode(bytes: &[u8]) -> Self {
        let mut reader = Reader::new(bytes);
        if reader.u8() != Some(VERSION) {
            return Bucket::default();
        }
        let entries = reader.list(|reader| {
            Some(Entry { key: reader.u64()?, session: reader.u64()?, shared: reader.u8()? != 0 })
        });
        Bucket(entries.unwrap_or_default())
    }

    /// Its bytes in shared data.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::with_capacity(64);
        writer.u8(VERSION);
        writer.list(&self.0, |w, entry| {
            w.u64(entry.key);
            w.u64(entry.session);
            w.u8(entry.shared.into());
        });
        writer.finish()
    }

    /// Who was sent the id.
    pub fn get(&self, key: u64) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.key == key)
    }

    /// Notes that a session was sent the id, and whether that changed the
    /// bucket.
    pub fn note(&mut self, key: u64, session: u64) -> (bool, Noted) {
        match self.0.iter_mut().find(|entry| entry.key == key) {
            Some(entry) if entry.session == session => (false, Noted::Own),
            Some(entry) if entry.shared => (false, Noted::Shared),
            Some(entry) => {
                entry.shared = true;
                (true, Noted::SharedWith(entry.session))
            }
            None => {
                if self.0.len() >= ENTRIES {
                    self.0.remove(0);
                }
                self.0.push(Entry { key, session, shared: false });
                (true, Noted::Own)
            }
        }
    }
}
