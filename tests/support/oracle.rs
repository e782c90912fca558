//! The naive twin of the ledger and the verdict: keeps every id of every
//! session for ever, in full, and judges a cursor by reading `design.md` from
//! the top. Where the design leaves room (who overtook whom on two connections
//! at once), it gives every verdict that is right.
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a test may fail"
)]

use std::collections::{BTreeMap, BTreeSet};

use mcp_resume_guard::event_id::{EventId, comes_back_unchanged};
use mcp_resume_guard::fingerprint::Secret;

const SECRET: Secret = Secret::new([1; 16]);

/// With more relatives the guard takes a session for everybody's.
const MANY_KIN: usize = 4;

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
    /// The server's stream, and its place there.
    place: (usize, usize),
    issued_ms: u64,
    /// Sent by a connection of which it is certain what it carries.
    placed: bool,
    /// The guard may have it of another stream only.
    perhaps_elsewhere: bool,
    /// The connection that brought it first.
    by: usize,
}

#[derive(Debug)]
pub struct Stream {
    kind: Kind,
    ids: Vec<Issued>,
    /// The requests that it answers; `None`: can't be told.
    calls: Option<Vec<u32>>,
    /// A connection was found to be this stream's after it had brought data,
    /// which may have been answers.
    calls_doubtful: bool,
    last_issued_ms: u64,
    /// Connections that have sent something new on it, the newest last.
    writers: Vec<usize>,
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

/// What was seen of the answers, wherever it came, and of streams that aren't
/// known.
#[derive(Debug, Clone, Copy)]
struct Seen<'a> {
    answered: &'a BTreeSet<u32>,
    /// When the newest event came on a stream that isn't known.
    unplaced_ms: Option<u64>,
    /// See [`Session::guessed`].
    guessed: bool,
    /// See [`Session::silent`].
    silent: bool,
}

impl Stream {
    fn finished(&self, answered: &BTreeSet<u32>) -> Finished {
        match (self.kind, &self.calls) {
            (Kind::Standalone, _) => Finished::No,
            (Kind::Unplaced, _) | (Kind::Post, None) => Finished::Unknown,
            (Kind::Post, Some(calls)) if calls.iter().all(|call| answered.contains(call)) => {
                Finished::Yes
            }
            (Kind::Post, Some(_)) => Finished::No,
        }
    }

    /// Whether the guard can know as much.
    fn finished_is_certain(&self, seen: Seen<'_>) -> bool {
        self.kind != Kind::Post
            || (!seen.guessed && !seen.silent && !self.calls_doubtful && seen.unplaced_ms.is_none())
    }

    fn find(&self, text: &str) -> Option<(usize, &Issued)> {
        self.ids.iter().enumerate().find(|(_, id)| id.text == text)
    }

    /// Whether an event brings the answer to one of its calls.
    fn answers_own(&self, answers: Answers) -> bool {
        matches!((answers, &self.calls), (Answers::Call(call), Some(calls)) if calls.contains(&call))
    }

    /// A connection writes something down for it. What others brought since the
    /// connection's resumption arrived may stand before or behind that.
    fn is_written_by(&mut self, connection: &mut Connection) {
        let known_then = connection.known_then.take();
        self.order_uncertain |= known_then.is_some_and(|known| known != self.ids.len());
    }

    /// How many ids with data stand behind an id, or behind none.
    fn data_behind(&self, text: &str) -> Option<usize> {
        let (at, _) = self.find(text)?;
        Some(self.ids[at + 1..].iter().filter(|id| id.data).count())
    }

    /// A GET brings an id with data again. What isn't the next one, or stands on
    /// another stream, shows that the server may have its events in another
    /// order than that in which they were seen: then the guard claims no floor
    /// any more. It needn't, where it knows what has to come, and doesn't where
    /// the ids of a sequence tell the order themselves.
    fn comes_again(&mut self, connection: &mut Connection, text: &str) {
        let cursor = connection.cursor.as_deref();
        let all = self.ids.iter().filter(|id| id.data).count();
        let behind = self.data_behind(text).unwrap_or(0);
        let from = cursor.map_or(all, |cursor| self.data_behind(cursor).unwrap_or(0));
        let is_next = match connection.behind_again {
            None if cursor == Some(text) => true,
            again => again.unwrap_or(from).checked_sub(1) == Some(behind),
        };
        // What stands before a cursor without data isn't certain even there.
        let is_primed = cursor.and_then(|cursor| self.find(cursor)).is_some_and(|(_, id)| !id.data);
        self.order_uncertain |= !is_next && (is_primed || !self.rises());
        connection.behind_again = Some(behind);
    }

    /// Whether all its ids are of one sequence, each higher than the one before.
    fn rises(&self) -> bool {
        let places: Vec<_> = self.ids.iter().map(|id| places(&id.text)).collect();
        let rises_in = |reading: usize| {
            places.windows(2).all(|pair| match (pair[0][reading], pair[1][reading]) {
                (Some((one, index)), Some((other, next))) => one == other && index < next,
                _ => false,
            })
        };
        places.len() > 1 && (rises_in(0) || rises_in(1))
    }

    fn is_below_floor(&self, rules: &Rules, now_ms: u64, seen: Seen<'_>, text: &str) -> Certainty {
        let Some((at, _)) = self.find(text) else { return Certainty::No };
        let owed = self.ids[at + 1..].iter().filter(|id| id.data).count() as u64;
        let last_ms = self.last_issued_ms.max(seen.unplaced_ms.unwrap_or(0));
        self.is_too_much(rules, now_ms - last_ms, seen, owed)
    }

    /// Whether more is owed than the server keeps, or for longer.
    fn is_too_much(&self, rules: &Rules, idle_ms: u64, seen: Seen<'_>, owed: u64) -> Certainty {
        if owed == 0 {
            return Certainty::No;
        }
        if rules.events_per_stream.is_some_and(|kept| owed > kept) {
            return Certainty::Yes;
        }
        let older_than = |seconds: Option<u64>| seconds.is_some_and(|s| idle_ms > s * 1000);
        let open = older_than(rules.seconds);
        let finished = older_than(rules.finished_stream_seconds);
        let too_old = match self.finished(seen.answered) {
            Finished::No => open,
            Finished::Yes => finished,
            Finished::Unknown => open && finished,
        };
        match too_old {
            false if seen.guessed && self.kind == Kind::Post && (open || finished) => {
                Certainty::Perhaps
            }
            false => Certainty::No,
            true if self.finished_is_certain(seen) || (open && finished) => Certainty::Yes,
            true => Certainty::Perhaps,
        }
    }
}

#[derive(Debug, Default)]
pub struct Session {
    complete: bool,
    ended: bool,
    streams: Vec<Stream>,
    /// Sessions that were sent the same ids live, or whose names it had.
    kin: BTreeSet<String>,
    /// The guard may have come to take it for everybody's kin.
    perhaps_everybodys: bool,
    /// The guard guessed at a resumption's stream, and may have looked for
    /// answers on the wrong one: from an ambiguous cursor that was passed (in
    /// observe mode, that is), or from an unknown one that brought first an id
    /// that another stream is known to have, and its own isn't yet. Whether it
    /// knows of answers is left open from then on.
    guessed: bool,
    /// A GET has brought ids of other streams again before the standalone stream
    /// had any of its own: see [`Stream::comes_again`].
    disordered: bool,
    /// A resumption from a cursor of several streams brought a common id that not
    /// all of them have: which one has it isn't certain. The guard takes the
    /// history for incomplete then, from some moment on.
    doubted: bool,
    /// A resumption of which the stream isn't known brought data without an
    /// id, which may have been an answer. Whether the guard takes notice is
    /// left open, as long as it doesn't refuse what is finished.
    silent: bool,
}

impl Session {
    fn has(&self, text: &str) -> bool {
        self.streams.iter().any(|stream| stream.find(text).is_some())
    }

    /// Whether a stream has it of which it is known which one it is.
    fn has_placed(&self, text: &str) -> Certainty {
        let placed = self.streams.iter().filter(|stream| stream.kind != Kind::Unplaced);
        let found = placed
            .filter_map(|stream| stream.find(text))
            .map(|(_, id)| if id.perhaps_elsewhere { Certainty::Perhaps } else { Certainty::Yes });
        found.max().unwrap_or(Certainty::No)
    }

    /// Whether a cursor is below the floor by the server's order, whatever
    /// streams the ids were taken to be of.
    fn is_below_floor_at_the_server(
        &self,
        rules: &Rules,
        now_ms: u64,
        seen: Seen<'_>,
        text: &str,
    ) -> bool {
        let all = || self.streams.iter().flat_map(|stream| &stream.ids);
        self.streams.iter().filter_map(|stream| Some((stream, stream.find(text)?.1))).any(
            |(stream, cursor)| {
                let (source, rank) = cursor.place;
                let later = all().filter(|id| id.place.0 == source && id.place.1 > rank);
                let with_data = later.clone().filter(|id| id.data).map(|id| id.place.1);
                let owed = with_data.collect::<BTreeSet<usize>>().len() as u64;
                let newest_ms = later.map(|id| id.issued_ms).max().unwrap_or(now_ms);
                stream.is_too_much(rules, now_ms - newest_ms, seen, owed) != Certainty::No
            },
        )
    }

    fn unplaced_ms(&self) -> Option<u64> {
        let unplaced = self.streams.iter().filter(|s| s.kind == Kind::Unplaced);
        unplaced.filter(|s| !s.ids.is_empty()).map(|s| s.last_issued_ms).max()
    }
}

/// How an id was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Live,
    Replayed,
    Unplaced,
}

/// That an id, or one of its sequence, was sent to a session.
#[derive(Debug)]
struct Sending {
    session: String,
    how: How,
    /// How many connections there had been.
    after: usize,
    /// By a connection whose stream is any of several, one of which may be one
    /// that isn't known.
    guessed: bool,
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
    /// It begins a stream, or is a GET without a cursor.
    live: bool,
    /// It is the answer to a POST.
    starts_stream: bool,
    /// It is a GET that knew what it carries when it began.
    is_placed_get: bool,
    /// Where it stood when its first event came: how many ids each stream of
    /// the session had.
    lengths: Option<Vec<usize>>,
    /// The cursor that it resumes from, if it is known.
    cursor: Option<String>,
    /// It has brought a common id that several streams have, before it was known
    /// which one this is.
    unplaceable: bool,
    /// The streams that have it, where those are several.
    several: Vec<usize>,
    /// The ids of its stream when the resumption arrived, until it writes
    /// something down.
    known_then: Option<usize>,
    /// The ids with data behind the last one that came again.
    behind_again: Option<usize>,
    /// What is owed to it, and hasn't come.
    owed: BTreeSet<String>,
    /// What it was the first to send, with data.
    pushed: BTreeSet<String>,
    saw_data: bool,
    /// The guard could not read an answer, or not the requests in time.
    calls_doubtful: bool,
}

/// What an event's data answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answers {
    Nothing,
    Call(u32),
    /// In more data than the guard reads.
    Unreadably(u32),
}

/// Everything that ever was.
#[derive(Debug, Default)]
pub struct Twin {
    rules: Rules,
    sessions: BTreeMap<String, Session>,
    /// By the key under which the guard knows them, in their order.
    sendings: BTreeMap<u64, Vec<Sending>>,
    /// The calls whose answers have passed, on whatever connection.
    answered: BTreeSet<u32>,
    /// The session of each call.
    asked_on: BTreeMap<u32, String>,
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

fn is_distinctive(text: &str) -> bool {
    id_of(text).is_some_and(|id| id.index_key().is_some())
}

/// Whether a GET brings an id again that it found on another stream of the
/// session, and that no two streams have by chance.
fn is_elsewhere(
    session: &Session,
    own: Option<usize>,
    text: &str,
    had: impl Fn(usize, &Stream) -> bool,
) -> bool {
    let elsewhere = |(at, stream)| Some(at) != own && had(at, stream);
    is_distinctive(text) && session.streams.iter().enumerate().any(elsewhere)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

    /// Whether answers may have come on connections of which the guard can't
    /// know what stream they carry. It settles what it knows of no answer.
    pub fn answers_may_be_unseen(&self, session: &str) -> bool {
        self.sessions.get(session).is_some_and(|session| {
            let doubtful = |stream: &Stream| stream.kind == Kind::Unplaced || stream.calls_doubtful;
            session.guessed || session.silent || session.streams.iter().any(doubtful)
        })
    }

    /// Whether the answer to a call has passed where the guard may know of it.
    pub fn is_answered(&self, call: u32) -> bool {
        self.answered.contains(&call)
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
        let older = self.sessions.get(old);
        let kin = older.map(|session| session.kin.clone()).unwrap_or_default();
        let perhaps_everybodys = older.is_some_and(|session| session.perhaps_everybodys);
        let session = self.sessions.entry(new.to_owned()).or_default();
        session.complete = false;
        session.kin.extend(kin);
        session.kin.insert(old.to_owned());
        session.perhaps_everybodys |= perhaps_everybodys || session.kin.len() > MANY_KIN;
        self.make_incomplete(old);
    }

    pub fn make_incomplete(&mut self, session: &str) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.complete = false;
        }
    }

    fn connect(&mut self, session: &str, carries: Carries) -> Connection {
        self.connections += 1;
        self.open.insert(self.connections);
        let is_new = matches!(carries, Carries::NewStream(_));
        Connection {
            live: is_new || matches!(carries, Carries::Standalone),
            starts_stream: is_new,
            is_placed_get: !is_new && !matches!(carries, Carries::Unknown(_)),
            number: self.connections,
            session: session.to_owned(),
            carries,
            lengths: None,
            cursor: None,
            unplaceable: false,
            several: Vec::new(),
            known_then: None,
            behind_again: None,
            owed: BTreeSet::new(),
            pushed: BTreeSet::new(),
            saw_data: false,
            calls_doubtful: false,
        }
    }

    /// A POST's event stream. `calls`: its requests, `None` if unreadable.
    pub fn post(&mut self, session: &str, calls: Option<Vec<u32>>) -> Connection {
        for call in calls.iter().flatten() {
            self.asked_on.insert(*call, session.to_owned());
        }
        self.connect(session, Carries::NewStream(calls))
    }

    /// A GET without a cursor. Answered under another session's name, what it
    /// carries there is not known.
    pub fn listen(&mut self, asked: &str, answered: &str) -> Connection {
        let carries = if asked == answered { Carries::Standalone } else { Carries::Unknown(None) };
        self.connect(answered, carries)
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
        let several = with_cursor.clone();
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
                    .max_by_key(|at| (streams[*at].finished(&self.answered) == Finished::No, *at))
                    .unwrap_or(0),
            ),
        };
        let guessed = self
            .sessions
            .get(asked)
            .is_some_and(|session| self.stands_on_two_open_streams(session, trimmed(cursor)));
        let (owed, known_then) = match carries {
            Carries::Stream(at) | Carries::Perhaps(at) => {
                let (place, _) = streams[at].find(trimmed(cursor)).unwrap();
                let later = streams[at].ids[place + 1..].iter();
                let owed = later.filter(|id| id.data).map(|id| id.text.clone()).collect();
                (owed, Some(streams[at].ids.len()))
            }
            _ => (BTreeSet::new(), None),
        };
        if let Some(session) = self.sessions.get_mut(asked) {
            session.guessed |= guessed;
        }
        let mut connection = self.connect(answered, carries);
        connection.cursor = known_then.map(|_| trimmed(cursor).to_owned());
        connection.owed = owed;
        connection.known_then = known_then;
        if matches!(connection.carries, Carries::Perhaps(_)) {
            connection.several = several;
        }
        connection
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
        answers: Answers,
        place: (usize, usize),
    ) {
        let text = text.map(trimmed).filter(|text| !text.is_empty());
        let too_long = text.is_some_and(|text| text.len() > self.rules.event_id_bytes);
        let recorded = text.filter(|_| !too_long);
        // A GET reads what is known of its streams when the first id comes, a
        // known stream's when the first event does.
        if recorded.is_some()
            || matches!(connection.carries, Carries::Stream(_) | Carries::Perhaps(_))
        {
            let streams = self.sessions.get(&connection.session).map(|session| &session.streams);
            let lengths = || streams.into_iter().flatten().map(|s| s.ids.len()).collect();
            connection.lengths.get_or_insert_with(lengths);
        }
        connection.saw_data |= data;
        let is_known = self.sessions.contains_key(&connection.session);
        if matches!(connection.carries, Carries::Unknown(None))
            && recorded.is_none()
            && data
            && let Some(session) = self.sessions.get_mut(&connection.session)
        {
            session.silent = true;
        }
        if let Some(text) = recorded {
            self.issue(connection, text, (data, answers), place);
        }
        if text
            .is_some_and(|text| !comes_back_unchanged(text.as_bytes(), self.rules.event_id_bytes))
        {
            self.make_incomplete(&connection.session);
        }
        if let Answers::Call(call) | Answers::Unreadably(call) = answers {
            // What comes under another session's name (a GET that was renamed)
            // is not looked for on the streams of the old one. Nor is anything
            // kept of a session before it has an id: there no client can have a
            // cursor of the stream that awaits this.
            let is_seen = is_known || !matches!(connection.carries, Carries::Unknown(None));
            if self.asked_on.get(&call) == Some(&connection.session) && is_seen {
                self.answered.insert(call);
            }
            if matches!(answers, Answers::Unreadably(_)) {
                self.doubt_calls(connection);
            }
            // It makes a record of its own for that.
            if let Carries::Stream(at) | Carries::Perhaps(at) = connection.carries
                && let Some(session) = self.sessions.get_mut(&connection.session)
            {
                session.streams[at].is_written_by(connection);
                session.streams[at].writers.push(connection.number);
            }
        }
    }

    /// The guard can't tell which calls of the connection's stream are pending.
    pub fn doubt_calls(&mut self, connection: &mut Connection) {
        connection.calls_doubtful = true;
        if let Carries::Stream(at) | Carries::Perhaps(at) = connection.carries
            && let Some(session) = self.sessions.get_mut(&connection.session)
        {
            session.streams[at].calls_doubtful = true;
        }
    }

    /// A POST's body ends after its answer has begun.
    pub fn late_body(&mut self, connection: &mut Connection) {
        // Data that has passed by then may have been answers.
        if connection.saw_data {
            self.doubt_calls(connection);
        }
    }

    fn issue(
        &mut self,
        connection: &mut Connection,
        text: &str,
        (data, answers): (bool, Answers),
        place: (usize, usize),
    ) {
        let (now_ms, open) = (self.now_ms, &self.open);
        let session = self.sessions.entry(connection.session.clone()).or_default();
        let new_stream = |kind, calls| Stream {
            kind,
            ids: Vec::new(),
            calls,
            calls_doubtful: false,
            last_issued_ms: now_ms,
            writers: Vec::new(),
            order_uncertain: kind == Kind::Unplaced,
        };
        let mut placed = true;
        let lengths = connection.lengths.as_deref().unwrap_or_default();
        // Whether the connection found this id on a stream.
        let had = |at: usize, stream: &Stream| {
            let length = lengths.get(at).copied().unwrap_or(0);
            stream.find(text).is_some_and(|(place, _)| place < length)
        };
        let at = match &mut connection.carries {
            Carries::NewStream(calls) => {
                session.streams.push(new_stream(Kind::Post, calls.take()));
                let at = session.streams.len() - 1;
                session.streams[at].calls_doubtful = connection.calls_doubtful;
                connection.carries = Carries::Stream(at);
                at
            }
            Carries::Standalone => {
                let standalone = |stream: &Stream| stream.kind == Kind::Standalone;
                match session.streams.iter().position(standalone) {
                    Some(at) => at,
                    None if is_elsewhere(session, None, text, had) => {
                        session.disordered |= data;
                        return;
                    }
                    None => {
                        let disordered = session.disordered;
                        session.streams.push(new_stream(Kind::Standalone, None));
                        session.streams.last_mut().unwrap().order_uncertain |= disordered;
                        session.streams.len() - 1
                    }
                }
            }
            Carries::Stream(at) => *at,
            Carries::Perhaps(at) => {
                placed = false;
                *at
            }
            Carries::Unknown(own) => {
                placed = false;
                let mut known = session
                    .streams
                    .iter()
                    .enumerate()
                    .filter(|(at, s)| s.kind != Kind::Unplaced && had(*at, s));
                let (first, another) = (known.next(), known.next());
                // The first known id has to tell.
                connection.unplaceable |= another.is_some() && !is_distinctive(text);
                let is_only = another.is_none() && !connection.unplaceable;
                let joined = first.filter(|_| is_only).map(|(at, _)| at);
                match (joined, *own) {
                    (Some(at), own) => {
                        connection.carries = Carries::Perhaps(at);
                        // The design's rule, and wrong where the id is one that
                        // the server's stream has as well.
                        let found = session.streams[at].find(text).map(|(_, id)| id.place.0);
                        session.guessed |= found != Some(place.0);
                        // What it brought before is the same stream's.
                        let before = own.map(|own| &mut session.streams[own]);
                        let before = before.map(|b| (b.last_issued_ms, std::mem::take(&mut b.ids)));
                        let stream = &mut session.streams[at];
                        if let Some((last_ms, ids)) = before {
                            stream.last_issued_ms = stream.last_issued_ms.max(last_ms);
                            stream.ids.extend(ids);
                        }
                        stream.order_uncertain = true;
                        stream.calls_doubtful |= connection.saw_data;
                        stream.writers.push(connection.number);
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
        let elsewhere = connection.is_placed_get && is_elsewhere(session, Some(at), text, had);
        let everybodys = || {
            let streams = &session.streams;
            let mut others = connection.several.iter().filter(|other| **other != at);
            streams[at].find(text).is_some() && others.all(|other| had(*other, &streams[*other]))
        };
        session.doubted |= connection.several.len() > 1 && !is_distinctive(text) && !everybodys();
        let was_there = had(at, &session.streams[at]);
        let stream = &mut session.streams[at];
        let is_unknown = matches!(connection.carries, Carries::Unknown(_));
        let how = match (connection.live, is_unknown || stream.kind == Kind::Unplaced) {
            (true, _) => How::Live,
            (false, true) => How::Unplaced,
            (false, false) => How::Replayed,
        };
        let key = id_of(text).and_then(|id| id.index_key());
        let name = connection.session.clone();
        connection.owed.remove(text);
        // The answer to a call of the stream is the stream's, whatever other
        // one has brought it.
        // Unless the guard doesn't know the calls.
        let is_answer = elsewhere && stream.answers_own(answers);
        let perhaps_elsewhere =
            (is_answer && stream.calls_doubtful) || !connection.several.is_empty();
        let elsewhere = elsewhere && !is_answer;
        let brought_by = stream.find(text).map(|(_, id)| id.by);
        if elsewhere || brought_by.is_some() {
            if data && !connection.starts_stream {
                stream.comes_again(connection, text);
            }
            // After new ones: then those weren't new, perhaps.
            stream.order_uncertain |=
                !connection.pushed.is_empty() && !connection.pushed.contains(text);
            let by_another = brought_by.is_some_and(|by| by != connection.number);
            if let Some(key) = key.filter(|_| !elsewhere && !was_there && by_another) {
                self.note_again(&name, key, how, connection);
            }
            return;
        }
        let others_open =
            stream.writers.iter().any(|w| *w != connection.number && open.contains(w));
        let others_since = stream.writers.contains(&connection.number)
            && stream.writers.last() != Some(&connection.number);
        stream.order_uncertain |= !placed || others_open || others_since;
        stream.is_written_by(connection);
        if data {
            stream.order_uncertain |= !connection.owed.is_empty();
            connection.pushed.insert(text.to_owned());
        }
        stream.writers.push(connection.number);
        stream.last_issued_ms = now_ms;
        stream.ids.push(Issued {
            text: text.to_owned(),
            data,
            place,
            issued_ms: now_ms,
            placed: placed && !perhaps_elsewhere,
            perhaps_elsewhere,
            by: connection.number,
        });
        if let Some(key) = key {
            self.note(&name, key, how, connection);
        }
    }

    /// An id that another connection has brought on the same stream since this
    /// one read it. To this one it is new, so the guard notes it a second time.
    /// Of those who were sent an id it keeps only the first: if that is another
    /// session, then it can't tell this one from a third, and takes it for
    /// everybody's. That proves less than it could, and refuses nothing.
    fn note_again(&mut self, name: &str, key: u64, how: How, connection: &Connection) {
        let first = self.sendings.get(&key).and_then(|sendings| sendings.first());
        let is_shared = first.is_some_and(|first| {
            let is_later = first.after >= connection.number;
            first.session != name && (how == How::Live || is_later)
        });
        if let Some(session) = self.sessions.get_mut(name) {
            session.perhaps_everybodys |= is_shared;
        }
    }

    fn note(&mut self, name: &str, key: u64, how: How, connection: &Connection) {
        let before = self.sendings.entry(key).or_default();
        let first = before.first().map(|first| first.session.clone());
        let others: BTreeSet<String> =
            before.iter().map(|s| s.session.clone()).filter(|s| s != name).collect();
        let live_before = before.iter().any(|s| s.session == name && s.how == How::Live);
        // What others were sent only after a resumption began is no replay of
        // theirs.
        let is_later =
            before.first().is_some_and(|f| f.session != name && f.after >= connection.number);
        let how = if is_later { How::Live } else { how };
        before.push(Sending {
            session: name.to_owned(),
            how,
            after: self.connections,
            guessed: !connection.several.is_empty(),
        });
        if how != How::Live || first.is_none_or(|first| first == name) || others.is_empty() {
            return;
        }
        // Each of the two may be forgotten, so both remember the other.
        for other in &others {
            let session = self.sessions.entry(other.clone()).or_default();
            session.kin.insert(name.to_owned());
            session.perhaps_everybodys |= session.kin.len() > MANY_KIN;
        }
        let session = self.sessions.entry(name.to_owned()).or_default();
        session.perhaps_everybodys |= others.len() > 1 || live_before;
        session.kin.extend(others);
        session.perhaps_everybodys |= session.kin.len() > MANY_KIN;
    }

    /// Whether ids of these two may be each other's.
    fn kin(&self, one: &str, other: &str) -> Certainty {
        let nothing = Session::default();
        let a = self.sessions.get(one).unwrap_or(&nothing);
        let b = self.sessions.get(other).unwrap_or(&nothing);
        let both_live = self.sendings.values().any(|sendings| {
            let live = |name| sendings.iter().any(|s| s.session == name && s.how == How::Live);
            live(one) && live(other)
        });
        if both_live {
            Certainty::Yes
        } else if a.kin.contains(other)
            || b.kin.contains(one)
            || a.perhaps_everybodys
            || b.perhaps_everybodys
        {
            Certainty::Perhaps
        } else {
            Certainty::No
        }
    }

    /// Whether the cursor is known to be another session's.
    fn foreign(&self, own: Option<&str>, cursor: &str) -> Certainty {
        let Some(id) = id_of(cursor) else { return Certainty::No };
        let proofs = id.distinctive_keys().map(|key| {
            let Some(sendings) = self.sendings.get(&key) else { return Certainty::No };
            let owner = &sendings[0].session;
            // Nobody else was sent it or its like, whatever way.
            let is_proof = sendings[0].how != How::Unplaced
                && sendings.iter().all(|s| s.session == *owner)
                && own != Some(owner);
            let has_it = match key == id.whole {
                true => Certainty::Yes,
                false => self.sessions[owner].has_placed(cursor),
            };
            match own.map_or(Certainty::No, |own| self.kin(own, owner)) {
                _ if !is_proof => Certainty::No,
                Certainty::Yes => Certainty::No,
                Certainty::Perhaps => has_it.min(Certainty::Perhaps),
                Certainty::No if sendings[0].guessed => has_it.min(Certainty::Perhaps),
                Certainty::No => has_it,
            }
        });
        proofs.max().unwrap_or(Certainty::No)
    }

    fn seen<'a>(&'a self, session: &Session) -> Seen<'a> {
        Seen {
            answered: &self.answered,
            unplaced_ms: session.unplaced_ms(),
            guessed: session.guessed,
            silent: session.silent,
        }
    }

    /// Whether two streams are open that have the cursor, whatever the guard
    /// can know of them.
    fn stands_on_two_open_streams(&self, session: &Session, cursor: &str) -> bool {
        let perhaps_open = |stream: &&Stream| match stream.finished(&self.answered) {
            Finished::No => true,
            Finished::Yes => session.guessed,
            Finished::Unknown => false,
        };
        let open = session.streams.iter().filter(perhaps_open);
        open.filter(|s| s.find(cursor).is_some()).count() > 1
    }

    fn ambiguous(&self, session: &Session, cursor: &str) -> Certainty {
        let seen = self.seen(session);
        // An answer may have come on a stream that isn't known.
        if !self.stands_on_two_open_streams(session, cursor) {
            return Certainty::No;
        }
        // After a wrong guess the guard may know of what the twin doesn't.
        if seen.unplaced_ms.is_some() {
            return if session.guessed { Certainty::Perhaps } else { Certainty::No };
        }
        let open = session.streams.iter().filter(|s| s.finished(&self.answered) == Finished::No);
        let certain = open
            .filter(|s| s.finished_is_certain(seen))
            .filter_map(|s| s.find(cursor))
            .filter(|(_, id)| id.placed)
            .count();
        if certain > 1 { Certainty::Yes } else { Certainty::Perhaps }
    }

    fn below_floor(&self, session: &Session, cursor: &str) -> Certainty {
        // A stream that the guard didn't see may be the one.
        if !session.complete && !is_distinctive(cursor) {
            return Certainty::No;
        }
        let seen = self.seen(session);
        let may_be_of_another = (!session.complete || session.doubted) && !is_distinctive(cursor);
        let with_cursor = session.streams.iter().filter(|s| s.find(cursor).is_some());
        let below = with_cursor.map(|stream| {
            match stream.is_below_floor(&self.rules, self.now_ms, seen, cursor) {
                // A common id may be of a stream that the guard never saw.
                Certainty::Yes if stream.order_uncertain || may_be_of_another => Certainty::Perhaps,
                below => below,
            }
        });
        below.min().unwrap_or(Certainty::No)
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
        if self.stands_on_two_open_streams(session, cursor) {
            faults.push("inconsistent;ambiguous_cursor");
        }
        // Where ids were forgotten and came again, the order in which they were
        // seen is the server's.
        let seen = self.seen(session);
        if self.below_floor(session, cursor) != Certainty::No
            || session.is_below_floor_at_the_server(&self.rules, self.now_ms, seen, cursor)
        {
            faults.push("inconsistent;below_floor");
        }
        faults
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
        if session.doubted {
            verdicts.push("unverified;history_incomplete");
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
