//! Properties of the check of replays, with a naive model of the servers.
//!
//! The model keeps every event of every stream in full, and every delivery in
//! the order of the wire. With an honest server nothing is ever found, whatever
//! its ids, and whatever breaks in between; and what is found in one that isn't
//! is there in the list of deliveries.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::arithmetic_side_effects,
    reason = "a test may fail"
)]

mod support {
    mod cases;
    mod events;
    #[path = "mod.rs"]
    mod gateway;
    pub use cases::cases;
    pub use events::*;
    pub use gateway::*;
}

use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;
use support::{
    Answer, Dice, Ended, Flaky, Format, Gateway, Out, Running, cases, index, joined, split, uuid,
};

const STREAM: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream")];

/// Ids of events without data, at the start of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Priming {
    None,
    /// One for each stream.
    Fixed,
    /// A new one for each connection, behind all that is replayed.
    New,
    /// The same before it, where the cursor is.
    NewAtCursor,
}

/// How the server of a session works.
#[derive(Debug, Clone, Copy)]
struct Server {
    format: Format,
    priming: Priming,
    /// A replay brings the cursor's own event, too.
    inclusive: bool,
    /// A GET without a cursor replays from the start.
    replays_on_get: bool,
    /// A replay gives the events new ids.
    remints: bool,
    /// The guard saw its `initialize`.
    is_known: bool,
}

#[derive(Debug, Clone, Default)]
struct Setup {
    servers: Vec<Server>,
    workers: u64,
    exclusive: bool,
    /// The faults that are cut, in the order of `FAULTS`.
    cuts: [bool; 4],
    /// How many sessions, streams and ids are remembered.
    sizes: (u32, u8, u16),
    seed: u64,
}

const FAULTS: [&str; 4] = ["gap", "foreign_session", "foreign_stream", "repeated"];

impl Setup {
    fn config(&self) -> String {
        let [gap, session, stream, repeated] =
            self.cuts.map(|is_cut| if is_cut { "cut" } else { "report" });
        let history = if self.exclusive { "exclusive" } else { "shared" };
        let (sessions, streams, ids) = self.sizes;
        format!(
            r#"{{"history":"{history}","replay":{{"gap":"{gap}","foreign_session":"{session}",
            "foreign_stream":"{stream}","repeated":"{repeated}"}},"state":{{"sessions":{sessions},
            "streams_per_session":{streams},"ids_per_stream":{ids}}}}}"#,
        )
    }
}

/// An event in the server's store.
#[derive(Debug, Clone)]
struct Logged {
    /// All its ids, the newest last.
    ids: Vec<String>,
    data: bool,
    /// The call that it answers.
    answers: Option<u32>,
}

impl Logged {
    fn new(id: String, data: bool) -> Self {
        Logged { ids: vec![id], data, answers: None }
    }

    fn id(&self) -> &String {
        self.ids.last().unwrap()
    }
}

/// What a client has when it comes back.
#[derive(Debug, Clone)]
struct Snapshot {
    cursor: String,
    /// The ids of events with data that it has.
    received: BTreeSet<String>,
}

#[derive(Debug)]
struct Stream {
    session: usize,
    /// `None`: the standalone stream.
    request: Option<u64>,
    next: u64,
    /// In the order in which they are replayed.
    log: Vec<Logged>,
    priming: Option<String>,
    has_calls: bool,
    /// Calls without an answer yet.
    pending: Vec<u32>,
    snapshots: Vec<Snapshot>,
    /// The order of the store is another one than that of the wire.
    is_reordered: bool,
}

impl Stream {
    fn position(&self, id: &str) -> Option<usize> {
        self.log.iter().position(|event| event.ids.iter().any(|known| known == id))
    }

    /// Whether the server gives who comes back so exactly what it lacks.
    fn is_honest_cursor(&self, snapshot: &Snapshot) -> bool {
        let Some(position) = self.position(&snapshot.cursor) else { return false };
        self.log.iter().enumerate().filter(|(_, event)| event.data).all(|(at, event)| {
            let has = event.ids.iter().any(|id| snapshot.received.contains(id));
            has == (at <= position) || (has && !self.is_reordered)
        })
    }

    fn honest_cursors(&self) -> impl Iterator<Item = &Snapshot> {
        self.snapshots.iter().filter(|snapshot| self.is_honest_cursor(snapshot))
    }
}

struct Connection {
    stream: usize,
    /// `None`: it is over.
    running: Option<Running>,
    gateway: usize,
    /// The cursor, and how much had been delivered anywhere.
    resumed: Option<(String, usize)>,
    sent: Vec<u8>,
    received: BTreeSet<String>,
}

/// An event that passed the guard.
#[derive(Debug, Clone)]
struct Delivery {
    stream: usize,
    connection: usize,
    id: String,
    data: bool,
}

#[derive(Debug, Clone, Copy)]
enum To {
    Newest,
    All,
    /// It is only stored.
    Nobody,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Abort,
    End,
    BreakOff,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Drop,
    RepeatOld,
    Swap,
    LeakStream,
    LeakSession,
}

/// The first numbers say which one, of as many as there are.
#[derive(Debug, Clone, Copy)]
enum Op {
    /// A POST with a number of calls, or a GET.
    Open(u8, Option<u32>),
    Emit(u8, Emit),
    /// The same event to the standalone streams of all sessions with UUIDs.
    Broadcast,
    /// A connection breaks in an event, or ends before its blank line.
    Tear(u8, How),
    Close(u8, How),
    Resume(u8, Resume),
    Advance(u16),
    Instance(u8),
    Restart,
    /// Compare-and-swaps fail.
    Failing(bool),
}

#[derive(Debug, Clone, Copy)]
struct Emit {
    count: u8,
    to: To,
    /// The last one is an answer.
    answers: bool,
    /// They are stored in another order.
    reorders: bool,
}

#[derive(Debug, Clone, Copy)]
struct Resume {
    cursor: u8,
    /// Earlier connections go on.
    zombies: bool,
    /// Events while the request is on its way.
    meanwhile: u8,
    /// The client goes away after so many hundredths of the replay.
    leaves: Option<usize>,
    /// With its place, and which event it is about.
    fault: Option<(Fault, u8, u8)>,
}

/// How the world is looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Watch {
    /// Nothing may be found.
    #[default]
    Honest,
    /// What is found is looked up among the deliveries.
    Faulty,
    /// What comes of it is written down.
    Trace,
}

/// The servers, the clients, the guard between them, and all that passed.
#[derive(Default)]
struct World {
    setup: Setup,
    watch: Watch,
    store: Rc<Flaky>,
    gateways: Vec<Gateway<Flaky>>,
    counters: Vec<u64>,
    streams: Vec<Stream>,
    connections: Vec<Connection>,
    wire: Vec<Delivery>,
    /// Gaps that were cut: stream, and the id that came.
    floors: Vec<(usize, String)>,
    /// What else was cut: session, cursor, and fault.
    cuts: Vec<(usize, String, &'static str)>,
    instance: u8,
    minted: u64,
    calls: u32,
    has_broadcast: bool,
    has_failed: bool,
    now_ms: u64,
    writing: Dice,
    splitting: Dice,
    trace: Vec<String>,
}

fn name(session: usize) -> String {
    uuid(900 + session as u64)
}

type Trace = Result<Vec<String>, TestCaseError>;

impl World {
    /// Lives through all that. Gives what came of it.
    fn live(setup: &Setup, watch: Watch, ops: &[Op], splitting: u32) -> Trace {
        let mut world = World {
            setup: setup.clone(),
            watch,
            counters: vec![0; setup.servers.len()],
            now_ms: 1_000_000,
            writing: Dice(setup.seed),
            splitting: Dice(splitting.into()),
            ..World::default()
        };
        world.start();
        for (session, server) in setup.servers.iter().enumerate() {
            if server.is_known {
                world.gateway().1.initialize(&name(session));
            }
        }
        for op in ops {
            world.run(*op)?;
        }
        world.finish()?;
        Ok(world.trace)
    }

    fn start(&mut self) {
        self.store = Rc::default();
        let config = self.setup.config();
        let worker = |n| Gateway::on(Rc::clone(&self.store), &config).with_nonces_from(n << 32);
        self.gateways = (0..self.setup.workers).map(worker).collect();
    }

    /// A worker, any of them.
    fn gateway(&mut self) -> (usize, &mut Gateway<Flaky>) {
        let at = self.writing.roll(self.gateways.len());
        let gateway = &mut self.gateways[at];
        gateway.now_ms = self.now_ms;
        gateway.address = format!("10.0.0.{}:80", self.instance);
        (at, gateway)
    }

    fn server(&self, stream: usize) -> Server {
        self.setup.servers[self.streams[stream].session]
    }

    /// With a number of calls, or the standalone one.
    fn new_stream(&mut self, session: usize, calls: Option<u32>) -> usize {
        let at = self.streams.len();
        let pending = self.calls..self.calls + calls.unwrap_or(0);
        self.calls = pending.end;
        let others = self.streams.iter().filter(|other| other.session == session).count();
        self.streams.push(Stream {
            session,
            request: calls.map(|_| others as u64),
            next: 0,
            log: Vec::new(),
            priming: None,
            has_calls: !pending.is_empty(),
            pending: pending.collect(),
            snapshots: Vec::new(),
            is_reordered: false,
        });
        if self.setup.servers[session].priming == Priming::Fixed {
            let id = self.mint(at);
            self.streams[at].priming = Some(id.clone());
            self.streams[at].log.push(Logged::new(id, false));
        }
        at
    }

    /// The next id of a stream.
    fn mint(&mut self, stream: usize) -> String {
        let stream = &mut self.streams[stream];
        self.minted += 1;
        let format = self.setup.servers[stream.session].format;
        let next = match format {
            Format::Counter => &mut self.counters[stream.session],
            _ => &mut stream.next,
        };
        *next += 1;
        format.id(stream.session, stream.request, *next - 1, self.minted, self.now_ms)
    }

    /// Stores a new event.
    fn log(&mut self, stream: usize) -> Logged {
        let event = Logged::new(self.mint(stream), true);
        self.streams[stream].log.push(event.clone());
        event
    }

    fn write(&mut self, event: &Logged) -> Out {
        let data = match event.answers {
            Some(call) => format!(r#"{{"jsonrpc":"2.0","id":{call},"result":{{}}}}"#),
            None => r#"{"jsonrpc":"2.0","method":"m"}"#.to_owned(),
        };
        Out::new(&mut self.writing, event.id(), event.data.then_some(&data))
    }

    fn write_all(&mut self, events: &[Logged]) -> Vec<Out> {
        events.iter().map(|event| self.write(event)).collect()
    }

    fn open_connections(&self, stream: Option<usize>) -> Vec<usize> {
        let is_open = |(_, connection): &(usize, &Connection)| {
            connection.running.is_some() && stream.is_none_or(|of| connection.stream == of)
        };
        self.connections.iter().enumerate().filter(is_open).map(|(at, _)| at).collect()
    }

    fn connect(&mut self, connection: Connection) -> usize {
        self.connections.push(connection);
        self.connections.len() - 1
    }

    /// The event without data at the start of a connection.
    fn priming(&mut self, stream: usize, cursor: Option<usize>) -> Option<Out> {
        let server = self.server(stream);
        let id = match server.priming {
            Priming::None => return None,
            Priming::Fixed => self.streams[stream].priming.clone()?,
            Priming::New | Priming::NewAtCursor => self.mint(stream),
        };
        let event = Logged::new(id, false);
        if server.priming != Priming::Fixed {
            let of = &mut self.streams[stream];
            let place = match cursor {
                Some(at) if server.priming == Priming::NewAtCursor => at + 1,
                None if server.replays_on_get && of.request.is_none() => 0,
                _ => of.log.len(),
            };
            of.log.insert(place, event.clone());
        }
        Some(self.write(&event))
    }

    /// Sends these events, or so many bytes of them.
    fn send(&mut self, at: usize, outs: &[Out], part: Option<usize>) -> TestCaseResult {
        let bytes = joined(outs);
        let mut len = part.unwrap_or(bytes.len());
        // An event is complete with the CR of its last CRLF.
        len += usize::from(bytes[..len].ends_with('\r') && bytes[len..].starts_with('\n'));
        if self.watch != Watch::Faulty {
            return self.send_together(at, outs, len);
        }
        for out in outs {
            let part = out.bytes.len().min(len);
            len -= part;
            self.send_together(at, std::slice::from_ref(out), part)?;
        }
        Ok(())
    }

    fn send_together(&mut self, at: usize, outs: &[Out], len: usize) -> TestCaseResult {
        let connection = &mut self.connections[at];
        let Some(mut running) = connection.running.take() else { return Ok(()) };
        let ends = outs.iter().scan(connection.sent.len(), |end, out| {
            *end += out.bytes.len();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let found_before = running.found.len();
        let gateway = &mut self.gateways[connection.gateway];
        gateway.now_ms = self.now_ms;
        for piece in split(&mut self.splitting, &joined(outs).as_bytes()[..len]) {
            gateway.send_bytes(&mut running, piece);
            connection.sent.extend_from_slice(piece);
            if running.reset {
                break;
            }
            let (sent, delivered) = (&connection.sent, &running.delivered);
            let complete = ends.iter().rfind(|end| **end <= sent.len());
            prop_assert!(sent.starts_with(delivered), "other bytes: {}", running.text());
            prop_assert!(complete.is_none_or(|end| delivered.len() >= *end), "held: {outs:?}");
        }
        let same = connection.sent.iter().zip(&running.delivered).take_while(|(a, b)| a == b);
        let same = same.count();
        let arrived = ends.iter().filter(|end| **end <= same).count();
        let found: Vec<String> =
            running.found[found_before..].iter().map(|line| line.ruling.to_string()).collect();
        let reset = running.reset;
        connection.running = Some(running);
        if self.watch == Watch::Honest {
            prop_assert!(found.is_empty() && !reset, "{found:?}: {:?}", self.wire);
        } else if self.watch == Watch::Faulty {
            for ruling in &found {
                let is_true = self.is_found_in(at, &outs[0], ruling);
                prop_assert!(is_true, "{ruling} at {outs:?}: {:?}", self.wire);
            }
            if reset {
                self.note_cut(at, &outs[0].id, found.last().unwrap())?;
            }
        }
        for out in &outs[..arrived] {
            self.deliver(at, out);
        }
        if reset { self.close(at, How::Abort) } else { Ok(()) }
    }

    fn deliver(&mut self, at: usize, out: &Out) {
        let connection = &mut self.connections[at];
        let Out { id, data, .. } = out.clone();
        if data {
            connection.received.insert(id.clone());
        }
        let snapshot = Snapshot { cursor: id.clone(), received: connection.received.clone() };
        self.streams[connection.stream].snapshots.push(snapshot);
        self.wire.push(Delivery { stream: connection.stream, connection: at, id, data });
    }

    fn note_cut(&mut self, at: usize, id: &str, ruling: &str) -> TestCaseResult {
        let Connection { stream, resumed, .. } = &self.connections[at];
        let place = fault_of(ruling).unwrap();
        prop_assert!(self.setup.cuts[place] && ruling.ends_with("action=cut"), "{ruling}");
        if FAULTS[place] == "gap" {
            self.floors.push((*stream, id.to_owned()));
        } else {
            let (cursor, _) = resumed.clone().unwrap();
            self.cuts.push((self.streams[*stream].session, cursor, FAULTS[place]));
        }
        Ok(())
    }

    /// Deliveries of an id, as their places on the wire.
    fn deliveries(&self, id: &str) -> impl Iterator<Item = usize> {
        (0..self.wire.len()).filter(move |at| self.wire[*at].id == id)
    }

    fn session_of(&self, delivery: usize) -> usize {
        self.streams[self.wire[delivery].stream].session
    }

    fn first_on(&self, stream: usize, id: &str) -> Option<usize> {
        self.deliveries(id).find(|at| self.wire[*at].stream == stream)
    }

    /// The ids with data that a resumption has to bring, by the wire, and that
    /// haven't come.
    fn missing(&self, at: usize) -> Vec<&str> {
        let Connection { stream, resumed: Some((cursor, begun)), .. } = &self.connections[at]
        else {
            return Vec::new();
        };
        let Some(cursor) = self.first_on(*stream, cursor) else { return Vec::new() };
        let owed = (cursor + 1..*begun).filter(|place| {
            let delivery = &self.wire[*place];
            delivery.stream == *stream
                && delivery.data
                && self.first_on(*stream, &delivery.id) == Some(*place)
        });
        let came = |id: &str| self.deliveries(id).any(|d| self.wire[d].connection == at);
        owed.map(|place| self.wire[place].id.as_str()).filter(|id| !came(id)).collect()
    }

    /// Whether the deliveries show a fault in the event that comes next.
    fn is_found_in(&self, at: usize, out: &Out, ruling: &str) -> bool {
        let Connection { stream, resumed: Some((cursor, _)), .. } = &self.connections[at] else {
            return false;
        };
        let session = self.streams[*stream].session;
        let is_here = |d: &usize| self.wire[*d].stream == *stream;
        let is_on_session = |d: &usize| self.session_of(*d) == session;
        let mut before = self.deliveries(&out.id).peekable();
        match fault_of(ruling).map(|place| FAULTS[place]) {
            Some("foreign_session") => {
                out.id.len() > 20 && before.peek().is_some() && !before.any(|d| is_on_session(&d))
            }
            // What was leaked before is another's all the same.
            Some("foreign_stream") => {
                out.data && before.find(is_on_session).is_some_and(|d| !is_here(&d))
            }
            Some("repeated") => {
                let cursor = self.first_on(*stream, cursor);
                out.data && before.any(|d| is_here(&d) && self.wire[d].data && Some(d) <= cursor)
            }
            Some("gap") => {
                let is_passed = |id: &str| id != out.id && index(id) < index(&out.id);
                let format = self.server(*stream).format;
                format.has_indexes() && self.missing(at).into_iter().any(is_passed)
            }
            _ => false,
        }
    }

    /// Whether they show what a resumption is refused for.
    fn is_refused_for(&self, stream: usize, cursor: &str, ruling: &str) -> bool {
        let session = self.streams[stream].session;
        let is_said = |reason: &str| ruling.starts_with(&format!("inconsistent;reason={reason};"));
        if is_said("below_floor") {
            let is_between = |d: &Delivery, floor: &str| {
                let (low, id, high) = (index(cursor), index(&d.id), index(floor));
                d.data && d.stream == stream && low < id && id < high
            };
            let mut floors = self.floors.iter().filter(|(of, _)| *of == stream);
            return floors.any(|(_, floor)| self.wire.iter().any(|d| is_between(d, floor)));
        }
        if is_said("foreign_session") {
            // It was leaked before the guard knew whose it is.
            let mut places = self.deliveries(cursor).peekable();
            return places.peek().is_some() && !places.any(|d| self.session_of(d) == session);
        }
        if is_said("ambiguous_cursor") {
            let places = self.deliveries(cursor).filter(|d| self.session_of(*d) == session);
            return places.map(|d| self.wire[d].stream).collect::<BTreeSet<_>>().len() > 1;
        }
        self.cuts.iter().any(|(of, from, fault)| {
            (*of, from.as_str()) == (session, cursor) && is_said(&format!("replay_{fault}"))
        })
    }

    /// What a client is told when it comes back.
    fn check_told(&mut self, stream: usize, cursor: &str, told: &str) -> TestCaseResult {
        match self.watch {
            Watch::Trace => self.trace.push(format!("{cursor} {told}")),
            _ if !told.starts_with("inconsistent") => {}
            watch => {
                let is_true = watch == Watch::Faulty && self.is_refused_for(stream, cursor, told);
                prop_assert!(is_true, "{told} from {cursor} of {:?}", self.streams[stream]);
            }
        }
        Ok(())
    }

    fn close(&mut self, at: usize, how: How) -> TestCaseResult {
        let connection = &mut self.connections[at];
        let Some(running) = connection.running.take() else { return Ok(()) };
        let gateway = &mut self.gateways[connection.gateway];
        gateway.now_ms = self.now_ms;
        let found_before = running.found.len();
        let Ended { text, found, replay, .. } = match how {
            How::Abort => gateway.abort(running),
            How::End => gateway.end(running),
            How::BreakOff => gateway.break_off(running),
        };
        let result = replay.map(|(result, _)| result);
        let Connection { stream, resumed, sent, .. } = &self.connections[at];
        match self.watch {
            Watch::Honest => {
                let is_whole = how != How::End || text.as_bytes() == sent;
                prop_assert!(is_whole && found.is_empty(), "{found:?}: {:?}", self.wire);
                let is_fine = matches!(result, None | Some("complete" | "unchecked"));
                prop_assert!(is_fine && result.is_some() == resumed.is_some());
            }
            Watch::Trace => self.trace.push(format!("{at} {text} {found:?} {replay:?}")),
            Watch::Faulty => {
                let missing = self.missing(at);
                let stream = &self.streams[*stream];
                if result == Some("complete") && !self.has_failed && !stream.is_reordered {
                    let cursor = resumed.as_ref().and_then(|(cursor, _)| stream.position(cursor));
                    let is_missed = missing.iter().any(|id| stream.position(id) > cursor);
                    prop_assert!(!is_missed, "complete without {missing:?}: {:?}", self.wire);
                }
                let came = self.wire.iter().any(|d| d.connection == at && d.data);
                let late = if came { "gap" } else { "empty" };
                let late = format!("inconsistent;reason=replay_{late};action=passed");
                let is_true = |found: &String| *found == late && !missing.is_empty();
                let is_true = found[found_before..].iter().all(is_true);
                prop_assert!(is_true, "{found:?} without {missing:?}: {:?}", self.wire);
            }
        }
        Ok(())
    }

    fn run(&mut self, op: Op) -> TestCaseResult {
        // The newer streams more often.
        let len = self.streams.len();
        let stream = |of: u8| (len > 0).then(|| len - 1 - usize::from(of) % len.min(6));
        let open = self.open_connections(None);
        let connection = |of: u8| open.get(usize::from(of) % open.len().max(1)).copied();
        let done = match op {
            Op::Open(session, calls) => {
                Some(self.open(usize::from(session) % self.counters.len(), calls))
            }
            Op::Emit(of, emit) => stream(of).map(|stream| self.emit(stream, emit)),
            Op::Broadcast => Some(self.broadcast()),
            Op::Tear(of, how) => connection(of).map(|at| self.tear(at, how)),
            Op::Close(of, how) => connection(of).map(|at| self.close(at, how)),
            Op::Resume(of, resume) => stream(of).map(|stream| self.resume(stream, resume)),
            Op::Advance(ms) => {
                self.now_ms += u64::from(ms);
                None
            }
            Op::Instance(instance) => {
                self.instance = instance;
                None
            }
            // What was broadcast before isn't known to be any more.
            Op::Restart if self.has_broadcast => None,
            Op::Restart => {
                open.into_iter().try_for_each(|at| self.close(at, How::Abort))?;
                self.start();
                self.wire.clear();
                None
            }
            Op::Failing(failing) => {
                self.has_failed |= failing;
                self.store.failing.set(failing);
                None
            }
        };
        done.unwrap_or(Ok(()))
    }

    fn standalone(&self, session: usize) -> Option<usize> {
        self.streams.iter().position(|s| s.session == session && s.request.is_none())
    }

    fn open(&mut self, session: usize, calls: Option<u32>) -> TestCaseResult {
        let known = self.standalone(session).filter(|_| calls.is_none());
        let stream = known.unwrap_or_else(|| self.new_stream(session, calls));
        let mut replayed = self.streams[stream].log.clone();
        replayed.retain(|event| event.data);
        let mut received = BTreeSet::new();
        if !self.server(stream).replays_on_get {
            // Who begins anew has no older cursor.
            self.streams[stream].snapshots.clear();
            received.extend(replayed.drain(..).map(|event| event.id().clone()));
        }
        let request = |call| format!(r#"{{"jsonrpc":"2.0","id":{call},"method":"m"}}"#);
        let requests: Vec<String> = self.streams[stream].pending.iter().map(request).collect();
        let (gateway, worker) = self.gateway();
        let running = match calls {
            Some(_) => worker.post(&name(session), &format!("[{}]", requests.join(","))),
            None => worker.listen(&name(session)),
        };
        let running = Some(running);
        let sent = Vec::new();
        let at =
            self.connect(Connection { stream, running, gateway, resumed: None, sent, received });
        let mut outs: Vec<Out> = self.priming(stream, None).into_iter().collect();
        outs.extend(self.write_all(&replayed));
        self.send(at, &outs, None)
    }

    fn tear(&mut self, at: usize, how: How) -> TestCaseResult {
        let event = self.log(self.connections[at].stream);
        let out = self.write(&event);
        // What ends so is an event all the same.
        let is_complete = how == How::End && self.watch == Watch::Honest;
        let part = if is_complete { out.bytes.trim_end().len() } else { out.bytes.len() / 2 };
        self.send(at, std::slice::from_ref(&out), Some(part))?;
        if is_complete {
            self.deliver(at, &out);
        }
        self.close(at, if is_complete { How::End } else { How::Abort })
    }

    fn emit(&mut self, stream: usize, emit: Emit) -> TestCaseResult {
        let Emit { count, to, answers, reorders } = emit;
        let mut events: Vec<Logged> = (0..count).map(|_| self.log(stream)).collect();
        let has_indexes = self.server(stream).format.has_indexes();
        let of = &mut self.streams[stream];
        let first = of.log.len() - events.len();
        if answers && !of.pending.is_empty() {
            let answer = events.last_mut().unwrap();
            answer.answers = Some(of.pending.remove(0));
            *of.log.last_mut().unwrap() = answer.clone();
        }
        if reorders && count > 1 && !of.has_calls && !has_indexes {
            of.log[first..].rotate_left(1);
            of.is_reordered = true;
        }
        let outs = self.write_all(&events);
        let open = self.open_connections(Some(stream));
        let to = match to {
            To::Newest => &open[open.len().saturating_sub(1)..],
            To::All => &open[..],
            To::Nobody => &[],
        };
        to.iter().try_for_each(|at| self.send(*at, &outs, None))
    }

    fn broadcast(&mut self) -> TestCaseResult {
        let mut sessions: Vec<usize> = (0..self.counters.len()).collect();
        sessions.retain(|session| self.setup.servers[*session].format == Format::Uuid);
        let streams: Vec<usize> = sessions.iter().filter_map(|s| self.standalone(*s)).collect();
        let newest = |stream: &usize| self.open_connections(Some(*stream)).pop();
        let is_live = |stream: &usize| {
            newest(stream).is_some_and(|at| self.connections[at].resumed.is_none())
        };
        let all_are_live = streams.len() == sessions.len() && streams.iter().all(is_live);
        if !self.has_broadcast && !all_are_live {
            return Ok(());
        }
        self.has_broadcast = true;
        self.minted += 1;
        let event = Logged::new(uuid(100_000 + self.minted), true);
        for stream in streams {
            self.streams[stream].log.push(event.clone());
            let out = self.write(&event);
            if let Some(at) = self.open_connections(Some(stream)).pop() {
                self.send(at, &[out], None)?;
            }
        }
        Ok(())
    }

    fn resume(&mut self, stream: usize, resume: Resume) -> TestCaseResult {
        if !resume.zombies {
            for at in self.open_connections(Some(stream)) {
                self.close(at, How::Abort)?;
            }
        }
        let of = &self.streams[stream];
        // A cursor that was leaked is two streams', and nobody can say whose.
        let is_own = |snapshot: &&Snapshot| {
            self.deliveries(&snapshot.cursor)
                .all(|d| self.wire[d].stream == stream || self.session_of(d) != of.session)
        };
        let snapshots: Vec<&Snapshot> = of.honest_cursors().filter(is_own).collect();
        if snapshots.is_empty() {
            return Ok(());
        }
        // The newest more often.
        let back = usize::from(resume.cursor) * usize::from(resume.cursor) / 256;
        let snapshot = snapshots[snapshots.len() - 1 - back % snapshots.len()];
        let Snapshot { cursor, received } = snapshot.clone();
        let session = of.session;
        let begun = self.wire.len();
        let (gateway, worker) = self.gateway();
        let answer = worker.try_resume(&name(session), &cursor);
        let refusal = answer.refusal().map(|(_, told)| told);
        let Answer::Passed { exchange, step } = answer else {
            return self.check_told(stream, &cursor, &refusal.unwrap());
        };
        self.check_told(stream, &cursor, &step.ruling.unwrap().to_string())?;
        let (count, to, answers, reorders) = (resume.meanwhile, To::All, false, false);
        self.emit(stream, Emit { count, to, answers, reorders })?;
        self.gateways[gateway].now_ms = self.now_ms;
        let running = Some(self.gateways[gateway].respond(exchange, &STREAM));
        self.cuts.retain(|(of, from, _)| (*of, from) != (session, &cursor));
        let (resumed, sent) = (Some((cursor.clone(), begun)), Vec::new());
        let at = self.connect(Connection { stream, running, gateway, resumed, sent, received });
        let server = self.server(stream);
        let position = self.streams[stream].position(&cursor).unwrap();
        let first = position + usize::from(!server.inclusive);
        let mut replayed: Vec<usize> = (first..self.streams[stream].log.len()).collect();
        replayed.retain(|event| self.streams[stream].log[*event].data);
        if server.remints && server.format == Format::Uuid {
            for event in &replayed {
                let id = self.mint(stream);
                self.streams[stream].log[*event].ids.push(id);
            }
        }
        let log = &self.streams[stream].log;
        let events: Vec<Logged> = replayed.iter().map(|event| log[*event].clone()).collect();
        let mut outs = self.write_all(&events);
        if let Some(fault) = resume.fault {
            self.spoil(stream, position, fault, &mut outs);
        }
        let priming = self.priming(stream, Some(position));
        let place = if server.priming == Priming::New { outs.len() } else { 0 };
        outs.splice(place..place, priming);
        let Some(part) = resume.leaves else { return self.send(at, &outs, None) };
        self.send(at, &outs, Some(joined(&outs).len() * part / 100))?;
        self.close(at, How::Abort)
    }

    /// An event of another stream, of this session or of another one.
    fn leaked(&mut self, stream: usize, which: u8, is_own: bool) -> Option<Out> {
        let session = self.streams[stream].session;
        let is_meant =
            |(at, other): &(usize, &Stream)| *at != stream && is_own == (other.session == session);
        let others = self.streams.iter().enumerate().filter(is_meant);
        let events = others.flat_map(|(_, other)| &other.log);
        let events: Vec<&Logged> = events.filter(|e| e.data && e.answers.is_none()).collect();
        let event = Logged::clone(events.get(usize::from(which) % events.len().max(1))?);
        Some(self.write(&event))
    }

    fn spoil(&mut self, stream: usize, cursor: usize, fault: (Fault, u8, u8), outs: &mut Vec<Out>) {
        let len = outs.len();
        let (fault, place, which) = fault;
        let place = usize::from(place) % (len + 1);
        match fault {
            Fault::Drop => drop(outs.drain(place..len - usize::from(which) % (len + 1 - place))),
            Fault::Swap if place + 1 < len => outs.swap(place, place + 1),
            Fault::Swap => {}
            Fault::RepeatOld => {
                let log = &self.streams[stream].log[..=cursor];
                let old: Vec<&Logged> = log.iter().filter(|event| event.data).collect();
                let old = old.get(usize::from(which) % old.len().max(1));
                let old = old.map(|event| Logged::clone(event));
                outs.splice(place..place, old.map(|event| self.write(&event)));
            }
            Fault::LeakStream => drop(outs.splice(place..place, self.leaked(stream, which, true))),
            Fault::LeakSession => {
                drop(outs.splice(place..place, self.leaked(stream, which, false)))
            }
        }
    }

    /// Everything ends, one way or another.
    fn finish(&mut self) -> TestCaseResult {
        for at in self.open_connections(None) {
            let how = [How::Abort, How::End][self.writing.roll(2)];
            self.close(at, how)?;
        }
        for stream in 0..self.streams.len() {
            let of = &self.streams[stream];
            let name = name(of.session);
            let cursors = of.honest_cursors().map(|snapshot| snapshot.cursor.clone());
            for cursor in cursors.collect::<BTreeSet<_>>() {
                let told = self.gateway().1.verdict(&name, &cursor);
                self.check_told(stream, &cursor, &told)?;
            }
        }
        Ok(())
    }
}

/// The place of a ruling's fault in `FAULTS`.
fn fault_of(ruling: &str) -> Option<usize> {
    let is_said =
        |fault: &&str| ruling.starts_with(&format!("inconsistent;reason=replay_{fault};"));
    FAULTS.iter().position(is_said)
}

fn setup() -> impl Strategy<Value = Setup> {
    use Format::{Counter, Go, Rmcp, TypeScript, Uuid};
    let format =
        select(vec![Go, Go, Go, Rmcp, Rmcp, Counter, Counter, Uuid, Uuid, Uuid, TypeScript]);
    let priming = select(vec![Priming::None, Priming::Fixed, Priming::New, Priming::NewAtCursor]);
    let rarely = || proptest::bool::weighted(0.2);
    let server = (format, priming, any::<[bool; 2]>(), rarely(), rarely()).prop_map(
        |(format, priming, [inclusive, replays_on_get], remints, is_unknown)| {
            let is_known = !is_unknown;
            Server { format, priming, inclusive, replays_on_get, remints, is_known }
        },
    );
    let sizes = prop_oneof![3 => Just(LARGE), 2 => (1u32..5, 1u8..4, 1u16..7)];
    (vec(server, 1..4), 1u64..3, any::<[bool; 4]>(), any::<bool>(), sizes, 0..u64::MAX).prop_map(
        |(servers, workers, cuts, exclusive, sizes, seed)| Setup {
            servers,
            workers,
            exclusive,
            cuts,
            sizes,
            seed,
        },
    )
}

/// So that nothing is forgotten.
const LARGE: (u32, u8, u16) = (40, 16, 64);

fn ops(is_faulty: bool) -> impl Strategy<Value = Vec<Op>> {
    let to = select(vec![To::Newest, To::Newest, To::Newest, To::All, To::Nobody]);
    let emit = (1u8..5, to, proptest::bool::weighted(0.3), any::<bool>())
        .prop_map(|(count, to, answers, reorders)| Emit { count, to, answers, reorders });
    let fault = prop_oneof![
        4 => Just(Fault::Drop),
        1 => Just(Fault::RepeatOld),
        1 => Just(Fault::Swap),
        1 => Just(Fault::LeakStream),
        1 => Just(Fault::LeakSession),
    ];
    let fault = proptest::option::of((fault, any::<u8>(), any::<u8>()));
    let resume = (
        any::<u8>(),
        proptest::bool::weighted(0.3),
        select(vec![0, 0, 0, 0, 1, 2]),
        proptest::option::weighted(0.4, 0usize..100),
        fault.prop_map(move |fault| fault.filter(|_| is_faulty)),
    )
        .prop_map(|(cursor, zombies, meanwhile, leaves, fault)| Resume {
            cursor,
            zombies,
            meanwhile,
            leaves,
            fault,
        });
    let calls = proptest::option::weighted(0.6, 0u32..4);
    let tear = select(vec![How::Abort, How::End]);
    let close = select(vec![How::Abort, How::Abort, How::End, How::End, How::BreakOff]);
    let op = prop_oneof![
        7 => (any::<u8>(), calls).prop_map(|(session, calls)| Op::Open(session, calls)),
        12 => (any::<u8>(), emit).prop_map(|(stream, emit)| Op::Emit(stream, emit)),
        3 => Just(Op::Broadcast),
        2 => (any::<u8>(), tear).prop_map(|(connection, how)| Op::Tear(connection, how)),
        5 => (any::<u8>(), close).prop_map(|(connection, how)| Op::Close(connection, how)),
        12 => (any::<u8>(), resume).prop_map(|(stream, resume)| Op::Resume(stream, resume)),
        3 => prop_oneof![0u16..20, 900u16..1_100, 0u16..4_000].prop_map(Op::Advance),
        2 => (0u8..3).prop_map(Op::Instance),
        1 => prop_oneof![1 => Just(Op::Restart), 2 => any::<bool>().prop_map(Op::Failing)],
    ];
    vec(op, 1..40)
}

proptest! {
    #![proptest_config(cases(250))]

    /// An honest server is never cut, and its clients are never refused: every
    /// byte arrives, in order, and nothing is found.
    #[test]
    fn an_honest_server_is_never_cut(setup in setup(), ops in ops(false), splitting: u32) {
        let setup = Setup { cuts: [true; 4], ..setup };
        World::live(&setup, Watch::Honest, &ops, splitting)?;
    }

    /// What the guard finds in a server that isn't is what was sent.
    #[test]
    fn what_is_found_was_so(setup in setup(), ops in ops(true), splitting: u32) {
        let setup = Setup { sizes: (setup.sizes.0, setup.sizes.1, LARGE.2), ..setup };
        World::live(&setup, Watch::Faulty, &ops, splitting)?;
    }

    /// The same stream in other chunks comes to the same.
    #[test]
    fn chunks_do_not_matter(setup in setup(), mut ops in ops(true), splittings: (u32, u32)) {
        let setup = Setup { sizes: LARGE, ..setup };
        ops.retain(|op| !matches!(op, Op::Failing(_)));
        let one = World::live(&setup, Watch::Trace, &ops, splittings.0)?;
        let other = World::live(&setup, Watch::Trace, &ops, splittings.1)?;
        prop_assert_eq!(one, other);
    }
}
