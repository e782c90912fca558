//! The session table: fixed sets of slots in shared data.
//!
//! A session's fingerprint names its set; a set is one value with a few slots
//! (ways), each a session with the directory of its records. So opening a
//! stream, ending a session, evicting one are each a single compare-and-swap,
//! and a session's state is found with one read. The records themselves are
//! keys of their own, one for each lane of each slot, and are written without
//! CAS by their only writer; the directory says whose record counts.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use crate::codec::{Reader, Writer};
use crate::config::State;
use crate::event_id::EventId;
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::SentIds;
use crate::owner::{Instance, MAX_ADDRESSES, MAX_ADDRESSES_BYTES, OwnerId};
use crate::telemetry::Tally;
use crate::verdict::ReplayFault;

const VERSION: u8 = 3;

/// Traffic moves a session's time of last use when that is so old.
const TOUCH_MS: u64 = 1_000;

/// Slots in a set, in a table of more than [`SINGLE_SET`] sessions.
const WAYS: u32 = 8;

/// Up to so many sessions are one set, so that a small table is used whole.
const SINGLE_SET: u32 = 32;

/// Lanes of a session beyond its streams: two connections can carry one
/// stream at once.
const SPARE_LANES: u8 = 2;

/// Sessions of a set whose eviction is remembered: one that begins again is
/// not taken for new.
const REMEMBERED_EVICTIONS: usize = 32;
const EVICTION_BYTES: usize = 4;

/// Room for a session that was changed; one that needs more gets it.
const CHANGED_BYTES: usize = 512;

/// Sessions that are remembered to have been sent the same ids.
const MAX_KIN: usize = 4;

/// Bytes of the JSON-RPC ids that are kept of a session's streams, lengths and
/// stream numbers included. One stream with the most and longest ids fits.
const MAX_SENT_BYTES: usize = 576;

/// Cursors of a session that are remembered to have been settled.
const MAX_SETTLED: usize = 8;

/// Learned floors of a session.
const MAX_FLOORS: usize = 4;

/// Cursors of a session that are remembered to have led to a cut.
const MAX_CUTS: usize = 4;

/// Words of the filter of evicted ids.
const FILTER_WORDS: usize = 16;

/// Bits that an id sets in it.
const FILTER_HASHES: u32 = 3;

/// The table's bounds, the same for all that share a `vm_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Sets of slots.
    pub sets: u32,
    /// Slots in a set.
    pub ways: u8,
    /// Streams of a session.
    pub streams: u8,
    /// Ids of a stream that are no range.
    pub ids: u16,
}

impl Shape {
    /// The shape that a configuration asks for.
    pub fn new(state: &State) -> Self {
        let ways = if state.sessions <= SINGLE_SET { state.sessions.max(1) } else { WAYS };
        Shape {
            sets: state.sessions.div_ceil(ways).max(1),
            ways: u8::try_from(ways).unwrap_or(1),
            streams: state.streams_per_session.max(1),
            ids: state.ids_per_stream.max(1),
        }
    }

    /// Sessions that there is room for.
    pub fn sessions(&self) -> u64 {
        u64::from(self.sets).saturating_mul(self.ways.into())
    }

    /// Records that a session has room for.
    pub fn lanes(&self) -> u8 {
        self.streams.saturating_add(SPARE_LANES)
    }

    /// The set of a session, by the half of its fingerprint that the index
    /// keeps too.
    pub(crate) fn set_of(&self, short: u64) -> u32 {
        u32::try_from(short.checked_rem(self.sets.into()).unwrap_or(0)).unwrap_or(0)
    }

    /// The most bytes of an encoded set.
    pub fn max_set_bytes(&self) -> u64 {
        const LANE: u64 = 1 + 4 + 1 + 8 + 8 + 4 + 4;
        const KIN: u64 = 1 + MAX_KIN as u64 * 8;
        const SETTLED: u64 = 1 + MAX_SETTLED as u64 * 8;
        const SENT: u64 = 1 + MAX_SENT_BYTES as u64;
        const FILTER: u64 = FILTER_WORDS as u64 * 8;
        const OWNERS: u64 = 4 + MAX_ADDRESSES_BYTES as u64;
        const FLOORS: u64 = 1 + MAX_FLOORS as u64 * (4 + 4 + 8 + 8);
        const CUTS: u64 = 1 + MAX_CUTS as u64 * (8 + 4 + 1);
        const LISTS: u64 = KIN + SETTLED + SENT + OWNERS + FLOORS + CUTS + 1;
        const SESSION: u64 = 4 + 1 + 16 + 1 + 8 + 8 + 4 + FILTER + LISTS;
        const SET: u64 = 1 + 1 + (REMEMBERED_EVICTIONS * EVICTION_BYTES) as u64 + 4 + 1;
        let session = SESSION.saturating_add(LANE.saturating_mul(self.lanes().into()));
        SET.saturating_add(session.saturating_mul(self.ways.into()))
    }
}

/// As the log tells it.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} sessions with {} streams of {} ids each",
            self.sessions(),
            self.streams,
            self.ids
        )
    }
}

/// What carries a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// The answer to a POST.
    Post,
    /// The session's GETs without a cursor.
    Standalone,
    /// A resumption whose cursor the ledger lacked: what stream it carries on
    /// is not known.
    Unplaced,
}

/// A record's entry in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// The lane's number, part of the record's key.
    pub number: u8,
    /// The stream it belongs to.
    pub stream: u32,
    /// What carries the stream.
    pub kind: StreamKind,
    /// Its writer has ended, and writes no more.
    pub closed: bool,
    /// Its stream was finished when it closed.
    pub finished: bool,
    /// The writer's nonce.
    pub nonce: u64,
    /// The nonce of the closed record that this writer took over, and that
    /// counts until it has written its own; 0: none.
    pub previous: u64,
    /// A hint at the stream's ids, to find those that other streams have too.
    pub hint: u32,
    /// The instance that issued what is recorded; `None` if it can't be told.
    pub owner: Option<OwnerId>,
    /// Several did, each with a sequence of its own: there is no order.
    pub mixed: bool,
}

impl Lane {
    /// Whether a record that was found in this lane counts.
    pub fn accepts(&self, nonce: u64) -> bool {
        nonce != 0 && (nonce == self.nonce || nonce == self.previous)
    }
}

/// What the evicted streams of a session may have issued: a Bloom filter of
/// single ids and of sequences. It never misses one; the more it holds, the
/// more others it takes for one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EvictedKeys([u64; FILTER_WORDS]);

impl EvictedKeys {
    /// Any id may have been there.
    fn saturate(&mut self) {
        self.0 = [u64::MAX; FILTER_WORDS];
    }

    fn add(&mut self, key: u64) {
        for (word, bit) in Self::places(key) {
            if let Some(word) = self.0.get_mut(word) {
                *word |= bit;
            }
        }
    }

    fn has(&self, key: u64) -> bool {
        Self::places(key).all(|(word, bit)| self.0.get(word).is_some_and(|word| word & bit != 0))
    }

    /// Whether an id may have been there, by itself or in its sequence.
    pub fn may_have(&self, id: &EventId) -> bool {
        self.has(id.whole) || id.places.iter().flatten().any(|place| self.has(place.sequence))
    }

    fn places(key: u64) -> impl Iterator<Item = (usize, u64)> {
        // Keys are fingerprints: ten of their bits are as good as a hash.
        (0..FILTER_HASHES).map(move |hash| {
            let bits = key >> hash.saturating_mul(10);
            let word = usize::try_from((bits >> 6) & 15).unwrap_or(0);
            (word, 1u64 << (bits & 63))
        })
    }
}

/// From where on an instance is known to replay a stream of indexed ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Floor {
    /// The stream's number.
    pub stream: u32,
    /// Who showed it.
    pub owner: OwnerId,
    /// The first id that came.
    pub id: u64,
    /// Its index.
    pub index: u64,
}

/// A cursor from which the last resumption was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// The cursor.
    pub cursor: u64,
    /// Who sent what was cut.
    pub owner: OwnerId,
    /// Why.
    pub fault: ReplayFault,
}

/// A session's slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The slot's number in its set.
    pub way: u8,
    /// Who it is.
    pub fingerprint: SessionFingerprint,
    /// The guard saw all of it.
    pub complete: bool,
    /// It was ended.
    pub ended: bool,
    /// Streams of it were evicted.
    pub streams_evicted: bool,
    /// What those may have issued.
    pub evicted_keys: EvictedKeys,
    /// One of them was unplaced: its events may have been any stream's.
    pub unplaced_evicted: bool,
    /// It was in the table before, and evicted: what it had then isn't known.
    pub returned: bool,
    /// It was sent ids that others had been sent, more than `kin` can tell.
    pub kin_unbounded: bool,
    /// When the guard got to know it, in milliseconds.
    pub known_since_ms: u64,
    /// When it last had traffic.
    pub last_used_ms: u64,
    /// Sessions with which nothing is distinctive.
    pub kin: Vec<u64>,
    /// The number of its next stream.
    pub next_stream: u32,
    /// Its records, in the order in which they were begun.
    pub lanes: Vec<Lane>,
    /// The ids of the requests that its streams answer, as they were sent.
    pub sent: Vec<(u32, SentIds)>,
    /// Cursors whose pending calls were settled.
    pub settled: Vec<u64>,
    /// The instance that answered its `initialize`, or else the first that was
    /// seen to serve it.
    pub owner: Option<OwnerId>,
    /// Where its owners are.
    addresses: Vec<(OwnerId, String)>,
    /// Learned floors.
    floors: Vec<Floor>,
    /// Cursors that led to a cut.
    cuts: Vec<Cut>,
}

impl Session {
    /// Whether ids of the one may well be ids of the other.
    pub fn is_kin(&self, other: &Session) -> bool {
        self.kin_unbounded
            || other.kin_unbounded
            || self.kin.contains(&other.fingerprint.short())
            || other.kin.contains(&self.fingerprint.short())
    }

    /// Remembers another session as kin; `None`: any. Whether that was new.
    pub fn add_kin(&mut self, other: Option<u64>) -> bool {
        match other {
            _ if self.kin_unbounded => false,
            Some(other) if self.kin.contains(&other) => false,
            Some(other) if self.kin.len() < MAX_KIN => {
                self.kin.push(other);
                true
            }
            _ => {
                self.kin_unbounded = true;
                true
            }
        }
    }

    /// Keeps the ids of the requests that a stream answers; those of streams
    /// that are gone go, and where there is no room those of the oldest.
    pub fn keep_sent(&mut self, stream: u32, ids: &SentIds) {
        let lanes = &self.lanes;
        self.sent.retain(|(of, _)| *of != stream && lanes.iter().any(|lane| lane.stream == *of));
        if ids.is_empty() {
            return;
        }
        self.sent.push((stream, ids.clone()));
        while self.sent.iter().map(|(_, ids)| sent_bytes(ids)).fold(0, usize::saturating_add)
            > MAX_SENT_BYTES
        {
            self.sent.remove(0);
        }
    }

    /// The ids of the requests that a stream answers, if they are kept.
    pub fn sent(&self, stream: u32) -> Option<&SentIds> {
        self.sent.iter().find(|(of, _)| *of == stream).map(|(_, ids)| ids)
    }

    /// Notes that a cursor's pending calls are settled. Whether they weren't.
    pub fn settle(&mut self, cursor: u64) -> bool {
        if self.settled.contains(&cursor) {
            return false;
        }
        if self.settled.len() >= MAX_SETTLED {
            self.settled.remove(0);
        }
        self.settled.push(cursor);
        true
    }

    /// Takes an instance for the session's owner, if it has none.
    pub fn own_by(&mut self, instance: Option<&Instance>) {
        if self.owner.is_none() {
            self.owner = instance.map(|instance| instance.id);
        }
    }

    /// Remembers where an instance is. Where there is no room the oldest goes
    /// that isn't the session's owner.
    pub fn locate(&mut self, instance: Option<&Instance>) {
        let Some(Instance { id, address: Some(address) }) = instance else { return };
        match self.addresses.iter_mut().find(|(owner, _)| owner == id) {
            Some((_, known)) => known.clone_from(address),
            None => {
                if self.addresses.len() >= MAX_ADDRESSES {
                    let session_owner = self.owner;
                    let oldest = self.addresses.iter().position(|(o, _)| Some(*o) != session_owner);
                    self.addresses.remove(oldest.unwrap_or(0));
                }
                self.addresses.push((*id, address.clone()));
            }
        }
    }

    /// Where an instance is, if that is known.
    pub fn address(&self, owner: Option<OwnerId>) -> Option<&str> {
        let found = self.addresses.iter().find(|(known, _)| Some(*known) == owner);
        found.map(|(_, address)| address.as_str())
    }

    /// The owner of a stream, if it is one, and known.
    pub fn stream_owner(&self, stream: u32) -> Option<OwnerId> {
        let mut owners = self.lanes.iter().filter(|l| l.stream == stream).map(|lane| lane.owner);
        let owner = owners.next()??;
        owners.all(|other| other == Some(owner)).then_some(owner)
    }

    /// From now on this instance is the owner of a stream. Whether it wasn't.
    pub fn give_stream(&mut self, stream: u32, instance: &Instance) -> bool {
        let changed = self.stream_owner(stream) != Some(instance.id);
        for lane in self.lanes.iter_mut().filter(|lane| lane.stream == stream) {
            lane.owner = Some(instance.id);
        }
        self.locate(Some(instance));
        changed
    }

    /// The floor of a stream at its owner, if one was learned.
    pub fn floor(&self, stream: u32, owner: OwnerId) -> Option<&Floor> {
        self.floors.iter().find(|floor| floor.stream == stream && floor.owner == owner)
    }

    /// Keeps a learned floor; the oldest goes.
    pub fn learn_floor(&mut self, new: Floor) {
        self.floors.retain(|known| (known.stream, known.owner) != (new.stream, new.owner));
        if self.floors.len() >= MAX_FLOORS {
            self.floors.remove(0);
        }
        self.floors.push(new);
    }

    /// Lets go of a learned floor. Whether it was there.
    pub fn forget_floor(&mut self, floor: &Floor) -> bool {
        let known = self.floors.len();
        self.floors.retain(|known| known != floor);
        self.floors.len() < known
    }

    /// Why the last resumption from a cursor was cut, if it was, at this owner.
    pub fn cut_from(&self, cursor: u64, owner: Option<OwnerId>) -> Option<ReplayFault> {
        let mut cuts = self.cuts.iter();
        cuts.find(|cut| cut.cursor == cursor && Some(cut.owner) == owner).map(|cut| cut.fault)
    }

    /// Whether a resumption from a cursor was cut, at whatever owner.
    pub fn was_cut(&self, cursor: u64) -> bool {
        self.cuts.iter().any(|cut| cut.cursor == cursor)
    }

    /// Remembers a cut; the oldest goes.
    pub fn remember_cut(&mut self, new: Cut) {
        self.forget_cut(new.cursor);
        if self.cuts.len() >= MAX_CUTS {
            self.cuts.remove(0);
        }
        self.cuts.push(new);
    }

    /// Another resumption from this cursor runs. Whether one had been cut.
    pub fn forget_cut(&mut self, cursor: u64) -> bool {
        let known = self.cuts.len();
        self.cuts.retain(|cut| cut.cursor != cursor);
        self.cuts.len() < known
    }

    /// A new stream's number.
    pub fn new_stream(&mut self) -> u32 {
        let number = self.next_stream;
        self.next_stream = number.wrapping_add(1);
        number
    }

    /// Whether there is room for one more record, of this stream.
    pub fn has_room(&self, shape: &Shape, stream: u32) -> bool {
        self.lanes.len() < usize::from(shape.lanes())
            && self.other_streams(stream) < usize::from(shape.streams)
    }

    fn other_streams(&self, stream: u32) -> usize {
        let others = self.lanes.iter().map(|lane| lane.stream).filter(|other| *other != stream);
        others.collect::<BTreeSet<u32>>().len()
    }

    /// Makes room for one more record, of this stream, and gives its lane's
    /// number. Where there is none, a stream is evicted: finished ones first,
    /// the standalone stream last, the older before the newer; but where only
    /// lanes are short and no stream is finished, the oldest record of a stream
    /// that has several. `keys` tells what the record of a lane holds, if that
    /// is known.
    pub fn make_room(
        &mut self,
        shape: &Shape,
        stream: u32,
        keys: impl Fn(&Lane) -> Option<Vec<u64>>,
        tally: &mut Tally,
    ) -> u8 {
        while !self.has_room(shape, stream) {
            let others = self.lanes.iter().filter(|lane| lane.stream != stream);
            let next = others.min_by_key(|lane| {
                (!lane.finished, lane.kind == StreamKind::Standalone, lane.stream)
            });
            let short_of_lanes = self.other_streams(stream) < usize::from(shape.streams);
            let (number, of_stream) = match next {
                Some(next) if next.finished || !short_of_lanes => (None, Some(next.stream)),
                _ => (self.oldest_of_several(), None),
            };
            let is_evicted =
                |lane: &Lane| Some(lane.number) == number || Some(lane.stream) == of_stream;
            for lane in self.lanes.iter().filter(|lane| is_evicted(lane)) {
                self.unplaced_evicted |= lane.kind == StreamKind::Unplaced;
                // A writer that still runs may write more.
                match keys(lane).filter(|_| lane.closed) {
                    Some(keys) => keys.into_iter().for_each(|key| self.evicted_keys.add(key)),
                    None => self.evicted_keys.saturate(),
                }
            }
            self.lanes.retain(|lane| !is_evicted(lane));
            self.streams_evicted = true;
            tally.streams_evicted = tally.streams_evicted.saturating_add(1);
        }
        (0..shape.lanes()).find(|n| self.lanes.iter().all(|lane| lane.number != *n)).unwrap_or(0)
    }

    /// The lane of the oldest record of a stream with several, those whose
    /// writer has ended first.
    fn oldest_of_several(&self) -> Option<u8> {
        let several = |lane: &&Lane| {
            self.lanes.iter().filter(|other| other.stream == lane.stream).count() > 1
        };
        self.lanes.iter().filter(several).min_by_key(|lane| !lane.closed).map(|lane| lane.number)
    }
}

/// One value of the table. A session stays encoded until it is changed: most
/// calls look at one of them, and many only at its head.
#[derive(Debug, Default)]
pub struct Set<'a> {
    /// Of [`REMEMBERED_EVICTIONS`] sessions, four bytes each.
    evictions: Cow<'a, [u8]>,
    /// Slots that were taken so far: a session that comes back counts its
    /// streams from another number than before.
    inserted: u32,
    slots: Vec<Slot<'a>>,
}

/// A slot that is taken.
#[derive(Debug)]
pub struct Slot<'a> {
    head: Head,
    contents: Contents<'a>,
}

#[derive(Debug)]
enum Contents<'a> {
    Encoded(&'a [u8]),
    Decoded(Box<Session>),
}

/// What a session's bytes begin with.
#[derive(Debug, Clone, Copy)]
struct Head {
    way: u8,
    fingerprint: SessionFingerprint,
    flags: u8,
    last_used_ms: u64,
}

const COMPLETE: u8 = 1;
const ENDED: u8 = 2;
const STREAMS_EVICTED: u8 = 4;
const KIN_UNBOUNDED: u8 = 8;
const UNPLACED_EVICTED: u8 = 16;
const RETURNED: u8 = 32;

impl Head {
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Head {
            way: reader.u8()?,
            fingerprint: SessionFingerprint(reader.u128()?),
            flags: reader.u8()?,
            last_used_ms: reader.u64()?,
        })
    }

    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

impl Slot<'_> {
    /// The session, if its bytes are one.
    pub fn session(&self) -> Option<Session> {
        match &self.contents {
            Contents::Encoded(bytes) => Session::decode(bytes),
            Contents::Decoded(session) => Some(Session::clone(session)),
        }
    }

    /// Who it is.
    pub fn fingerprint(&self) -> SessionFingerprint {
        self.head.fingerprint
    }

    /// Whether the session was ended.
    pub fn is_ended(&self) -> bool {
        self.head.has(ENDED)
    }
}

impl Session {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let reader = &mut Reader::new(bytes);
        let head = Head::read(reader)?;
        Some(Session {
            way: head.way,
            fingerprint: head.fingerprint,
            complete: head.has(COMPLETE),
            ended: head.has(ENDED),
            streams_evicted: head.has(STREAMS_EVICTED),
            evicted_keys: {
                let mut words = [0; FILTER_WORDS];
                for word in &mut words {
                    *word = reader.u64()?;
                }
                EvictedKeys(words)
            },
            kin_unbounded: head.has(KIN_UNBOUNDED),
            unplaced_evicted: head.has(UNPLACED_EVICTED),
            returned: head.has(RETURNED),
            known_since_ms: reader.u64()?,
            last_used_ms: head.last_used_ms,
            next_stream: reader.u32()?,
            kin: reader.list(Reader::u64)?,
            lanes: reader.list(|reader| {
                let number = reader.u8()?;
                let stream = reader.u32()?;
                let flags = reader.u8()?;
                Some(Lane {
                    number,
                    stream,
                    kind: match flags & 3 {
                        0 => StreamKind::Post,
                        1 => StreamKind::Standalone,
                        _ => StreamKind::Unplaced,
                    },
                    closed: flags & 4 != 0,
                    finished: flags & 8 != 0,
                    nonce: reader.u64()?,
                    previous: reader.u64()?,
                    hint: reader.u32()?,
                    owner: OwnerId::decode(reader.u32()?),
                    mixed: flags & 16 != 0,
                })
            })?,
            sent: reader.list(|reader| {
                Some((reader.u32()?, reader.list(|reader| reader.list(Reader::u8))?))
            })?,
            settled: reader.list(Reader::u64)?,
            owner: OwnerId::decode(reader.u32()?),
            addresses: reader.list(|reader| {
                let owner = OwnerId::decode(reader.u32()?)?;
                let address = String::from_utf8(reader.list(Reader::u8)?).ok()?;
                Some((owner, address))
            })?,
            floors: reader.list(|reader| {
                Some(Floor {
                    stream: reader.u32()?,
                    owner: OwnerId::decode(reader.u32()?)?,
                    id: reader.u64()?,
                    index: reader.u64()?,
                })
            })?,
            cuts: reader.list(|reader| {
                Some(Cut {
                    cursor: reader.u64()?,
                    owner: OwnerId::decode(reader.u32()?)?,
                    fault: ReplayFault::decode(reader.u8()?)?,
                })
            })?,
        })
    }

    fn encode(&self, w: &mut Writer) {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        w.u8(self.way);
        w.u128(self.fingerprint.0);
        w.u8(flag(self.complete, COMPLETE)
            | flag(self.ended, ENDED)
            | flag(self.streams_evicted, STREAMS_EVICTED)
            | flag(self.kin_unbounded, KIN_UNBOUNDED)
            | flag(self.unplaced_evicted, UNPLACED_EVICTED)
            | flag(self.returned, RETURNED));
        w.u64(self.last_used_ms);
        self.evicted_keys.0.iter().for_each(|word| w.u64(*word));
        w.u64(self.known_since_ms);
        w.u32(self.next_stream);
        w.list(&self.kin, |w, kin| w.u64(*kin));
        w.list(&self.lanes, |w, lane| {
            w.u8(lane.number);
            w.u32(lane.stream);
            let kind = match lane.kind {
                StreamKind::Post => 0,
                StreamKind::Standalone => 1,
                StreamKind::Unplaced => 2,
            };
            w.u8(kind
                | (u8::from(lane.closed) << 2)
                | (u8::from(lane.finished) << 3)
                | (u8::from(lane.mixed) << 4));
            w.u64(lane.nonce);
            w.u64(lane.previous);
            w.u32(lane.hint);
            w.u32(OwnerId::encode(lane.owner));
        });
        w.list(&self.sent, |w, (stream, ids)| {
            w.u32(*stream);
            w.list(ids, |w, id| w.list(id, |w, byte| w.u8(*byte)));
        });
        w.list(&self.settled, |w, cursor| w.u64(*cursor));
        w.u32(OwnerId::encode(self.owner));
        w.list(&self.addresses, |w, (owner, address)| {
            w.u32(OwnerId::encode(Some(*owner)));
            w.list(address.as_bytes(), |w, byte| w.u8(*byte));
        });
        w.list(&self.floors, |w, floor| {
            w.u32(floor.stream);
            w.u32(OwnerId::encode(Some(floor.owner)));
            w.u64(floor.id);
            w.u64(floor.index);
        });
        w.list(&self.cuts, |w, cut| {
            w.u64(cut.cursor);
            w.u32(OwnerId::encode(Some(cut.owner)));
            w.u8(cut.fault.encode());
        });
    }
}

impl<'a> Set<'a> {
    /// Reads a set. What is none, or of another version, is an empty one: its
    /// sessions are not known any more.
    pub fn decode(bytes: &'a [u8]) -> Self {
        Self::try_decode(bytes).unwrap_or_default()
    }

    fn try_decode(bytes: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let evictions = usize::from(reader.u8()?).saturating_mul(EVICTION_BYTES);
        let evictions = Cow::Borrowed(reader.bytes(evictions)?);
        let inserted = reader.u32()?;
        let slots = reader.list(|reader| {
            let len = usize::try_from(reader.u32()?).ok()?;
            let bytes = reader.bytes(len)?;
            let head = Head::read(&mut Reader::new(bytes))?;
            Some(Slot { head, contents: Contents::Encoded(bytes) })
        })?;
        Some(Set { evictions, inserted, slots })
    }

    /// Its bytes in shared data.
    pub fn encode(&self) -> Vec<u8> {
        let room = self.slots.iter().map(|slot| match &slot.contents {
            Contents::Encoded(bytes) => bytes.len(),
            Contents::Decoded(_) => CHANGED_BYTES,
        });
        let mut writer = Writer::with_room(room.fold(CHANGED_BYTES, usize::saturating_add));
        writer.u8(VERSION);
        let evictions = self.evictions.len().checked_div(EVICTION_BYTES).unwrap_or(0);
        writer.u8(u8::try_from(evictions).unwrap_or(0));
        writer.bytes(&self.evictions);
        writer.u32(self.inserted);
        writer.list(&self.slots, |w, slot| {
            w.block(|w| match &slot.contents {
                Contents::Encoded(bytes) => w.bytes(bytes),
                Contents::Decoded(session) => session.encode(w),
            });
        });
        writer.finish()
    }

    /// The session's slot, if it has one.
    pub fn get(&self, fingerprint: SessionFingerprint) -> Option<&Slot<'a>> {
        self.slots.iter().find(|slot| slot.head.fingerprint == fingerprint)
    }

    /// The slot of the session whose fingerprint has this half, if it is here.
    pub fn get_short(&self, short: u64) -> Option<&Slot<'a>> {
        self.slots.iter().find(|slot| slot.head.fingerprint.short() == short)
    }

    /// The session, to be changed.
    pub fn get_mut(&mut self, fingerprint: SessionFingerprint) -> Option<&mut Session> {
        let slot = self.slots.iter_mut().find(|slot| slot.head.fingerprint == fingerprint)?;
        if let Contents::Encoded(bytes) = slot.contents {
            slot.contents = Contents::Decoded(Box::new(Session::decode(bytes)?));
        }
        match &mut slot.contents {
            Contents::Decoded(session) => Some(session),
            Contents::Encoded(_) => None,
        }
    }

    /// Takes a slot for a session that isn't here. It counts as complete only
    /// if the caller says so and it wasn't evicted from here a while ago.
    pub fn insert(
        &mut self,
        fingerprint: SessionFingerprint,
        complete: bool,
        shape: &Shape,
        idle_ms: u64,
        now_ms: u64,
        tally: &mut Tally,
    ) -> Option<&mut Session> {
        let free = (0..shape.ways).find(|n| self.slots.iter().all(|slot| slot.head.way != *n));
        let way = match free {
            Some(way) => way,
            None => self.evict(idle_ms, now_ms, tally)?,
        };
        self.inserted = self.inserted.wrapping_add(1);
        let mut evictions = self.evictions.chunks_exact(EVICTION_BYTES);
        let was_evicted = evictions.any(|evicted| evicted == remembered(fingerprint));
        let session = Session {
            way,
            fingerprint,
            complete: complete && !was_evicted,
            ended: false,
            streams_evicted: false,
            evicted_keys: EvictedKeys::default(),
            unplaced_evicted: false,
            returned: was_evicted,
            kin_unbounded: false,
            known_since_ms: now_ms,
            last_used_ms: now_ms,
            kin: Vec::new(),
            next_stream: self.inserted << 16,
            lanes: Vec::new(),
            sent: Vec::new(),
            settled: Vec::new(),
            owner: None,
            addresses: Vec::new(),
            floors: Vec::new(),
            cuts: Vec::new(),
        };
        let head = Head { way, fingerprint, flags: 0, last_used_ms: now_ms };
        self.slots.push(Slot { head, contents: Contents::Decoded(Box::new(session)) });
        self.get_mut(fingerprint)
    }

    /// Who would be evicted next: an ended session, or else an idle one, or
    /// else an adopted one, or else the least recently used.
    fn next_victim(&self, idle_ms: u64, now_ms: u64) -> Option<(usize, &Head)> {
        let heads = self.slots.iter().map(|slot| &slot.head);
        heads.enumerate().min_by_key(|(_, head)| {
            let idle = now_ms.saturating_sub(head.last_used_ms) > idle_ms;
            (!head.has(ENDED), !idle, head.has(COMPLETE), head.last_used_ms)
        })
    }

    /// Whether traffic of this session has to be noted now: it was noted a
    /// while ago, or the session would be the next to be evicted.
    pub fn wants_touch(&self, slot: &Slot<'_>, shape: &Shape, idle_ms: u64, now_ms: u64) -> bool {
        let since_ms = now_ms.saturating_sub(slot.head.last_used_ms);
        let is_full = self.slots.len() >= usize::from(shape.ways);
        let is_next = |(_, next): (usize, &Head)| next.way == slot.head.way;
        since_ms >= TOUCH_MS
            || (is_full && since_ms > 0 && self.next_victim(idle_ms, now_ms).is_some_and(is_next))
    }

    fn evict(&mut self, idle_ms: u64, now_ms: u64, tally: &mut Tally) -> Option<u8> {
        let (at, _) = self.next_victim(idle_ms, now_ms)?;
        let evicted = self.slots.remove(at);
        if !evicted.is_ended() {
            tally.sessions_evicted = tally.sessions_evicted.saturating_add(1);
        }
        let evictions = self.evictions.to_mut();
        if evictions.len() >= REMEMBERED_EVICTIONS.saturating_mul(EVICTION_BYTES) {
            evictions.drain(..EVICTION_BYTES);
        }
        evictions.extend_from_slice(&remembered(evicted.fingerprint()));
        Some(evicted.head.way)
    }
}

/// Bytes of one stream's ids in an encoded set.
fn sent_bytes(ids: &SentIds) -> usize {
    const HEADER: usize = 4 + 1;
    ids.iter().map(|id| id.len().saturating_add(1)).fold(HEADER, usize::saturating_add)
}

fn remembered(fingerprint: SessionFingerprint) -> [u8; EVICTION_BYTES] {
    // Not the bits that chose the set.
    ((fingerprint.0 >> 96) as u32).to_le_bytes()
}
