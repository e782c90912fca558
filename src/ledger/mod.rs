//! The ledger: what each session's streams issued, in shared data.
//!
//! | key | value | writers |
//! | --- | --- | --- |
//! | `mcprg.t` | the table's shape and the key of the fingerprints | the first configuration, once |
//! | `mcprg.c` | the digest of the configuration that was announced in the log | each configuration |
//! | `mcprg.s.<set>` | a set of sessions with the directories of their records | all, by compare-and-swap |
//! | `mcprg.l.<set>.<way>.<lane>` | a record | the connection that the directory names, without CAS and without reading |
//! | `mcprg.i.<bucket>` | a bucket of the index of distinctive ids | all, by compare-and-swap |
//! | `mcprg.d.<set>` | a mark: a write to the set was given up | all, blindly |
//!
//! A writer that has lost its lane (its session or its stream was evicted)
//! doesn't know at once and may overwrite the record of the one that has it
//! now. That is found out, not prevented: a record whose nonce isn't the one
//! in the directory counts as evicted, and whoever evicts a stream or a session
//! has noted it before. So a write costs one call to the host.

pub mod index;
pub mod record;
pub mod stream;
pub mod table;

use std::collections::BTreeMap;

use crate::config::State;
use crate::event_id::EventId;
use crate::fingerprint::{Role, Secret, SessionFingerprint};
use crate::jsonrpc::{Calls, SentIds};
use crate::owner::Instance;
use crate::recorder::Carries;
use crate::store::{ABSENT, GaveUp, MAX_TRIES, Store, update};
use crate::telemetry::Tally;
use index::{Bucket, How, Noted, Shared};
use record::Record;
use stream::{History, Stream};
use table::{Cut, Floor, Lane, Session, Set, Shape, Slot, StreamKind};

const TABLE_KEY: &str = "mcprg.t";
const TABLE_VERSION: u8 = 1;
const ANNOUNCED_KEY: &str = "mcprg.c";

/// So many streams that begin alike are looked at for an id that is reused.
const MAX_ALIKE: usize = 4;

/// What an operation works on: the store, the time, and where it counts.
pub struct Access<'a, S> {
    /// Shared data.
    pub store: &'a S,
    /// The monotonic clock, in milliseconds.
    pub now_ms: u64,
    /// The same, in microseconds.
    pub now_us: u64,
    /// Where it counts.
    pub tally: &'a mut Tally,
}

/// What is the same for all operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    secret: Secret,
    shape: Shape,
    idle_ms: u64,
}

/// A connection that is about to open a lane.
pub(crate) struct Opening {
    pub session: SessionFingerprint,
    pub carries: Carries,
    pub nonce: u64,
    /// Tells streams that begin with the same id.
    pub hint: u32,
    /// The requests that the stream answers, if they are its own.
    pub sent: Option<SentIds>,
    /// It had a lane and lost it, of a session that was known since then.
    pub lost_with: Option<u64>,
    /// Who issues its events.
    pub instance: Option<Instance>,
    /// Another instance may not have what this one issues.
    pub is_local: bool,
}

impl Opening {
    fn kind(&self) -> StreamKind {
        match self.carries {
            Carries::NewStream => StreamKind::Post,
            Carries::Standalone => StreamKind::Standalone,
            Carries::Known(_, StreamKind::Standalone) => StreamKind::Standalone,
            // The stream is gone, or its kind wouldn't be asked for.
            Carries::Known(..) | Carries::Unknown => StreamKind::Unplaced,
        }
    }
}

/// A lane, opened.
pub(crate) struct Opened {
    pub lane: u8,
    pub way: u8,
    /// Where its record is.
    pub key: String,
    pub known_since_ms: u64,
    /// Lanes of other streams with the same hint.
    pub alike: Vec<Lane>,
    /// The record that the connection carries on.
    pub taken_over: Option<Record>,
    /// The stream's other records.
    pub others: Vec<Record>,
    /// What the stream has to answer, if it is one that was there.
    pub calls: Option<Calls>,
}

/// What becomes of a session that isn't in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Skip,
    Adopt,
}

impl Ledger {
    /// Joins the table of this process, and makes it if it is the first.
    /// `random` must be from a cryptographic source. Gives the ledger, and the
    /// shape that the configuration asked for where the table has another.
    pub fn join(
        store: &impl Store,
        state: &State,
        random: [u8; Secret::LEN],
    ) -> (Self, Option<Shape>) {
        let wanted = Shape::new(state);
        let mine = encode_table(&wanted, &Secret::new(random));
        let there = || store.get(TABLE_KEY).0.as_deref().and_then(decode_table);
        // Inserted, or somebody was faster.
        let _ = store.set(TABLE_KEY, &mine, Some(ABSENT));
        let joined = there().or_else(|| {
            // Of another version: its sessions are not known any more.
            let _ = store.set(TABLE_KEY, &mine, None);
            there()
        });
        let (shape, secret) = joined.unwrap_or((wanted, Secret::new(random)));
        let idle_ms = u64::from(state.idle_seconds).saturating_mul(1000);
        (Ledger { secret, shape, idle_ms }, (shape != wanted).then_some(wanted))
    }

    /// The key of the fingerprints.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The table's bounds.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The most memory that the state can take in Envoy, in bytes: all values
    /// at their longest, and what the host's map and allocator add.
    pub fn max_memory_bytes(&self) -> u64 {
        let (bytes, values) = max_state(&self.shape);
        // Measured on Envoy 1.40: about 130 bytes a value, and an eighth of it
        // for the allocator's size classes.
        bytes.saturating_add(bytes / 8).saturating_add(values.saturating_mul(130))
    }

    /// Whether this configuration, or this version of the guard with it, is the
    /// first to come here since another: then it is announced in the log.
    pub fn announces(&self, store: &impl Store, configuration: &[u8]) -> bool {
        let told = [env!("CARGO_PKG_VERSION").as_bytes(), b"\n", configuration].concat();
        let digest = self.secret.text(Role::Configuration, &told).to_le_bytes();
        let last = store.get(ANNOUNCED_KEY).0;
        let is_new = last.as_deref() != Some(&digest);
        if is_new {
            let _ = store.set(ANNOUNCED_KEY, &digest, None);
        }
        is_new
    }

    /// Opens a lane for a connection that brings an id which isn't known yet:
    /// takes over the stream's newest record if its writer has ended, or else
    /// begins one. `known` is what was read of the session, if it was. `None`
    /// if that was given up; the session is in doubt then.
    pub(crate) fn open_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        opening: &Opening,
        known: Option<History>,
    ) -> Option<Opened> {
        // A new stream needs no look at the others, unless one has to go.
        let is_new = matches!(opening.carries, Carries::NewStream | Carries::Unknown);
        let mut history = match known {
            None if !is_new => self.history(at, opening.session),
            known => known,
        };
        for _ in 0..MAX_TRIES {
            match self.try_open_lane(at, opening, history.as_ref()) {
                Ok(Some(opened)) => return Some(opened),
                // The stream has got or lost a record in between, or there is
                // no room.
                Ok(None) => history = self.history(at, opening.session),
                Err(GaveUp) => break,
            }
        }
        self.doubt(at, opening.session);
        None
    }

    fn try_open_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        opening: &Opening,
        history: Option<&History>,
    ) -> Result<Option<Opened>, GaveUp> {
        let streams = history.map(|history| history.streams.as_slice()).unwrap_or_default();
        let keys_of = |lane: &Lane| {
            let records = streams.iter().flat_map(|stream| &stream.records);
            records.filter(|r| lane.accepts(r.nonce)).find_map(Record::keys)
        };
        let mut stream = streams.iter().find(|s| opening.carries.continues(s)).cloned();
        let seen = stream.as_ref().map(|stream| stream.lanes.clone()).unwrap_or_default();
        let all_read = stream.as_ref().is_some_and(|s| s.records.len() == s.lanes.len());
        let calls = stream.as_ref().map(Stream::calls);
        let taken_over = match (seen.last(), &mut stream) {
            (Some(lane), Some(stream))
                if lane.closed && all_read && opening.lost_with.is_none() =>
            {
                stream.records.pop().map(|record| (lane.number, record))
            }
            _ => None,
        };
        let opened =
            self.change_session(at, opening.session, Missing::Adopt, |session, tally| {
                let kind = stream.as_ref().map(|stream| stream.kind);
                let stream = stream.as_ref().map(|stream| stream.number);
                let current = session.lanes.iter().filter(|lane| Some(lane.stream) == stream);
                if !current.eq(&seen) {
                    return (false, None);
                }
                // The ledger had forgotten the session and what it was sent.
                let is_another = opening
                    .lost_with
                    .is_some_and(|known_since| known_since != session.known_since_ms);
                session.complete &= !is_another;
                session.returned |= is_another;
                let kind = kind.unwrap_or_else(|| opening.kind());
                let number = stream.unwrap_or_else(|| session.new_stream());
                session.own_by(opening.instance.as_ref());
                session.locate(opening.instance.as_ref());
                let owner = opening.instance.as_ref().map(|instance| instance.id);
                let mut lane = Lane {
                    number: 0,
                    stream: number,
                    kind,
                    closed: false,
                    finished: false,
                    nonce: opening.nonce,
                    previous: 0,
                    hint: opening.hint,
                    owner,
                    mixed: false,
                };
                if let Some((taken, record)) = &taken_over
                    && let Some(there) = session.lanes.iter_mut().find(|lane| lane.number == *taken)
                {
                    lane.number = *taken;
                    lane.previous = record.nonce;
                    lane.hint = there.hint;
                    if there.owner != owner {
                        // What was there before may not be this one's.
                        lane.owner = None;
                    }
                    lane.mixed = there.mixed || (opening.is_local && there.owner != owner);
                    *there = lane.clone();
                } else {
                    if history.is_none() && !session.has_room(&self.shape, number) {
                        return (false, None);
                    }
                    lane.number = session.make_room(&self.shape, number, keys_of, tally);
                    session.lanes.push(lane.clone());
                    if let Some(sent) = &opening.sent {
                        session.keep_sent(number, sent);
                    }
                }
                let alike = session
                    .lanes
                    .iter()
                    .filter(|other| other.hint == lane.hint && other.stream != number);
                let alike = alike.rev().take(MAX_ALIKE).cloned().collect();
                (true, Some((lane.number, session.way, session.known_since_ms, alike)))
            })?;
        Ok(opened.flatten().map(|(lane, way, known_since_ms, alike)| Opened {
            lane,
            way,
            key: lane_key(self.shape.set_of(opening.session.short()), way, lane),
            known_since_ms,
            alike,
            taken_over: taken_over.map(|(_, record)| record),
            others: stream.map(|stream| stream.records).unwrap_or_default(),
            calls,
        }))
    }

    /// Whether a lane still is this writer's.
    pub(crate) fn holds_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        lane: u8,
        nonce: u64,
    ) -> bool {
        let session = self.used_session(at, fingerprint, |slot| slot.session()).flatten();
        session.is_some_and(|session| {
            session.lanes.iter().any(|l| l.number == lane && l.nonce == nonce)
        })
    }

    /// The writer of a lane has ended.
    pub(crate) fn close_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        nonce: u64,
        finished: bool,
    ) {
        // Given up, the lane stays open: who resumes the stream then begins a
        // record of its own.
        let _ = self.change_lane(at, fingerprint, nonce, |lane| {
            lane.closed = true;
            lane.finished = finished;
        });
    }

    /// A connection has found out which stream it carries on.
    pub(crate) fn move_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        nonce: u64,
        stream: u32,
        kind: StreamKind,
    ) {
        let moved = self.change_lane(at, fingerprint, nonce, |lane| {
            lane.stream = stream;
            lane.kind = kind;
        });
        if moved.is_err() {
            self.doubt(at, fingerprint);
        }
    }

    /// Changes the lane of a writer, if it still has it.
    fn change_lane<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        nonce: u64,
        change: impl Fn(&mut Lane),
    ) -> Result<Option<()>, GaveUp> {
        self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            let lane = session.lanes.iter_mut().find(|lane| lane.nonce == nonce);
            (lane.map(&change).is_some(), ())
        })
    }

    /// Writes a record where only its writer writes.
    pub(crate) fn write_record<S: Store>(at: &Access<'_, S>, key: &str, record: &Record) {
        // Without a CAS there is nothing to conflict with.
        let _ = at.store.set(key, &record.encode(), None);
    }

    /// The record of a lane, if it is there and counts.
    pub(crate) fn read_record<S: Store>(
        &self,
        at: &Access<'_, S>,
        session: SessionFingerprint,
        way: u8,
        lane: &Lane,
    ) -> Option<Record> {
        let key = lane_key(self.shape.set_of(session.short()), way, lane.number);
        let value = at.store.get(&key).0?;
        Record::decode(&value).filter(|record| lane.accepts(record.nonce))
    }

    /// A nonce that no other writer has.
    pub fn nonce(&self, random: u64) -> u64 {
        self.secret.text(Role::Nonce, &random.to_le_bytes()).max(1)
    }

    fn set_key(&self, session: SessionFingerprint) -> String {
        set_key(self.shape.set_of(session.short()))
    }

    /// The session's slot, if it has one.
    pub fn session<S: Store>(
        &self,
        at: &Access<'_, S>,
        session: SessionFingerprint,
    ) -> Option<Session> {
        let value = at.store.get(&self.set_key(session)).0?;
        Set::decode(&value).get(session)?.session()
    }

    /// What the ledger has of a session.
    pub fn history<S: Store>(
        &self,
        at: &Access<'_, S>,
        session: SessionFingerprint,
    ) -> Option<History> {
        self.session(at, session).map(|session| self.history_of(at, session))
    }

    /// What it has of a session whose slot was read.
    pub fn history_of<S: Store>(&self, at: &Access<'_, S>, session: Session) -> History {
        let mut streams: BTreeMap<u32, Stream> = BTreeMap::new();
        let mut unreadable = false;
        for lane in &session.lanes {
            let mut record = self.read_record(at, session.fingerprint, session.way, lane);
            if let Some(record) = &mut record {
                record.unordered |= lane.mixed;
            }
            unreadable |= record.is_none();
            let stream = streams.entry(lane.stream).or_insert_with(|| Stream {
                number: lane.stream,
                kind: lane.kind,
                records: Vec::new(),
                lanes: Vec::new(),
            });
            stream.lanes.push(lane.clone());
            stream.records.extend(record);
        }
        History {
            read_ms: at.now_ms,
            session,
            streams: streams.into_values().collect(),
            unreadable,
        }
    }

    fn change_session<S: Store, T>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        missing: Missing,
        mut change: impl FnMut(&mut Session, &mut Tally) -> (bool, T),
    ) -> Result<Option<T>, GaveUp> {
        let (now_ms, idle_ms) = (at.now_ms, self.idle_ms);
        update(at.store, at.tally, &self.set_key(fingerprint), |value, tally| {
            let mut set = Set::decode(&value);
            let adopted = set.get(fingerprint).is_none();
            if adopted {
                if missing == Missing::Skip {
                    return (None, None);
                }
                set.insert(fingerprint, false, &self.shape, idle_ms, now_ms, tally);
            }
            let Some(session) = set.get_mut(fingerprint) else { return (None, None) };
            let (changed, result) = change(session, tally);
            if changed {
                session.last_used_ms = now_ms;
            }
            ((changed || adopted).then(|| set.encode()), Some(result))
        })
    }

    /// What is read of the session's slot, if it has one. It has traffic, which
    /// keeps it there.
    pub fn used_session<S: Store, T>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        read: impl FnOnce(&Slot<'_>) -> T,
    ) -> Option<T> {
        let value = at.store.get(&self.set_key(fingerprint)).0?;
        let set = Set::decode(&value);
        let slot = set.get(fingerprint)?;
        let used = read(slot);
        if set.wants_touch(slot, &self.shape, self.idle_ms, at.now_ms) {
            // Given up, it seems only a little less recently used than it is.
            let _ = self.change_session(at, fingerprint, Missing::Skip, |_, _| (true, ()));
        }
        Some(used)
    }

    /// A session begins: the upstream gave its id to a request that had none.
    /// One that is known, or was ended, lives on as incomplete.
    pub fn begin<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        instance: Option<&Instance>,
    ) {
        let (now_ms, idle_ms) = (at.now_ms, self.idle_ms);
        let begun = update(at.store, at.tally, &self.set_key(fingerprint), |value, tally| {
            let mut set = Set::decode(&value);
            match set.get_mut(fingerprint) {
                Some(session) => {
                    session.complete = false;
                    session.ended = false;
                    session.last_used_ms = now_ms;
                    session.owner = instance.map(|instance| instance.id);
                    session.locate(instance);
                    tally.session_ids_reissued = tally.session_ids_reissued.saturating_add(1);
                }
                None => {
                    let new = set.insert(fingerprint, true, &self.shape, idle_ms, now_ms, tally);
                    if let Some(session) = new {
                        session.own_by(instance);
                        session.locate(instance);
                    }
                    tally.sessions_started = tally.sessions_started.saturating_add(1);
                }
            }
            (Some(set.encode()), ())
        });
        if begun.is_err() {
            self.doubt(at, fingerprint);
        }
    }

    /// The upstream answered a request of one session with the id of another:
    /// the new name is adopted, and ids of the old one are not foreign to it.
    /// What is issued under one name may come back under the other, so both
    /// are incomplete.
    pub fn rename<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        old: SessionFingerprint,
        new: SessionFingerprint,
        instance: Option<&Instance>,
    ) {
        let old_session = self.session(at, old);
        let unbounded = old_session.as_ref().is_some_and(|session| session.kin_unbounded);
        let older = old_session.map(|session| session.kin).unwrap_or_default();
        let renamed = self.change_session(at, new, Missing::Adopt, |session, _| {
            let mut changed = std::mem::take(&mut session.complete);
            for kin in older.iter().chain([&old.short()]) {
                changed |= session.add_kin(Some(*kin));
            }
            changed |= unbounded && session.add_kin(None);
            if session.owner.is_none() {
                session.own_by(instance);
                session.locate(instance);
                changed |= session.owner.is_some();
            }
            (changed, ())
        });
        if renamed.is_err() {
            self.doubt(at, new);
        }
        self.make_incomplete(at, old);
    }

    /// The session was ended. Whether it is known, and so known to be ended.
    pub fn end<S: Store>(&self, at: &mut Access<'_, S>, fingerprint: SessionFingerprint) -> bool {
        let ended = self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            (!std::mem::replace(&mut session.ended, true), ())
        });
        matches!(ended, Ok(Some(())))
    }

    /// The calls that are pending for a cursor are about to be settled.
    /// Whether that is to be done: they are settled once.
    pub fn settle<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        cursor: &EventId,
    ) -> bool {
        let settled = self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            let is_first = session.settle(cursor.whole);
            (is_first, is_first)
        });
        settled == Ok(Some(true))
    }

    /// A resumption passes, and this instance answers it: it owns the stream
    /// from now on, and what the last one from this cursor led to is past.
    pub(crate) fn carry_on<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        stream: Option<u32>,
        cursor: &EventId,
        instance: Option<&Instance>,
    ) {
        self.change_or_doubt(at, fingerprint, |session| {
            let given = match (stream, instance) {
                (Some(stream), Some(instance)) => session.give_stream(stream, instance),
                _ => false,
            };
            session.forget_cut(cursor.whole) || given
        });
    }

    /// Two instances were seen to have the events of a stream: it has no owner.
    pub(crate) fn disown<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        stream: u32,
    ) {
        self.change_or_doubt(at, fingerprint, |session| {
            for lane in session.lanes.iter_mut().filter(|lane| lane.stream == stream) {
                lane.owner = None;
                lane.mixed = true;
            }
            true
        });
    }

    /// A replay was cut for a gap.
    pub(crate) fn learn_floor<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        floor: Floor,
    ) {
        // Given up, the next resumption is cut again.
        let _ = self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            session.learn_floor(floor);
            (true, ())
        });
    }

    /// A stream's owner was seen to have what is below a learned floor.
    pub(crate) fn forget_floor<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        floor: Floor,
    ) {
        self.change_or_doubt(at, fingerprint, |session| session.forget_floor(&floor));
    }

    /// A replay was cut for something else.
    pub(crate) fn remember_cut<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        cut: Cut,
    ) {
        // As above.
        let _ = self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            session.remember_cut(cut);
            (true, ())
        });
    }

    /// A stream answers these requests.
    pub(crate) fn keep_sent<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        nonce: u64,
        ids: &SentIds,
    ) {
        // Given up, the calls are not settled.
        let _ = self.change_session(at, fingerprint, Missing::Skip, |session, _| {
            let stream = session.lanes.iter().find(|l| l.nonce == nonce).map(|lane| lane.stream);
            if let Some(stream) = stream {
                session.keep_sent(stream, ids);
            }
            (stream.is_some(), ())
        });
    }

    /// Something of the session may have been issued that the guard didn't
    /// see.
    pub fn make_incomplete<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
    ) {
        self.change_or_doubt(at, fingerprint, |session| std::mem::take(&mut session.complete));
    }

    /// Changes a session, if it is known; `change` tells whether it did. Given
    /// up, what the session has is in doubt.
    fn change_or_doubt<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        fingerprint: SessionFingerprint,
        change: impl Fn(&mut Session) -> bool,
    ) {
        let changed =
            self.change_session(at, fingerprint, Missing::Skip, |session, _| (change(session), ()));
        if changed.is_err() {
            self.doubt(at, fingerprint);
        }
    }

    /// A write was given up: nothing is proven of the sessions of this set any
    /// more.
    fn doubt<S: Store>(&self, at: &Access<'_, S>, fingerprint: SessionFingerprint) {
        let key = doubt_key(self.shape.set_of(fingerprint.short()));
        // Without a CAS there is nothing to conflict with.
        let _ = at.store.set(&key, b"!", None);
    }

    /// Whether a write of this session, known or not, may have been given up.
    pub fn is_doubted<S: Store>(&self, at: &Access<'_, S>, session: SessionFingerprint) -> bool {
        at.store.get(&doubt_key(self.shape.set_of(session.short()))).0.is_some()
    }

    /// Whether this cursor is known to have been issued on another session
    /// than this one (`None`: than any), and on no two.
    ///
    /// `before_us`: and was so before that moment.
    pub fn is_of_another<S: Store>(
        &self,
        at: &Access<'_, S>,
        cursor: &EventId,
        own: Option<SessionFingerprint>,
        before_us: Option<u64>,
    ) -> bool {
        cursor.distinctive_keys().any(|key| {
            let bucket = Bucket::new(at.store.get(&self.bucket_key(key)).0.unwrap_or_default());
            let is_known = |entry: &index::Entry| {
                entry.shared == Shared::No
                    && before_us.is_none_or(|moment| entry.was_noted_before(moment))
                    && own.is_none_or(|own| own.short() != entry.session)
            };
            let Some(entry) = bucket.get(key).filter(is_known) else { return false };
            let own_session = own.and_then(|own| self.session(at, own));
            if own.is_some_and(|own| self.is_doubted(at, own)) {
                return false;
            }
            // With the other session, what it shares has left the table too.
            let set = at.store.get(&set_key(self.shape.set_of(entry.session))).0;
            let set = set.unwrap_or_default();
            let other = Set::decode(&set).get_short(entry.session).and_then(Slot::session);
            let Some(other) = other else { return false };
            if own_session.as_ref().is_some_and(|own| own.is_kin(&other))
                || own.is_some_and(|own| other.kin.contains(&own.short()))
            {
                return false;
            }
            // A sequence that is the other's says nothing of an index in it.
            key == cursor.whole
                || self
                    .history_of(at, other)
                    .streams
                    .iter()
                    .filter(|stream| stream.kind != StreamKind::Unplaced)
                    .any(|stream| stream.find(cursor).is_some())
        })
    }

    /// Notes in the index that a session was sent a distinctive id or
    /// sequence.
    pub(crate) fn note_distinctive<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        session: SessionFingerprint,
        key: u64,
        how: How,
    ) {
        let now_us = at.now_us;
        let noted = update(at.store, at.tally, &self.bucket_key(key), |value, _| {
            let mut bucket = Bucket::new(value);
            let (changed, noted) = bucket.note(key, session.short(), how, now_us);
            (changed.then(|| bucket.into_bytes()), noted)
        });
        match noted {
            Ok(Noted::Own) => {}
            Ok(Noted::SharedWith(other)) => {
                // Each of the two may be forgotten.
                let set = at.store.get(&set_key(self.shape.set_of(other))).0.unwrap_or_default();
                let other = Set::decode(&set).get_short(other).map(Slot::fingerprint);
                if let Some(other) = other {
                    self.relate(at, other, Some(session.short()));
                    self.relate(at, session, Some(other.short()));
                }
            }
            Ok(Noted::Shared) | Err(GaveUp) => self.relate(at, session, None),
        }
    }

    /// Between a session and another (`None`: any) nothing is distinctive.
    fn relate<S: Store>(
        &self,
        at: &mut Access<'_, S>,
        session: SessionFingerprint,
        kin: Option<u64>,
    ) {
        self.change_or_doubt(at, session, |session| session.add_kin(kin));
    }

    fn bucket_key(&self, key: u64) -> String {
        let bucket = key.checked_rem(index_buckets(&self.shape)).unwrap_or(0);
        key_of('i', &[bucket])
    }
}

fn set_key(set: u32) -> String {
    key_of('s', &[set.into()])
}

fn lane_key(set: u32, way: u8, lane: u8) -> String {
    key_of('l', &[set.into(), way.into(), lane.into()])
}

fn doubt_key(set: u32) -> String {
    key_of('d', &[set.into()])
}

/// `mcprg.<kind>.<number>…`, the numbers in hexadecimal. Each event needs one,
/// and `format!` takes as long as all else that is done about it.
fn key_of(kind: char, numbers: &[u64]) -> String {
    let mut key = String::with_capacity(48);
    key.push_str("mcprg.");
    key.push(kind);
    for number in numbers {
        key.push('.');
        let digits = (u64::BITS.saturating_sub(number.leading_zeros())).div_ceil(4).max(1);
        for digit in (0..digits).rev() {
            let digit = (number >> digit.saturating_mul(4)) & 15;
            key.push(char::from_digit(digit as u32, 16).unwrap_or('0'));
        }
    }
    key
}

/// Buckets of the index: one for each session, and some for a small table.
fn index_buckets(shape: &Shape) -> u64 {
    shape.sessions().max(64)
}

/// The most bytes of all values, and the most values.
fn max_state(shape: &Shape) -> (u64, u64) {
    let sets = u64::from(shape.sets);
    let records = shape.sessions().saturating_mul(shape.lanes().into());
    let record_bytes = u64::try_from(Record::max_bytes(shape.ids)).unwrap_or(u64::MAX);
    let buckets = index_buckets(shape);
    let bytes = records
        .saturating_mul(record_bytes)
        .saturating_add(sets.saturating_mul(shape.max_set_bytes()))
        .saturating_add(buckets.saturating_mul(Bucket::MAX_BYTES))
        .saturating_add(sets);
    (bytes, records.saturating_add(sets.saturating_mul(2)).saturating_add(buckets))
}

fn encode_table(shape: &Shape, secret: &Secret) -> Vec<u8> {
    let mut writer = crate::codec::Writer::default();
    writer.u8(TABLE_VERSION);
    writer.u32(shape.sets);
    writer.u8(shape.ways);
    writer.u8(shape.streams);
    writer.u32(shape.ids.into());
    writer.u128(u128::from_le_bytes(*secret.bytes()));
    writer.finish()
}

fn decode_table(value: &[u8]) -> Option<(Shape, Secret)> {
    let mut reader = crate::codec::Reader::new(value);
    if reader.u8()? != TABLE_VERSION {
        return None;
    }
    let shape = Shape {
        sets: reader.u32()?,
        ways: reader.u8()?,
        streams: reader.u8()?,
        ids: u16::try_from(reader.u32()?).ok()?,
    };
    Some((shape, Secret::new(reader.u128()?.to_le_bytes())))
}
