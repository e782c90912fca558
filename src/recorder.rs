//! The recorder of one connection: the bytes of an event stream go in, the ids
//! that they dispatch are in shared data when it returns.
//!
//! ```text
//! bytes -> sse::Decoder -> event ids -> Record -> Store
//! ```
//!
//! Nothing is kept of a stream before it brings an id that the ledger doesn't
//! have. Then the connection opens a lane in the session's directory (one
//! compare-and-swap), and from there on each chunk with new ids is one write.

use crate::event_id::{EventId, IdReader, NextId, comes_back_unchanged, trim};
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::{Calls, METHOD_FIRST, SentIds};
use crate::ledger::index::How;
use crate::ledger::record::Record;
use crate::ledger::stream::{History, Stream};
use crate::ledger::table::{Floor, Lane, StreamKind};
use crate::ledger::{Access, Ledger, Opening};
use crate::owner::Instance;
use crate::sse::{Data, Decoder, Dispatched, IdField};
use crate::store::Store;
use crate::verdict::CarriedOn;

/// A lane is written without a look at the directory for so long.
const VALID_MS: u64 = 1_000;

/// What a connection carries, as far as it is known when it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carries {
    /// A new stream: the answer to a POST.
    NewStream,
    /// The session's standalone stream: a GET without a cursor.
    Standalone,
    /// A known stream: a resumption whose cursor the ledger has.
    Known(u32, StreamKind),
    /// A stream that isn't known yet: any other resumption.
    Unknown,
}

impl Carries {
    /// Whether this is a stream that the connection carries on.
    pub(crate) fn continues(self, stream: &Stream) -> bool {
        match self {
            // A session has one, whatever its number.
            Carries::Standalone | Carries::Known(_, StreamKind::Standalone) => {
                stream.kind == StreamKind::Standalone
            }
            Carries::Known(number, _) => stream.number == number,
            Carries::NewStream | Carries::Unknown => false,
        }
    }
}

/// An event, as far as it matters.
pub(crate) struct Event {
    /// Its id, if it has one that can be kept.
    pub id: Option<EventId>,
    /// It has data.
    pub data: bool,
    /// The fingerprints of the JSON-RPC ids that it answers, while calls are
    /// awaited.
    pub answers: Vec<u64>,
}

/// What a chunk dispatched.
#[derive(Default)]
pub(crate) struct Batch {
    /// The first events that just carry on the range that grows: their ids are
    /// expected, and none is an answer.
    expected: u64,
    /// The events behind these that have an id or an answer.
    pub events: Vec<Event>,
    /// An id that can't come back, or not as it was.
    unreturnable: bool,
    /// Data that may have been an answer could not be read.
    unreadable: bool,
    /// An event had data.
    pub data: bool,
}

impl Batch {
    fn with_ids(&self) -> impl Iterator<Item = (&EventId, &Event)> {
        self.events.iter().filter_map(|event| event.id.as_ref().map(|id| (id, event)))
    }

    /// Appends what came next, of a resumption: there none is expected.
    pub fn append(&mut self, mut next: Batch) {
        debug_assert_eq!(next.expected, 0);
        self.events.append(&mut next.events);
        self.unreturnable |= next.unreturnable;
        self.unreadable |= next.unreadable;
        self.data |= next.data;
    }
}

/// The recorder of one connection.
pub struct Recorder {
    session: SessionFingerprint,
    carries: Carries,
    nonce: u64,
    decoder: Decoder,
    ids: IdReader,
    id_limit: usize,
    calls: Calls,
    /// The ids of these requests as they were sent; `None` for a resumption,
    /// whose stream has them.
    sent: Option<SentIds>,
    /// The record isn't written as it is now.
    changed: bool,
    /// It has brought an answer, or what may have been one.
    answered: bool,
    /// The stream's records that others wrote.
    others: Vec<Record>,
    /// Those of the session's other streams, where this is a GET.
    elsewhere: Vec<Record>,
    /// What there is of the session, while it isn't known which of its streams
    /// this is.
    candidates: Option<History>,
    /// What was read of the session, as long as nobody has used it up.
    history: Option<Box<History>>,
    loaded: bool,
    own: Option<Record>,
    lane: Option<OwnLane>,
    /// Tells streams that begin with the same id.
    hint: u32,
    /// Lanes of other streams with the same hint.
    alike: Vec<Lane>,
    /// The lane was lost, and none is open again yet.
    lost_with: Option<u64>,
    /// Ids with data that this connection brought first.
    pushed: u64,
    /// The cursor that it resumes from, and the ids with data that followed it
    /// then and haven't come again yet.
    cursor: Option<EventId>,
    owed: u64,
    /// Ids that the stream had when the resumption arrived.
    known_then: Option<u64>,
    /// The cursor's place isn't certain.
    is_vague: bool,
    /// Nobody else looks at the order in which ids come again.
    notes_order: bool,
    /// The ids with data behind the last one that came again.
    behind_again: Option<u64>,
    /// These may have come in another order than that of their events.
    unordered: bool,
    /// The same, unless the connection ends with a gap.
    passed_over: bool,
    /// An id came twice with data here.
    repeats: bool,
    /// Who issues the events.
    instance: Option<Instance>,
    /// The stream that others own and that this one, unasked, brings too.
    of_others: Option<u32>,
    /// When the answer began, in microseconds.
    since_us: u64,
    /// Another instance may not have what this one issues.
    is_local: bool,
    /// A floor that was learned of this instance.
    floor: Option<Floor>,
    /// The cursor that it resumes from stands on several streams.
    ambiguous: Option<EventId>,
    /// Answers are read although none is awaited: the client may have missed
    /// them.
    reads_answers: bool,
    reuse_checked: bool,
    /// The newest id or sequence that the index was told.
    noted: Option<u64>,
    /// What carries on the range that grows in the record.
    expected: Option<Expected>,
    saw_event: bool,
    saw_data: bool,
    saw_id: bool,
}

/// The event that carries on a range.
struct Expected {
    id: NextId,
    /// Whether it has data.
    data: bool,
}

/// How a lane is this connection's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// As it was.
    Still,
    /// Opened just now: what others have of the stream has been read, too.
    Anew,
}

struct OwnLane {
    number: u8,
    way: u8,
    /// Where its record is.
    key: String,
    /// Since when the session was known when the lane was opened.
    known_since_ms: u64,
    /// When the directory was last looked at.
    checked_ms: u64,
}

impl Recorder {
    /// A recorder at the start of a connection's event stream. `nonce` is from
    /// [`Ledger::nonce`]; `calls` are the requests that the stream answers.
    pub fn new(
        session: SessionFingerprint,
        carries: Carries,
        nonce: u64,
        id_limit: usize,
        (calls, sent): (Calls, SentIds),
    ) -> Self {
        Recorder {
            session,
            carries,
            nonce,
            decoder: Decoder::new(id_limit).leaving_out(METHOD_FIRST),
            ids: IdReader::default(),
            id_limit,
            calls,
            sent: (carries == Carries::NewStream).then_some(sent),
            changed: false,
            answered: false,
            others: Vec::new(),
            elsewhere: Vec::new(),
            candidates: None,
            history: None,
            loaded: false,
            own: None,
            lane: None,
            hint: 0,
            alike: Vec::new(),
            lost_with: None,
            pushed: 0,
            cursor: None,
            owed: 0,
            known_then: None,
            is_vague: false,
            notes_order: carries != Carries::NewStream,
            behind_again: None,
            unordered: false,
            passed_over: false,
            repeats: false,
            instance: None,
            of_others: None,
            since_us: 0,
            is_local: true,
            floor: None,
            ambiguous: None,
            reads_answers: false,
            reuse_checked: false,
            noted: None,
            expected: None,
            saw_event: false,
            saw_data: false,
            saw_id: false,
        }
    }

    /// Somebody else looks at the order in which ids come again.
    pub(crate) fn leave_order(&mut self) {
        self.notes_order = false;
    }

    /// What was read of the session, if that was just now.
    fn take_history<S: Store>(&mut self, at: &Access<'_, S>) -> Option<History> {
        let is_new = |history: &History| at.now_ms.saturating_sub(history.read_ms) < VALID_MS;
        self.history.take().map(|history| *history).filter(is_new)
    }

    /// It resumes from a cursor that is known, and that `ids` has read.
    pub fn resumes(mut self, carried: &CarriedOn, ids: IdReader) -> Self {
        self.ids = ids;
        self.cursor = Some(carried.cursor);
        self.owed = carried.owed;
        let counts = carried.stream.records.iter().map(|record| record.count);
        self.known_then = Some(counts.fold(0, u64::saturating_add));
        self.is_vague = carried.is_vague();
        self.unordered |= carried.ambiguous;
        self.ambiguous = carried.ambiguous.then_some(carried.cursor);
        // The client may have missed answers that have passed.
        self.reads_answers = !carried.stream.pending(&carried.cursor, &[]).is_empty();
        self
    }

    /// Who sends the stream, and since when; `is_local`: others may not have
    /// its events.
    pub fn sent_by(mut self, instance: Option<Instance>, since_us: u64, is_local: bool) -> Self {
        self.instance = instance;
        self.since_us = since_us;
        self.is_local = is_local;
        self
    }

    /// An id came twice with data.
    pub(crate) fn note_repeat(&mut self) {
        self.repeats = true;
        self.changed = true;
    }

    /// The server has them in another order than that in which they were seen.
    pub(crate) fn note_disorder(&mut self) {
        self.changed |= !self.unordered;
        self.unordered = true;
    }

    /// Whether ids came ahead of others that are owed still: somebody else may
    /// resume meanwhile.
    pub(crate) fn set_passed_over(&mut self, passed_over: bool) {
        self.changed |= std::mem::replace(&mut self.passed_over, passed_over) != passed_over;
    }

    /// The session whose events it records.
    pub fn session(&self) -> SessionFingerprint {
        self.session
    }

    /// The requests that the stream answers, once the POST's body has passed.
    pub fn set_calls<S: Store>(
        &mut self,
        ledger: &Ledger,
        at: &mut Access<'_, S>,
        (calls, sent): (Calls, SentIds),
    ) {
        // An event that has passed by then may have been the answer.
        if self.saw_data {
            return;
        }
        self.calls = calls;
        self.sent = Some(sent);
        if let (Some(_), Some(sent)) = (&self.lane, &self.sent) {
            ledger.keep_sent(at, self.session, self.nonce, sent);
            self.changed = true;
            self.write_change(ledger, at);
        }
    }

    /// Records what these bytes dispatch, before they go on.
    pub fn record<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, bytes: &[u8]) {
        let batch = self.read(ledger, at, bytes);
        self.keep(ledger, at, batch);
    }

    /// Reads what these bytes dispatch, and keeps nothing of it yet. What was
    /// expected of it counts as kept: the batch has to be.
    pub(crate) fn read<S: Store>(
        &mut self,
        ledger: &Ledger,
        at: &mut Access<'_, S>,
        bytes: &[u8],
    ) -> Batch {
        if matches!(self.carries, Carries::Known(..)) {
            // It answers the calls of the stream that it carries on.
            self.load(ledger, at);
        }
        self.decode(ledger, |decoder, sink| decoder.feed(bytes, sink))
    }

    /// The stream has ended cleanly: its last event may lack the blank line.
    pub fn finish<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>) {
        let batch = self.read_end(ledger);
        self.keep(ledger, at, batch);
    }

    /// Reads that event, and keeps nothing of it yet.
    pub(crate) fn read_end(&mut self, ledger: &Ledger) -> Batch {
        self.decode(ledger, |decoder, sink| decoder.finish(sink))
    }

    /// The connection is over, however it ended: nothing is written any more.
    pub fn close<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>) {
        if self.saw_event && !self.saw_id {
            at.tally.streams_without_ids = at.tally.streams_without_ids.saturating_add(1);
        }
        self.write_change(ledger, at);
        if self.lane.take().is_some() {
            ledger.close_lane(at, self.session, self.nonce, self.calls.all_answered());
        }
    }

    fn decode(
        &mut self,
        ledger: &Ledger,
        run: impl FnOnce(&mut Decoder, &mut dyn FnMut(Dispatched<'_>)),
    ) -> Batch {
        let mut batch = Batch::default();
        if self.lane.is_none() {
            // The next id has to open it.
            self.expected = None;
        }
        let awaited = self.calls.awaited();
        let reads_answers = awaited || self.reads_answers;
        self.decoder.capture(reads_answers);
        let is_resumption = matches!(self.carries, Carries::Known(..) | Carries::Unknown);
        let mut saw_event = false;
        let secret = ledger.secret();
        let (id_limit, ids, expected) = (self.id_limit, &mut self.ids, &mut self.expected);
        run(&mut self.decoder, &mut |event| {
            saw_event = true;
            let has_data = event.data != Data::Empty;
            batch.data |= has_data;
            let may_answer = reads_answers && !matches!(event.data, Data::Empty | Data::LeftOut);
            if let (Some(expected), IdField::Set(text)) = (expected.as_mut(), event.id)
                && batch.events.is_empty()
                && expected.data == has_data
                && !may_answer
                && expected.id.is(text)
            {
                batch.expected = batch.expected.saturating_add(1);
                return;
            }
            let id = match event.id {
                IdField::Unchanged | IdField::Reset => None,
                IdField::TooLong => {
                    batch.unreturnable = true;
                    None
                }
                IdField::Set(text) => ids.read(secret, text).inspect(|_| {
                    batch.unreturnable |= !comes_back_unchanged(trim(text), id_limit);
                }),
            };
            let mut answers = Vec::new();
            if may_answer {
                let read = match event.data {
                    Data::Captured(data) => Calls::answered_by(secret, data),
                    // It may have been the answer.
                    _ => None,
                };
                batch.unreadable |= awaited && read.is_none();
                answers = read.unwrap_or_default();
            }
            if id.is_some() || !answers.is_empty() || is_resumption {
                batch.events.push(Event { id, data: has_data, answers });
            }
        });
        self.saw_event |= saw_event;
        self.saw_data |= batch.data;
        self.saw_id |=
            batch.unreturnable || batch.expected > 0 || batch.with_ids().next().is_some();
        batch
    }

    /// Records what was read, before it goes on.
    pub(crate) fn keep<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, batch: Batch) {
        self.keep_expected(at, batch.expected);
        let before = self.ordinal_of_last();
        let mut keys = Vec::new();
        if batch.with_ids().next().is_some() {
            self.load(ledger, at);
            self.join(ledger, at, &batch);
            self.doubt_place(ledger, at, &batch);
            self.doubt_floor(ledger, at, &batch);
            let is_of_others = self.of_others.is_some()
                && batch.with_ids().any(|(id, event)| self.knows(id, event));
            match batch.with_ids().position(|(id, event)| !self.knows(id, event)) {
                None => batch.with_ids().for_each(|(id, event)| self.see_again(id, event.data)),
                Some(first_new) => keys = self.keep_new(ledger, at, &batch, first_new),
            }
            if is_of_others && let Some(stream) = self.of_others.take() {
                ledger.disown(at, self.session, stream);
            }
            self.expected = self.expect_next();
        }
        self.answer_calls(&batch, before);
        if batch.data && self.carries == Carries::Unknown && self.lane.is_none() {
            // Without an id, and perhaps the answer that a stream awaits: one
            // that is known, or one that has brought no id yet.
            self.answered |= ledger.session(at, self.session).is_some();
            self.changed |= self.answered;
        }
        self.write_change(ledger, at);
        for key in keys {
            ledger.note_distinctive(at, self.session, key, self.how());
        }
        if batch.unreturnable {
            ledger.make_incomplete(at, self.session);
        }
    }

    /// Takes up so many ids that carry on the range that grows.
    fn keep_expected<S: Store>(&mut self, at: &mut Access<'_, S>, ids: u64) {
        let (Some(own), Some(expected)) = (&mut self.own, &self.expected) else { return };
        if ids == 0 {
            return;
        }
        own.grow(ids, at.now_ms);
        self.changed = true;
        if expected.data {
            self.pushed = self.pushed.saturating_add(ids);
        }
        at.tally.events_recorded = at.tally.events_recorded.saturating_add(ids);
    }

    /// What carries on the range that grows: on a new stream, which is this
    /// connection's alone, nothing else has to be seen to then.
    fn expect_next(&self) -> Option<Expected> {
        let own = self.own.as_ref().filter(|_| self.carries == Carries::NewStream)?;
        let range = own.growing()?;
        Some(Expected { id: self.ids.next(range.sequence, range.next)?, data: range.data })
    }

    /// Notes the calls that the batch answers, and where. A client that has
    /// the id before an answer without one may well have lost the answer.
    fn answer_calls(&mut self, batch: &Batch, before: u32) {
        if batch.unreadable {
            self.calls = Calls::Unknown;
            self.changed = true;
            self.answered = true;
        }
        let mut last = None;
        for event in &batch.events {
            last = event.id.as_ref().or(last);
            let is_own = event.id.is_some();
            for call in &event.answers {
                let at = last.map_or(before, |id| self.ordinal(id));
                let is_news = self.calls.answer(*call, at.saturating_add(u32::from(!is_own)));
                self.changed |= is_news;
                self.answered |= is_news;
            }
        }
    }

    fn ordinal(&self, id: &EventId) -> u32 {
        let place = |record: &Record| record.find(id).map(|found| record.ordinal(found.behind));
        self.records().find_map(place).unwrap_or(1)
    }

    /// The ids with data behind an id, and all that there are.
    fn data_behind(&self, id: &EventId) -> (u64, u64) {
        let (mut behind, mut all) = (None, 0u64);
        for record in self.records().rev() {
            let found = record.find(id).map(|found| found.owed.saturating_add(all));
            behind = behind.or(found);
            all = all.saturating_add(record.owed());
        }
        (behind.unwrap_or(0), all)
    }

    /// Whether all ids are of one sequence that never fell.
    fn rises(&self) -> bool {
        Record::rising_sequence_of(self.records()).is_some()
    }

    fn ordinal_of_last(&self) -> u32 {
        self.records().map(|record| record.ordinal(0)).max().unwrap_or(0)
    }

    /// Takes up the ids that are new; `first_new` is the first of them, as far
    /// as this connection knows. Gives what the index has to be told once they
    /// are written.
    fn keep_new<S: Store>(
        &mut self,
        ledger: &Ledger,
        at: &mut Access<'_, S>,
        batch: &Batch,
        first_new: usize,
    ) -> Vec<u64> {
        let mut keys = Vec::new();
        let Some((first, _)) = batch.with_ids().next() else { return keys };
        if self.own.is_none() {
            self.hint = first.whole as u32;
        }
        let Some(held) = self.hold_lane(ledger, at) else { return keys };
        let ids_per_stream = ledger.shape().ids;
        for (number, (id, event)) in batch.with_ids().enumerate() {
            let data = event.data;
            let is_new = held == Held::Still && number == first_new;
            if !is_new && self.knows(id, event) {
                self.see_again(id, data);
                continue;
            }
            // A GET that replays from the start brings ids again that have
            // left the window, as if they were new.
            self.unordered |= match self.carries {
                Carries::NewStream => false,
                Carries::Known(..) => data && self.is_vague,
                Carries::Standalone => self.records().any(|record| record.may_have_evicted(id)),
                Carries::Unknown => true,
            };
            if data {
                // So are those between known ones: one that the server has
                // before them, and that was not sent with them.
                self.unordered |=
                    self.carries == Carries::Standalone && self.behind_again > Some(0);
                // New events while known ones are owed still: the server may
                // have given those other ids.
                self.unordered |= self.owed > 0;
                self.pushed = self.pushed.saturating_add(1);
            }
            // A lower one of a sequence that is further by now was stored
            // before that, or the server counts anew.
            let is_past = self.records().any(|record| record.is_past(id));
            self.unordered |= is_past;
            let falls = self.falls(id);
            let Some(own) = &mut self.own else { break };
            self.changed = true;
            if falls {
                own.begins_lower();
            }
            own.push(id, data, ids_per_stream, at.now_ms);
            at.tally.events_recorded = at.tally.events_recorded.saturating_add(1);
            if let Some(key) = id.index_key()
                && self.noted != Some(key)
            {
                self.noted = Some(key);
                keys.push(key);
            }
            if data && !self.reuse_checked {
                self.reuse_checked = true;
                self.check_reuse(ledger, at, id);
            }
        }
        keys
    }

    /// Whether an id that is new doesn't rise over those before it.
    fn falls(&self, id: &EventId) -> bool {
        self.others.iter().any(|record| record.count > 0 && !record.is_past_head(id))
    }

    /// How the session is sent what this connection brings.
    fn how(&self) -> How {
        let since_us = self.since_us;
        match self.carries {
            Carries::NewStream | Carries::Standalone => How::Live,
            Carries::Unknown | Carries::Known(_, StreamKind::Unplaced) => {
                How::Replayed { since_us, placed: false }
            }
            Carries::Known(..) => How::Replayed { since_us, placed: true },
        }
    }

    fn records(&self) -> impl DoubleEndedIterator<Item = &Record> + Clone {
        self.others.iter().chain(&self.own)
    }

    /// An id that is known has come again. If others knew it before this
    /// connection, and it comes after ids that were new, then those were not
    /// new: they had only left the window.
    fn see_again(&mut self, id: &EventId, data: bool) {
        if data {
            let place = self.ordinal(id);
            let is_owed = self.cursor.is_some_and(|cursor| place > self.ordinal(&cursor));
            self.owed = self.owed.saturating_sub(u64::from(is_owed));
        }
        if data && self.notes_order {
            let (behind, all) = self.data_behind(id);
            // What comes again in another order, or only in part: the server
            // may have the others behind that.
            let from = self.cursor.map_or(all, |cursor| self.data_behind(&cursor).0);
            let in_order = match self.behind_again {
                None if self.cursor == Some(*id) => true,
                again => again.unwrap_or(from).checked_sub(1) == Some(behind),
            };
            if !in_order && !self.rises() {
                self.note_disorder();
            }
            self.behind_again = Some(behind);
        }
        if self.pushed == 0 {
            return;
        }
        let found = self.own.as_ref().and_then(|own| own.find(id));
        let pushed_here = found.filter(|found| found.owed < self.pushed);
        if pushed_here.is_some_and(|found| found.data && data) {
            self.note_repeat();
        }
        if pushed_here.is_none() {
            self.note_disorder();
        }
    }

    fn knows(&self, id: &EventId, event: &Event) -> bool {
        self.records().any(|record| record.find(id).is_some() || record.is_surely_old(id))
            || (self.is_of_another_stream(id) && !self.calls.has_any(&event.answers))
    }

    /// Whether a GET brings again what another stream of the session issued.
    /// That makes the id no ambiguous one, if no two streams can have it by
    /// chance.
    fn is_of_another_stream(&self, id: &EventId) -> bool {
        id.index_key().is_some() && self.elsewhere.iter().any(|record| record.find(id).is_some())
    }

    /// Reads what others recorded of this stream.
    fn load<S: Store>(&mut self, ledger: &Ledger, at: &Access<'_, S>) {
        if std::mem::replace(&mut self.loaded, true) || self.carries == Carries::NewStream {
            return;
        }
        let Some(history) = ledger.history(at, self.session) else { return };
        if self.carries == Carries::Unknown {
            self.candidates = Some(history);
            return;
        }
        for stream in &history.streams {
            if self.carries.continues(stream) {
                let instance = self.instance.as_ref();
                let floor = instance.and_then(|i| history.session.floor(stream.number, i.id));
                self.floor = floor.copied();
                self.calls = stream.calls();
                let owner = self.instance.as_ref().map(|instance| instance.id);
                let is_of_others = self.carries == Carries::Standalone
                    && self.is_local
                    && stream.lanes.iter().any(|lane| lane.owner != owner);
                self.of_others = is_of_others.then_some(stream.number);
                self.others.clone_from(&stream.records);
            } else {
                self.elsewhere.extend_from_slice(&stream.records);
            }
        }
        self.history = Some(Box::new(history));
    }

    /// A resumption whose cursor wasn't known carries on the stream of the
    /// first id that is. What came between the two isn't known, so nothing is
    /// said of the order any more. Where that first id may be of several, later
    /// ones don't tell either: that one stream alone has an id may be because
    /// the right one hasn't come so far.
    fn join<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, batch: &Batch) {
        let Some(history) = &self.candidates else { return };
        let joined = batch.with_ids().find_map(|(id, _)| {
            if history.may_be_of_several(id) {
                return Some(None);
            }
            let mut with_id = history
                .streams
                .iter()
                .filter(|stream| stream.kind != StreamKind::Unplaced && stream.find(id).is_some());
            let only = with_id.next()?;
            let may_be_anothers = with_id.next().is_some() || history.may_have_evicted(id);
            (!may_be_anothers).then(|| Some(only.clone()))
        });
        let Some(joined) = joined else { return };
        let history = self.candidates.take();
        let Some(stream) = joined else { return };
        let others = history.into_iter().flat_map(|history| history.streams);
        let others = others
            .filter(|other| other.kind != StreamKind::Unplaced && other.number != stream.number);
        self.elsewhere = others.flat_map(|other| other.records).collect();
        self.carries = Carries::Known(stream.number, stream.kind);
        self.unordered = true;
        if self.lane.is_some() {
            ledger.move_lane(at, self.session, self.nonce, stream.number, stream.kind);
        }
        self.calls = stream.calls();
        if self.saw_data && self.calls.awaited() {
            // The answer may have come before it was known whose it is.
            self.calls = Calls::Unknown;
            self.answered = true;
        }
        self.changed = true;
        self.others = stream.records;
    }

    /// What comes from a cursor that several streams have may be any one's: an
    /// id that not all of them have, and that other streams may have too, makes
    /// the place of the next cursor uncertain.
    fn doubt_place<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, batch: &Batch) {
        let Some(cursor) = self.ambiguous else { return };
        let candidates = self.elsewhere.iter().filter(|record| record.find(&cursor).is_some());
        let is_everybodys = |id: &EventId| {
            self.records().any(|record| record.find(id).is_some())
                && candidates.clone().all(|record| record.find(id).is_some())
        };
        let mut common = batch.with_ids().filter(|(id, _)| id.index_key().is_none());
        if common.any(|(id, _)| !is_everybodys(id)) {
            self.ambiguous = None;
            ledger.make_incomplete(at, self.session);
        }
    }

    /// What comes from below a learned floor shows that it is none any more.
    fn doubt_floor<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, batch: &Batch) {
        let Some(floor) = self.floor else { return };
        let is_below = |id: &EventId| {
            let sequence = self.records().find_map(Record::rising_sequence);
            let index = sequence.and_then(|sequence| id.index_in(sequence));
            index.is_some_and(|index| index < floor.index)
        };
        if batch.with_ids().any(|(id, event)| event.data && is_below(id)) {
            self.floor = None;
            ledger.forget_floor(at, self.session, floor);
        }
    }

    /// Makes sure that the record's lane is this connection's own. `None` if
    /// the directory could not be written: then the session is in doubt.
    fn hold_lane<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>) -> Option<Held> {
        if let Some(lane) = &mut self.lane {
            if at.now_ms.saturating_sub(lane.checked_ms) < VALID_MS {
                return Some(Held::Still);
            }
            if ledger.holds_lane(at, self.session, lane.number, self.nonce) {
                lane.checked_ms = at.now_ms;
                return Some(Held::Still);
            }
        }
        let opening = Opening {
            session: self.session,
            carries: self.carries,
            nonce: self.nonce,
            hint: self.hint,
            sent: self.sent.clone(),
            lost_with: self.lane.take().map(|lane| lane.known_since_ms).or(self.lost_with),
            instance: self.instance.clone(),
            is_local: self.is_local,
        };
        self.lost_with = opening.lost_with;
        // Whoever still writes may have written more.
        let is_final = |stream: &Stream| stream.lanes.iter().all(|lane| lane.closed);
        let known = self.take_history(at).filter(|history| {
            let mut streams = history.streams.iter();
            streams.find(|stream| self.carries.continues(stream)).is_some_and(is_final)
        });
        let opened = ledger.open_lane(at, &opening, known)?;
        if self.lost_with.take().is_some() {
            // Other connections may have brought the answers meanwhile, and
            // have lost theirs, too.
            self.calls = Calls::Unknown;
        }
        self.lane = Some(OwnLane {
            number: opened.lane,
            way: opened.way,
            key: opened.key,
            known_since_ms: opened.known_since_ms,
            checked_ms: at.now_ms,
        });
        self.alike = opened.alike;
        if let Some(calls) = opened.calls {
            self.calls = self.calls.and(&calls);
        }
        self.others = opened.others;
        if self.own.is_some() {
            // It stands behind others now that are newer than its first ids.
            self.unordered |= !self.others.is_empty();
            return Some(Held::Anew);
        }
        let count_before = self.others.iter().map(|r| r.count).fold(0, u64::saturating_add);
        let taken = opened.taken_over.as_ref().map_or(0, |record| record.count);
        // Another connection has brought more since: what comes here may stand
        // before that.
        self.unordered |=
            self.known_then.is_some_and(|known| known != count_before.saturating_add(taken));
        self.own = Some(match opened.taken_over {
            Some(record) => record.taken_over_by(self.nonce),
            None => Record::new(self.nonce, count_before),
        });
        // A lane without a record can't be read, even if nothing comes of it.
        self.changed = true;
        Some(Held::Anew)
    }

    /// Writes what has changed.
    fn write_change<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>) {
        // What is found out without a new id belongs to the stream's record,
        // too.
        let belongs = (self.answered || self.repeats || self.unordered || self.passed_over)
            && self.carries != Carries::NewStream;
        if self.changed && (self.lane.is_some() || belongs) && self.hold_lane(ledger, at).is_some()
        {
            self.write(at);
        }
    }

    fn write<S: Store>(&mut self, at: &mut Access<'_, S>) {
        let (Some(own), Some(lane)) = (&mut self.own, &self.lane) else { return };
        own.calls.clone_from(&self.calls);
        own.unordered |= self.unordered;
        own.repeats |= self.repeats;
        let unordered = own.unordered;
        own.unordered |= self.passed_over;
        Ledger::write_record(at, &lane.key, own);
        own.unordered = unordered;
        self.changed = false;
    }

    /// Whether the stream's first id with data stands on another stream, too.
    fn check_reuse<S: Store>(&mut self, ledger: &Ledger, at: &mut Access<'_, S>, id: &EventId) {
        let Some(way) = self.lane.as_ref().map(|lane| lane.way) else { return };
        let reused = std::mem::take(&mut self.alike).iter().any(|lane| {
            ledger
                .read_record(at, self.session, way, lane)
                .and_then(|record| record.find(id))
                .is_some_and(|found| found.data)
        });
        if reused {
            at.tally.event_ids_reused = at.tally.event_ids_reused.saturating_add(1);
        }
    }
}
