//! The checks of a replay: what follows a cursor must bring what is owed.
//!
//! A `200` with a stream is no proof that it is the right one. The events of a
//! resumption that was let through are compared with what the ledger had when
//! it arrived. An id that the ledger doesn't know proves nothing, wherever it
//! comes; and where the order of a stream isn't known for certain, nothing is
//! claimed about it.

use crate::config::{Config, Mode, ReplayAction};
use crate::event_id::EventId;
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::MAX_CALLS;
use crate::ledger::record::{Found, Ids, Record};
use crate::ledger::stream::{History, Stream};
use crate::ledger::table::StreamKind;
use crate::ledger::{Access, Ledger};
use crate::recorder::Event;
use crate::store::Store;
use crate::verdict::{Action, CarriedOn, ReplayFault};

/// A client that leaves sooner has not waited for what is owed.
const PATIENCE_US: u64 = 5_000_000;

/// Calls that are remembered to have been answered, many times those of a POST.
const MAX_ANSWERED: usize = 8 * MAX_CALLS;

/// Splits of what is owed, while it comes out of order.
const MAX_SPLITS: usize = 512;

/// How the connection of a resumption ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The upstream ended it.
    Upstream,
    /// Somebody else did, mostly the client.
    Other,
}

/// What a replay came to, once the connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// The worst that was found.
    pub fault: Option<ReplayFault>,
    /// What was done about it.
    pub action: Action,
    /// All that was owed has come, or nothing was.
    pub complete: bool,
}

impl Outcome {
    /// Its name in the metric.
    pub const fn result(&self) -> &'static str {
        match self.fault {
            Some(fault) => fault.as_str(),
            None if self.complete => "complete",
            None => "unchecked",
        }
    }
}

/// The check of one resumption's answer.
pub struct Replay {
    /// Whose resumption it is; `None`: nothing can be checked.
    session: Option<SessionFingerprint>,
    since_us: u64,
    /// The stream that the cursor stands on, if that is known.
    stream: Option<Placed>,
    /// An event with data has come.
    came: bool,
    /// One with an id, too.
    came_with_id: bool,
    /// The calls that were answered here.
    answered: Vec<u64>,
    found: Option<(ReplayFault, Action)>,
}

struct Placed {
    cursor: EventId,
    /// The stream as it was when the resumption arrived.
    stream: Stream,
    /// The cursor may stand on another stream.
    uncertain: bool,
    /// What is owed, where the order is known.
    order: Option<Order>,
}

/// Whether an id was issued on another stream of the session only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OfAnother {
    No,
    /// Unless the stream's own counter has come to it, too.
    Perhaps,
    Surely,
}

struct Order {
    owed: Owed,
    /// Where the cursor stands.
    cursor: Found,
    /// The one sequence of all ids, if it never fell.
    rising: Option<u64>,
}

/// The session's history as it is now, read when somebody asks for it.
#[derive(Default)]
pub struct Current(Option<Option<History>>);

impl Current {
    fn history<S: Store>(
        &mut self,
        ledger: &Ledger,
        at: &Access<'_, S>,
        session: SessionFingerprint,
    ) -> Option<&History> {
        self.0.get_or_insert_with(|| ledger.history(at, session)).as_ref()
    }
}

/// What the guard finds in an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// Nothing that is wrong.
    Nothing,
    /// An id has come that is another event's, too: an owed one a second time,
    /// or one with data that had none.
    Twice,
    /// An owed id has come behind another one that stands behind it.
    OutOfOrder,
    /// A fault.
    Fault(ReplayFault),
}

impl Replay {
    /// A replay of which nothing can be checked.
    pub fn unchecked() -> Self {
        Replay {
            session: None,
            since_us: 0,
            stream: None,
            came: false,
            came_with_id: false,
            answered: Vec::new(),
            found: None,
        }
    }

    /// The check of an answer that begins now, to a resumption that carries on
    /// a stream, if that is known.
    pub fn new(session: SessionFingerprint, since_us: u64, carried: Option<CarriedOn>) -> Self {
        let stream = carried.filter(|carried| carried.stream.kind != StreamKind::Unplaced);
        Replay {
            session: Some(session),
            since_us,
            stream: stream.map(|carried| {
                let uncertain = carried.uncertain || carried.ambiguous;
                Placed {
                    order: Order::of(&carried).filter(|_| !uncertain),
                    cursor: carried.cursor,
                    stream: carried.stream,
                    uncertain,
                }
            }),
            ..Replay::unchecked()
        }
    }

    /// What is wrong with the next event, the worst of it.
    pub(crate) fn see<S: Store>(
        &mut self,
        ledger: &Ledger,
        at: &Access<'_, S>,
        current: &mut Current,
        event: &Event,
    ) -> Finding {
        self.came |= event.data;
        let is_event = event.data && event.id.is_some();
        let is_first = is_event && !std::mem::replace(&mut self.came_with_id, true);
        let finding = match (&event.id, self.session) {
            (Some(id), Some(session)) => {
                let known =
                    self.stream.as_mut().and_then(|s| s.see_known(id, event.data, is_first));
                // Else the stream didn't have it when the resumption arrived.
                known.unwrap_or_else(|| self.see_new(ledger, at, session, current, id, event))
            }
            _ => Finding::Nothing,
        };
        if !matches!(finding, Finding::Fault(_)) {
            for call in &event.answers {
                if self.answered.len() < MAX_ANSWERED && !self.answered.contains(call) {
                    self.answered.push(*call);
                }
            }
        }
        finding
    }

    /// Nothing is looked for that has an index in the stream's own sequence, if
    /// no other can have that.
    fn see_new<S: Store>(
        &self,
        ledger: &Ledger,
        at: &Access<'_, S>,
        session: SessionFingerprint,
        current: &mut Current,
        id: &EventId,
        event: &Event,
    ) -> Finding {
        let is_own = self.stream.as_ref().is_some_and(|placed| placed.owns_sequence_of(id));
        if !is_own && ledger.is_of_another(at, id, Some(session), Some(self.since_us)) {
            let own = current.history(ledger, at, session);
            if !own.is_some_and(|own| own.streams.iter().any(|stream| stream.has(id))) {
                return Finding::Fault(ReplayFault::ForeignSession);
            }
        }
        let Some(placed) = self.stream.as_ref().filter(|_| event.data) else {
            return Finding::Nothing;
        };
        let history = if is_own { None } else { current.history(ledger, at, session) };
        let of_another = history.map(|history| placed.is_of_another(history, id, event));
        let order = placed.order.as_ref();
        let passes_over = order.is_some_and(|order| order.is_passed_over(&placed.stream, id));
        match (of_another, passes_over) {
            // Wrong it is in any case, and nothing that another stream has tells
            // what this one has lost.
            (Some(OfAnother::Surely), _) | (Some(OfAnother::Perhaps), true) => {
                Finding::Fault(ReplayFault::ForeignStream)
            }
            (_, true) => Finding::Fault(ReplayFault::Gap),
            _ => Finding::Nothing,
        }
    }

    /// Notes a fault and what was done about it. Whether it is worse than what
    /// was found before.
    pub fn note(&mut self, fault: ReplayFault, action: Action) -> bool {
        let is_worse = self.found.is_none_or(|(known, _)| fault > known);
        if is_worse || action == Action::Cut {
            self.found = Some((fault, action));
        }
        is_worse
    }

    /// An owed id came twice with data: nothing is said of the order any more.
    pub fn give_up_order(&mut self) {
        if let Some(placed) = &mut self.stream {
            placed.order = None;
        }
    }

    /// The calls that were answered here.
    pub fn answered(&self) -> &[u64] {
        &self.answered
    }

    /// The number of the stream.
    pub fn stream(&self) -> Option<u32> {
        self.stream.as_ref().map(|placed| placed.stream.number)
    }

    /// The index of an id in the stream's rising sequence.
    pub fn rising_index(&self, id: &EventId) -> Option<u64> {
        let sequence = self.stream.as_ref()?.order.as_ref()?.rising?;
        id.index_in(sequence)
    }

    /// The connection is over. Gives what it came to, and the fault in it that
    /// is found only now.
    pub fn finish(&mut self, now_us: u64, end: End) -> (Outcome, Option<ReplayFault>) {
        // What a cut kept from coming is not missing.
        let was_cut = self.found.is_some_and(|(_, action)| action == Action::Cut);
        let late = if was_cut { None } else { self.found_at_end(now_us, end) };
        let late = late.filter(|fault| self.note(*fault, Action::Passed));
        let order = self.stream.as_ref().and_then(|placed| placed.order.as_ref());
        let complete = order.is_some_and(|order| order.owed.is_empty());
        let (fault, action) = match self.found {
            Some((fault, action)) => (Some(fault), action),
            None => (None, Action::Passed),
        };
        (Outcome { fault, action, complete }, late)
    }

    /// Whether the order is known in which ids have to come.
    pub fn is_ordered(&self) -> bool {
        self.stream.as_ref().is_some_and(|placed| placed.order.is_some())
    }

    /// Whether ids came ahead of others that may still come.
    pub fn passes_over(&self) -> bool {
        let order = self.stream.as_ref().and_then(|placed| placed.order.as_ref());
        order.is_some_and(|order| order.rising.is_none() && order.owed.are_passed_over())
    }

    /// Whether ids came ahead of others, which may have come had the connection
    /// not broken.
    pub fn is_disordered(&self) -> bool {
        let order = self.stream.as_ref().and_then(|placed| placed.order.as_ref());
        let has_gap = matches!(self.found, Some((ReplayFault::Gap, _)));
        !has_gap && order.is_some_and(|order| order.owed.are_passed_over())
    }

    fn found_at_end(&self, now_us: u64, end: End) -> Option<ReplayFault> {
        let placed = self.stream.as_ref()?;
        let order = placed.order.as_ref().filter(|order| !order.owed.is_empty())?;
        let waited_us = now_us.saturating_sub(self.since_us);
        if !self.came {
            let is_empty = end == End::Upstream || waited_us >= PATIENCE_US;
            return is_empty.then_some(ReplayFault::Empty);
        }
        let is_decided = end == End::Upstream || placed.is_answered(&self.answered);
        (is_decided && order.owed.are_passed_over()).then_some(ReplayFault::Gap)
    }
}

impl Placed {
    /// What an id tells that the stream had; `None` if it had it not, as far
    /// as is known.
    fn see_known(&mut self, id: &EventId, data: bool, is_first: bool) -> Option<Finding> {
        let found = self.stream.find_entry(id);
        let Some(order) = &mut self.order else {
            return self.stream.has(id).then_some(Finding::Nothing);
        };
        let found = found?;
        let is_cursor = found.behind == order.cursor.behind;
        if data != found.data {
            // Not the event that the ledger has, unless a connection begins
            // with the cursor.
            return Some(if is_cursor { Finding::Nothing } else { Finding::Twice });
        }
        if !data {
            return Some(Finding::Nothing);
        }
        Some(match order.owed.take(id) {
            Some(Taken::Lost) => {
                self.order = None;
                Finding::Nothing
            }
            Some(Taken::Early) if order.rising.is_some() => Finding::Fault(ReplayFault::Gap),
            Some(Taken::Late) => Finding::OutOfOrder,
            Some(Taken::Early | Taken::InOrder) => Finding::Nothing,
            // rmcp replays inclusively.
            None if is_cursor && is_first => Finding::Nothing,
            None if order.owed.ever_had(found.owed) => Finding::Twice,
            None if order.cursor.data => Finding::Fault(ReplayFault::Repeated),
            // Ids without data are sent whenever a connection begins: what
            // stands before one isn't certain.
            None => Finding::OutOfOrder,
        })
    }

    /// Whether an id is of the stream's one sequence, and that is distinctive.
    fn owns_sequence_of(&self, id: &EventId) -> bool {
        let rising = self.order.as_ref().and_then(|order| order.rising);
        id.places.iter().zip(id.distinctive_sequence).any(|(place, is_distinctive)| {
            is_distinctive && place.is_some_and(|place| Some(place.sequence) == rising)
        })
    }

    /// Whether an id was issued on another stream of the session only.
    ///
    /// Sequences that every stream counts for itself have the same ids, so one
    /// that isn't distinctive has to be known better: the stream has been past
    /// it, or its own ids have gaps, and the two have no id in common.
    fn is_of_another(&self, history: &History, id: &EventId, event: &Event) -> OfAnother {
        // A session has one standalone stream, whatever its number.
        let own = |stream: &&Stream| {
            stream.number == self.stream.number
                || (stream.kind == StreamKind::Standalone && stream.kind == self.stream.kind)
        };
        // Forgotten, it may have been begun anew by another connection of it.
        let is_forgotten = !history.streams.iter().any(|stream| own(&stream));
        let is_answer = self.stream.calls().has_any(&event.answers);
        let may_be_own = history.unreadable
            || history.session.evicted_keys.may_have(id)
            || history.streams.iter().filter(own).any(|stream| stream.has(id))
            || self.stream.records.iter().any(|record| record.may_have_evicted(id));
        if is_answer || is_forgotten || may_be_own || self.uncertain {
            return OfAnother::No;
        }
        let mut others = history.streams.iter().filter(|stream| {
            !own(stream) && stream.kind != StreamKind::Unplaced && stream.has_with_data(id)
        });
        let Some(other) = others.next() else { return OfAnother::No };
        if id.index_key().is_some() {
            return OfAnother::Surely;
        }
        let shares_ids = |own: &Record| other.records.iter().any(|theirs| own.shares_an_id(theirs));
        if !history.session.complete
            || other.records.iter().any(|record| record.evicted)
            || self.stream.records.iter().any(shares_ids)
        {
            return OfAnother::No;
        }
        if self.stream.records.iter().any(|record| record.may_come_to(id)) {
            OfAnother::Perhaps
        } else {
            OfAnother::Surely
        }
    }

    /// Whether the last answer that was pending has come here.
    fn is_answered(&self, answered: &[u64]) -> bool {
        !self.stream.pending(&self.cursor, &[]).is_empty()
            && self.stream.pending(&self.cursor, answered).is_empty()
    }
}

impl Order {
    fn of(carried: &CarriedOn) -> Option<Self> {
        let cursor = carried.stream.find_entry(&carried.cursor).filter(|_| !carried.is_vague())?;
        let owed = carried.stream.owed_behind(&carried.cursor)?;
        let rising = carried.stream.rising_sequence();
        let is_known = rising.is_some() || carried.is_whole;
        is_known.then(|| Order { owed: Owed::new(owed), cursor, rising })
    }

    /// Whether an id that is new passes over what is owed: it is of the same
    /// sequence, and past all of that.
    fn is_passed_over(&self, stream: &Stream, id: &EventId) -> bool {
        let index = self.rising.and_then(|sequence| id.index_in(sequence));
        index.is_some() && index > stream.highest_index() && !self.owed.is_empty()
    }
}

/// Whether a fault of a replay is told or cut.
fn action(config: &Config, fault: ReplayFault) -> ReplayAction {
    match fault {
        _ if config.mode == Mode::Observe => ReplayAction::Report,
        ReplayFault::Gap => config.replay.gap,
        ReplayFault::ForeignSession => config.replay.foreign_session,
        ReplayFault::ForeignStream => config.replay.foreign_stream,
        ReplayFault::Repeated => config.replay.repeated,
        ReplayFault::Empty => ReplayAction::Report,
    }
}

/// An event has brought this fault: what is done about it. `can_cut`: it is
/// still in the guard's hands.
pub fn judge(config: &Config, fault: ReplayFault, can_cut: bool) -> Action {
    if can_cut && action(config, fault) == ReplayAction::Cut { Action::Cut } else { Action::Passed }
}

/// Whether a fault may lead to a cut, so that events have to be held until
/// they are complete.
pub fn may_cut(config: &Config) -> bool {
    ReplayFault::ALL.into_iter().any(|fault| action(config, fault) == ReplayAction::Cut)
}

/// The ids with data that have to follow a cursor, and haven't yet.
struct Owed {
    /// In their order, each with the number of those behind its last.
    pieces: Vec<(Ids, u64)>,
    /// All that there were.
    total: u64,
    /// The number of those behind the furthest that has come.
    furthest: Option<u64>,
    /// How many pieces there may be.
    most: usize,
}

/// An id that was owed has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// It was the next.
    InOrder,
    /// Others that stand before it haven't come.
    Early,
    /// Others that stand behind it have come.
    Late,
    /// They come in such a disorder that it can't be followed.
    Lost,
}

impl Owed {
    fn new(pieces: Vec<(Ids, u64)>) -> Self {
        let total = pieces.first().map_or(0, |(ids, behind)| behind.saturating_add(ids.count()));
        let most = pieces.len().saturating_add(MAX_SPLITS);
        Owed { pieces, total, furthest: None, most }
    }

    /// Whether all have come.
    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether an id with so many behind it was among them.
    fn ever_had(&self, behind: u64) -> bool {
        behind < self.total
    }

    /// Whether one came, and one before it didn't.
    fn are_passed_over(&self) -> bool {
        let furthest = self.furthest.unwrap_or(u64::MAX);
        self.pieces.iter().any(|(_, behind)| *behind > furthest)
    }

    /// An id has come. `None` if it wasn't owed, or not any more.
    fn take(&mut self, id: &EventId) -> Option<Taken> {
        let find = |(at, (ids, behind)): (usize, &(Ids, u64))| {
            ids.find(id).map(|later| (at, *ids, *behind, later))
        };
        let (at, ids, behind, later) = self.pieces.iter().enumerate().find_map(find)?;
        let place = behind.saturating_add(later);
        let is_late = self.furthest.is_some_and(|furthest| furthest < place);
        self.furthest = Some(self.furthest.map_or(place, |furthest| furthest.min(place)));
        let mut rest = Vec::new();
        let mut is_first = at == 0;
        if let Ids::Range { sequence, first, last } = ids {
            let index = last.saturating_sub(later);
            if index > first {
                is_first = false;
                let before = Ids::Range { sequence, first, last: index.saturating_sub(1) };
                rest.push((before, place.saturating_add(1)));
            }
            if later > 0 {
                rest.push((Ids::Range { sequence, first: index.saturating_add(1), last }, behind));
            }
        }
        self.pieces.splice(at..=at, rest);
        Some(match is_first {
            _ if self.pieces.len() > self.most => Taken::Lost,
            _ if is_late => Taken::Late,
            true => Taken::InOrder,
            false => Taken::Early,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::Secret;

    fn id(text: &str) -> EventId {
        EventId::new(&Secret::new([1; 16]), text.as_bytes()).unwrap()
    }

    fn owed(ids: &[&str], cursor: &str) -> Owed {
        let mut record = Record::new(7, 0);
        for text in ids {
            record.push(&id(text), true, 64, 5);
        }
        let (mut elements, mut count) = (Vec::new(), 0);
        assert!(record.push_owed(Some(&id(cursor)), &mut count, &mut elements));
        elements.reverse();
        Owed::new(elements)
    }

    #[test]
    fn what_is_owed_comes_once_and_in_any_order() {
        let ids = ["s_0", "s_1", "s_2", "s_3", "s_4", "s_5", "a-b", "c-d"];
        let mut owed = owed(&ids, "s_1");
        assert_eq!(owed.total, 6);
        assert_eq!(owed.take(&id("s_1")), None);
        assert_eq!(owed.take(&id("s_2")), Some(Taken::InOrder));
        assert_eq!(owed.take(&id("s_2")), None);
        assert_eq!(owed.take(&id("s_4")), Some(Taken::Early));
        assert!(owed.are_passed_over());
        assert_eq!(owed.take(&id("s_3")), Some(Taken::Late));
        assert!(!owed.are_passed_over());
        assert_eq!(owed.take(&id("c-d")), Some(Taken::Early));
        assert!(owed.are_passed_over());
        assert_eq!(owed.take(&id("s_5")), Some(Taken::Late));
        assert_eq!(owed.take(&id("a-b")), Some(Taken::Late));
        assert!(owed.is_empty() && !owed.are_passed_over());
    }

    #[test]
    fn disorder_is_bounded() {
        let ids: Vec<String> = (0..4_000).map(|n| format!("s_{n}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let mut owed = owed(&ids, "s_0");
        let taken = (2..4_000).step_by(2).map(|n| owed.take(&id(&format!("s_{n}"))));
        let until = taken.take_while(|taken| *taken != Some(Taken::Lost)).count();
        assert_eq!(until, MAX_SPLITS);
    }
}
