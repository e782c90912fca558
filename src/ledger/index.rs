//! The index of distinctive ids: which session was sent one.
//!
//! Buckets of a fixed size; the oldest entry leaves a full one. What has left
//! is not known to be foreign any more, nothing else follows from it.

use crate::codec::Reader;

const VERSION: u8 = 3;

/// Bytes before its entries, and where the flag stands there.
const HEAD_BYTES: usize = 2;
const FORGOT_SHARED: usize = 1;

/// Entries of a bucket.
const ENTRIES: usize = 32;

/// Bytes of an entry: its key, the session, when, and whether it is shared.
const ENTRY_BYTES: usize = 8 + 8 + 5 + 1;

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
    fn decode(bytes: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let reader = &mut Reader::new(bytes);
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
    }

    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        let noted = self.noted.0.to_le_bytes();
        let shared = match self.shared {
            Shared::No => 0,
            Shared::Live => 1,
            Shared::Replayed => 2,
        };
        let (key, rest) = bytes.split_at_mut(8);
        let (session, rest) = rest.split_at_mut(8);
        let (when, last) = rest.split_at_mut(5);
        key.copy_from_slice(&self.key.to_le_bytes());
        session.copy_from_slice(&self.session.to_le_bytes());
        when.copy_from_slice(noted.first_chunk::<5>().unwrap_or(&[0; 5]));
        last.fill(shared);
        bytes
    }

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

/// A bucket of the index, as it is in shared data: a version, whether an id
/// left it that several sessions were sent (one that comes new may be that),
/// and its entries, the oldest first.
#[derive(Debug)]
pub struct Bucket(Vec<u8>);

impl Bucket {
    /// The most bytes of a bucket.
    pub const MAX_BYTES: u64 = (HEAD_BYTES + ENTRIES * ENTRY_BYTES) as u64;

    /// Reads a bucket; what is none is an empty one.
    pub fn new(bytes: Vec<u8>) -> Self {
        let is_bucket = bytes.first() == Some(&VERSION)
            && bytes.get(HEAD_BYTES..).is_some_and(|entries| entries.len() % ENTRY_BYTES == 0);
        Bucket(if is_bucket { bytes } else { vec![VERSION, 0] })
    }

    /// Its bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn entries(&self) -> impl Iterator<Item = &[u8; ENTRY_BYTES]> {
        self.0.get(HEAD_BYTES..).unwrap_or_default().as_chunks().0.iter()
    }

    /// Who was sent the id.
    pub fn get(&self, key: u64) -> Option<Entry> {
        self.find(key).map(|(_, entry)| entry)
    }

    fn find(&self, key: u64) -> Option<(usize, Entry)> {
        let bytes = key.to_le_bytes();
        let (at, entry) =
            self.entries().enumerate().find(|(_, entry)| entry.starts_with(&bytes))?;
        Entry::decode(entry).map(|entry| (at, entry))
    }

    fn put(&mut self, at: usize, entry: &Entry) {
        let start = at.saturating_mul(ENTRY_BYTES).saturating_add(HEAD_BYTES);
        if let Some(place) = self.0.get_mut(start..start.saturating_add(ENTRY_BYTES)) {
            place.copy_from_slice(&entry.encode());
        }
    }

    /// Notes that a session was sent the id, and whether that changed the
    /// bucket.
    pub fn note(&mut self, key: u64, session: u64, how: How, now_us: u64) -> (bool, Noted) {
        let is_replay_of = |entry: &Entry| match how {
            How::Live => false,
            How::Replayed { since_us, .. } => entry.was_noted_before(since_us),
        };
        match self.find(key) {
            Some((_, entry)) if entry.session == session => (false, Noted::Own),
            Some((at, entry)) if is_replay_of(&entry) => {
                let changed = entry.shared == Shared::No;
                if changed {
                    self.put(at, &Entry { shared: Shared::Replayed, ..entry });
                }
                (changed, Noted::Own)
            }
            Some((_, entry)) if entry.shared == Shared::Live => (false, Noted::Shared),
            Some((at, entry)) => {
                self.put(at, &Entry { shared: Shared::Live, ..entry });
                (true, Noted::SharedWith(entry.session))
            }
            None => {
                if self.entries().count() >= ENTRIES {
                    self.evict();
                }
                let is_unplaced = matches!(how, How::Replayed { placed: false, .. });
                let is_no_proof = is_unplaced || self.0.get(FORGOT_SHARED) == Some(&1);
                let shared = if is_no_proof { Shared::Replayed } else { Shared::No };
                let entry = Entry { key, session, noted: Moment::of(now_us), shared };
                self.0.extend_from_slice(&entry.encode());
                (true, Noted::Own)
            }
        }
    }

    /// Lets go of the oldest entry, of those that several sessions were sent
    /// last.
    fn evict(&mut self) {
        let is_live = |entry: &[u8; ENTRY_BYTES]| {
            Entry::decode(entry).is_some_and(|entry| entry.shared == Shared::Live)
        };
        let oldest = self.entries().position(|entry| !is_live(entry));
        if oldest.is_none()
            && let Some(forgot_shared) = self.0.get_mut(FORGOT_SHARED)
        {
            *forgot_shared = 1;
        }
        let start = oldest.unwrap_or(0).saturating_mul(ENTRY_BYTES).saturating_add(HEAD_BYTES);
        self.0.drain(start..start.saturating_add(ENTRY_BYTES));
    }
}
