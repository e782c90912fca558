//! The naive twin of the ledger and the verdict: keeps every id of every
//! session for ever, in full, and judges a cursor by reading `design.md` from
//! the top. Where the design leaves room (who overtook whom on two connections
//! at once), it gives every verdict that is right.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};

use mcp_resume_guard::event_id::{EventId, comes_back_unchanged};
use mcp_resume_guard::fingerprint::Secret;

const SECRET: Secret = Secret::new([1; 16]);

/// With more relatives the guard may take a session for everybody's.
const MANY_KIN: usize = 1;

/// What the twin has to know of the configuration.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    pub exclusive: bool,
    pub event_id_bytes: usize,
    pub events_per_stream: Option<u64>,
    pub seconds: Option<u64>,
    pub finished_stream_seconds: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Post,
    Standalone,
    /// A resumption whose cursor was not known.
    Unplaced,
}

#[derive(Debug, Clone)]
pub struct Issued {
    pub text: String,
    pub data: bool,
    /// Its place in the server's log.
    rank: usize,
    issued_ms: u64,
    /// Sent by a connection of which it is certain what it carries.
    placed: bool,
    /// Sent first in what can't be another session's replay.
    live: bool,
}

#[derive(Debug)]
pub struct Stream {
    kind: Kind,
    ids: Vec<Issued>,
    /// The requests without an answer; `None`: can't be told.
    pending: Option<Vec<u32>>,
    last_issued_ms: u64,
    /// Connections that have sent something new on it.
    writers: BTreeSet<usize>,
    /// Two connections delivered at once, or what one carried was guessed:
    /// which of two ids came first isn't certain.
    order_uncertain: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finished {
    Yes,
    No,
    Unknown,
}

impl Stream {
    fn finished(&self) -> Finished {
        match (self.kind, &self.pending) {
            (Kind::Standalone, _) => Finished::No,
            (Kind::Unplaced, _) | (Kind::Post, None) => Finished::Unknown,
            (Kind::Post, Some(pending)) if pending.is_empty() => Finished::Yes,
            (Kind::Post, Some(_)) => Finished::No,
        }
    }

    fn find(&self, text: &str) -> Option<(usize, &Issued)> {
        self.ids.iter().enumerate().find(|(_, id)| id.text == text)
    }

    fn is_below_floor(&self, rules: &Rules, now_ms: u64, text: &str) -> bool {
        let Some((at, _)) = self.find(text) else { return false };
        let owed = self.ids[at + 1..].iter().filter(|id| id.data).count() as u64;
        self.is_too_much(rules, now_ms - self.last_issued_ms, owed)
    }

    /// The same by the server's order.
    fn is_below_floor_by_rank(&self, rules: &Rules, now_ms: u64, text: &str) -> bool {
        let Some((_, cursor)) = self.find(text) else { return false };
        let later = self.ids.iter().filter(|id| id.rank > cursor.rank);
        let owed = later.clone().filter(|id| id.data).count() as u64;
        let newest_ms = later.map(|id| id.issued_ms).max().unwrap_or(now_ms);
        self.is_too_much(rules, now_ms - newest_ms, owed)
    }

    /// Whether more is owed than the server keeps, or for longer.
    fn is_too_much(&self, rules: &Rules, idle_ms: u64, owed: u64) -> bool {
        if owed == 0 {
            return false;
        }
        let older_than = |seconds: Option<u64>| seconds.is_some_and(|s| idle_ms > s * 1000);
        let too_old = match self.finished() {
            Finished::No => older_than(rules.seconds),
            Finished::Yes => older_than(rules.finished_stream_seconds),
            Finished::Unknown => {
                older_than(rules.seconds) && older_than(rules.finished_stream_seconds)
            }
        };
        too_old || rules.events_per_stream.is_some_and(|kept| owed > kept)
    }
}

#[derive(Debug, Default)]
pub struct Session {
    complete: bool,
    ended: bool,
    streams: Vec<Stream>,
    /// The sessions whose names this one had.
    renamed_from: BTreeSet<String>,
    /// Distinctive ids that were sent here live.
    live: BTreeSet<String>,
    /// Distinctive ids and sequences of all that was sent here.
    keys: BTreeSet<u64>,
}

impl Session {
    fn ids(&self) -> impl Iterator<Item = &Issued> {
        self.streams.iter().filter(|s| s.kind != Kind::Unplaced).flat_map(|s| &s.ids)
    }

    fn has(&self, text: &str) -> bool {
        self.streams.iter().any(|stream| stream.find(text).is_some())
    }
}

/// What a connection carries.
#[derive(Debug, Clone)]
enum Carries {
    NewStream(Option<Vec<u32>>),
    Standalone,
    Stream(usize),
    /// A stream of which it is not certain that it is this.
    Perhaps(usize),
    /// Not known yet; what came so far stands on a stream of its own.
    Unknown(Option<usize>),
}

/// A connection that brings events.
#[derive(Debug, Clone)]
pub struct Connection {
    number: usize,
    session: String,
    carries: Carries,
    /// What it brings can't be another session's replay.
    live: bool,
}

/// Everything that ever was.
#[derive(Debug, Default)]
pub struct Twin {
    rules: Rules,
    sessions: BTreeMap<String, Session>,
    open: BTreeSet<usize>,
    connections: usize,
    pub now_ms: u64,
}

fn id_of(text: &str) -> Option<EventId> {
    EventId::new(&SECRET, text.as_bytes())
}

fn trimmed(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// The sequences in which an id stands, by each reading, with its index.
fn places(text: &str) -> [Option<(u64, u64)>; 2] {
    id_of(text).map_or([None; 2], |id| id.places.map(|p| p.map(|p| (p.sequence, p.index))))
}

/// The distinctive sequences in which an id stands.
fn distinctive_sequences(text: &str) -> Vec<u64> {
    let Some(id) = id_of(text) else { return Vec::new() };
    let places = id.places.into_iter().zip(id.distinctive_sequence);
    places
        .filter_map(|(place, distinctive)| place.filter(|_| distinctive))
        .map(|p| p.sequence)
        .collect()
}

fn is_distinctive(text: &str) -> bool {
    id_of(text).is_some_and(|id| id.distinctive)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Certainty {
    No,
    Perhaps,
    Yes,
}

impl Twin {
    pub fn new(rules: Rules, now_ms: u64) -> Self {
        Twin { rules, now_ms, ..Twin::default() }
    }

    pub fn restart(&mut self) {
        *self =
            Twin { connections: self.connections, ..Twin::new(self.rules.clone(), self.now_ms) };
    }

    pub fn is_known(&self, session: &str) -> bool {
        self.sessions.contains_key(session)
    }

    pub fn is_ended(&self, session: &str) -> bool {
        self.sessions.get(session).is_some_and(|session| session.ended)
    }

    /// All that was issued on a session, in no particular order.
    pub fn issued(&self, session: &str) -> Vec<String> {
        let streams = self.sessions.get(session).map(|s| s.streams.iter()).into_iter().flatten();
        let all: BTreeSet<&String> = streams.flat_map(|s| &s.ids).map(|id| &id.text).collect();
        all.into_iter().cloned().collect()
    }

    pub fn is_issued(&self, session: &str, cursor: &str) -> bool {
        self.sessions.get(session).is_some_and(|session| session.has(trimmed(cursor)))
    }

    /// The most ids of one stream, over all sessions.
    pub fn longest_stream(&self) -> usize {
        let streams = self.sessions.values().flat_map(|session| &session.streams);
        streams.map(|stream| stream.ids.len()).max().unwrap_or(0)
    }

    /// `initialize` was answered with this id.
    pub fn begin(&mut self, session: &str) {
        let again = self.sessions.contains_key(session);
        let session = self.sessions.entry(session.to_owned()).or_default();
        session.complete = !again;
        session.ended = false;
    }

    pub fn end(&mut self, session: &str) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.ended = true;
        }
    }

    pub fn rename(&mut self, old: &str, new: &str) {
        let session = self.sessions.entry(new.to_owned()).or_default();
        session.complete = false;
        session.renamed_from.insert(old.to_owned());
    }

    pub fn make_incomplete(&mut self, session: &str) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.complete = false;
        }
    }

    fn connect(&mut self, session: &str, carries: Carries) -> Connection {
        self.connections += 1;
        self.open.insert(self.connections);
        let live = matches!(carries, Carries::NewStream(_) | Carries::Standalone);
        Connection { number: self.connections, session: session.to_owned(), carries, live }
    }

    /// A POST's event stream. `calls`: its requests, `None` if unreadable.
    pub fn post(&mut self, session: &str, calls: Option<Vec<u32>>) -> Connection {
        self.connect(session, Carries::NewStream(calls))
    }

    pub fn listen(&mut self, session: &str) -> Connection {
        self.connect(session, Carries::Standalone)
    }

    /// A resumption that passed. `asked`: the session of the request.
    pub fn resume(&mut self, asked: &str, answered: &str, cursor: &str) -> Connection {
        let streams = self.sessions.get(asked).map(|session| &session.streams[..]).unwrap_or(&[]);
        let with_cursor: Vec<usize> = streams
            .iter()
            .enumerate()
            .filter(|(_, stream)| stream.find(trimmed(cursor)).is_some())
            .map(|(at, _)| at)
            .collect();
        let carries = match with_cursor[..] {
            // The cursor says nothing of another session's streams, nor of
            // those of a session that has ended.
            _ if asked != answered || self.is_ended(asked) => Carries::Unknown(None),
            [] => Carries::Unknown(None),
            [stream] => Carries::Stream(stream),
            // An open one before one that may be finished, the newer one.
            _ => Carries::Perhaps(
                with_cursor
                    .into_iter()
                    .max_by_key(|at| (streams[*at].finished() == Finished::No, *at))
                    .unwrap_or(0),
            ),
        };
        self.connect(answered, carries)
    }

    pub fn close(&mut self, connection: &Connection) {
        self.open.remove(&connection.number);
    }

    /// An event was dispatched on a connection: its id, if it has one, whether
    /// it has data, and the request that it answers.
    pub fn event(
        &mut self,
        connection: &mut Connection,
        text: Option<&str>,
        data: bool,
        answers: Option<u32>,
        rank: usize,
    ) {
        let text = text.map(trimmed).filter(|text| !text.is_empty());
        let too_long = text.is_some_and(|text| text.len() > self.rules.event_id_bytes);
        if let Some(text) = text.filter(|_| !too_long) {
            self.issue(connection, text, data, rank);
        }
        if text
            .is_some_and(|text| !comes_back_unchanged(text.as_bytes(), self.rules.event_id_bytes))
        {
            self.make_incomplete(&connection.session);
        }
        let Some(answered) = answers else { return };
        let pending = match &mut connection.carries {
            Carries::NewStream(calls) => calls.as_mut(),
            Carries::Stream(at) | Carries::Perhaps(at) => self
                .sessions
                .get_mut(&connection.session)
                .and_then(|session| session.streams.get_mut(*at))
                .and_then(|stream| stream.pending.as_mut()),
            Carries::Standalone | Carries::Unknown(_) => None,
        };
        if let Some(pending) = pending {
            pending.retain(|call| *call != answered);
        }
    }

    fn issue(&mut self, connection: &mut Connection, text: &str, data: bool, rank: usize) {
        let (now_ms, open) = (self.now_ms, &self.open);
        let session = self.sessions.entry(connection.session.clone()).or_default();
        let new_stream = |kind, pending| Stream {
            kind,
            ids: Vec::new(),
            pending,
            last_issued_ms: now_ms,
            writers: BTreeSet::new(),
            order_uncertain: kind == Kind::Unplaced,
        };
        let mut placed = true;
        let live = connection.live;
        let at = match &mut connection.carries {
            Carries::NewStream(calls) => {
                session.streams.push(new_stream(Kind::Post, calls.take()));
                let at = session.streams.len() - 1;
                connection.carries = Carries::Stream(at);
                at
            }
            Carries::Standalone => {
                let standalone = |stream: &Stream| stream.kind == Kind::Standalone;
                session.streams.iter().position(standalone).unwrap_or_else(|| {
                    session.streams.push(new_stream(Kind::Standalone, None));
                    session.streams.len() - 1
                })
            }
            Carries::Stream(at) => *at,
            Carries::Perhaps(at) => {
                placed = false;
                *at
            }
            Carries::Unknown(own) => {
                placed = false;
                let known = |s: &Stream| s.kind != Kind::Unplaced && s.find(text).is_some();
                let joined = session.streams.iter().position(known);
                match (joined, *own) {
                    (Some(at), own) => {
                        connection.carries = Carries::Perhaps(at);
                        // What it brought before is the same stream's.
                        let before = own.map(|own| std::mem::take(&mut session.streams[own].ids));
                        session.streams[at].ids.extend(before.unwrap_or_default());
                        session.streams[at].order_uncertain = true;
                        at
                    }
                    (None, Some(at)) => at,
                    (None, None) => {
                        session.streams.push(new_stream(Kind::Unplaced, None));
                        let at = session.streams.len() - 1;
                        *own = Some(at);
                        at
                    }
                }
            }
        };
        let stream = &mut session.streams[at];
        if stream.find(text).is_some() {
            return;
        }
        stream.order_uncertain |=
            !placed || stream.writers.iter().any(|w| *w != connection.number && open.contains(w));
        stream.writers.insert(connection.number);
        stream.last_issued_ms = now_ms;
        stream.ids.push(Issued {
            text: text.to_owned(),
            data,
            rank,
            issued_ms: now_ms,
            placed,
            live,
        });
        if live && is_distinctive(text) {
            session.live.insert(text.to_owned());
        }
        session.keys.extend(distinctive_sequences(text));
        session.keys.extend(id_of(text).filter(|id| id.distinctive).map(|id| id.whole));
    }

    /// Whether ids of these two may be each other's.
    fn kin(&self, one: &str, other: &str) -> Certainty {
        let nothing = Session::default();
        let a = self.sessions.get(one).unwrap_or(&nothing);
        let b = self.sessions.get(other).unwrap_or(&nothing);
        if a.renamed_from.contains(other) || !a.live.is_disjoint(&b.live) {
            return Certainty::Yes;
        }
        let perhaps = self.relatives(one).contains(other)
            || self.relatives(one).len() > MANY_KIN
            || self.relatives(other).len() > MANY_KIN;
        if perhaps { Certainty::Perhaps } else { Certainty::No }
    }

    /// Sessions with which this one shares an id, a distinctive sequence, or a
    /// name, directly or over others.
    fn relatives(&self, name: &str) -> BTreeSet<String> {
        let touch = |a: &str, b: &str| {
            let nothing = Session::default();
            let sa = self.sessions.get(a).unwrap_or(&nothing);
            let sb = self.sessions.get(b).unwrap_or(&nothing);
            sa.renamed_from.contains(b)
                || sb.renamed_from.contains(a)
                || !sa.keys.is_disjoint(&sb.keys)
        };
        let mut found = BTreeSet::new();
        let mut todo = vec![name.to_owned()];
        while let Some(next) = todo.pop() {
            for other in self.sessions.keys() {
                if *other != next && other != name && !found.contains(other) && touch(&next, other)
                {
                    found.insert(other.clone());
                    todo.push(other.clone());
                }
            }
        }
        found
    }

    /// Whether the cursor is known to be another session's.
    fn foreign(&self, own: Option<&str>, cursor: &str) -> Certainty {
        let others: Vec<&String> = self
            .sessions
            .iter()
            .filter(|(name, session)| {
                Some(name.as_str()) != own && session.ids().any(|id| id.text == cursor)
            })
            .map(|(name, _)| name)
            .collect();
        let lives =
            |name: &&&String| self.sessions[**name].ids().any(|id| id.live && id.text == cursor);
        let sequences = distinctive_sequences(cursor);
        let kin = |other: &str| own.map_or(Certainty::No, |own| self.kin(own, other));
        let no = others.is_empty()
            || (!is_distinctive(cursor) && sequences.is_empty())
            || others.iter().all(|other| kin(other) == Certainty::Yes)
            || others.iter().filter(lives).count() > 1;
        if no {
            return Certainty::No;
        }
        // Nobody else was sent it or its like, whatever way.
        let only_one = self.sessions.iter().filter(|(name, session)| {
            Some(name.as_str()) != own
                && (session.has(cursor) || sequences.iter().any(|s| session.keys.contains(s)))
        });
        let yes = only_one.count() == 1
            && is_distinctive(cursor)
            && (!sequences.is_empty() || !self.stands_in_a_row(others[0], cursor))
            && others.iter().filter(lives).count() == 1
            && kin(others[0]) == Certainty::No
            // What it was sent in a resumption from nowhere is no proof.
            && self.sessions[others[0]].streams.iter().all(|s| s.kind != Kind::Unplaced);
        if yes { Certainty::Yes } else { Certainty::Perhaps }
    }

    /// Whether other ids of this one's sequences were sent to the session.
    fn stands_in_a_row(&self, name: &str, cursor: &str) -> bool {
        let of = places(cursor).map(|place| place.map(|(sequence, _)| sequence));
        self.sessions[name].ids().filter(|id| id.text != cursor).any(|id| {
            let there = places(&id.text).map(|place| place.map(|(sequence, _)| sequence));
            (0..2).any(|reading| of[reading].is_some() && of[reading] == there[reading])
        })
    }

    fn ambiguous(&self, session: &Session, cursor: &str) -> Certainty {
        let open = |placed_only: bool| {
            let streams = session.streams.iter().filter(|s| s.finished() == Finished::No);
            streams
                .filter_map(|s| s.find(cursor))
                .filter(|(_, id)| id.placed || !placed_only)
                .count()
        };
        // An answer may have come on a stream that isn't known.
        let unplaced = session.streams.iter().any(|s| s.kind == Kind::Unplaced);
        match (open(true), open(false)) {
            (2.., _) if !unplaced => Certainty::Yes,
            (_, 2..) => Certainty::Perhaps,
            _ => Certainty::No,
        }
    }

    fn below_floor(&self, session: &Session, cursor: &str) -> Certainty {
        let mut with_cursor =
            session.streams.iter().filter(|s| s.find(cursor).is_some()).peekable();
        let all = with_cursor.peek().is_some()
            && with_cursor.all(|s| s.is_below_floor(&self.rules, self.now_ms, cursor));
        let certain =
            session.streams.iter().all(|s| !s.order_uncertain && s.kind != Kind::Unplaced);
        match (all, certain) {
            (false, _) => Certainty::No,
            (true, false) => Certainty::Perhaps,
            (true, true) => Certainty::Yes,
        }
    }

    fn ahead_of_head(session: &Session, cursor: &str) -> Certainty {
        let past = |stream: &Stream, any: bool| {
            let sequences = |nth: usize| {
                let id = stream.ids.iter().rev().nth(nth);
                id.map(|id| places(&id.text)).unwrap_or_default().map(|p| p.map(|(s, _)| s))
            };
            // Of two readings that is meant by which it follows another id.
            let mut newest = sequences(0);
            let before = sequences(1);
            if (0..2).any(|reading| newest[reading].is_some() && newest[reading] == before[reading])
            {
                for reading in 0..2 {
                    newest[reading] = newest[reading].filter(|s| Some(*s) == before[reading]);
                }
            }
            (0..2).any(|reading| {
                let Some((sequence, index)) = places(cursor)[reading] else { return false };
                let mut of_sequence = stream
                    .ids
                    .iter()
                    .filter_map(|id| places(&id.text)[reading])
                    .filter(|(s, _)| *s == sequence)
                    .map(|(_, index)| index);
                if any {
                    of_sequence.any(|there| index > there)
                } else {
                    newest[reading] == Some(sequence) && of_sequence.all(|there| index > there)
                }
            })
        };
        if session.streams.iter().any(|stream| past(stream, false)) {
            Certainty::Yes
        } else if session.streams.iter().any(|stream| past(stream, true)) {
            Certainty::Perhaps
        } else {
            Certainty::No
        }
    }

    /// The faults that may be told of a cursor that was issued on this very
    /// session, whatever the guard has forgotten.
    pub fn faults_of_issued(&self, name: &str, cursor: &str) -> Vec<&'static str> {
        let cursor = trimmed(cursor);
        let Some(session) = self.sessions.get(name) else { return Vec::new() };
        let mut faults = Vec::new();
        if session.ended {
            faults.push("inconsistent;session_terminated");
        }
        if self.ambiguous(session, cursor) != Certainty::No {
            faults.push("inconsistent;ambiguous_cursor");
        }
        // Where ids were forgotten and came again, the order in which they were
        // seen is the server's.
        let mut with_cursor = session.streams.iter().filter(|s| s.find(cursor).is_some());
        if self.below_floor(session, cursor) != Certainty::No
            || with_cursor.any(|s| s.is_below_floor_by_rank(&self.rules, self.now_ms, cursor))
        {
            faults.push("inconsistent;below_floor");
        }
        faults
    }

    /// Whether a fault `foreign_session` would be wrong even where the guard
    /// has forgotten things: the cursor's session had this one's name, or was
    /// sent the same ids.
    pub fn is_of_kin(&self, name: &str, cursor: &str) -> bool {
        let others = self.sessions.iter().filter(|(other, s)| *other != name && s.has(cursor));
        others.clone().next().is_some()
            && others.into_iter().all(|(other, _)| self.kin(name, other) == Certainty::Yes)
    }

    /// The verdicts that are right for a guard that has forgotten nothing.
    pub fn judge(&self, name: Option<&str>, cursor: &str) -> Vec<&'static str> {
        let cursor = trimmed(cursor);
        // Rule 3.
        if cursor.len() > self.rules.event_id_bytes {
            return vec!["unverified;cursor_too_long"];
        }
        let session = name.and_then(|name| self.sessions.get(name));
        // Rule 4.
        if session.is_some_and(|session| session.ended) {
            return vec!["inconsistent;session_terminated"];
        }
        let mut verdicts = Vec::new();
        let is_issued = session.is_some_and(|session| session.has(cursor));
        if !is_issued {
            // Rules 5 to 7.
            let (fault, otherwise) = match name {
                None => ("inconsistent;session_missing", Some("unverified;session_missing")),
                Some(_) => ("inconsistent;foreign_session", None),
            };
            let foreign = self.foreign(name, cursor);
            if foreign != Certainty::No {
                verdicts.push(fault);
            }
            if foreign == Certainty::Yes {
                return verdicts;
            }
            if let Some(otherwise) = otherwise {
                verdicts.push(otherwise);
                return verdicts;
            }
        }
        // Rule 8.
        let Some(session) = session else {
            verdicts.push("unverified;unknown_session");
            return verdicts;
        };
        if is_issued {
            // Rules 9, 10 and 12.
            for (fault, certainty) in [
                ("inconsistent;ambiguous_cursor", self.ambiguous(session, cursor)),
                ("inconsistent;below_floor", self.below_floor(session, cursor)),
            ] {
                if certainty != Certainty::No {
                    verdicts.push(fault);
                }
                if certainty == Certainty::Yes {
                    return verdicts;
                }
            }
            verdicts.push("continue");
            return verdicts;
        }
        // Rule 13.
        if !session.complete || !self.rules.exclusive {
            verdicts.push("unverified;history_incomplete");
            return verdicts;
        }
        // Rules 15 and 16; nothing was evicted here.
        let ahead = Twin::ahead_of_head(session, cursor);
        if ahead != Certainty::No {
            verdicts.push("inconsistent;ahead_of_head");
        }
        if ahead != Certainty::Yes {
            verdicts.push("inconsistent;never_issued");
        }
        verdicts
    }
}
