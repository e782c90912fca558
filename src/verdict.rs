//! The verdict on a resumption: the rules, in their order, in one place.
//!
//! What may be resumed is decided by what the guard issued, not by what a
//! cursor looks like. Three outcomes are kept apart: `continue`, `unverified`
//! (the guard can't know) and `inconsistent` (proven wrong). A false
//! `inconsistent` is the worst mistake this program can make, so every rule
//! that says it asks first whether what it relies on may have been evicted,
//! missed, or issued elsewhere.

use std::fmt;

use crate::config::{self, Config};
use crate::event_id::EventId;
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::SentIds;
use crate::ledger::stream::{Finished, History, Stream};
use crate::ledger::table::Session;
use crate::ledger::{Access, Ledger};
use crate::owner::OwnerId;
use crate::store::Store;
use crate::telemetry::Known;

/// Why the guard can't know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The request names no session.
    SessionMissing,
    /// The cursor is longer than the limit.
    CursorTooLong,
    /// The guard doesn't know the session.
    UnknownSession,
    /// Events of the session may have been issued past the guard.
    HistoryIncomplete,
    /// The part of the history that could hold the cursor was evicted.
    HistoryEvicted,
    /// Another instance answers than the one that issued the stream, and it
    /// isn't known whether it can replay it.
    OwnerMoved,
}

/// What is proven wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Two cursors, or a control character in it.
    MalformedCursor,
    /// Two sessions.
    MalformedSession,
    /// The session was ended.
    SessionTerminated,
    /// The request names no session, and the cursor belongs to one.
    SessionMissing,
    /// The cursor was issued on another session.
    ForeignSession,
    /// The cursor was issued on two streams that are both open.
    AmbiguousCursor,
    /// The server has dropped what follows the cursor.
    BelowFloor,
    /// The cursor is past the newest event of its sequence.
    AheadOfHead,
    /// The cursor was never issued.
    NeverIssued,
    /// Another instance answers than the one that issued the stream, and only
    /// that one can replay it.
    OwnerMoved,
    /// What was replayed was not what follows the cursor.
    Replay(ReplayFault),
}

/// What is wrong with a replay, the worse behind the better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplayFault {
    /// Nothing came although events are owed.
    Empty,
    /// An event from before the cursor came.
    Repeated,
    /// Another stream's event came.
    ForeignStream,
    /// Events that are owed were passed over.
    Gap,
    /// Another session's event came.
    ForeignSession,
}

impl ReplayFault {
    /// All of them.
    pub const ALL: [ReplayFault; 5] = [
        ReplayFault::Empty,
        ReplayFault::Repeated,
        ReplayFault::ForeignStream,
        ReplayFault::Gap,
        ReplayFault::ForeignSession,
    ];

    /// Its name among the results of a replay.
    pub const fn as_str(self) -> &'static str {
        match self {
            ReplayFault::Empty => "empty",
            ReplayFault::Repeated => "repeated",
            ReplayFault::ForeignStream => "foreign_stream",
            ReplayFault::Gap => "gap",
            ReplayFault::ForeignSession => "foreign_session",
        }
    }

    /// As it is kept.
    pub(crate) const fn encode(self) -> u8 {
        self as u8
    }

    /// Reads it back.
    pub(crate) fn decode(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.encode() == code)
    }
}

impl Doubt {
    /// Every doubt, in the order of the rules.
    pub const ALL: [Doubt; 6] = [
        Doubt::CursorTooLong,
        Doubt::SessionMissing,
        Doubt::UnknownSession,
        Doubt::HistoryIncomplete,
        Doubt::HistoryEvicted,
        Doubt::OwnerMoved,
    ];

    /// Its name in headers, metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Doubt::SessionMissing => "session_missing",
            Doubt::CursorTooLong => "cursor_too_long",
            Doubt::UnknownSession => "unknown_session",
            Doubt::HistoryIncomplete => "history_incomplete",
            Doubt::HistoryEvicted => "history_evicted",
            Doubt::OwnerMoved => "owner_moved",
        }
    }
}

impl Fault {
    /// Every fault, in the order of the rules.
    pub const ALL: [Fault; 15] = [
        Fault::MalformedCursor,
        Fault::MalformedSession,
        Fault::SessionTerminated,
        Fault::SessionMissing,
        Fault::ForeignSession,
        Fault::AmbiguousCursor,
        Fault::BelowFloor,
        Fault::AheadOfHead,
        Fault::NeverIssued,
        Fault::OwnerMoved,
        Fault::Replay(ReplayFault::ForeignSession),
        Fault::Replay(ReplayFault::ForeignStream),
        Fault::Replay(ReplayFault::Repeated),
        Fault::Replay(ReplayFault::Gap),
        Fault::Replay(ReplayFault::Empty),
    ];

    /// Its name in headers, metrics, logs and the configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Fault::MalformedCursor => "malformed_cursor",
            Fault::MalformedSession => "malformed_session",
            Fault::SessionTerminated => "session_terminated",
            Fault::SessionMissing => "session_missing",
            Fault::ForeignSession => "foreign_session",
            Fault::AmbiguousCursor => "ambiguous_cursor",
            Fault::BelowFloor => "below_floor",
            Fault::AheadOfHead => "ahead_of_head",
            Fault::NeverIssued => "never_issued",
            Fault::OwnerMoved => "owner_moved",
            Fault::Replay(fault) => match fault {
                ReplayFault::Empty => "replay_empty",
                ReplayFault::Repeated => "replay_repeated",
                ReplayFault::ForeignStream => "replay_foreign_stream",
                ReplayFault::Gap => "replay_gap",
                ReplayFault::ForeignSession => "replay_foreign_session",
            },
        }
    }
}

/// Outcome and reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The guard issued this cursor on this session, and nothing speaks
    /// against it.
    Continue,
    /// The guard can't know.
    Unverified(Doubt),
    /// Proven wrong.
    Inconsistent(Fault),
}

impl Verdict {
    /// The outcome's name.
    pub const fn outcome(self) -> &'static str {
        match self {
            Verdict::Continue => "continue",
            Verdict::Unverified(_) => "unverified",
            Verdict::Inconsistent(_) => "inconsistent",
        }
    }

    /// The reason's name; `none` for `continue`.
    pub const fn reason(self) -> &'static str {
        match self {
            Verdict::Continue => "none",
            Verdict::Unverified(doubt) => doubt.as_str(),
            Verdict::Inconsistent(fault) => fault.as_str(),
        }
    }
}

/// What the guard does about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The request goes on as it came.
    Passed,
    /// It is answered with an HTTP error.
    Rejected,
    /// It is answered with a JSON-RPC error for each call that waits for it.
    Settled,
    /// The stream that came is ended before what is wrong.
    Cut,
}

impl Action {
    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Action::Passed => "passed",
            Action::Rejected => "rejected",
            Action::Settled => "settled",
            Action::Cut => "cut",
        }
    }
}

/// A verdict and what was done: the value of the `mcp-resumption` header and
/// of the filter state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ruling {
    /// The verdict.
    pub verdict: Verdict,
    /// The action.
    pub action: Action,
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Continue => f.write_str("continue"),
            verdict => write!(
                f,
                "{};reason={};action={}",
                verdict.outcome(),
                verdict.reason(),
                self.action.as_str()
            ),
        }
    }
}

/// A header that may come more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Single<T> {
    /// It is not there, or empty.
    Absent,
    /// It is there, once or alike.
    One(T),
    /// It is there with different values, or with what it may not contain.
    Malformed,
}

/// A cursor within the limit, or one that is longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cursor {
    /// To be looked for.
    Id(EventId),
    /// Too long to have been recorded.
    TooLong,
}

/// The stream that a resumption carries on, as it was when that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarriedOn {
    /// The cursor.
    pub cursor: EventId,
    /// The stream.
    pub stream: Stream,
    /// Ids with data behind the cursor.
    pub owed: u64,
    /// The cursor stands on other streams, too.
    pub ambiguous: bool,
    /// It may stand on one more that the guard doesn't know.
    pub uncertain: bool,
    /// Nothing of the session may have come unseen, or where it isn't known.
    pub is_whole: bool,
    /// The owners of all that it stands on, if they are all known.
    pub owners: Option<Vec<OwnerId>>,
    /// A resumption from this cursor was cut.
    pub was_cut: bool,
}

impl CarriedOn {
    /// Whether the cursor may stand elsewhere on the stream: an id without data
    /// that is sent whenever a connection begins may have left the window, and
    /// come again as if it were new.
    pub fn is_vague(&self) -> bool {
        let has_data = self.stream.has_with_data(&self.cursor);
        !has_data && self.stream.records.iter().any(|record| record.evicted)
    }
}

/// A verdict, the stream that the cursor stands on, and who waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// The stream that a resumption from here carries on, if one is known.
    pub stream: Option<CarriedOn>,
    /// The JSON-RPC ids of the calls that are pending for the cursor, as they
    /// were sent, where a fault is to be told to them.
    pub pending: SentIds,
    /// What the ledger had of the session.
    pub known: Option<Known>,
}

/// Judges a resumption by what the ledger has; `slot` is its session's, if it
/// has one. Rule 1, by which the guard is inert, comes before.
pub fn judge<S: Store>(
    config: &Config,
    ledger: &Ledger,
    at: &Access<'_, S>,
    (session, slot): (&Single<SessionFingerprint>, Option<&Session>),
    cursor: &Single<Cursor>,
) -> Judgement {
    use Verdict::{Inconsistent, Unverified};
    let judged =
        |verdict| Judgement { verdict, stream: None, pending: SentIds::new(), known: None };

    // Rule 2.
    let cursor = match cursor {
        Single::One(cursor) => *cursor,
        Single::Malformed | Single::Absent => return judged(Inconsistent(Fault::MalformedCursor)),
    };
    let session = match session {
        Single::One(session) => Some(*session),
        Single::Absent => None,
        Single::Malformed => return judged(Inconsistent(Fault::MalformedSession)),
    };
    // Rule 3.
    let Cursor::Id(cursor) = cursor else {
        return judged(Unverified(Doubt::CursorTooLong));
    };
    let history = slot.map(|session| ledger.history_of(at, session.clone()));
    let known = history.as_ref().map(|history| Known {
        complete: history.session.complete,
        streams: history.streams.len(),
        owed: history.owed_behind(&cursor),
    });
    let only = |verdict| Judgement { known, ..judged(verdict) };
    // Rule 4.
    if history.as_ref().is_some_and(|history| history.session.ended) {
        return only(Inconsistent(Fault::SessionTerminated));
    }
    // Rules 5 and 6.
    let Some(session) = session else {
        return only(if ledger.is_of_another(at, &cursor, None, None) {
            Inconsistent(Fault::SessionMissing)
        } else {
            Unverified(Doubt::SessionMissing)
        });
    };
    let issued = history.as_ref().map(|history| streams_with(history, &cursor)).unwrap_or_default();
    // Rule 7.
    if issued.is_empty() && ledger.is_of_another(at, &cursor, Some(session), None) {
        return only(Inconsistent(Fault::ForeignSession));
    }
    // Rule 8.
    let Some(history) = &history else {
        return only(Unverified(Doubt::UnknownSession));
    };
    if !issued.is_empty() {
        // Answers and newer events may not have been written down.
        let is_doubted = ledger.is_doubted(at, session);
        let verdict = if is_doubted {
            Verdict::Continue
        } else {
            judge_issued(config, at.now_ms, history, &issued, &cursor)
        };
        let pending = match verdict {
            Inconsistent(_) => history.pending_calls(&cursor, &[]),
            Verdict::Continue | Unverified(_) => SentIds::new(),
        };
        let stream = match verdict {
            Inconsistent(Fault::AmbiguousCursor) => None,
            _ => carried_on(history, &issued, &cursor, is_doubted),
        };
        return Judgement { stream, pending, ..only(verdict) };
    }
    // Rule 11.
    if let Some(fault) = history.session.cut_from(cursor.whole, history.session.owner)
        && !ledger.is_doubted(at, session)
    {
        let pending = history.pending_calls(&cursor, &[]);
        return Judgement { pending, ..only(Inconsistent(Fault::Replay(fault))) };
    }
    // Rule 13.
    let complete = history.session.complete && !ledger.is_doubted(at, session);
    if config.history == config::History::Shared || !complete {
        let known = known.map(|known| Known { complete, ..known });
        return Judgement { known, ..judged(Unverified(Doubt::HistoryIncomplete)) };
    }
    // Rule 14.
    if history.could_have_held(&cursor) {
        return only(Unverified(Doubt::HistoryEvicted));
    }
    // Rules 15 and 16.
    let mut records = history.streams.iter().flat_map(|stream| &stream.records);
    let fault = if records.any(|record| record.is_past_head(&cursor)) {
        Fault::AheadOfHead
    } else {
        Fault::NeverIssued
    };
    Judgement { pending: history.pending_calls(&cursor, &[]), ..only(Inconsistent(fault)) }
}

fn streams_with<'a>(history: &'a History, cursor: &EventId) -> Vec<&'a Stream> {
    history.streams.iter().filter(|stream| stream.find(cursor).is_some()).collect()
}

/// The stream that a resumption carries on: one that is open before one that
/// may be finished, the newer before the older.
fn carried_on(
    history: &History,
    issued: &[&Stream],
    cursor: &EventId,
    is_doubted: bool,
) -> Option<CarriedOn> {
    if history.may_have_evicted(cursor) {
        return None;
    }
    let stream = issued.iter().max_by_key(|s| (s.finished() == Finished::No, s.number))?;
    let owners = issued.iter().map(|stream| stream.owners()).collect::<Option<Vec<_>>>();
    Some(CarriedOn {
        cursor: *cursor,
        stream: Stream::clone(stream),
        owed: stream.find(cursor).unwrap_or(0),
        ambiguous: issued.len() > 1,
        uncertain: is_doubted || history.may_be_of_unseen(cursor),
        is_whole: history.is_whole(),
        owners: owners.map(|owners| owners.concat()),
        was_cut: history.session.was_cut(cursor.whole),
    })
}

/// The rules for a cursor that was issued on this session.
fn judge_issued(
    config: &Config,
    now_ms: u64,
    history: &History,
    issued: &[&Stream],
    cursor: &EventId,
) -> Verdict {
    // Rule 9.
    let is_open = |stream: &&&Stream| history.finished(stream) == Finished::No;
    if issued.iter().filter(is_open).count() > 1 && !history.may_be_brought_again(cursor) {
        return Verdict::Inconsistent(Fault::AmbiguousCursor);
    }
    // Rule 10. Of several streams the server may take any, and one that isn't
    // known may be the one.
    let is_below = |stream: &&Stream| {
        is_below_floor(config, now_ms, history, stream, cursor)
            || is_below_learned_floor(history, stream, cursor)
    };
    if !history.may_be_of_unseen(cursor) && issued.iter().all(is_below) {
        return Verdict::Inconsistent(Fault::BelowFloor);
    }
    // Rule 11.
    let cuts = issued.iter().map(|stream| {
        history.session.cut_from(cursor.whole, history.session.stream_owner(stream.number))
    });
    if let Some(Some(fault)) = cuts.reduce(|first, other| first.and(other)) {
        return Verdict::Inconsistent(Fault::Replay(fault));
    }
    // Rule 12.
    Verdict::Continue
}

/// Whether the declared floor of a stream is above the cursor: more is owed
/// than the server keeps, or something is, and the server keeps it no longer.
fn is_below_floor(
    config: &Config,
    now_ms: u64,
    history: &History,
    stream: &Stream,
    cursor: &EventId,
) -> bool {
    let owed = stream.find(cursor).unwrap_or(0);
    if owed == 0 {
        return false;
    }
    let retention = &config.retention;
    let too_many = retention.events_per_stream.is_some_and(|kept| owed > kept);
    let last_event_ms = stream.last_event_ms().max(history.last_unplaced_ms().unwrap_or(0));
    let idle_ms = now_ms.saturating_sub(last_event_ms);
    let older_than = |seconds: Option<u64>| {
        seconds.is_some_and(|seconds| idle_ms > seconds.saturating_mul(1000))
    };
    let too_old = match history.finished(stream) {
        Finished::No => older_than(retention.seconds),
        Finished::Yes => older_than(retention.finished_stream_seconds),
        Finished::Unknown => {
            older_than(retention.seconds) && older_than(retention.finished_stream_seconds)
        }
    };
    too_many || too_old
}

/// Whether events that are owed stand between the cursor and the first id that
/// the stream's owner could replay when it was asked last.
fn is_below_learned_floor(history: &History, stream: &Stream, cursor: &EventId) -> bool {
    let owner = history.session.stream_owner(stream.number);
    let floor = owner.and_then(|owner| history.session.floor(stream.number, owner));
    let (Some(floor), Some(sequence)) = (floor, stream.rising_sequence()) else { return false };
    let owed = stream.find(cursor).unwrap_or(0);
    match stream.find_entry(&EventId::of_sequence(floor.id, sequence, floor.index)) {
        Some(first) => owed > first.owed.saturating_add(u64::from(first.data)),
        // It was not issued: what is owed came before it, or long after it.
        None => owed > 0 && stream.highest_index() < Some(floor.index),
    }
}
