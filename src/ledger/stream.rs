//! Streams, put together from their records, and the history of a session.

use super::record::{Found, Ids, Record};
use super::table::{Lane, Session, StreamKind};
use crate::event_id::EventId;
use crate::jsonrpc::{Call, Calls, SentIds};
use crate::owner::OwnerId;

/// A stream as the records tell it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// Its number in the session.
    pub number: u32,
    /// What carries it.
    pub kind: StreamKind,
    /// Its records, in the order in which they were begun.
    pub records: Vec<Record>,
    /// The lanes of these records, with nonce and whether closed: what has to
    /// be unchanged for the records to be still all there is.
    pub lanes: Vec<Lane>,
}

/// Whether a POST's stream has brought every answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// It has.
    Yes,
    /// It has not.
    No,
    /// The guard can't tell.
    Unknown,
}

impl Stream {
    /// The ids with data behind a cursor, if it was issued on this stream; 0
    /// where their order isn't known.
    pub fn find(&self, id: &EventId) -> Option<u64> {
        let mut later: u64 = 0;
        let mut least: Option<u64> = None;
        for record in self.records.iter().rev() {
            if let Some(found) = record.find(id) {
                let owed = found.owed.saturating_add(later);
                // An id that two connections delivered at once is owed from
                // the place where less follows.
                least = Some(least.map_or(owed, |least| least.min(owed)));
            }
            later = later.saturating_add(record.owed());
        }
        least.map(|owed| if self.is_ordered() { owed } else { 0 })
    }

    /// Where an id stands, with all ids behind it; `None` too where the order
    /// isn't known.
    pub fn find_entry(&self, id: &EventId) -> Option<Found> {
        if !self.is_ordered() {
            return None;
        }
        let (mut behind, mut owed) = (0u64, 0u64);
        for record in self.records.iter().rev() {
            if let Some(found) = record.find(id) {
                return Some(Found {
                    data: found.data,
                    behind: behind.saturating_add(found.behind),
                    owed: owed.saturating_add(found.owed),
                });
            }
            behind = behind.saturating_add(record.count);
            owed = owed.saturating_add(record.owed());
        }
        None
    }

    /// Whether an id was issued here, by what is still known.
    pub fn has(&self, id: &EventId) -> bool {
        self.records.iter().any(|record| record.find(id).is_some())
    }

    /// The same, with data.
    pub fn has_with_data(&self, id: &EventId) -> bool {
        self.records.iter().filter_map(|record| record.find(id)).any(|found| found.data)
    }

    /// The owners of all its records, if they are all known.
    pub fn owners(&self) -> Option<Vec<OwnerId>> {
        self.lanes.iter().map(|lane| lane.owner).collect()
    }

    /// The sequence of all its ids, if it is one that has never fallen.
    pub fn rising_sequence(&self) -> Option<u64> {
        Record::rising_sequence_of(self.records.iter()).filter(|_| self.is_ordered())
    }

    /// The highest index of its sequence.
    pub fn highest_index(&self) -> Option<u64> {
        self.records.iter().filter_map(Record::highest_index).max()
    }

    /// The ids with data behind a cursor, in their order, each element with the
    /// number of those that follow it; `None` where that can't be relied on.
    pub fn owed_behind(&self, cursor: &EventId) -> Option<Vec<(Ids, u64)>> {
        if !self.is_ordered() || self.records.iter().any(|record| record.repeats) {
            return None;
        }
        let (mut elements, mut owed) = (Vec::new(), 0u64);
        for record in self.records.iter().rev() {
            let found = record.push_owed(Some(cursor), &mut owed, &mut elements);
            if found {
                elements.reverse();
                return Some(elements);
            }
        }
        None
    }

    /// Whether it may have issued an id, one that other streams have as well,
    /// that is not known here any more.
    pub fn may_have_had(&self, id: &EventId) -> bool {
        id.index_key().is_none() && self.may_have_forgotten(id)
    }

    /// The same of any id.
    fn may_have_forgotten(&self, id: &EventId) -> bool {
        self.find(id).is_none() && self.records.iter().any(|record| record.may_have_evicted(id))
    }

    /// Whether the order of all ids is the order of the records.
    pub fn is_ordered(&self) -> bool {
        let mut before: u64 = 0;
        self.records.iter().all(|record| {
            let in_order = record.count_before == before && !record.unordered;
            before = before.saturating_add(record.count);
            in_order
        })
    }

    /// Whether the stream is finished.
    pub fn finished(&self) -> Finished {
        match self.kind {
            StreamKind::Standalone => Finished::No,
            StreamKind::Unplaced => Finished::Unknown,
            // What can't be read may have had the answer.
            StreamKind::Post if self.records.len() < self.lanes.len() => Finished::Unknown,
            StreamKind::Post => match self.calls() {
                Calls::Unknown => Finished::Unknown,
                calls if calls.all_answered() => Finished::Yes,
                Calls::Known(_) => Finished::No,
            },
        }
    }

    /// The calls that no record has seen answered.
    pub fn calls(&self) -> Calls {
        let calls = self.records.iter().map(|record| record.calls.clone());
        calls.reduce(|awaited, calls| awaited.and(&calls)).unwrap_or_default()
    }

    /// The place of a cursor, counted in event ids; `None` if it isn't here.
    fn ordinal(&self, id: &EventId) -> Option<u32> {
        self.records.iter().find_map(|r| r.find(id).map(|found| r.ordinal(found.behind)))
    }

    /// Which of its calls are pending for a cursor, by their place in the
    /// POST: those whose answer doesn't stand at or before it. A cursor that
    /// was never issued stands behind what was.
    /// Those that were answered on the way back count as answered, too.
    pub(crate) fn pending(&self, cursor: &EventId, answered: &[u64]) -> Vec<usize> {
        let at = self.ordinal(cursor).unwrap_or(u32::MAX);
        let Calls::Known(calls) = self.calls() else { return Vec::new() };
        let is_pending = |call: &Call| {
            (call.answered_at == 0 || call.answered_at > at) && !answered.contains(&call.id)
        };
        calls.iter().enumerate().filter(|(_, call)| is_pending(call)).map(|(n, _)| n).collect()
    }

    /// Whether a cursor stands on the stream, or is of its sequence.
    pub fn may_hold(&self, cursor: &EventId) -> bool {
        self.records.iter().any(|r| r.find(cursor).is_some() || r.grows_in_sequence_of(cursor))
    }

    /// When its newest id was recorded.
    pub fn last_event_ms(&self) -> u64 {
        self.records.iter().map(|record| record.last_event_ms).max().unwrap_or(0)
    }
}

/// What the ledger has of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// When it was read, in milliseconds.
    pub read_ms: u64,
    /// Its slot.
    pub session: Session,
    /// Its streams.
    pub streams: Vec<Stream>,
    /// A record of it can't be read.
    pub unreadable: bool,
}

impl History {
    /// Whether a stream that isn't known to have an id may have it all the
    /// same: one that was evicted, or one that other streams have as well.
    pub fn may_have_evicted(&self, id: &EventId) -> bool {
        let is_common = id.index_key().is_none();
        (is_common && self.unreadable)
            || self.session.evicted_keys.may_have(id)
            || self.streams.iter().any(|stream| stream.may_have_had(id))
    }

    /// Whether a cursor that is known may stand on a stream that isn't, too:
    /// then nothing follows from what the known one has behind it.
    pub fn may_be_of_unseen(&self, cursor: &EventId) -> bool {
        let is_common = cursor.index_key().is_none();
        self.may_have_evicted(cursor)
            || self.session.returned
            || (!self.session.complete && is_common)
    }

    /// Whether a common id may be of several streams, known or not.
    pub fn may_be_of_several(&self, id: &EventId) -> bool {
        let placed = self.streams.iter().filter(|stream| stream.kind != StreamKind::Unplaced);
        let with_it = placed.filter(|stream| stream.has(id) || stream.may_have_had(id)).count();
        let may_be_of_unseen = self.unreadable || self.session.evicted_keys.may_have(id);
        id.index_key().is_none() && with_it.saturating_add(usize::from(may_be_of_unseen)) > 1
    }

    /// Whether a stream may seem to have issued an id that it brought again: a
    /// GET brings those of other streams, too, which is known by what these
    /// have. Common ids don't tell, and are each stream's own.
    pub fn may_be_brought_again(&self, id: &EventId) -> bool {
        id.index_key().is_some()
            && (self.unreadable
                || self.may_be_of_unseen(id)
                || self.streams.iter().any(|stream| stream.may_have_forgotten(id)))
    }

    /// How many events follow a cursor, where it stands on one stream whose order
    /// is known.
    pub fn owed_behind(&self, cursor: &EventId) -> Option<u64> {
        let mut with_it = self.streams.iter().filter(|stream| stream.has(cursor));
        match (with_it.next(), with_it.next()) {
            (Some(stream), None) => stream.find_entry(cursor).map(|found| found.owed),
            _ => None,
        }
    }

    /// Whether the part of the history that could hold an id was evicted. An id
    /// of a distinctive sequence belongs to the stream that has that sequence.
    pub fn could_have_held(&self, id: &EventId) -> bool {
        let mut records = self.streams.iter().flat_map(|stream| &stream.records);
        if self.unreadable || records.clone().any(|record| record.may_have_evicted(id)) {
            return true;
        }
        let belongs_to_known = id.distinctive_sequence.contains(&true)
            && records.any(|record| record.grows_in_sequence_of(id));
        self.session.streams_evicted
            && (!belongs_to_known || self.session.evicted_keys.may_have(id))
    }

    /// When the newest event came on a stream that isn't known: it may have
    /// been any stream's, and so may the answers that came there. Of one that
    /// was evicted that isn't known: it may be this moment.
    pub fn last_unplaced_ms(&self) -> Option<u64> {
        if self.session.unplaced_evicted {
            return Some(u64::MAX);
        }
        let unplaced = self.streams.iter().filter(|s| s.kind == StreamKind::Unplaced);
        unplaced.map(Stream::last_event_ms).max()
    }

    /// Whether all that was issued stands on its stream, or has left a window of
    /// that.
    pub fn is_whole(&self) -> bool {
        self.session.complete && !self.unreadable && self.last_unplaced_ms().is_none()
    }

    /// Whether a stream of it is finished: of a POST's that seems open, the
    /// answer may have come on a stream that isn't known.
    pub fn finished(&self, stream: &Stream) -> Finished {
        match stream.finished() {
            Finished::No
                if stream.kind == StreamKind::Post && self.last_unplaced_ms().is_some() =>
            {
                Finished::Unknown
            }
            finished => finished,
        }
    }

    /// The ids of the calls that wait for what follows a cursor, where that
    /// stands on, or belongs to the sequence of, one POST's stream alone.
    /// `answered`: calls that were answered on the way back.
    pub fn pending_calls(&self, cursor: &EventId, answered: &[u64]) -> SentIds {
        if self.may_have_evicted(cursor) {
            return Vec::new();
        }
        let mut streams = self.streams.iter().filter(|stream| stream.may_hold(cursor));
        let (Some(stream), None) = (streams.next(), streams.next()) else { return Vec::new() };
        let Some(sent) = self.session.sent(stream.number) else { return Vec::new() };
        let pending = stream.pending(cursor, answered);
        pending.into_iter().filter_map(|call| sent.get(call).cloned()).collect()
    }
}
