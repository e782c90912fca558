//! Honest cursors that were once called inconsistent, and one that the guard was
//! too unsure of: the shortest sequences that a comparison with a naive twin has
//! found.

mod support;

use std::rc::Rc;

use mcp_resume_guard::store::Store;
use support::{Answer, Flaky, Gateway};

const A: &str = "550e8400-e29b-41d4-a716-446655440000";
const B: &str = "6fa459ea-ee8a-3ca4-894e-db77e160355e";
const C: &str = "7d444840-9dc0-11d1-b245-5ffdce74fad2";
const D: &str = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";

/// A broadcast that is missed by one session alone looks like a leak, and is cut
/// by default.
const FEW_IDS_REPORTED: &str =
    r#"{"state":{"ids_per_stream":2},"replay":{"foreign_session":"report"}}"#;

/// An id of a stream with a random name.
fn go(index: u32) -> String {
    format!("7ZKQ3M5VXN2LB4YTRW6CJHDPAE_{index}")
}

#[track_caller]
fn assert_not_refused<S: Store>(gateway: &mut Gateway<S>, session: &str, cursor: &str) {
    let verdict = gateway.verdict(session, cursor);
    assert!(!verdict.starts_with("inconsistent"), "{verdict}");
}

#[test]
fn an_id_that_was_first_sent_by_a_replay_and_has_left_the_window() {
    let mut gateway = Gateway::new(FEW_IDS_REPORTED);
    let mut other = gateway.listen("o");
    gateway.events(&mut other, &[A]);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &[B]);
    gateway.abort(stream);
    // The broadcast that `s` missed is replayed to it, then more comes.
    let mut stream = gateway.resume("s", B);
    gateway.events(&mut stream, &[A, C, D]);
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn the_same_from_a_cursor_that_was_not_known() {
    let mut gateway = Gateway::new(FEW_IDS_REPORTED);
    let mut other = gateway.listen("o");
    gateway.events(&mut other, &[A]);
    let mut stream = gateway.resume("s", B);
    gateway.events(&mut stream, &[A, C, D]);
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn ids_of_an_unplaced_stream_are_not_foreign() {
    let mut gateway = Gateway::new("{}");
    let mut other = gateway.listen("o");
    gateway.events(&mut other, &[&go(0), &go(1), &go(2)]);
    let mut stream = gateway.resume("o", &go(7));
    gateway.events(&mut stream, &[&go(9)]);
    assert_not_refused(&mut gateway, "s", &go(9));
}

#[test]
fn nor_are_those_of_its_resumption() {
    let mut gateway = Gateway::new("{}");
    let mut other = gateway.resume("o", B);
    gateway.events(&mut other, &[A]);
    gateway.end(other);
    let mut other = gateway.resume("o", A);
    gateway.events(&mut other, &[C]);
    assert_not_refused(&mut gateway, "s", A);
    assert_not_refused(&mut gateway, "s", C);
}

#[test]
fn a_range_and_a_single_id_are_of_one_sequence() {
    let mut gateway = Gateway::new("{}");
    let mut other = gateway.listen("o");
    gateway.events(&mut other, &[&go(0), &go(1), &go(2), &go(3)]);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &[&go(3)]);
    assert_not_refused(&mut gateway, "s", &go(1));
}

#[test]
fn an_answer_without_an_id_on_a_resumption_without_news() {
    let mut gateway = Gateway::new("{}");
    for call in [1, 2] {
        let mut stream = gateway.call("s", call);
        gateway.priming(&mut stream, &format!("x{call}"));
        gateway.events(&mut stream, &["0"]);
        gateway.abort(stream);
        let mut stream = gateway.resume("s", &format!("x{call}"));
        gateway.send(
            &mut stream,
            &format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{call},\"result\":{{}}}}\n\n"),
        );
        gateway.end(stream);
    }
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_unplaced_stream_may_be_the_one_that_seems_idle() {
    let mut gateway = Gateway::new(r#"{"retention":{"seconds":10},"state":{"ids_per_stream":2}}"#);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &[A, B, C]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", A);
    gateway.now_ms += 11_000;
    gateway.events(&mut stream, &[D]);
    assert_not_refused(&mut gateway, "s", B);
}

#[test]
fn an_unplaced_stream_may_bring_the_answer_that_seems_awaited() {
    let mut gateway = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut one = gateway.call("s", 1);
    gateway.events(&mut one, &["p-a", "p-b", "0"]);
    gateway.abort(one);
    // From an id that has left the window; the answer comes.
    let mut again = gateway.resume("s", "p-a");
    gateway.answer(&mut again, "p-z", 1);
    gateway.end(again);
    let mut two = gateway.call("s", 2);
    gateway.events(&mut two, &["0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn streams_of_two_lives_of_a_session_have_different_numbers() {
    let mut gateway = Gateway::new(r#"{"state":{"sessions":1}}"#);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &["1", "2"]);
    gateway.abort(stream);
    let mut live = gateway.resume("s", "2");
    gateway.initialize("other");
    let mut post = gateway.call("s", 1);
    gateway.events(&mut post, &["p"]);
    gateway.events(&mut live, &["3"]);
    let mut again = gateway.listen("s");
    gateway.events(&mut again, &["1", "2", "3"]);
    assert_not_refused(&mut gateway, "s", "3");
}

#[test]
fn a_common_cursor_may_be_of_a_stream_that_has_forgotten_it() {
    let mut gateway = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut post = gateway.call("s", 1);
    gateway.priming(&mut post, "0");
    gateway.events(&mut post, &["2", "4", "6"]);
    gateway.abort(post);
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &["0"]);
    gateway.end(get);
    // `0` is the POST's, too, but has left its window there; the POST's
    // stream is replayed.
    let mut again = gateway.resume("s", "0");
    gateway.events(&mut again, &["2", "4", "6"]);
    assert_not_refused(&mut gateway, "s", "6");
}

fn flaky(config: &str) -> Gateway<Flaky> {
    Gateway::on(Rc::new(Flaky::default()), config)
}

#[test]
fn an_adoption_that_was_given_up_before_the_session_begins() {
    let mut gateway = flaky(r#"{"history":"exclusive"}"#);
    let mut stream = gateway.listen("s");
    gateway.store.failing.set(true);
    gateway.events(&mut stream, &["1"]);
    gateway.store.failing.set(false);
    gateway.now_ms += 1;
    gateway.initialize("s");
    assert_not_refused(&mut gateway, "s", "1");
}

#[test]
fn an_adoption_that_was_given_up_for_good() {
    let mut gateway = flaky("{}");
    let mut other = gateway.listen("o");
    gateway.events(&mut other, &[A]);
    gateway.store.failing.set(true);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &[A]);
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn the_newest_event_was_given_up() {
    let mut gateway = flaky(r#"{"retention":{"seconds":10}}"#);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &["1", "2"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "2");
    gateway.now_ms += 11_000;
    gateway.store.failing.set(true);
    gateway.events(&mut stream, &["3"]);
    assert_not_refused(&mut gateway, "s", "1");
}

#[test]
fn a_floor_of_another_stream_that_has_the_same_ids() {
    for (state, evict) in [(r#""ids_per_stream":1"#, false), (r#""streams_per_session":2"#, true)] {
        let config = format!(
            r#"{{"history":"exclusive","retention":{{"events_per_stream":3}},"state":{{{state}}}}}"#
        );
        let mut gateway = Gateway::new(&config);
        gateway.initialize("s");
        let mut own = gateway.call("s", 2);
        gateway.events(&mut own, &["0"]);
        let mut other = gateway.call("s", 1);
        gateway.events(&mut other, &["0", "1", "2", "3", "4", "5"]);
        // The cursor's own stream forgets it, or is forgotten itself.
        gateway.events(&mut own, &["x-7-y"]);
        if evict {
            let mut third = gateway.call("s", 3);
            gateway.events(&mut third, &["z-1-z"]);
        }
        assert_not_refused(&mut gateway, "s", "0");
    }
}

#[test]
fn an_encoded_counter_after_a_restart() {
    // `standalone:3` in base 64.
    let id = "c3RhbmRhbG9uZToz";
    let mut gateway = Gateway::new("{}");
    let mut stream = gateway.listen("other");
    gateway.events(&mut stream, &[id]);
    assert_not_refused(&mut gateway, "s", id);
}

#[test]
fn an_answer_in_the_chunk_that_tells_whose_it_is() {
    let mut gateway = Gateway::new("{}");
    let mut stream = gateway.call("s", 1);
    gateway.events(&mut stream, &["x1", "0"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "unknown");
    gateway.send(
        &mut stream,
        "id: x1\ndata: {}\n\nid: x2\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n",
    );
    gateway.end(stream);
    let mut stream = gateway.call("s", 2);
    gateway.events(&mut stream, &["y1", "0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_answer_before_it_is_known_whose_it_is() {
    let mut gateway = Gateway::new("{}");
    let mut stream = gateway.call("s", 1);
    gateway.events(&mut stream, &["x1", "0"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "unknown");
    gateway.answer(&mut stream, "x2", 1);
    gateway.events(&mut stream, &["x1"]);
    gateway.end(stream);
    let mut stream = gateway.call("s", 2);
    gateway.events(&mut stream, &["y1", "0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_answer_that_is_too_large_on_a_resumption() {
    let mut gateway = Gateway::new("{}");
    let mut stream = gateway.call("s", 1);
    gateway.events(&mut stream, &["x1", "0"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "x1");
    gateway.send(
        &mut stream,
        &format!(
            "data: {{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":\"{}\"}}\n\n",
            "x".repeat(70_000)
        ),
    );
    gateway.end(stream);
    let mut stream = gateway.call("s", 2);
    gateway.events(&mut stream, &["y1", "0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_answer_on_an_unplaced_stream_and_two_times_of_retention() {
    let mut gateway = Gateway::new(r#"{"retention":{"seconds":5,"finished_stream_seconds":100}}"#);
    gateway.initialize("s");
    let mut stream = gateway.call("s", 1);
    gateway.events(&mut stream, &["x1", "x2"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "unknown");
    gateway.answer(&mut stream, "x3", 1);
    gateway.end(stream);
    gateway.now_ms += 10_000;
    assert_not_refused(&mut gateway, "s", "x1");
}

#[test]
fn kinship_with_anybody_under_another_name() {
    let mut gateway = Gateway::new("{}");
    for session in ["a", "b", "c"] {
        let mut stream = gateway.listen(session);
        gateway.events(&mut stream, &[A]);
        if session == "b" {
            gateway.events(&mut stream, &[B]);
        }
    }
    assert_not_refused(&mut gateway, "c", B);
    let Answer::Passed { exchange, .. } =
        gateway.request(&[(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "c")])
    else {
        panic!("refused")
    };
    gateway.respond(exchange, &[(":status", "200"), ("mcp-session-id", "n")]);
    assert_not_refused(&mut gateway, "n", B);
}

#[test]
fn an_answer_without_an_id_from_a_cursor_that_was_not_known() {
    let mut gateway = Gateway::new("{}");
    let mut stream = gateway.call("s", 1);
    gateway.events(&mut stream, &["0"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "unknown");
    gateway.send(&mut stream, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n");
    gateway.end(stream);
    let mut stream = gateway.call("s", 2);
    gateway.events(&mut stream, &["0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_unplaced_stream_that_was_evicted_was_not_idle() {
    let mut gateway =
        Gateway::new(r#"{"retention":{"seconds":2},"state":{"streams_per_session":2}}"#);
    let mut stream = gateway.listen("s");
    gateway.events(&mut stream, &[A, B]);
    gateway.abort(stream);
    let mut stream = gateway.resume("s", "unknown");
    gateway.now_ms += 3_000;
    gateway.events(&mut stream, &[C]);
    gateway.end(stream);
    for call in [1, 2, 3] {
        let mut stream = gateway.call("s", call);
        gateway.events(&mut stream, &[&format!("p{call}")]);
    }
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn a_floor_where_the_distinctive_id_was_an_evicted_streams_too() {
    let mut gateway =
        Gateway::new(r#"{"retention":{"events_per_stream":3},"state":{"streams_per_session":2}}"#);
    gateway.initialize("s");
    // A broadcast reaches a call's stream, too. Nothing is owed there.
    let mut own = gateway.call("s", 1);
    gateway.events(&mut own, &[&go(0)]);
    gateway.abort(own);
    let mut other = gateway.call("s", 2);
    gateway.events(&mut other, &[&go(0), &go(1), &go(2), &go(3), &go(4)]);
    let mut third = gateway.call("s", 3);
    gateway.events(&mut third, &["z-1-z"]);
    assert_not_refused(&mut gateway, "s", &go(0));
}

#[test]
fn an_answer_in_a_lane_that_was_lost_before_another_connections() {
    let mut gateway = Gateway::new(r#"{"state":{"sessions":1}}"#);
    let mut first = gateway.call("s", 1);
    gateway.events(&mut first, &["x1", "0"]);
    let mut again = gateway.resume("s", "x1");
    gateway.events(&mut again, &["x2"]);
    // The session is evicted; neither connection knows, and the one writes the
    // answer where nobody looks for it any more.
    gateway.initialize("other");
    gateway.answer(&mut again, "x3", 1);
    gateway.end(again);
    gateway.now_ms += 1_100;
    gateway.events(&mut first, &["x4"]);
    let mut second = gateway.call("s", 2);
    gateway.events(&mut second, &["0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn a_floor_where_the_distinctive_id_was_sent_before_the_session_was_evicted() {
    let mut gateway =
        Gateway::new(r#"{"retention":{"events_per_stream":1},"state":{"sessions":1}}"#);
    // The same broadcast, on a call's stream and on the standalone one, of
    // which only that knows it still. Nothing is owed on the other.
    let mut call = gateway.call("s", 1);
    gateway.events(&mut call, &[A]);
    gateway.abort(call);
    gateway.initialize("other");
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &[A, B, C]);
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn the_same_where_so_many_were_evicted_that_only_a_connection_knows() {
    let mut gateway =
        Gateway::new(r#"{"retention":{"events_per_stream":1},"state":{"sessions":1}}"#);
    let mut call = gateway.call("s", 1);
    gateway.events(&mut call, &[A]);
    gateway.abort(call);
    let mut other = gateway.call("s", 2);
    gateway.events(&mut other, &[A, B, C]);
    for n in 0..40 {
        gateway.initialize(&format!("other-{n}"));
    }
    gateway.now_ms += 1_100;
    gateway.events(&mut other, &[D]);
    assert_not_refused(&mut gateway, "s", A);
}

#[test]
fn a_distinctive_id_that_a_get_brought_again_of_a_stream_that_has_forgotten_it() {
    // That stream is there still, or is evicted as well.
    for streams in [3, 2] {
        let mut gateway = Gateway::new(&format!(
            r#"{{"state":{{"ids_per_stream":1,"streams_per_session":{streams}}}}}"#
        ));
        let mut call = gateway.call("s", 1);
        gateway.events(&mut call, &[A]);
        gateway.answer(&mut call, B, 1);
        gateway.end(call);
        // That this is the finished call's isn't known any more.
        let mut get = gateway.listen("s");
        gateway.events(&mut get, &[A]);
        let mut other = gateway.call("s", 2);
        gateway.events(&mut other, &[A]);
        assert_not_refused(&mut gateway, "s", A);
    }
}

#[test]
fn an_answer_without_an_id_to_a_call_whose_stream_has_brought_none() {
    let mut gateway = Gateway::new("{}");
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &["0"]);
    let mut call = gateway.call("s", 1);
    let mut stream = gateway.resume("s", "unknown");
    gateway.send(&mut stream, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n");
    gateway.end(stream);
    gateway.events(&mut call, &["0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn an_id_of_two_streams_comes_before_one_that_only_the_wrong_one_has() {
    for before in [["0", "1"], ["9", "0"]] {
        let mut gateway = Gateway::new("{}");
        let mut done = gateway.call("s", 1);
        gateway.events(&mut done, &["0", "1", "2"]);
        gateway.answer(&mut done, "3", 1);
        gateway.end(done);
        let mut call = gateway.call("s", 2);
        gateway.events(&mut call, &["0", "1"]);
        // The open call's stream is resumed, from nowhere that is known.
        let mut stream = gateway.resume("s", "unknown");
        gateway.events(&mut stream, &before);
        gateway.answer(&mut stream, "3", 2);
        gateway.end(stream);
        let mut get = gateway.listen("s");
        gateway.events(&mut get, &["0"]);
        assert_not_refused(&mut gateway, "s", "0");
    }
}

#[test]
fn a_stream_that_got_its_id_after_an_event_without_one_elsewhere() {
    let mut gateway = Gateway::new("{}");
    let mut done = gateway.call("s", 1);
    gateway.answer(&mut done, "3", 1);
    gateway.end(done);
    let mut stream = gateway.resume("s", "unknown");
    gateway.send(&mut stream, "data: {}\n\n");
    // The open call's stream is the one that is resumed.
    let mut call = gateway.call("s", 2);
    gateway.events(&mut call, &["0", "3"]);
    gateway.events(&mut stream, &["3"]);
    gateway.answer(&mut stream, "4", 2);
    gateway.end(stream);
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &["0"]);
    assert_not_refused(&mut gateway, "s", "0");
}

#[test]
fn a_distinctive_id_of_another_stream_behind_one_that_tells_whose_it_is() {
    let mut gateway = Gateway::new("{}");
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &[A]);
    let mut call = gateway.call("s", 1);
    gateway.events(&mut call, &[B]);
    // All that the session was sent is replayed, from nowhere that is known.
    let mut stream = gateway.resume("s", C);
    gateway.events(&mut stream, &[A, B]);
    assert_not_refused(&mut gateway, "s", B);
}

#[test]
fn a_connection_that_opened_a_lane_for_what_another_had_brought_meanwhile() {
    let mut gateway = Gateway::new("{}");
    let mut call = gateway.call("s", 1);
    gateway.events(&mut call, &["0"]);
    let mut again = gateway.resume("s", "0");
    gateway.events(&mut again, &["0"]);
    gateway.events(&mut call, &["1"]);
    gateway.events(&mut again, &["1"]);
    let mut get = gateway.listen("s");
    gateway.events(&mut get, &["0"]);
    let verdict = gateway.verdict("s", "0");
    assert!(verdict.starts_with("inconsistent;reason=ambiguous_cursor"), "{verdict}");
}

/// A range that grows is written again once its lane could not be opened anew.
#[test]
fn a_stream_goes_on_after_a_lane_that_could_not_be_opened() {
    let config = r#"{"history":"exclusive","state":{"sessions":1,"streams_per_session":2}}"#;
    let mut gateway = Gateway::on(Rc::new(Flaky::default()), config);
    gateway.initialize("s");
    let mut stream = gateway.call("s", 1);
    let send = |gateway: &mut Gateway<Flaky>, stream: &mut _, index: u32| {
        gateway.now_ms += 10;
        let data = r#"{"jsonrpc":"2.0","method":"notifications/message"}"#;
        gateway.send(stream, &format!("id: {}\ndata: {data}\n\n", go(index)));
    };
    (1..5).for_each(|index| send(&mut gateway, &mut stream, index));
    for call in 10..20 {
        let mut other = gateway.call("s", call);
        gateway.events(&mut other, &[&format!("other-{call}")]);
        gateway.end(other);
    }
    gateway.now_ms += 1_500;
    gateway.store.failing.set(true);
    send(&mut gateway, &mut stream, 5);
    gateway.store.failing.set(false);
    (6..200).for_each(|index| send(&mut gateway, &mut stream, index));
    assert_eq!(gateway.verdict("s", &go(199)), "continue");
}
