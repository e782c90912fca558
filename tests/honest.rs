//! Honest servers that were once cut, and clients that were refused for it: the
//! shortest sequences that reviews and a model server have found.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use support::{Answer, Ended, Gateway, Running, UUIDS as U};

const CUT: &str =
    r#"{"replay":{"gap":"cut","foreign_session":"cut","foreign_stream":"cut","repeated":"cut"}}"#;

/// Many more.
fn uuid(n: u64) -> String {
    let x = n.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5bd1_e995_1234_5678;
    let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let y = (x ^ (x >> 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let (a, b, c, d) = (x as u32, (x >> 32) as u16, (x >> 48) as u16 & 0xfff, y as u16 & 0xfff);
    format!("{a:08x}-{b:04x}-4{c:03x}-a{d:03x}-{:012x}", y >> 16)
}

fn gateway(config: &str) -> Gateway {
    let mut gateway = Gateway::new(config);
    gateway.initialize("a");
    gateway
}

#[track_caller]
fn assert_nothing_found(ended: &Ended) {
    assert!(!ended.reset && ended.found.is_empty(), "{:?}", ended.found);
}

/// A resumption that is answered with these ids; nothing may be found.
#[track_caller]
fn assert_resumes(gateway: &mut Gateway, session: &str, cursor: &str, ids: &[&str]) {
    let mut stream = gateway.resume(session, cursor);
    gateway.events(&mut stream, ids);
    assert_nothing_found(&gateway.abort(stream));
}

fn call_with(gateway: &mut Gateway, ids: &[&str]) -> Running {
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, ids);
    stream
}

#[test]
fn sessions_that_are_kin_stay_so_when_one_is_forgotten() {
    for away in ["a", "b"] {
        let mut gateway = Gateway::new(r#"{"state":{"sessions":2}}"#);
        let mut streams = Vec::new();
        for session in ["a", "b"] {
            gateway.initialize(session);
            let mut stream = gateway.listen(session);
            // A broadcast under one UUID, live to both.
            gateway.events(&mut stream, &[U[0]]);
            streams.push((session, stream));
        }
        streams.retain(|(session, _)| *session != away);
        let (_, mut there) = streams.pop().unwrap();
        gateway.now_ms += 2_000;
        gateway.events(&mut there, &[U[1]]);
        gateway.now_ms += 2_000;
        // The one that is away leaves the table.
        gateway.initialize("c");
        gateway.now_ms += 2_000;
        assert_resumes(&mut gateway, away, U[0], &[U[1]]);
        assert_eq!(gateway.verdict(away, U[1]), "continue");
    }
}

#[test]
fn a_sequence_that_several_sessions_were_sent_stays_so() {
    let mut gateway = Gateway::new(r#"{"state":{"sessions":8}}"#);
    let id = |n: u32| format!("7ZKQ3M5VXN2LB4YTRW6CJHDPAE_{n}");
    for session in ["a", "b"] {
        gateway.initialize(session);
        let mut stream = gateway.listen(session);
        gateway.events(&mut stream, &[&id(1), &id(2)]);
    }
    // Another server's events fill the index.
    gateway.initialize("p");
    let mut stream = gateway.listen("p");
    for n in 0..8_192 {
        gateway.events(&mut stream, &[&uuid(n)]);
    }
    gateway.initialize("c");
    let mut stream = gateway.listen("c");
    gateway.events(&mut stream, &[&id(1), &id(2), &id(3), &id(4)]);
    assert_resumes(&mut gateway, "a", &id(2), &[&id(3)]);
}

#[test]
fn a_restarted_counter_primes_with_an_id_that_had_data() {
    let mut gateway = gateway("{}");
    for ids in [&["1", "2", "3", "4", "5", "6"][..], &["1", "2"]] {
        let mut stream = gateway.listen("a");
        gateway.priming(&mut stream, "0");
        gateway.events(&mut stream, ids);
        gateway.break_off(stream);
    }
    let mut stream = gateway.resume("a", "2");
    gateway.priming(&mut stream, "3");
    gateway.events(&mut stream, &["4"]);
    assert_nothing_found(&gateway.end(stream));
    assert_eq!(gateway.verdict("a", "2"), "continue");
}

#[test]
fn where_a_cursor_was_any_streams_the_next_one_is_too() {
    let mut gateway = gateway("{}");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2", "3", "4", "5", "6"]);
    gateway.abort(stream);
    // Whether this one is finished isn't known.
    let mut stream = gateway.post("a", "not json");
    gateway.events(&mut stream, &["1", "2"]);
    gateway.abort(stream);
    assert_resumes(&mut gateway, "a", "2", &["3", "4"]);
    let stream = gateway.resume("a", "4");
    assert_nothing_found(&gateway.end(stream));
    let mut stream = gateway.resume("a", "4");
    gateway.priming(&mut stream, "5");
    gateway.events(&mut stream, &["6"]);
    assert_nothing_found(&gateway.end(stream));
}

#[test]
fn a_learned_floor_is_forgotten_when_its_owner_has_what_is_below() {
    let mut gateway = gateway("{}");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2", "3", "4", "5", "6"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("a", "1");
    gateway.events(&mut stream, &["5"]);
    assert!(gateway.end(stream).reset);
    assert!(gateway.verdict("a", "2").contains("below_floor"));
    // The client opens a new stream, and gets it all from the start.
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2", "3", "4"]);
    gateway.abort(stream);
    assert_eq!(gateway.verdict("a", "2"), "continue");
}

#[test]
fn an_instance_that_counts_anew_owes_nothing_of_another() {
    let mut gateway = gateway(r#"{"retention":{"events_per_stream":3}}"#);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["_0", "_1", "_2", "_3", "_4", "_5", "_6"]);
    gateway.break_off(stream);
    gateway.address = "127.0.0.1:8001".to_owned();
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["_0", "_1", "_2"]);
    gateway.abort(stream);
    let stream = gateway.resume("a", "_2");
    assert_nothing_found(&gateway.end(stream));
}

#[test]
fn streams_that_count_for_themselves_from_different_ids() {
    let mut gateway = gateway(CUT);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2", "3"]);
    let mut stream = gateway.call("a", 1);
    gateway.priming(&mut stream, "0");
    gateway.end(stream);
    assert_resumes(&mut gateway, "a", "0", &["1"]);
}

/// Numbers with zeros before them are no indices to the guard.
#[test]
fn streams_that_count_for_themselves_in_their_own_way() {
    let mut gateway = gateway(CUT);
    let mut other = gateway.call("a", 2);
    gateway.events(&mut other, &["0000", "0001", "0002", "0003"]);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["0000", "only-1", "0001"]);
    gateway.break_off(stream);
    assert_resumes(&mut gateway, "a", "only-1", &["0001", "0002", "0003"]);
}

#[test]
fn the_cursors_own_event_after_one_without_an_id() {
    let mut gateway = gateway(CUT);
    let stream = call_with(&mut gateway, &["1/0", "2/0", "3/0"]);
    gateway.abort(stream);
    let mut stream = gateway.resume("a", "2/0");
    gateway.send(&mut stream, "event: ping\ndata: {}\n\n");
    gateway.events(&mut stream, &["2/0", "3/0"]);
    assert_nothing_found(&gateway.abort(stream));
}

#[test]
fn many_ids_that_are_no_range() {
    let mut gateway = gateway(r#"{"state":{"ids_per_stream":1024}}"#);
    let ids: Vec<String> = (0..700).map(|n| (n * 3).to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let stream = call_with(&mut gateway, &ids);
    gateway.abort(stream);
    for _ in 0..2 {
        let mut stream = gateway.resume("a", ids[0]);
        gateway.events(&mut stream, &ids[1..]);
        assert_eq!(gateway.abort(stream).replay, Some(("complete", "passed")));
    }
}

#[test]
fn a_store_that_has_them_in_another_order() {
    let mut gateway = gateway(CUT);
    let stream = call_with(&mut gateway, &U[..3]);
    gateway.abort(stream);
    assert_resumes(&mut gateway, "a", U[0], &[U[2]]);
    assert_resumes(&mut gateway, "a", U[2], &[U[1]]);
}

#[test]
fn another_connection_delivers_between_request_and_answer() {
    for ids in [[U[0], U[1], U[2]], ["1", "2", "3"]] {
        let mut gateway = gateway(CUT);
        let mut zombie = call_with(&mut gateway, &[ids[0]]);
        let Answer::Passed { exchange, .. } = gateway.try_resume("a", ids[0]) else { return };
        gateway.events(&mut zombie, &[ids[2]]);
        let mut stream =
            gateway.respond(exchange, &[(":status", "200"), ("content-type", "text/event-stream")]);
        // Stored, and not sent before.
        gateway.events(&mut stream, &[ids[1]]);
        assert_nothing_found(&gateway.abort(stream));
        gateway.abort(zombie);
        assert_resumes(&mut gateway, "a", ids[1], &[ids[2]]);
    }
}

#[test]
fn a_stream_that_is_forgotten_while_two_connections_carry_it() {
    let mut gateway = gateway(&CUT.replacen('{', r#"{"state":{"sessions":1},"#, 1));
    let mut first = gateway.listen("a");
    gateway.events(&mut first, &[U[0]]);
    let mut second = gateway.resume("a", U[0]);
    gateway.now_ms += 5_000;
    gateway.initialize("t");
    gateway.now_ms += 5_000;
    gateway.events(&mut first, &[U[1]]);
    gateway.events(&mut second, &[U[1]]);
    assert_nothing_found(&gateway.abort(second));
}

#[test]
fn a_priming_id_that_has_left_the_window() {
    let mut gateway = gateway(&CUT.replacen('{', r#"{"state":{"ids_per_stream":5},"#, 1));
    let ids: Vec<String> = (1..10).map(uuid).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut stream = gateway.call("a", 1);
    gateway.priming(&mut stream, U[0]);
    gateway.events(&mut stream, &ids);
    gateway.abort(stream);
    // Each connection begins with it: from the eighth, from nowhere, from the third.
    for (cursor, events) in [(ids[7], &ids[8..]), (U[0], &ids[..3]), (ids[2], &ids[3..])] {
        let mut stream = gateway.resume("a", cursor);
        gateway.priming(&mut stream, U[0]);
        gateway.events(&mut stream, events);
        let ended = gateway.abort(stream);
        assert_nothing_found(&ended);
        let result = if cursor == ids[7] { "complete" } else { "unchecked" };
        assert_eq!(ended.replay, Some((result, "passed")));
    }
}

#[test]
fn an_id_that_came_twice_where_nothing_else_was_new() {
    let mut gateway = gateway(CUT);
    let stream = call_with(&mut gateway, &U[..3]);
    gateway.abort(stream);
    assert_resumes(&mut gateway, "a", U[0], &[U[1], U[2], U[1]]);
    assert_resumes(&mut gateway, "a", U[2], &[U[1]]);
}

#[test]
fn a_get_that_replays_what_was_not_sent() {
    let mut gateway = gateway(CUT);
    for ids in [[U[0], U[2]], [U[0], U[1]]] {
        let mut stream = gateway.listen("a");
        gateway.events(&mut stream, &ids);
        gateway.abort(stream);
    }
    assert_resumes(&mut gateway, "a", U[1], &[U[2]]);
}

/// What a store has in another order than it sent it: from `first`, the
/// beginning of that; from the last of these, the rest.
#[track_caller]
fn assert_resumes_twice(gateway: &mut Gateway, first: &str, begin: &[&str], rest: &[&str]) {
    assert_resumes(gateway, "a", first, begin);
    assert_resumes(gateway, "a", begin.last().unwrap(), rest);
}

#[test]
fn a_get_that_replays_in_another_order() {
    for replayed in [&[U[1]][..], &[U[1], U[0]]] {
        let mut gateway = gateway(CUT);
        for ids in [&[U[0], U[1]], replayed] {
            let mut stream = gateway.listen("a");
            gateway.events(&mut stream, ids);
            gateway.abort(stream);
        }
        assert_resumes(&mut gateway, "a", U[1], &[U[0]]);
    }
}

#[test]
fn another_order_shows_while_the_first_resumption_runs() {
    let mut gateway = gateway(CUT);
    let stream = call_with(&mut gateway, &U[..3]);
    gateway.abort(stream);
    let mut first = gateway.resume("a", U[0]);
    gateway.events(&mut first, &[U[2]]);
    assert_resumes(&mut gateway, "a", U[2], &[U[1]]);
}

#[test]
fn another_order_behind_a_priming_id() {
    let mut gateway = gateway(CUT);
    let mut stream = gateway.listen("a");
    gateway.priming(&mut stream, U[0]);
    gateway.events(&mut stream, &U[1..4]);
    gateway.abort(stream);
    // A new one for each connection, where the cursor is.
    let mut stream = gateway.resume("a", U[0]);
    gateway.priming(&mut stream, U[4]);
    gateway.abort(stream);
    assert_resumes_twice(&mut gateway, U[4], &[U[2]], &[U[3], U[1]]);
}

#[test]
fn another_order_where_the_cursors_place_is_not_known() {
    let mut gateway = gateway(&CUT.replacen('{', r#"{"state":{"ids_per_stream":4},"#, 1));
    let mut stream = gateway.call("a", 1);
    gateway.priming(&mut stream, U[0]);
    gateway.priming(&mut stream, U[1]);
    gateway.events(&mut stream, &U[2..5]);
    gateway.abort(stream);
    assert_resumes_twice(&mut gateway, U[1], &[U[3]], &[U[2], U[4]]);
}

#[test]
fn another_order_on_a_stream_that_is_not_placed() {
    let mut gateway = gateway(&CUT.replacen('{', r#"{"state":{"ids_per_stream":3},"#, 1));
    let mut stream = gateway.call("a", 1);
    let priming = uuid(1);
    gateway.priming(&mut stream, &priming);
    gateway.events(&mut stream, &U);
    gateway.abort(stream);
    // It has left the window.
    let mut stream = gateway.resume("a", &priming);
    gateway.priming(&mut stream, &priming);
    gateway.abort(stream);
    let begin = [U[1], U[2], U[0], U[4], U[5]];
    assert_resumes_twice(&mut gateway, &priming, &begin, &[U[3]]);
}

#[test]
fn an_index_that_was_stored_before_one_that_was_sent() {
    let mut gateway = gateway(r#"{"retention":{"events_per_stream":1}}"#);
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["_1", "_2"]);
    gateway.abort(stream);
    // `_3` and `_4` are stored, and not sent here.
    let mut stream = gateway.listen("a");
    gateway.priming(&mut stream, "_5");
    gateway.abort(stream);
    assert_resumes(&mut gateway, "a", "_2", &["_3", "_4"]);
    let stream = gateway.resume("a", "_5");
    assert_nothing_found(&gateway.end(stream));
}

#[test]
fn an_instance_that_primes_and_counts_anew_in_one_chunk() {
    let mut gateway = gateway(r#"{"retention":{"events_per_stream":3}}"#);
    let mut first = gateway.listen("a");
    gateway.events(&mut first, &["_0", "_1", "_2", "_3", "_4", "_5", "_6"]);
    gateway.address = "127.0.0.1:8001".to_owned();
    let mut second = gateway.listen("a");
    gateway.send(&mut second, "id: p\ndata:\n\nid: _0\ndata: {}\n\nid: _1\ndata: {}\n\n");
    gateway.abort(second);
    let stream = gateway.resume("a", "_1");
    assert_nothing_found(&gateway.end(stream));
}
