//! The answer to a resumption, as it passes: recorded, checked, and cut where
//! it is wrong.
//!
//! What can be cut has to be in the guard's hands, so where a cut is possible an
//! event goes on when it is complete. Comments go on at once, and so does what
//! is too long to be held.

use crate::blocks::Blocks;
use crate::budget::{Budget, Held};
use crate::config::PendingCalls;
use crate::event_id::EventId;
use crate::exchange::{BodyStep, Guard};
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::SentIds;
use crate::ledger::Access;
use crate::ledger::table::{Cut, Floor};
use crate::owner::Instance;
use crate::recorder::{Batch, Recorder};
use crate::replay::{self, Current, End, Finding, Outcome, Replay};
use crate::reply;
use crate::store::Store;
use crate::telemetry::{Known, LogLine};
use crate::verdict::{Action, Fault, ReplayFault, Ruling, Verdict};

/// Bytes of an event that are held until it is complete.
const HELD_LIMIT: usize = 64 * 1024;

/// The resumption that is answered.
#[derive(Debug, Clone)]
pub(crate) struct Resumed {
    /// The session that the request names.
    pub session: Option<SessionFingerprint>,
    /// Its cursor.
    pub cursor: Option<EventId>,
    /// The ruling by which it passed.
    pub ruling: Ruling,
    /// What was known of the session then.
    pub known: Option<Known>,
    /// Who answers.
    pub instance: Option<Instance>,
}

/// The answer to a resumption.
pub(crate) struct Answer {
    resumed: Resumed,
    /// Not there where the body can't be read.
    recorder: Option<Recorder>,
    replay: Replay,
    /// Where it may be cut.
    gate: Option<Gate>,
    /// It has ended cleanly.
    ended: bool,
}

/// Holds an event until it is complete.
struct Gate {
    blocks: Blocks,
    held: Vec<u8>,
    budget: Held,
    /// The event is too long, and passes.
    passing: bool,
    /// The stream was cut: nothing passes any more.
    is_shut: bool,
}

impl Gate {
    fn new(budget: &Budget) -> Self {
        Gate {
            blocks: Blocks::default(),
            held: Vec::new(),
            budget: budget.hold(),
            passing: false,
            is_shut: false,
        }
    }

    /// Takes some of an event. Whether it is to be looked at now: it is
    /// complete, or too long to be held.
    fn take(&mut self, part: &[u8], is_complete: bool) -> bool {
        self.held.extend_from_slice(part);
        let len = self.held.len();
        let is_held = len <= HELD_LIMIT && (is_complete || self.budget.grow_to(len));
        self.passing |= !is_held;
        is_complete || self.passing
    }

    /// It has gone out.
    fn release(&mut self, is_complete: bool) {
        self.held.clear();
        self.passing &= !is_complete;
        self.budget.shrink();
    }
}

/// The fault that leads to a cut, and the id that showed it.
type Reason = (ReplayFault, Option<EventId>);

impl Answer {
    /// An answer that can't be read. `ended`: it has no body.
    pub fn unread(resumed: Resumed, ended: bool) -> Self {
        Answer { resumed, recorder: None, replay: Replay::unchecked(), gate: None, ended }
    }

    /// An answer that is read and checked.
    pub fn new(
        guard: &Guard,
        resumed: Resumed,
        ended: bool,
        recorder: Recorder,
        replay: Replay,
    ) -> Self {
        let gate = replay::may_cut(&guard.config).then(|| Gate::new(&guard.body_budget));
        Answer { resumed, recorder: Some(recorder), replay, gate, ended }
    }

    /// The session whose events it records.
    pub fn session(&self) -> Option<SessionFingerprint> {
        self.recorder.as_ref().map(Recorder::session)
    }

    /// The ruling on the resumption as it stands now.
    pub fn ruling(&self) -> Ruling {
        self.resumed.ruling
    }

    /// Whether a part of the body may have to be replaced.
    pub fn is_gated(&self) -> bool {
        self.gate.is_some()
    }

    /// Some of the body is about to go on to the client.
    pub fn body<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        bytes: &[u8],
    ) -> BodyStep {
        if let Some(mut gate) = self.gate.take() {
            let step = self.pass(guard, at, &mut gate, bytes);
            self.gate = Some(gate);
            return step;
        }
        let mut step = BodyStep::default();
        if let Some(recorder) = &mut self.recorder {
            let batch = recorder.read(&guard.ledger, at, bytes);
            self.check(guard, at, &mut Current::default(), &batch, false, &mut step);
            self.keep(guard, at, batch);
        }
        step
    }

    /// Lets through the gate what is complete, up to an event that leads to a
    /// cut.
    fn pass<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        gate: &mut Gate,
        bytes: &[u8],
    ) -> BodyStep {
        if gate.is_shut {
            return BodyStep { replace: Some(Vec::new()), ..BodyStep::default() };
        }
        let mut step = BodyStep::default();
        let mut batch = Batch::default();
        let mut out = Vec::new();
        let held_before = !gate.held.is_empty();
        let mut cut = None;
        let mut history = Current::default();
        let mut rest = bytes;
        while !rest.is_empty() && cut.is_none() {
            let (len, is_complete) = gate.blocks.next(rest);
            let (part, tail) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            rest = tail;
            if !gate.take(part, is_complete) {
                break;
            }
            let Some(recorder) = &mut self.recorder else { break };
            let read = recorder.read(&guard.ledger, at, &gate.held);
            cut = self.check(guard, at, &mut history, &read, !gate.passing, &mut step);
            if cut.is_none() {
                batch.append(read);
                out.append(&mut gate.held);
            }
            gate.release(is_complete);
        }
        self.keep(guard, at, batch);
        if let Some(reason) = cut {
            gate.is_shut = true;
            out.append(&mut self.cut(guard, at, reason));
            step.reset = true;
        }
        if cut.is_some() || held_before || !gate.held.is_empty() {
            step.replace = Some(out);
        }
        step
    }

    /// Checks events in their order, up to one that leads to a cut.
    fn check<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        history: &mut Current,
        batch: &Batch,
        can_cut: bool,
        step: &mut BodyStep,
    ) -> Option<Reason> {
        for event in &batch.events {
            match self.replay.see(&guard.ledger, at, history, event) {
                Finding::Nothing => {}
                Finding::Twice => {
                    self.replay.give_up_order();
                    self.recorder.iter_mut().for_each(Recorder::note_repeat);
                }
                Finding::OutOfOrder => {
                    self.recorder.iter_mut().for_each(Recorder::note_disorder);
                }
                Finding::Fault(fault) => {
                    let action = replay::judge(&guard.config, fault, can_cut);
                    if self.replay.note(fault, action) || action == Action::Cut {
                        step.found.push(self.found(fault, action));
                    }
                    if action == Action::Cut {
                        return Some((fault, event.id));
                    }
                }
            }
        }
        self.set_passed_over(self.replay.passes_over());
        None
    }

    /// Whether ids came ahead of others that may still come.
    fn set_passed_over(&mut self, passed_over: bool) {
        self.recorder.iter_mut().for_each(|recorder| recorder.set_passed_over(passed_over));
    }

    /// A fault of the replay. It is what shows of the resumption from now on,
    /// unless that should not have passed at all.
    fn found(&mut self, fault: ReplayFault, action: Action) -> LogLine {
        let ruling = Ruling { verdict: Verdict::Inconsistent(Fault::Replay(fault)), action };
        let shows = match self.resumed.ruling.verdict {
            Verdict::Inconsistent(Fault::Replay(_)) => true,
            Verdict::Inconsistent(_) => action == Action::Cut,
            Verdict::Continue | Verdict::Unverified(_) => true,
        };
        if shows {
            self.resumed.ruling = ruling;
        }
        LogLine { ruling, session: self.resumed.session, known: self.resumed.known }
    }

    fn keep<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>, batch: Batch) {
        if let Some(recorder) = &mut self.recorder {
            recorder.keep(&guard.ledger, at, batch);
        }
    }

    /// It is cut: remembers that, and gives its last word.
    fn cut<S: Store>(&self, guard: &Guard, at: &mut Access<'_, S>, (fault, id): Reason) -> Vec<u8> {
        let mut pending = SentIds::new();
        if let (Some(session), Some(cursor)) = (self.resumed.session, &self.resumed.cursor) {
            if guard.config.reject.pending_calls == PendingCalls::Settle
                && let Some(history) = guard.ledger.history(at, session)
            {
                pending = history.pending_calls(cursor, self.replay.answered());
                if !pending.is_empty() {
                    guard.ledger.settle(at, session, cursor);
                }
            }
            let index = id.and_then(|id| Some((id.whole, self.replay.rising_index(&id)?)));
            let owner = self.resumed.instance.as_ref().map(|instance| instance.id);
            match (owner.filter(|owner| owner.is_told()), fault, self.replay.stream(), index) {
                (None, ..) => {}
                (Some(owner), ReplayFault::Gap, Some(stream), Some((id, index))) => {
                    guard.ledger.learn_floor(at, session, Floor { stream, owner, id, index });
                }
                (Some(owner), ..) => {
                    let cut = Cut { cursor: cursor.whole, owner, fault };
                    guard.ledger.remember_cut(at, session, cut);
                }
            }
        }
        reply::last_word(Verdict::Inconsistent(Fault::Replay(fault)), &pending)
    }

    /// It has ended cleanly, with its body or, `with_trailers`, where nothing
    /// can be sent any more.
    pub fn end<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        with_trailers: bool,
    ) -> BodyStep {
        let mut step = BodyStep::default();
        self.ended = true;
        let mut gate = self.gate.take();
        let held = gate.as_mut().map(|gate| std::mem::take(&mut gate.held)).unwrap_or_default();
        let is_dropped = with_trailers && !held.is_empty();
        if gate.is_some_and(|gate| gate.is_shut) || is_dropped {
            return step;
        }
        let Some(recorder) = &mut self.recorder else { return step };
        let mut batch = recorder.read(&guard.ledger, at, &held);
        batch.append(recorder.read_end(&guard.ledger));
        let can_cut = !held.is_empty();
        match self.check(guard, at, &mut Current::default(), &batch, can_cut, &mut step) {
            Some(reason) => step.replace = Some(self.cut(guard, at, reason)),
            None => {
                self.keep(guard, at, batch);
                step.replace = can_cut.then_some(held);
            }
        }
        // What hasn't come by now is missing.
        self.set_passed_over(false);
        self.close_recorder(guard, at);
        step
    }

    /// It is over, however it ended. Gives what the replay came to, and a fault
    /// of it that was found only now.
    pub fn close<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        ended_by_upstream: impl FnOnce() -> bool,
    ) -> (Outcome, Option<LogLine>) {
        let end = if self.ended || ended_by_upstream() { End::Upstream } else { End::Other };
        let (outcome, late) = self.replay.finish(at.now_us, end);
        self.set_passed_over(false);
        if self.replay.is_disordered() {
            self.recorder.iter_mut().for_each(Recorder::note_disorder);
        }
        self.close_recorder(guard, at);
        (outcome, late.map(|fault| self.found(fault, Action::Passed)))
    }

    fn close_recorder<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>) {
        if let Some(mut recorder) = self.recorder.take() {
            recorder.close(&guard.ledger, at);
        }
    }
}
