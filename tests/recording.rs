//! What is recorded, and when: connections that come, go, and overlap.

mod support;

use std::rc::Rc;

use mcp_resume_guard::exchange::Exchange;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry::Tally;
use support::{Answer, Gateway, Sender, fields};

const EXCLUSIVE: &str = r#"{"history":"exclusive"}"#;
const NEVER_ISSUED: &str = "inconsistent;reason=never_issued;action=rejected";
const HISTORY_EVICTED: &str = "unverified;reason=history_evicted;action=passed";
const HISTORY_INCOMPLETE: &str = "unverified;reason=history_incomplete;action=passed";
const UNKNOWN_SESSION: &str = "unverified;reason=unknown_session;action=passed";

fn gateway(config: &str) -> Gateway {
    let mut gateway = Gateway::new(config);
    gateway.initialize("a");
    gateway
}

fn assert_continue(gateway: &mut Gateway, cursors: &[&str]) {
    for cursor in cursors {
        assert_eq!(gateway.verdict("a", cursor), "continue", "{cursor}");
    }
}

#[test]
fn requests_alone_create_no_state() {
    let mut gateway = Gateway::new("{}");
    let before = (gateway.store.len(), gateway.store.bytes());
    for number in 0..1_000 {
        let session = format!("session-{number}");
        for method in ["GET", "POST", "DELETE", "PUT"] {
            let list = [(":method", method), (":path", "/mcp"), ("mcp-session-id", &session)];
            let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
            // Not even the upstream's 2xx changes that.
            gateway.respond(exchange, &[(":status", "200")]);
        }
        gateway.verdict(&session, "5");
        let stream = gateway.listen(&session);
        gateway.end(stream);
    }
    assert_eq!((gateway.store.len(), gateway.store.bytes()), before);
}

#[test]
fn an_answer_that_is_not_the_upstreams_changes_nothing() {
    let mut gateway = gateway(EXCLUSIVE);
    let ok = fields(&[
        (":status", "200"),
        ("content-type", "text/event-stream"),
        ("mcp-session-id", "other"),
    ]);
    let from = Sender { upstream: false, ..Sender::upstream(1) };
    for method in ["DELETE", "POST", "GET"] {
        let list = fields(&[(":method", method), (":path", "/mcp"), ("mcp-session-id", "a")]);
        gateway.with(|guard, at| {
            let (mut exchange, _) = Exchange::begin(guard, at, &list);
            let step = exchange.response(guard, at, &ok, false, &from);
            assert!(!step.body && step.attest.is_none());
        });
    }
    assert_eq!(gateway.verdict("a", "x"), NEVER_ISSUED);
    assert_eq!(gateway.verdict("other", "x"), UNKNOWN_SESSION);
}

#[test]
fn an_upstreams_error_begins_and_ends_nothing() {
    let mut gateway = gateway(EXCLUSIVE);
    for status in ["400", "401", "404", "405", "409", "500", "503"] {
        gateway.delete("a", status);
        let list = [(":method", "POST"), (":path", "/mcp")];
        let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
        gateway.respond(exchange, &[(":status", status), ("mcp-session-id", "b")]);
    }
    assert_eq!(gateway.verdict("a", "x"), NEVER_ISSUED);
    assert_eq!(gateway.verdict("b", "x"), UNKNOWN_SESSION);
}

#[test]
fn an_unfinished_event_is_issued_at_a_clean_end_only() {
    for (clean, verdict) in [(true, "continue"), (false, NEVER_ISSUED)] {
        let mut gateway = gateway(EXCLUSIVE);
        let mut stream = gateway.call("a", 1);
        gateway.send(&mut stream, "id: x-y\ndata: {}\n");
        assert_eq!(gateway.verdict("a", "x-y"), NEVER_ISSUED);
        if clean {
            gateway.end(stream);
        } else {
            gateway.abort(stream);
        }
        assert_eq!(gateway.verdict("a", "x-y"), verdict);
    }
}

#[test]
fn a_connection_that_still_delivers_while_a_second_one_resumes() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut first = gateway.call("a", 1);
    gateway.events(&mut first, &["s-1-x", "s-2-x"]);
    let mut second = gateway.resume("a", "s-1-x");
    gateway.events(&mut second, &["s-2-x", "s-3-x"]);
    gateway.events(&mut first, &["s-4-x"]);
    gateway.events(&mut second, &["s-5-x"]);
    gateway.events(&mut first, &["s-6-x"]);
    let all = ["s-1-x", "s-2-x", "s-3-x", "s-4-x", "s-5-x", "s-6-x"];
    assert_continue(&mut gateway, &all);
    gateway.abort(first);
    gateway.end(second);
    assert_continue(&mut gateway, &all);
    // The next one finds both, and adds to the newer.
    let mut third = gateway.resume("a", "s-6-x");
    gateway.events(&mut third, &["s-7-x"]);
    assert_continue(&mut gateway, &all);
    assert_continue(&mut gateway, &["s-7-x"]);
    assert_eq!(gateway.verdict("a", "s-8-x"), NEVER_ISSUED);
    assert_eq!(gateway.tally.streams_evicted, 0);
}

#[test]
fn who_resumes_takes_over_the_record_of_the_one_that_ended() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"streams_per_session":1}}"#);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["p-0-x"]);
    gateway.end(stream);
    // Polling: each connection brings one more event, and ends.
    for number in 1..50 {
        let cursor = format!("p-{}-x", number - 1);
        let mut stream = gateway.resume("a", &cursor);
        gateway.events(&mut stream, &[&format!("p-{number}-x")]);
        gateway.end(stream);
    }
    for number in 0..50 {
        assert_continue(&mut gateway, &[&format!("p-{number}-x")]);
    }
    assert_eq!(gateway.verdict("a", "p-50-x"), NEVER_ISSUED);
}

#[test]
fn the_answer_may_come_on_the_connection_that_resumes() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut one = gateway.call("a", 1);
    gateway.events(&mut one, &["0"]);
    gateway.abort(one);
    let mut two = gateway.call("a", 2);
    gateway.events(&mut two, &["0"]);
    assert!(gateway.verdict("a", "0").contains("ambiguous_cursor"));
    gateway.answer(&mut two, "1", 2);
    // One is open still, and that is the one that is carried on.
    let mut resumed = gateway.resume("a", "0");
    gateway.answer(&mut resumed, "2", 1);
    let mut three = gateway.call("a", 3);
    gateway.events(&mut three, &["0"]);
    assert_eq!(gateway.verdict("a", "0"), "continue");
}

#[test]
fn an_answer_without_an_id_finishes_its_stream_too() {
    let mut gateway = gateway(EXCLUSIVE);
    for call in [1, 2] {
        let mut stream = gateway.call("a", call);
        gateway.priming(&mut stream, "p");
        gateway.send(&mut stream, &format!("data: {{\"result\":{{}},\"id\":{call}}}\n\n"));
        gateway.end(stream);
    }
    assert_eq!(gateway.verdict("a", "p"), "continue");
}

#[test]
fn the_body_of_a_request_may_end_after_its_answer_has_begun() {
    let mut gateway = gateway(EXCLUSIVE);
    for call in [1, 2] {
        let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
        let Answer::Passed { mut exchange, .. } = gateway.request(&list) else { panic!() };
        let body = format!(r#"{{"jsonrpc":"2.0","id":{call},"method":"tools/call"}}"#);
        let (head, tail) = body.split_at(10);
        assert!(gateway.with(|guard, at| exchange.request_body(guard, at, head.as_bytes(), false)));
        let sse = [(":status", "200"), ("content-type", "text/event-stream; charset=utf-8")];
        let mut running = gateway.respond(exchange, &sse);
        gateway.priming(&mut running, "x");
        gateway.late_body(&mut running, tail.as_bytes(), true);
        gateway.events(&mut running, &[&format!("y{call}-x")]);
    }
    assert!(gateway.verdict("a", "x").contains("ambiguous_cursor"));
}

#[test]
fn a_plain_get_that_replays_from_the_start_changes_nothing() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"events_per_stream":2}}"#);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["n-1-x", "n-2-x", "n-3-x"]);
    gateway.abort(stream);
    let mut again = gateway.listen("a");
    gateway.events(&mut again, &["n-1-x", "n-2-x", "n-3-x"]);
    assert_eq!(gateway.tally.events_recorded, 3);
    assert_continue(&mut gateway, &["n-1-x", "n-2-x", "n-3-x"]);
    gateway.events(&mut again, &["n-4-x"]);
    assert!(gateway.verdict("a", "n-1-x").contains("below_floor"));
    assert_continue(&mut gateway, &["n-2-x"]);
}

#[test]
fn ids_that_come_again_after_they_left_the_window_make_no_floor() {
    let mut gateway = gateway(
        r#"{"history":"exclusive","retention":{"events_per_stream":2},"state":{"ids_per_stream":4}}"#,
    );
    let mut stream = gateway.listen("a");
    let ids: Vec<String> = (0..8).map(|number| format!("n-{number}-x")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    gateway.events(&mut stream, &ids);
    gateway.abort(stream);
    let mut again = gateway.listen("a");
    gateway.events(&mut again, &ids[..3]);
    // The head is n-7-x, whatever has come again since.
    assert_continue(&mut gateway, &["n-7-x"]);
}

#[test]
fn a_resumption_that_is_replayed_from_the_start_makes_no_floor_either() {
    let mut gateway = gateway(
        r#"{"history":"exclusive","retention":{"events_per_stream":3},"state":{"ids_per_stream":4}}"#,
    );
    let mut stream = gateway.listen("a");
    let ids: Vec<String> = (0..8).map(|number| format!("n-{number}-x")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    gateway.events(&mut stream, &ids);
    gateway.abort(stream);
    let mut again = gateway.resume("a", "n-7-x");
    gateway
        .send(&mut again, &ids.iter().map(|id| format!("id:{id}\ndata:x\n\n")).collect::<String>());
    assert_continue(&mut gateway, &["n-7-x"]);
}

#[test]
fn a_resumption_from_an_unknown_cursor_joins_the_stream_that_it_turns_out_to_be() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"streams_per_session":2}}"#);
    gateway.restart();
    let mut standalone = gateway.listen("a");
    gateway.events(&mut standalone, &["n-5-x"]);
    let mut resumed = gateway.resume("a", "n-2-x");
    gateway.events(&mut resumed, &["n-3-x", "n-4-x"]);
    gateway.events(&mut resumed, &["n-5-x", "n-6-x"]);
    assert_continue(&mut gateway, &["n-3-x", "n-4-x", "n-5-x", "n-6-x"]);
    gateway.end(resumed);
    // It is one stream: a second one has room beside it.
    let mut call = gateway.call("a", 1);
    gateway.events(&mut call, &["c-1-x"]);
    assert_eq!(gateway.tally.streams_evicted, 0);
    assert_continue(&mut gateway, &["n-3-x", "n-6-x", "c-1-x"]);
}

#[test]
fn a_stream_that_was_evicted_while_it_ran() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"streams_per_session":1}}"#);
    let mut first = gateway.call("a", 1);
    gateway.events(&mut first, &["f-1-x"]);
    let mut second = gateway.call("a", 2);
    gateway.events(&mut second, &["s-1-x"]);
    assert_eq!(gateway.verdict("a", "f-1-x"), HISTORY_EVICTED);
    // It doesn't know yet, and writes where another has its record by now.
    gateway.events(&mut first, &["f-2-x"]);
    for cursor in ["f-1-x", "f-2-x", "s-1-x"] {
        let verdict = gateway.verdict("a", cursor);
        assert!(verdict == "continue" || verdict == HISTORY_EVICTED, "{cursor}: {verdict}");
    }
    gateway.events(&mut second, &["s-2-x"]);
    assert_continue(&mut gateway, &["s-1-x", "s-2-x"]);
    // A second later it looks, and takes a lane again.
    gateway.now_ms += 1_000;
    gateway.events(&mut first, &["f-3-x"]);
    assert_continue(&mut gateway, &["f-1-x", "f-2-x", "f-3-x"]);
}

#[test]
fn a_session_that_was_evicted_under_a_running_stream() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"sessions":1}}"#);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["f-1-x"]);
    gateway.initialize("b");
    assert_eq!(gateway.verdict("a", "f-1-x"), UNKNOWN_SESSION);
    gateway.events(&mut stream, &["f-2-x"]);
    assert_eq!(gateway.verdict("b", "x"), NEVER_ISSUED);
    // It begins again, under the same id: what it was sent before is lost.
    gateway.initialize("a");
    gateway.events(&mut stream, &["f-3-x"]);
    for cursor in ["f-1-x", "f-2-x", "f-3-x", "x"] {
        let verdict = gateway.verdict("a", cursor);
        assert!(verdict == "continue" || verdict == HISTORY_INCOMPLETE, "{cursor}: {verdict}");
    }
    gateway.now_ms += 1_000;
    gateway.events(&mut stream, &["f-4-x"]);
    assert_continue(&mut gateway, &["f-1-x", "f-2-x", "f-3-x", "f-4-x"]);
    assert_eq!(gateway.verdict("a", "x"), HISTORY_INCOMPLETE);
    assert_eq!(gateway.tally.sessions_evicted, 2);
}

#[test]
fn ended_sessions_are_evicted_first_then_idle_then_adopted_ones() {
    let mut gateway = Gateway::new(r#"{"state":{"sessions":4,"idle_seconds":60}}"#);
    // Without traffic, which would count as use.
    let known = |gateway: &mut Gateway, session: &str| {
        gateway.with(|guard, at| {
            let session = guard.ledger.secret().session(session.as_bytes());
            guard.ledger.session(at, session).is_some()
        })
    };
    gateway.initialize("idle");
    gateway.now_ms += 61_000;
    gateway.initialize("ended");
    let mut adopted = gateway.listen("adopted");
    gateway.events(&mut adopted, &["1"]);
    gateway.now_ms += 10;
    gateway.initialize("oldest");
    gateway.delete("ended", "200");
    gateway.now_ms += 10;
    for (number, victim) in ["ended", "idle", "adopted", "oldest"].into_iter().enumerate() {
        assert!(known(&mut gateway, victim), "{victim}");
        gateway.now_ms += 10;
        gateway.initialize(&format!("new-{number}"));
        assert!(!known(&mut gateway, victim), "{victim}");
    }
    // The one that had ended was no loss.
    assert_eq!(gateway.tally.sessions_evicted, 3);
}

#[test]
fn two_workers_see_each_others_records() {
    let store = Rc::new(SharedData::default());
    let mut one = Gateway::on(Rc::clone(&store), EXCLUSIVE);
    let mut two = Gateway::on(store, EXCLUSIVE).with_nonces_from(1 << 32);
    one.initialize("a");
    let mut stream = one.call("a", 1);
    one.events(&mut stream, &["s-1-x", "s-2-x"]);
    assert_eq!(two.verdict("a", "s-2-x"), "continue");
    assert_eq!(two.verdict("a", "s-3-x"), NEVER_ISSUED);
    one.abort(stream);
    let mut resumed = two.resume("a", "s-2-x");
    two.events(&mut resumed, &["s-3-x"]);
    assert_eq!(one.verdict("a", "s-1-x"), "continue");
    assert_eq!(one.verdict("a", "s-3-x"), "continue");
}

#[test]
fn contract_violations_are_counted() {
    let mut gateway = gateway(EXCLUSIVE);
    for call in [1, 2] {
        let mut stream = gateway.call("a", call);
        gateway.priming(&mut stream, "0");
        assert_eq!(gateway.tally.event_ids_reused, 0);
        gateway.answer(&mut stream, "1", call);
        gateway.end(stream);
    }
    assert_eq!(gateway.tally.event_ids_reused, 1);
    let mut silent = gateway.call("a", 3);
    gateway.send(&mut silent, ": ping\n\n");
    gateway.end(silent);
    assert_eq!(gateway.tally.streams_without_ids, 0);
    let mut without = gateway.call("a", 4);
    gateway.send(&mut without, "data: {}\n\n");
    gateway.end(without);
    assert_eq!(gateway.tally.streams_without_ids, 1);
    gateway.initialize("a");
    assert_eq!(gateway.tally.session_ids_reissued, 1);
    assert_eq!(gateway.tally.sessions_started, 1);
}

#[test]
fn nothing_is_in_clear() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["secret-cursor"]);
    let line = gateway.log_line("secret-session", "secret-cursor").unwrap();
    let text = line.to_json(Some(b"some-request"), 3);
    assert!(!text.contains("secret"), "{text}");
    assert!(
        gateway
            .store
            .values()
            .iter()
            .all(|value| { !value.windows(6).any(|window| window == b"secret") })
    );
    assert_eq!(gateway.tally.cas_conflicts, Tally::default().cas_conflicts);
}

#[test]
fn both_names_of_a_renamed_session_are_incomplete() {
    let mut gateway = gateway(EXCLUSIVE);
    let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
    let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
    let head =
        [(":status", "200"), ("content-type", "text/event-stream"), ("mcp-session-id", "inner")];
    let mut stream = gateway.respond(exchange, &head);
    gateway.events(&mut stream, &["1", "2"]);
    // Behind a proxy that shows the client the first name only.
    assert_eq!(gateway.verdict("a", "2"), HISTORY_INCOMPLETE);
    assert_eq!(gateway.verdict("inner", "2"), "continue");
}

#[test]
fn events_of_nobody_knows_whom_make_everybody_incomplete() {
    for (request, response) in [
        (&["a"][..], &["a", "b"][..]),
        (&["a", "b"], &[]),
        (&["a", "b"], &["b"]),
        (&["a", ""], &[]),
    ] {
        let mut gateway = gateway(EXCLUSIVE);
        let mut list = vec![(":method", "POST"), (":path", "/mcp")];
        list.extend(request.iter().map(|session| ("mcp-session-id", *session)));
        let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
        let mut head = vec![(":status", "200"), ("content-type", "text/event-stream")];
        head.extend(response.iter().map(|session| ("mcp-session-id", *session)));
        let mut stream = gateway.respond(exchange, &head);
        gateway.events(&mut stream, &["1"]);
        assert_eq!(gateway.verdict("a", "1"), HISTORY_INCOMPLETE, "{request:?} {response:?}");
    }
}

#[test]
fn an_answer_to_a_get_that_some_clients_read_as_a_stream() {
    for (content_type, verdict) in [
        ("application/json", NEVER_ISSUED),
        ("text/plain", HISTORY_INCOMPLETE),
        ("", HISTORY_INCOMPLETE),
        ("text/event-stream,text/event-stream", "continue"),
    ] {
        let mut gateway = gateway(EXCLUSIVE);
        let list = [(":method", "GET"), (":path", "/mcp"), ("mcp-session-id", "a")];
        let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
        let head = [(":status", "200"), ("content-type", content_type)];
        let mut stream = gateway.respond(exchange, &head);
        gateway.events(&mut stream, &["x-y"]);
        assert_eq!(gateway.verdict("a", "x-y"), verdict, "{content_type}");
    }
}

#[test]
fn a_stream_that_was_resumed_can_still_be_finished() {
    let mut gateway = gateway(
        r#"{"retention":{"finished_stream_seconds":60},"reject":{"pending_calls":"status"}}"#,
    );
    let mut first = gateway.call("a", 1);
    gateway.events(&mut first, &["x-1-x"]);
    gateway.abort(first);
    let mut second = gateway.resume("a", "x-1-x");
    gateway.events(&mut second, &["x-2-x"]);
    gateway.answer(&mut second, "x-3-x", 1);
    gateway.end(second);
    gateway.now_ms += 61_000;
    assert!(gateway.verdict("a", "x-1-x").contains("below_floor"));
}

#[test]
fn a_uuid_that_another_stream_brings_again_is_not_ambiguous() {
    const UUID: &str = "6fa459ea-ee8a-3ca4-894e-db77e160355e";
    let mut gateway = gateway(EXCLUSIVE);
    let mut call = gateway.call("a", 1);
    gateway.events(&mut call, &[UUID]);
    let mut standalone = gateway.listen("a");
    gateway.events(&mut standalone, &[UUID]);
    assert_continue(&mut gateway, &[UUID]);
}

#[test]
fn a_cursor_of_two_streams_whose_replay_is_the_other_one_makes_no_floor() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"events_per_stream":5}}"#);
    let mut standalone = gateway.listen("a");
    gateway.events(&mut standalone, &["1", "2", "3"]);
    gateway.abort(standalone);
    let mut call = gateway.call("a", 1);
    gateway.events(&mut call, &["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    gateway.answer(&mut call, "10", 1);
    gateway.end(call);
    let mut resumed = gateway.resume("a", "2");
    gateway.events(&mut resumed, &["3", "4", "5", "6", "7", "8", "9", "10"]);
    assert_continue(&mut gateway, &["3"]);
}

#[test]
fn a_server_that_gives_replayed_events_new_ids_makes_no_floor() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"events_per_stream":3}}"#);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["a-1-x", "a-2-x", "a-3-x"]);
    gateway.abort(stream);
    let mut resumed = gateway.resume("a", "a-1-x");
    gateway.events(&mut resumed, &["b-2-x", "b-3-x"]);
    gateway.abort(resumed);
    assert_continue(&mut gateway, &["a-1-x"]);
}

#[test]
fn a_priming_event_before_the_replay_leaves_the_floor() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"events_per_stream":2}}"#);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["a-1-x", "a-2-x", "a-3-x", "a-4-x"]);
    gateway.abort(stream);
    let mut resumed = gateway.resume("a", "a-3-x");
    gateway.priming(&mut resumed, "p-x");
    gateway.events(&mut resumed, &["a-4-x"]);
    assert!(gateway.verdict("a", "a-1-x").contains("below_floor"));
    assert_continue(&mut gateway, &["a-2-x"]);
}

#[test]
fn an_answer_under_another_name_carries_on_no_stream_of_that_session() {
    let mut gateway = gateway(r#"{"retention":{"events_per_stream":2}}"#);
    gateway.initialize("b");
    let mut of_b = gateway.listen("b");
    gateway.events(&mut of_b, &["b-1-x"]);
    let mut of_a = gateway.listen("a");
    gateway.events(&mut of_a, &["a-1-x"]);
    let Answer::Passed { exchange, .. } = gateway.try_resume("a", "a-1-x") else { panic!() };
    let head = [(":status", "200"), ("content-type", "text/event-stream"), ("mcp-session-id", "b")];
    let mut stream = gateway.respond(exchange, &head);
    gateway.events(&mut stream, &["a-2-x", "a-3-x", "a-4-x"]);
    assert_eq!(gateway.verdict("b", "b-1-x"), "continue");
}

#[test]
fn a_long_session_keeps_its_streams_apart() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut standalone = gateway.listen("a");
    gateway.events(&mut standalone, &["0", "1"]);
    for call in 0..40 {
        let mut stream = gateway.call("a", call);
        gateway.priming(&mut stream, &format!("0/{call}"));
        gateway.abort(stream);
        let mut resumed = gateway.resume("a", &format!("0/{call}"));
        gateway.answer(&mut resumed, &format!("1/{call}"), call);
        gateway.end(resumed);
    }
    // Streams were evicted, but none of what is resumed now.
    let evicted = gateway.tally.streams_evicted;
    let mut call = gateway.call("a", 99);
    gateway.priming(&mut call, "0/99");
    for reconnect in 1..30 {
        gateway.abort(call);
        call = gateway.resume("a", &format!("{}/99", reconnect - 1));
        gateway.events(&mut call, &[&format!("{reconnect}/99")]);
        gateway.abort(standalone);
        standalone = gateway.resume("a", &reconnect.to_string());
        gateway.events(&mut standalone, &[&(reconnect + 1).to_string()]);
    }
    assert_eq!(gateway.tally.streams_evicted, evicted + 1);
    assert_continue(&mut gateway, &["0", "30", "0/99", "29/99"]);
}

#[test]
fn a_sequence_that_is_known_was_not_evicted() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"streams_per_session":2}}"#);
    let go = |stream: char, index: u32| format!("7ZKQ3M5VXN2LB4YTRW6CJHDPA{stream}_{index}");
    for (call, stream) in ['A', 'B', 'C'].into_iter().enumerate() {
        let call = u32::try_from(call).unwrap();
        let mut running = gateway.call("a", call);
        for index in 0..3 {
            gateway.events(&mut running, &[&go(stream, index)]);
        }
        gateway.answer(&mut running, &go(stream, 3), call);
        gateway.end(running);
    }
    assert!(gateway.verdict("a", &go('C', 9)).contains("ahead_of_head"));
    assert_eq!(gateway.verdict("a", &go('A', 2)), HISTORY_EVICTED);
    assert_eq!(gateway.verdict("a", "nobody"), HISTORY_EVICTED);
}
