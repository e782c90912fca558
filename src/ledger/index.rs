//! The index of distinctive ids: which session was sent one.
//!
//! Buckets of a fixed size; the oldest entry leaves a full one. What has left
//! is not known to be foreign any more, nothing else follows from it.

use crate::codec::{Reader, Writer};

const VERSION: u8 = 2;

/// Entries of a bucket.
const ENTRIES: usize = 32;

/// Who was sent a distinctive id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    key: u64,
    /// The session that was sent it first.
    pub session: u64,
    /// When.
    noted: Moment,
    /// Whether another one was sent it, too: it is not distinctive after all.
    pub shared: Shared,
}

impl Entry {
    /// Whether it was noted before that moment.
    pub fn was_noted_before(&self, moment_us: u64) -> bool {
        self.noted.is_before(Moment::of(moment_us))
    }
}

/// A point in time in 40 bits, of 64 µs each: in good order for more than a
/// year.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment(u64);

impl Moment {
    const BITS: u32 = 40;

    fn of(time_us: u64) -> Self {
        Moment((time_us >> 6) & ((1u64 << Self::BITS) - 1))
    }

    fn is_before(self, other: Moment) -> bool {
        let later = other.0.wrapping_sub(self.0) & ((1u64 << Self::BITS) - 1);
        later > 0 && later < 1 << (Self::BITS - 1)
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let low = u64::from(reader.u32()?);
        Some(Moment(low | (u64::from(reader.u8()?) << u32::BITS)))
    }

    fn write(self, writer: &mut Writer) {
        writer.u32(self.0 as u32);
        writer.u8((self.0 >> u32::BITS) as u8);
    }
}

/// Whether several sessions were sent an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// One was.
    No,
    /// Several were, live.
    Live,
    /// Only in a replay that may have been another session's.
    Replayed,
}

/// How a session was sent an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Live.
    Live,
    /// In a resumption whose answer began then: live, too, if others were sent
    /// it only after that.
    Replayed {
        /// In microseconds.
        since_us: u64,
        /// Its stream is known.
        placed: bool,
    },
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
pub struct Bucket {
    entries: Vec<Entry>,
    /// An id left it that several sessions were sent: one that comes new may
    /// be that.
    forgot_shared: bool,
}

impl Bucket {
    /// The most bytes of an encoded bucket.
    pub const MAX_BYTES: u64 = 3 + ENTRIES as u64 * 22;

    /// Reads a bucket; what is none is an empty one.
    pub fn decode(bytes: &[u8]) -> Self {
        let mut reader = Reader::new(bytes);
        if reader.u8() != Some(VERSION) {
            return Bucket::default();
        }
        let forgot_shared = reader.u8() == Some(1);
        let entries = reader.list(|reader| {
            Some(Entry {
                key: reader.u64()?,
                session: reader.u64()?,
                noted: Moment::read(reader)?,
                shared: match reader.u8()? {
                    0 => Shared::No,
                    1 => Shared::Live,
                    _ => Shared::Replayed,
                },
            })
        });
        Bucket { entries: entries.unwrap_or_default(), forgot_shared }
    }

    /// Its bytes in shared data.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::with_capacity(64);
        writer.u8(VERSION);
        writer.u8(u8::from(self.forgot_shared));
        writer.list(&self.entries, |w, entry| {
            w.u64(entry.key);
            w.u64(entry.session);
            entry.noted.write(w);
            w.u8(match entry.shared {
                Shared::No => 0,
                Shared::Live => 1,
                Shared::Replayed => 2,
            });
        });
        writer.finish()
    }

    /// Who was sent the id.
    pub fn get(&self, key: u64) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Notes that a session was sent the id, and whether that changed the
    /// bucket.
    pub fn note(&mut self, key: u64, session: u64, how: How, now_us: u64) -> (bool, Noted) {
        let is_replay_of = |entry: &Entry| match how {
            How::Live => false,
            How::Replayed { since_us, .. } => entry.was_noted_before(since_us),
        };
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) if entry.session == session => (false, Noted::Own),
            Some(entry) if is_replay_of(entry) => {
                let changed = entry.shared == Shared::No;
                if changed {
                    entry.shared = Shared::Replayed;
                }
                (changed, Noted::Own)
            }
            Some(entry) if entry.shared == Shared::Live => (false, Noted::Shared),
            Some(entry) => {
                entry.shared = Shared::Live;
                (true, Noted::SharedWith(entry.session))
            }
            None => {
                if self.entries.len() >= ENTRIES {
                    self.evict();
                }
                let is_unplaced = matches!(how, How::Replayed { placed: false, .. });
                let is_no_proof = is_unplaced || self.forgot_shared;
                let shared = if is_no_proof { Shared::Replayed } else { Shared::No };
                self.entries.push(Entry { key, session, noted: Moment::of(now_us), shared });
                (true, Noted::Own)
            }
        }
    }

    /// Lets go of the oldest entry, of those that several sessions were sent
    /// last.
    fn evict(&mut self) {
        let oldest = self.entries.iter().position(|entry| entry.shared != Shared::Live);
        self.forgot_shared |= oldest.is_none();
        self.entries.remove(oldest.unwrap_or(0));
    }
}
