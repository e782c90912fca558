//! A record: what one writer's connections issued on one stream.
//!
//! Each connection that brings new ids has a record of its own, which nobody
//! else writes; a stream is the records of its connections (mostly one: who
//! resumes a stream takes over the record that is closed). Ids stand in the
//! order in which they were first seen on the wire.

use std::collections::VecDeque;

use crate::codec::{Reader, Writer};
use crate::event_id::{EventId, READINGS};
use crate::jsonrpc::{Call, Calls, MAX_CALLS};

const VERSION: u8 = 2;

/// Bytes of an encoded single id, and of a range; four elements share a byte
/// of flags.
const ID_BYTES: usize = 8;
const RANGE_BYTES: usize = 24;
const ELEMENTS_A_BYTE: usize = 4;

/// Consecutive ids that are kept one by one before they become a range: three
/// take more room than the range.
const RUN: u8 = 3;

/// One id, or several that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// One id, by its fingerprint.
    Single(u64),
    /// All places of a sequence from the first to the last.
    Range {
        /// The sequence.
        sequence: u64,
        /// The first index.
        first: u64,
        /// The last.
        last: u64,
    },
}

impl Ids {
    /// How many ids stand behind this id here, if it is here.
    pub fn find(&self, id: &EventId) -> Option<u64> {
        match *self {
            Ids::Single(whole) => (whole == id.whole).then_some(0),
            Ids::Range { sequence, first, last } => id
                .places
                .iter()
                .flatten()
                .find(|place| place.sequence == sequence && (first..=last).contains(&place.index))
                .map(|place| last.saturating_sub(place.index)),
        }
    }

    fn overlaps(self, other: Ids) -> bool {
        match (self, other) {
            (
                Ids::Range { sequence, first, last },
                Ids::Range { sequence: other, first: other_first, last: other_last },
            ) => sequence == other && first <= other_last && other_first <= last,
            (ids, other) => ids == other,
        }
    }

    /// How many ids these are.
    pub fn count(&self) -> u64 {
        match *self {
            Ids::Single(_) => 1,
            Ids::Range { first, last, .. } => last.saturating_sub(first).saturating_add(1),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Element {
    ids: Ids,
    /// Whether the events had data.
    data: bool,
}

impl Element {
    /// The single ids that take as much room, and are no more than it holds.
    fn weight(&self) -> usize {
        match self.ids {
            Ids::Single(_) => 1,
            Ids::Range { .. } => usize::from(RUN),
        }
    }

    /// How many of its ids stand behind this id, if it is here.
    fn find(&self, id: &EventId) -> Option<u64> {
        self.ids.find(id)
    }

    /// How many ids it holds.
    fn len(&self) -> u64 {
        self.ids.count()
    }

    /// How many of so many ids of it are owed: those with data.
    fn owed(&self, ids: u64) -> u64 {
        if self.data { ids } else { 0 }
    }
}

/// The newest id, read as a place in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tail {
    sequence: u64,
    /// The newest index.
    last: u64,
    /// The highest index.
    highest: u64,
    /// How many consecutive single ids end here.
    run: u8,
}

/// A range that may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Growing {
    /// Its sequence: by the index at the end of the ids.
    pub sequence: u64,
    /// The index that it grows by.
    pub next: u64,
    /// Whether its events have data.
    pub data: bool,
}

/// Where an id stands in a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Whether its event had data.
    pub data: bool,
    /// The ids behind it.
    pub behind: u64,
    /// Those of them whose events had data.
    pub owed: u64,
}

/// What one writer issued on one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Who wrote it: the record counts only while the directory names the same.
    pub nonce: u64,
    /// When the newest id was recorded, in milliseconds.
    pub last_event_ms: u64,
    /// The requests that the stream still has to answer.
    pub calls: Calls,
    /// Ids that were ever recorded here.
    pub count: u64,
    /// The same of the stream's other records, when this one was begun: if
    /// they have more by now, two connections delivered at once, and which of
    /// their ids came first is not known.
    pub count_before: u64,
    /// Older ids have left the window.
    pub evicted: bool,
    /// The order of the ids can't be relied on: an id that had left the window
    /// may have come again as if it were new.
    pub unordered: bool,
    /// An id came twice with data on one connection.
    pub repeats: bool,
    /// All ids so far, and all before them on the stream, are of one sequence, each higher than the one before.
    rising: bool,
    tails: [Option<Tail>; READINGS],
    window: VecDeque<Element>,
}

impl Record {
    /// An empty record, behind so many ids in the stream's other records.
    pub fn new(nonce: u64, count_before: u64) -> Self {
        Record {
            nonce,
            last_event_ms: 0,
            calls: Calls::Unknown,
            count: 0,
            count_before,
            evicted: false,
            unordered: false,
            repeats: false,
            rising: true,
            tails: [None; READINGS],
            window: VecDeque::new(),
        }
    }

    /// The most bytes of an encoded record.
    pub const fn max_bytes(ids_per_stream: u16) -> usize {
        const FLAGS: usize = 1 + 1;
        const COUNTS: usize = 4 * 8;
        const CALLS: usize = 1 + MAX_CALLS * (8 + 4);
        const TAILS: usize = READINGS * (1 + 3 * 8);
        const HEADER: usize = FLAGS + COUNTS + CALLS + TAILS;
        HEADER.saturating_add(Self::window_bytes(ids_per_stream))
    }

    /// Room for so many of the newest ids, however they are kept, and for the
    /// rest of a range that is older in part.
    const fn window_bytes(ids_per_stream: u16) -> usize {
        const {
            assert!(
                RANGE_BYTES * ELEMENTS_A_BYTE < RUN as usize * (ID_BYTES * ELEMENTS_A_BYTE + 1)
            );
        }
        let ids = (ids_per_stream as usize).saturating_add(RUN as usize);
        ids.saturating_mul(ID_BYTES).saturating_add(ids.div_ceil(ELEMENTS_A_BYTE)).saturating_add(4)
    }

    /// The same record, carried on by another writer.
    pub fn taken_over_by(mut self, nonce: u64) -> Self {
        self.nonce = nonce;
        self
    }

    /// Whether an id was issued here and is still known.
    pub fn has(&self, id: &EventId) -> bool {
        self.window.iter().any(|element| match element.ids {
            Ids::Single(whole) => whole == id.whole,
            Ids::Range { .. } => element.find(id).is_some(),
        })
    }

    /// Whether an id of another stream's record was issued here, too.
    pub fn shares_an_id(&self, other: &Record) -> bool {
        let theirs = || other.window.iter().map(|element| element.ids);
        self.window.iter().any(|element| theirs().any(|ids| element.ids.overlaps(ids)))
    }

    /// Where an id stands, if it was issued here and is still known.
    pub fn find(&self, id: &EventId) -> Option<Found> {
        // Most ids that are looked for are new.
        if !self.has(id) {
            return None;
        }
        let (mut behind, mut owed) = (0u64, 0u64);
        for element in self.window.iter().rev() {
            let found = element.find(id);
            let within = found.unwrap_or_else(|| element.len());
            behind = behind.saturating_add(within);
            owed = owed.saturating_add(element.owed(within));
            if found.is_some() {
                return Some(Found { data: element.data, behind, owed });
            }
        }
        None
    }

    /// The place in the stream of an id behind which there are so many here.
    pub fn ordinal(&self, behind: u64) -> u32 {
        let ordinal = self.count_before.saturating_add(self.count).saturating_sub(behind);
        u32::try_from(ordinal).unwrap_or(u32::MAX)
    }

    /// Whether an id is of the sequence that grows here. One id alone that can
    /// be read in two ways doesn't tell which.
    pub fn grows_in_sequence_of(&self, id: &EventId) -> bool {
        self.tails.iter().flatten().count() == 1 && self.shares_sequence(id)
    }

    fn shares_sequence(&self, id: &EventId) -> bool {
        self.tails.iter().zip(&id.places).any(|readings| {
            matches!(readings, (Some(tail), Some(place)) if tail.sequence == place.sequence)
        })
    }

    /// The keys of all ids that were ever recorded here: their one sequence, or
    /// sequences and single ids. `None` if some have left the window that can't
    /// be told any more.
    pub fn keys(&self) -> Option<Vec<u64>> {
        if let Some(sequence) = self.rising_sequence() {
            return Some(vec![sequence]);
        }
        let keys = self.window.iter().map(|element| match element.ids {
            Ids::Single(whole) => whole,
            Ids::Range { sequence, .. } => sequence,
        });
        (!self.evicted).then(|| keys.collect())
    }

    /// The sequence of all its ids, if it is one that has never fallen.
    pub fn rising_sequence(&self) -> Option<u64> {
        let mut readings = self.tails.iter().flatten();
        match (self.rising, readings.next(), readings.next()) {
            (true, Some(tail), None) => Some(tail.sequence),
            _ => None,
        }
    }

    /// Whether all its ids can be read as ones of this sequence.
    fn rises_in(&self, sequence: u64) -> bool {
        self.rising && self.tails.iter().flatten().any(|tail| tail.sequence == sequence)
    }

    /// The sequence of all ids of several records of a stream, if it is one that
    /// has never fallen.
    pub fn rising_sequence_of<'a>(
        records: impl Iterator<Item = &'a Record> + Clone,
    ) -> Option<u64> {
        let sequence = records.clone().find_map(Record::rising_sequence)?;
        records.clone().all(|record| record.rises_in(sequence)).then_some(sequence)
    }

    /// The highest index of its sequence.
    pub fn highest_index(&self) -> Option<u64> {
        self.tails.iter().flatten().map(|tail| tail.highest).max()
    }

    /// The stream's ids before these are no lower ones of the same sequence.
    pub fn begins_lower(&mut self) {
        self.rising = false;
    }

    /// Appends its ids with data, the newest first and each element with the
    /// number of those behind it, back to the cursor. Whether that is here.
    pub fn push_owed(
        &self,
        cursor: Option<&EventId>,
        owed: &mut u64,
        elements: &mut Vec<(Ids, u64)>,
    ) -> bool {
        for element in self.window.iter().rev() {
            let found = cursor.and_then(|cursor| element.find(cursor));
            let behind = found.unwrap_or_else(|| element.len());
            let ids = match element.ids {
                Ids::Range { sequence, last, .. } if behind > 0 => {
                    let first = last.saturating_sub(behind.saturating_sub(1));
                    Some(Ids::Range { sequence, first, last })
                }
                Ids::Single(_) if behind > 0 => Some(element.ids),
                _ => None,
            };
            if let Some(ids) = ids.filter(|_| element.data) {
                elements.push((ids, *owed));
                *owed = owed.saturating_add(behind);
            }
            if found.is_some() {
                return true;
            }
        }
        false
    }

    /// The ids with data that it holds.
    pub fn owed(&self) -> u64 {
        self.window.iter().map(|element| element.owed(element.len())).fold(0, u64::saturating_add)
    }

    /// Whether the id is of the sequence in which the newest id stands, and
    /// past the highest index there.
    pub fn is_past_head(&self, id: &EventId) -> bool {
        self.tails.iter().zip(&id.places).any(|readings| match readings {
            (Some(tail), Some(place)) => {
                tail.sequence == place.sequence && place.index > tail.highest
            }
            _ => false,
        })
    }

    /// Whether the id is of the sequence in which the newest id stands, and
    /// below the highest index there.
    pub fn is_past(&self, id: &EventId) -> bool {
        self.tails.iter().zip(&id.places).any(|readings| match readings {
            (Some(tail), Some(place)) => {
                tail.sequence == place.sequence && place.index < tail.highest
            }
            _ => false,
        })
    }

    /// Whether the id may be the next of a sequence that is counted here.
    pub fn may_come_to(&self, id: &EventId) -> bool {
        self.tails.iter().zip(&id.places).any(|readings| match readings {
            (Some(tail), Some(place)) if tail.sequence == place.sequence => {
                place.index > tail.highest && tail.highest <= self.count
            }
            _ => false,
        })
    }

    /// Whether the part that has left the window may have held this id.
    pub fn may_have_evicted(&self, id: &EventId) -> bool {
        self.evicted && !(self.rising && (self.is_past_head(id) || !self.shares_sequence(id)))
    }

    /// Whether this id, which the window doesn't have, is one that has left it:
    /// all ids were of one rising sequence, and it is below the head.
    pub fn is_surely_old(&self, id: &EventId) -> bool {
        self.evicted && self.rising && self.shares_sequence(id) && !self.is_past_head(id)
    }

    /// Appends an id that is not known yet.
    pub fn push(&mut self, id: &EventId, data: bool, ids_per_stream: u16, now_ms: u64) {
        self.count = self.count.saturating_add(1);
        self.last_event_ms = now_ms;
        self.follow_sequence(id, data);
        if self.extend_range(id, data) {
            return;
        }
        self.window.push_back(Element { ids: Ids::Single(id.whole), data });
        if let Some(tail) = self.tails.iter().flatten().find(|tail| tail.run >= RUN) {
            let range = Ids::Range {
                sequence: tail.sequence,
                first: tail.last.saturating_sub(u64::from(RUN).saturating_sub(1)),
                last: tail.last,
            };
            self.window.truncate(self.window.len().saturating_sub(usize::from(RUN)));
            self.window.push_back(Element { ids: range, data });
        }
        self.evict(ids_per_stream);
    }

    /// The range that grows here, if all ids so far are of its sequence, each
    /// higher than the one before: then the next of it is new, and needs no more
    /// than [`Record::grow`].
    pub fn growing(&self) -> Option<Growing> {
        let ([Some(tail), None], Some(newest)) = (self.tails, self.window.back()) else {
            return None;
        };
        match newest.ids {
            Ids::Range { sequence, last, .. }
                if self.rising && sequence == tail.sequence && last == tail.highest =>
            {
                let next = last.checked_add(1)?;
                Some(Growing { sequence, next, data: newest.data })
            }
            _ => None,
        }
    }

    /// Appends the next ids of the range that [`Record::growing`] has told of,
    /// where nothing was pushed since: as [`Record::push`] does it with each.
    pub fn grow(&mut self, ids: u64, now_ms: u64) {
        let ([Some(tail), None], Some(Element { ids: Ids::Range { last, .. }, .. })) =
            (&mut self.tails, self.window.back_mut())
        else {
            return;
        };
        *last = last.saturating_add(ids);
        *tail = Tail { last: *last, highest: *last, run: 1, ..*tail };
        self.count = self.count.saturating_add(ids);
        self.last_event_ms = now_ms;
    }

    fn follow_sequence(&mut self, id: &EventId, data: bool) {
        let last_is_single_with = |data| matches!(self.window.back(), Some(e) if e.data == data && matches!(e.ids, Ids::Single(_)));
        let joins_run = last_is_single_with(data);
        let is_first = self.count == 1;
        let mut continued = [None; READINGS];
        for ((new, tail), place) in continued.iter_mut().zip(&self.tails).zip(&id.places) {
            if let (Some(tail), Some(place)) = (tail, place)
                && tail.sequence == place.sequence
            {
                let next = tail.last.checked_add(1) == Some(place.index);
                self.rising &= place.index > tail.highest;
                *new = Some(Tail {
                    sequence: tail.sequence,
                    last: place.index,
                    highest: tail.highest.max(place.index),
                    run: if next && joins_run { tail.run.saturating_add(1) } else { 1 },
                });
            }
        }
        if continued.iter().all(Option::is_none) {
            self.rising &= is_first && id.places.iter().any(Option::is_some);
            continued = id.places.map(|place| {
                place.map(|place| Tail {
                    sequence: place.sequence,
                    last: place.index,
                    highest: place.index,
                    run: 1,
                })
            });
        }
        self.tails = continued;
    }

    fn extend_range(&mut self, id: &EventId, with_data: bool) -> bool {
        let Some(Element { ids: Ids::Range { sequence, last, .. }, data }) = self.window.back_mut()
        else {
            return false;
        };
        let follows = *data == with_data
            && id.places.iter().flatten().any(|place| {
                place.sequence == *sequence && last.checked_add(1) == Some(place.index)
            });
        if follows {
            *last = last.saturating_add(1);
        }
        follows
    }

    /// Lets go of what is older than the newest ids that have to be kept.
    fn evict(&mut self, ids_per_stream: u16) {
        let mut weight = self.window.iter().map(Element::weight).fold(0, usize::saturating_add);
        while let Some(oldest) = self.window.front() {
            weight = weight.saturating_sub(oldest.weight());
            if weight < usize::from(ids_per_stream) {
                break;
            }
            self.window.pop_front();
            self.evicted = true;
        }
    }

    /// Its bytes in shared data.
    pub fn encode(&self) -> Vec<u8> {
        let is_range = |element: &&Element| matches!(element.ids, Ids::Range { .. });
        let ranges = self.window.iter().filter(is_range).count();
        let singles = self.window.len().saturating_sub(ranges);
        let ids_bytes =
            singles.saturating_mul(ID_BYTES).saturating_add(ranges.saturating_mul(RANGE_BYTES));
        let room = Self::max_bytes(0).saturating_add(self.window.len()).saturating_add(ids_bytes);
        let mut writer = Writer::with_room(room);
        writer.u8(VERSION);
        writer.u64(self.nonce);
        writer.u64(self.last_event_ms);
        writer.u64(self.count);
        writer.u64(self.count_before);
        writer.u8(u8::from(self.evicted)
            | (u8::from(self.unordered) << 1)
            | (u8::from(self.rising) << 2)
            | (u8::from(matches!(self.calls, Calls::Unknown)) << 3)
            | (u8::from(self.repeats) << 4));
        let calls = match &self.calls {
            Calls::Unknown => &[][..],
            Calls::Known(calls) => calls,
        };
        writer.list(calls, |w, call| {
            w.u64(call.id);
            w.u32(call.answered_at);
        });
        for tail in &self.tails {
            writer.u8(tail.map_or(0, |tail| tail.run.max(1)));
            if let Some(tail) = tail {
                writer.u64(tail.sequence);
                writer.u64(tail.last);
                writer.u64(tail.highest);
            }
        }
        writer.u32(u32::try_from(self.window.len()).unwrap_or(u32::MAX));
        let flags_bytes = self.window.len().div_ceil(ELEMENTS_A_BYTE);
        let room = writer.room(flags_bytes.saturating_add(ids_bytes));
        let (flags, ids) = room.split_at_mut_checked(flags_bytes).unwrap_or_default();
        let mut places = ids.as_chunks_mut().0.iter_mut();
        let mut put = |value: u64| {
            if let Some(place) = places.next() {
                *place = value.to_le_bytes();
            }
        };
        for (number, element) in self.window.iter().enumerate() {
            let range = match element.ids {
                Ids::Single(whole) => {
                    put(whole);
                    0
                }
                Ids::Range { sequence, first, last } => {
                    put(sequence);
                    put(first);
                    put(last);
                    2
                }
            };
            if let Some(group) = flags.get_mut(number / ELEMENTS_A_BYTE) {
                *group = (*group << 2) | range | u8::from(element.data);
            }
        }
        writer.finish()
    }

    /// Reads it back; `None` for another version, or what is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let mut record = Record::new(reader.u64()?, 0);
        record.last_event_ms = reader.u64()?;
        record.count = reader.u64()?;
        record.count_before = reader.u64()?;
        let flags = reader.u8()?;
        record.evicted = flags & 1 != 0;
        record.unordered = flags & 2 != 0;
        record.rising = flags & 4 != 0;
        record.repeats = flags & 16 != 0;
        let calls =
            reader.list(|reader| Some(Call { id: reader.u64()?, answered_at: reader.u32()? }))?;
        if flags & 8 == 0 {
            record.calls = Calls::Known(calls);
        }
        for tail in &mut record.tails {
            let run = reader.u8()?;
            if run > 0 {
                *tail = Some(Tail {
                    run,
                    sequence: reader.u64()?,
                    last: reader.u64()?,
                    highest: reader.u64()?,
                });
            }
        }
        let len = usize::try_from(reader.u32()?).ok()?;
        let flags = reader.bytes(len.div_ceil(ELEMENTS_A_BYTE))?;
        for (group, flags) in flags.iter().enumerate() {
            let before = group.saturating_mul(ELEMENTS_A_BYTE);
            let in_group = len.saturating_sub(before).min(ELEMENTS_A_BYTE);
            for at in (0..in_group).rev() {
                let flags = flags.checked_shr(u32::try_from(at).ok()?.saturating_mul(2))?;
                let ids = if flags & 2 == 0 {
                    Ids::Single(reader.u64()?)
                } else {
                    Ids::Range {
                        sequence: reader.u64()?,
                        first: reader.u64()?,
                        last: reader.u64()?,
                    }
                };
                record.window.push_back(Element { ids, data: flags & 1 != 0 });
            }
        }
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::Secret;

    fn id(text: &str) -> EventId {
        EventId::new(&Secret::new([1; 16]), text.as_bytes()).unwrap()
    }

    fn record(ids: &[(&str, bool)], ids_per_stream: u16) -> Record {
        let mut record = Record::new(7, 0);
        for (text, data) in ids {
            record.push(&id(text), *data, ids_per_stream, 5);
        }
        record
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for len in 0..12usize {
            let mut all = Vec::new();
            for n in 0..len {
                // Singles, ranges, with and without data.
                let text = if n % 5 < 3 { format!("r_{n}") } else { format!("s-{n}-x") };
                all.push((text, n % 3 > 0 || n < 4));
            }
            let ids: Vec<_> = all.iter().map(|(text, data)| (text.as_str(), *data)).collect();
            let mut record = record(&ids, 64);
            record.calls = Calls::Known(vec![Call { id: 3, answered_at: 9 }]);
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        assert_eq!(Record::decode(b""), None);
        assert_eq!(Record::decode(&[9; 100]), None);
    }

    #[test]
    fn consecutive_ids_take_constant_room() {
        let mut record = Record::new(1, 0);
        for n in 0..10_000 {
            record.push(&id(&format!("s_{n}")), true, 4, 0);
        }
        assert!(record.encode().len() < 200);
        assert!(!record.evicted);
        assert_eq!(record.find(&id("s_0")).map(|found| found.owed), Some(9_999));
        assert_eq!(record.find(&id("s_07")), None);
        assert_eq!(record.find(&id("s_10000")), None);
        assert!(record.is_past_head(&id("s_10000")));
    }

    #[test]
    fn the_newest_ids_are_always_kept_and_room_is_bounded() {
        for ids_per_stream in [1, 2, 3, 5, 64] {
            // Runs of every length, with gaps between them.
            let mut record = Record::new(1, 0);
            let mut issued = Vec::new();
            let mut index = 0;
            for run in 0..60 {
                for _ in 0..run % 6 {
                    index += 1;
                    issued.push(index);
                    let data = run % 4 > 0;
                    record.push(&id(&index.to_string()), data, ids_per_stream, 0);
                    assert!(record.encode().len() <= Record::max_bytes(ids_per_stream));
                    for newest in issued.iter().rev().take(ids_per_stream.into()) {
                        assert!(record.find(&id(&newest.to_string())).is_some());
                    }
                }
                index += 1;
            }
        }
    }

    #[test]
    fn single_ids_are_kept_to_the_number() {
        let ids: Vec<String> = (0..9).map(|n| format!("x-{n}-y")).collect();
        let ids: Vec<_> = ids.iter().map(|text| (text.as_str(), true)).collect();
        let record = record(&ids, 4);
        assert!(record.evicted);
        assert_eq!(record.find(&id("x-4-y")), None);
        assert_eq!(record.find(&id("x-5-y")).map(|found| (found.behind, found.owed)), Some((3, 3)));
    }

    #[test]
    fn both_readings_of_an_id() {
        // rmcp: the index stands first; the first id alone doesn't tell.
        let one = record(&[("0/4", false)], 64);
        assert!(one.is_past_head(&id("3/4")) && one.is_past_head(&id("0/9")));
        let two = record(&[("0/4", false), ("1/4", true)], 64);
        assert!(two.is_past_head(&id("3/4")) && !two.is_past_head(&id("0/9")));
    }
}
