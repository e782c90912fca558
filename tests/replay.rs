//! What follows a cursor is checked: each result of the table, what is cut, and
//! what is remembered of it. Honest servers have a file of their own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod support;

use support::{Ended, Gateway, Running, UUIDS};

/// Every fault is cut, and nothing is settled.
const CUT: &str = r#"{"history":"exclusive","reject":{"pending_calls":"status"},
    "replay":{"gap":"cut","foreign_session":"cut","foreign_stream":"cut","repeated":"cut"}}"#;
const REPORT: &str = r#"{"history":"exclusive",
    "replay":{"gap":"report","foreign_session":"report","foreign_stream":"report","repeated":"report"}}"#;

fn event(id: &str) -> String {
    format!("id: {id}\ndata: {{}}\n\n")
}

fn events(ids: &[&str]) -> String {
    ids.iter().map(|id| event(id)).collect()
}

fn comment(reason: &str) -> String {
    format!(": mcp-resume-guard: inconsistent;reason=replay_{reason};action=cut\n\n")
}

/// Session `a` with a call whose stream brought these ids and broke.
fn gateway(config: &str, ids: &[&str]) -> Gateway {
    let mut gateway = Gateway::new(config);
    gateway.initialize("a");
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, ids);
    gateway.abort(stream);
    gateway
}

/// A resumption from there, answered with these ids in one chunk, and ended.
fn resumed(gateway: &mut Gateway, cursor: &str, ids: &[&str]) -> Ended {
    let mut stream = gateway.resume("a", cursor);
    gateway.send(&mut stream, &events(ids));
    gateway.end(stream)
}

#[track_caller]
fn assert_cut(ended: &Ended, before: &[&str], fault: &str) {
    assert_eq!(ended.text, events(before) + &comment(fault));
    assert!(ended.reset);
    assert_eq!(ended.found, [format!("inconsistent;reason=replay_{fault};action=cut")]);
    assert_eq!(ended.replay, Some((fault, "cut")));
}

#[track_caller]
fn assert_reported(ended: &Ended, ids: &[&str], fault: &str) {
    assert_eq!(ended.text, events(ids));
    assert!(!ended.reset);
    assert_eq!(ended.found, [format!("inconsistent;reason=replay_{fault};action=passed")]);
    assert_eq!(ended.replay, Some((fault, "passed")));
}

#[track_caller]
fn assert_fine(ended: &Ended, ids: &[&str], result: &str) {
    assert_eq!(ended.text, events(ids));
    assert!(!ended.reset && ended.found.is_empty(), "{:?}", ended.found);
    assert_eq!(ended.replay, Some((result, "passed")));
}

#[test]
fn all_that_is_owed_and_more() {
    for ids in [["s_0", "s_1", "s_2", "s_3"], [UUIDS[0], UUIDS[1], UUIDS[2], UUIDS[3]]] {
        let mut gateway = gateway(CUT, &ids[..3]);
        assert_fine(&resumed(&mut gateway, ids[0], &ids[1..]), &ids[1..], "complete");
        // Again, from an older cursor and from the newest.
        assert_fine(&resumed(&mut gateway, ids[0], &ids[1..]), &ids[1..], "complete");
        assert_fine(&resumed(&mut gateway, ids[3], &[]), &[], "complete");
        // Inclusive, as rmcp does it.
        assert_fine(&resumed(&mut gateway, ids[1], &ids[1..]), &ids[1..], "complete");
    }
}

#[test]
fn a_gap_in_a_sequence_is_proof_at_once() {
    for (ids, next) in [
        (["s_0", "s_1", "s_2", "s_3"], "s_4"),
        (["0/7", "1/7", "2/7", "3/7"], "4/7"),
        // Gaps of the server's own.
        (["5", "9", "12", "13"], "20"),
    ] {
        for replayed in [[ids[1], ids[3]], [ids[1], next]] {
            let mut gateway1 = gateway(CUT, &ids);
            let ended = resumed(&mut gateway1, ids[0], &replayed);
            assert_cut(&ended, &[ids[1]], "gap");
            let mut gateway2 = gateway(REPORT, &ids);
            let ended = resumed(&mut gateway2, ids[0], &replayed);
            assert_reported(&ended, &replayed, "gap");
        }
    }
}

#[test]
fn a_gap_elsewhere_shows_at_the_end() {
    let ids = &UUIDS[..4];
    let mut gateway = gateway(CUT, ids);
    assert_reported(&resumed(&mut gateway, ids[0], &[ids[1], ids[3]]), &[ids[1], ids[3]], "gap");
    // And again.
    assert_reported(&resumed(&mut gateway, ids[0], &[ids[3]]), &[ids[3]], "gap");
    // The rest may come with the next one.
    assert_fine(&resumed(&mut gateway, ids[0], &[ids[1]]), &[ids[1]], "unchecked");
    // In another order all the same; that isn't known from then on.
    let other = [ids[3], ids[2], ids[1]];
    assert_fine(&resumed(&mut gateway, ids[0], &other), &other, "complete");
    assert_fine(&resumed(&mut gateway, ids[0], &[ids[3]]), &[ids[3]], "unchecked");
}

#[test]
fn the_last_answer_decides_too() {
    let mut gateway = gateway(CUT, &UUIDS[..3]);
    let mut stream = gateway.resume("a", UUIDS[0]);
    gateway.events(&mut stream, &[UUIDS[2]]);
    gateway.answer(&mut stream, UUIDS[3], 1);
    let ended = gateway.abort(stream);
    assert_eq!(ended.replay, Some(("gap", "passed")));
}

#[test]
fn what_was_passed_over_is_below_the_learned_floor() {
    let ids = ["s_0", "s_1", "s_2", "s_3", "s_4", "s_5"];
    let below = "inconsistent;reason=below_floor;action=rejected";
    let mut gateway = gateway(CUT, &ids);
    assert_cut(&resumed(&mut gateway, "s_0", &["s_4", "s_5"]), &[], "gap");
    for cursor in ["s_0", "s_1", "s_2"] {
        assert_eq!(gateway.verdict("a", cursor), below, "{cursor}");
    }
    for cursor in ["s_3", "s_4", "s_5"] {
        assert_eq!(gateway.verdict("a", cursor), "continue", "{cursor}");
    }
    // Another instance may have it.
    gateway.address = "127.0.0.1:8001".to_owned();
    let stream = gateway.resume("a", "s_4");
    gateway.abort(stream);
    assert_eq!(gateway.verdict("a", "s_0"), "continue");
}

#[test]
fn a_floor_above_all_that_was_issued() {
    let mut gateway = gateway(CUT, &["s_0", "s_1", "s_2"]);
    assert_cut(&resumed(&mut gateway, "s_0", &["s_7"]), &[], "gap");
    let below = "inconsistent;reason=below_floor;action=rejected";
    assert_eq!(gateway.verdict("a", "s_0"), below);
    assert_eq!(gateway.verdict("a", "s_1"), below);
    assert_eq!(gateway.verdict("a", "s_2"), "continue");
    // It is issued at last.
    assert_fine(&resumed(&mut gateway, "s_2", &["s_7", "s_8"]), &["s_7", "s_8"], "complete");
    assert_eq!(gateway.verdict("a", "s_1"), below);
    assert_eq!(gateway.verdict("a", "s_2"), "continue");
}

#[test]
fn another_sessions_event() {
    for (own, other) in [
        (["s_0", "s_1"], UUIDS[0]),
        (["s_0", "s_1"], "7ZKQ3M5VXN2LB4YTRW6CJHDPAE_3"),
        ([UUIDS[4], UUIDS[5]], UUIDS[1]),
    ] {
        for (config, is_cut) in [(CUT, true), (REPORT, false)] {
            let mut gateway = gateway(config, &own);
            gateway.initialize("b");
            let mut stream = gateway.call("b", 1);
            gateway.events(&mut stream, &[other]);
            let sent = [own[1], other];
            let ended = resumed(&mut gateway, own[0], &sent);
            if is_cut {
                assert_cut(&ended, &[own[1]], "foreign_session");
                assert_eq!(
                    gateway.verdict("a", own[0]),
                    "inconsistent;reason=replay_foreign_session;action=rejected"
                );
                assert_eq!(gateway.verdict("a", own[1]), "continue");
            } else {
                assert_reported(&ended, &sent, "foreign_session");
                assert_eq!(gateway.verdict("a", own[0]), "continue");
            }
        }
    }
}

#[test]
fn a_priming_event_of_another_session_is_its_cursor() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    gateway.initialize("b");
    let mut stream = gateway.call("b", 1);
    gateway.priming(&mut stream, UUIDS[0]);
    let mut stream = gateway.resume("a", "s_0");
    gateway.priming(&mut stream, UUIDS[0]);
    assert_cut(&gateway.end(stream), &[], "foreign_session");
}

#[test]
fn of_a_cursor_that_is_not_known_only_that_is_checked() {
    let mut gateway = Gateway::new(r#"{"reject":{"pending_calls":"status"}}"#);
    gateway.initialize("b");
    let mut stream = gateway.call("b", 1);
    gateway.events(&mut stream, &[UUIDS[0]]);
    gateway.initialize("a");
    let ended = resumed(&mut gateway, "3", &["4", "9", "2"]);
    assert_fine(&ended, &["4", "9", "2"], "unchecked");
    let ended = resumed(&mut gateway, "7", &["8", UUIDS[0]]);
    assert_cut(&ended, &["8"], "foreign_session");
    assert_eq!(
        gateway.verdict("a", "7"),
        "inconsistent;reason=replay_foreign_session;action=rejected"
    );
}

#[test]
fn one_id_for_many_sessions_live() {
    // The session that resumes gets it live, too: it was noted for the other
    // only after the answer had begun.
    let mut gateway = gateway(CUT, &[UUIDS[0], UUIDS[1]]);
    gateway.initialize("b");
    let mut other = gateway.listen("b");
    let mut stream = gateway.resume("a", UUIDS[1]);
    gateway.now_ms += 5;
    gateway.events(&mut other, &[UUIDS[2]]);
    gateway.events(&mut stream, &[UUIDS[2]]);
    assert_fine(&gateway.abort(stream), &[UUIDS[2]], "complete");
    // From then on nothing is distinctive between the two.
    gateway.events(&mut other, &[UUIDS[3]]);
    gateway.now_ms += 5;
    assert_fine(&resumed(&mut gateway, UUIDS[2], &[UUIDS[3]]), &[UUIDS[3]], "complete");
}

#[test]
fn another_streams_event() {
    for (own, other) in [
        (["s_0", "s_1"], "t_1"),
        (["0/0", "1/0"], "2/1"),
        ([UUIDS[0], UUIDS[1]], UUIDS[2]),
        // One counter for all streams of the session.
        (["2", "4"], "3"),
        (["2", "4"], "5"),
    ] {
        for (config, is_cut) in [(CUT, true), (REPORT, false)] {
            let mut gateway = gateway(config, &own);
            let mut stream = gateway.call("a", 2);
            gateway.events(&mut stream, &[other]);
            let sent = [own[1], other];
            let ended = resumed(&mut gateway, own[0], &sent);
            if is_cut {
                assert_cut(&ended, &[own[1]], "foreign_stream");
                assert_eq!(
                    gateway.verdict("a", own[0]),
                    "inconsistent;reason=replay_foreign_stream;action=rejected"
                );
            } else {
                assert_reported(&ended, &sent, "foreign_stream");
            }
        }
    }
}

/// One counter for all streams: an event of another one is no gap of this one, and
/// no floor is learned of it.
#[test]
fn another_streams_event_before_what_is_owed() {
    let own = ["1", "2", "3", "4", "5", "6"];
    for (config, is_cut) in [(CUT, true), (r#"{"history":"exclusive"}"#, false)] {
        let mut gateway = gateway(config, &own);
        let mut other = gateway.call("a", 2);
        gateway.events(&mut other, &["7", "8", "9"]);
        let sent = ["3", "8", "4", "5", "6"];
        let ended = resumed(&mut gateway, "2", &sent);
        if is_cut {
            assert_cut(&ended, &["3"], "foreign_stream");
        } else {
            assert_reported(&ended, &sent, "foreign_stream");
        }
        assert_eq!(gateway.verdict("a", "5"), "continue");
    }
}

#[test]
fn an_event_that_another_stream_got_a_moment_ago() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    let mut other = gateway.call("a", 2);
    let mut stream = gateway.resume("a", "s_0");
    gateway.events(&mut stream, &["s_1"]);
    gateway.events(&mut other, &["t_0"]);
    gateway.events(&mut stream, &["t_0"]);
    assert_cut(&gateway.end(stream), &["s_1"], "foreign_stream");
}

#[test]
fn sequences_that_each_stream_counts_for_itself() {
    let mut gateway = gateway(CUT, &["1", "2", "3"]);
    let mut other = gateway.call("a", 2);
    gateway.events(&mut other, &["1", "2", "3", "4", "5"]);
    gateway.answer(&mut other, "6", 2);
    gateway.end(other);
    assert_fine(&resumed(&mut gateway, "2", &["3", "4", "5"]), &["3", "4", "5"], "unchecked");
}

#[test]
fn answers_that_all_have_one_id() {
    // Java's servers.
    let mut gateway = gateway(CUT, &[UUIDS[0], UUIDS[1]]);
    let mut other = gateway.call("a", 2);
    gateway.answer(&mut other, UUIDS[5], 2);
    gateway.end(other);
    let mut stream = gateway.resume("a", UUIDS[0]);
    gateway.events(&mut stream, &[UUIDS[1]]);
    gateway.answer(&mut stream, UUIDS[5], 1);
    let ended = gateway.end(stream);
    assert_eq!(ended.replay, Some(("complete", "passed")));
}

#[test]
fn what_the_client_had() {
    let ids = ["s_0", "s_1", "s_2", "s_3"];
    let mut cutting = gateway(CUT, &ids);
    assert_cut(&resumed(&mut cutting, "s_2", &["s_0", "s_1"]), &[], "repeated");
    assert_eq!(cutting.verdict("a", "s_2"), "inconsistent;reason=replay_repeated;action=rejected");
    assert_eq!(cutting.verdict("a", "s_1"), "continue");
    // Its own event comes too late, or a second time.
    let mut cutting = gateway(CUT, &ids);
    assert_cut(&resumed(&mut cutting, "s_2", &["s_3", "s_2"]), &["s_3"], "repeated");
    let mut cutting = gateway(CUT, &ids);
    assert_cut(&resumed(&mut cutting, "s_2", &["s_2", "s_2"]), &["s_2"], "repeated");
    let mut reporting = gateway(REPORT, &ids);
    assert_reported(&resumed(&mut reporting, "s_2", &ids), &ids, "repeated");
}

#[test]
fn a_cut_from_a_cursor_is_past_once_it_passes_elsewhere() {
    let mut gateway = gateway(CUT, &["s_0", "s_1", "s_2"]);
    assert_cut(&resumed(&mut gateway, "s_2", &["s_0"]), &[], "repeated");
    let refused = "inconsistent;reason=replay_repeated;action=rejected";
    assert_eq!(gateway.verdict("a", "s_2"), refused);
    // Another instance has the stream by way of another cursor.
    gateway.address = "127.0.0.1:8001".to_owned();
    assert_fine(&resumed(&mut gateway, "s_1", &["s_2"]), &["s_2"], "complete");
    assert_fine(&resumed(&mut gateway, "s_2", &[]), &[], "complete");
    gateway.address = "127.0.0.1:8000".to_owned();
    assert_fine(&resumed(&mut gateway, "s_1", &["s_2"]), &["s_2"], "complete");
    assert_eq!(gateway.verdict("a", "s_2"), "continue");
}

#[test]
fn nothing_came() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    assert_reported(&resumed(&mut gateway, "s_0", &[]), &[], "empty");
    assert_fine(&resumed(&mut gateway, "s_1", &[]), &[], "complete");
    for (waited_ms, result) in [(4_000, "unchecked"), (5_000, "empty")] {
        let mut stream = gateway.resume("a", "s_0");
        gateway.send(&mut stream, ": ok\n\nid: s_9\ndata:\n\n");
        gateway.now_ms += waited_ms;
        let ended = gateway.abort(stream);
        assert_eq!(ended.replay, Some((result, "passed")));
        assert!(!ended.reset);
    }
    let stream = gateway.resume("a", "s_0");
    assert_eq!(gateway.break_off(stream).replay, Some(("empty", "passed")));
}

#[test]
fn the_worst_counts_once() {
    let mut gateway = gateway(REPORT, &["s_0", "s_1", "s_2", "s_3"]);
    let ended = resumed(&mut gateway, "s_1", &["s_0", "s_3", "s_0"]);
    assert_eq!(ended.replay, Some(("gap", "passed")));
    assert_eq!(
        ended.found,
        [
            "inconsistent;reason=replay_repeated;action=passed",
            "inconsistent;reason=replay_gap;action=passed"
        ]
    );
}

#[test]
fn an_id_that_comes_twice_ends_the_check() {
    let mut gateway = gateway(CUT, &["s_0", "s_1", "s_2", "s_3"]);
    let sent = ["s_1", "s_1", "s_3"];
    assert_fine(&resumed(&mut gateway, "s_0", &sent), &sent, "unchecked");
}

#[test]
fn a_stream_that_gave_an_id_twice_is_not_checked() {
    let mut gateway = gateway(CUT, &["s_0", "s_1", "s_1", "s_2", "s_3"]);
    let sent = ["s_3"];
    assert_fine(&resumed(&mut gateway, "s_0", &sent), &sent, "unchecked");
    // Given out again by a second connection, it has not come twice.
    let mut gateway = Gateway::new(CUT);
    gateway.initialize("a");
    for _ in 0..3 {
        let mut stream = gateway.listen("a");
        gateway.events(&mut stream, &["1", "2", "3", "4"]);
        gateway.abort(stream);
    }
    assert_cut(&resumed(&mut gateway, "1", &["3"]), &[], "gap");
}

#[test]
fn where_ids_have_left_the_window_nothing_is_claimed() {
    let config = CUT.replacen('{', r#"{"state":{"ids_per_stream":2},"#, 1);
    let mut gateway = gateway(&config, &UUIDS[..5]);
    // The cursor is known, what was before it isn't.
    let sent = [UUIDS[0], UUIDS[4]];
    assert_fine(&resumed(&mut gateway, UUIDS[3], &sent), &sent, "complete");
    // The cursor has left, too.
    let sent = [UUIDS[4]];
    assert_fine(&resumed(&mut gateway, UUIDS[0], &sent), &sent, "unchecked");
    // A leak is one all the same.
    gateway.initialize("b");
    let mut other = gateway.call("b", 1);
    gateway.events(&mut other, &[UUIDS[5]]);
    assert_cut(
        &resumed(&mut gateway, UUIDS[3], &[UUIDS[4], UUIDS[5]]),
        &[UUIDS[4]],
        "foreign_session",
    );
}

#[test]
fn ids_that_nobody_knows_prove_nothing() {
    let mut gateway = gateway(CUT, &UUIDS[..3]);
    // Encrypted with a fresh salt, each time.
    let sent = [UUIDS[4], UUIDS[5]];
    assert_fine(&resumed(&mut gateway, UUIDS[0], &sent), &sent, "unchecked");
}

#[test]
fn what_another_connection_delivers_meanwhile_is_not_owed() {
    let mut gateway = Gateway::new(CUT);
    gateway.initialize("a");
    let mut zombie = gateway.listen("a");
    gateway.events(&mut zombie, &["1", "2", "3"]);
    let mut stream = gateway.resume("a", "1");
    gateway.events(&mut zombie, &["4", "5"]);
    gateway.events(&mut stream, &["2", "3", "6"]);
    assert_fine(&gateway.abort(stream), &["2", "3", "6"], "complete");
    // Which of the new ones came first isn't known any more.
    let sent = ["3", "6"];
    assert_fine(&resumed(&mut gateway, "1", &sent), &sent, "unchecked");
}

#[test]
fn the_third_resumption_is_checked_like_the_first() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    assert_fine(&resumed(&mut gateway, "s_0", &["s_1", "s_2"]), &["s_1", "s_2"], "complete");
    assert_fine(&resumed(&mut gateway, "s_1", &["s_2", "s_3"]), &["s_2", "s_3"], "complete");
    assert_cut(&resumed(&mut gateway, "s_1", &["s_3"]), &[], "gap");
}

fn chunked(gateway: &mut Gateway, cursor: &str, bytes: &[u8], size: usize) -> Ended {
    let mut stream = gateway.resume("a", cursor);
    for chunk in bytes.chunks(size) {
        gateway.send_bytes(&mut stream, chunk);
    }
    gateway.end(stream)
}

#[test]
fn in_any_chunks_and_with_any_line_ends() {
    for end in ["\n", "\r", "\r\n"] {
        let good = format!(": ping{end}{end}data: 1{end}id: s_1{end}{end}retry: 5{end}{end}");
        // The data stands before the id.
        let bad = format!("event: message{end}data: SECRET{end}id: s_3{end}{end}");
        let all = format!("{good}{bad}{}", event("s_4"));
        for size in [1, 2, 3, 7, all.len()] {
            let mut gateway = gateway(CUT, &["s_0", "s_1", "s_2", "s_3"]);
            let ended = chunked(&mut gateway, "s_0", all.as_bytes(), size);
            assert_eq!(ended.text, good.clone() + &comment("gap"), "{size}");
        }
    }
}

/// What has gone on to the client so far.
#[track_caller]
fn assert_delivered(running: &Running, text: &str) {
    assert_eq!(running.text(), text);
}

#[test]
fn an_event_goes_out_when_it_is_complete() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    let mut stream = gateway.resume("a", "s_0");
    gateway.send(&mut stream, ": ping\n\nid: s_1\nda");
    assert_delivered(&stream, ": ping\n\n");
    gateway.send(&mut stream, "ta: x\n");
    assert_delivered(&stream, ": ping\n\n");
    gateway.send(&mut stream, "\n: pin");
    assert_delivered(&stream, ": ping\n\nid: s_1\ndata: x\n\n: pin");
    // An unfinished one counts at a clean end.
    gateway.send(&mut stream, "g\n\nid: s_2\ndata: y");
    let ended = gateway.end(stream);
    assert_eq!(ended.text, ": ping\n\nid: s_1\ndata: x\n\n: ping\n\nid: s_2\ndata: y");
    assert_eq!(gateway.verdict("a", "s_2"), "continue");
}

#[test]
fn an_unfinished_event_is_dropped_where_nothing_can_be_sent() {
    for trailers in [true, false] {
        let mut gateway = gateway(CUT, &["s_0", "s_1"]);
        let mut stream = gateway.resume("a", "s_0");
        gateway.send(&mut stream, "id: s_1\ndata: x\n\nid: s_2\ndata: y");
        let ended =
            if trailers { gateway.end_with(stream, true) } else { gateway.break_off(stream) };
        assert_eq!(ended.text, "id: s_1\ndata: x\n\n");
        assert_eq!(ended.replay, Some(("complete", "passed")));
        assert!(gateway.verdict("a", "s_2").contains("ahead_of_head"));
    }
}

#[test]
fn a_long_event_goes_out_unchecked() {
    let long = "x".repeat(70_000);
    let all = format!("id: s_1\ndata: {long}\n\nid: s_3\ndata: {long}\n\n{}", event("s_4"));
    for size in [1_000, 65_536] {
        let mut gateway = gateway(CUT, &["s_0", "s_1", "s_2", "s_3"]);
        let ended = chunked(&mut gateway, "s_0", all.as_bytes(), size);
        let good = all.strip_suffix(&event("s_4")).unwrap();
        assert!(ended.text.starts_with(good));
        // What came is known all the same.
        assert_eq!(ended.replay, Some(("gap", "cut")));
        assert_eq!(ended.text.strip_prefix(good).unwrap(), comment("gap"));
    }
}

#[test]
fn calls_that_wait_are_told_at_a_cut() {
    let settle = CUT.replace("status", "settle");
    let mut gateway = Gateway::new(&settle);
    gateway.initialize("a");
    let mut stream = gateway.post(
        "a",
        r#"[{"id":1,"method":"m"},{"id":"b\u0020","method":"m"},{"id":3,"method":"m"}]"#,
    );
    gateway.priming(&mut stream, "s_0");
    gateway.answer(&mut stream, "s_1", 1);
    gateway.events(&mut stream, &["s_2", "s_3", "s_4"]);
    gateway.abort(stream);
    // The answer to 1 has been lost, comes again before the cut, and is not
    // pending then.
    let mut stream = gateway.resume("a", "s_0");
    gateway.answer(&mut stream, "s_1", 1);
    gateway.events(&mut stream, &["s_4"]);
    let told = stream.text();
    let ended = gateway.abort(stream);
    assert!(ended.reset);
    let ids: Vec<&str> = told
        .split("\n\n")
        .skip(1)
        .filter_map(|event| {
            event.strip_prefix("event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":")
        })
        .map(|event| event.split_once(",\"error\":").unwrap().0)
        .collect();
    assert_eq!(ids, [r#""b\u0020""#, "3"]);
    assert!(told.contains(r#""reason":"replay_gap","recovery":"open_new_stream"}}"#));
    // They have been told.
    let refused = "inconsistent;reason=below_floor;action=rejected";
    assert_eq!(gateway.verdict("a", "s_0"), refused);
}

#[test]
fn to_observe_changes_nothing() {
    let observe = CUT.replacen('{', r#"{"mode":"observe","#, 1);
    let mut gateway = gateway(&observe, &["s_0", "s_1", "s_2"]);
    let mut stream = gateway.resume("a", "s_0");
    gateway.send(&mut stream, "id: s_2\nda");
    assert_delivered(&stream, "id: s_2\nda");
    gateway.send(&mut stream, "ta: x\n\n");
    let ended = gateway.end(stream);
    assert_eq!(ended.replay, Some(("gap", "passed")));
    assert_eq!(ended.found, ["inconsistent;reason=replay_gap;action=passed"]);
    assert_eq!(gateway.verdict("a", "s_0"), "continue");
}

#[test]
fn what_can_be_cut_has_no_length() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    let support::Answer::Passed { exchange, .. } = gateway.try_resume("a", "s_0") else {
        panic!("refused");
    };
    let running = gateway.respond(
        exchange,
        &[(":status", "200"), ("content-type", "text/event-stream"), ("content-length", "20")],
    );
    assert_eq!(running.step.remove, ["content-length"]);
}

#[test]
fn answers_that_are_not_checked_count_too() {
    // Without a session; compressed all the same.
    let mut gateway = gateway(CUT, &["s_0"]);
    for (session, encoding) in [(None, "identity"), (Some("a"), "gzip")] {
        let mut list = vec![(":method", "GET"), (":path", "/mcp"), ("last-event-id", "s_0")];
        list.extend(session.map(|session| ("mcp-session-id", session)));
        let support::Answer::Passed { exchange, .. } = gateway.request(&list) else {
            panic!("refused");
        };
        let running = gateway.respond(
            exchange,
            &[
                (":status", "200"),
                ("content-type", "text/event-stream"),
                ("content-encoding", encoding),
            ],
        );
        assert_eq!(gateway.end(running).replay, Some(("unchecked", "passed")));
    }
}

#[test]
fn what_all_streams_hold_together_is_bounded() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    let part = format!("id: s_2\ndata: {}", "x".repeat(60_000));
    let mut streams: Vec<Running> = (0..40).map(|_| gateway.resume("a", "s_1")).collect();
    for stream in &mut streams {
        gateway.send(stream, &part);
    }
    // The budget of the tests is a mebibyte.
    let held = streams.iter().filter(|stream| stream.delivered.is_empty()).count();
    assert_eq!(held, (1 << 20) / part.len());
    let whole = format!("{part}\n\n");
    for mut stream in streams {
        gateway.send(&mut stream, "\n\n");
        assert_eq!(gateway.end(stream).text, whole);
    }
    let mut stream = gateway.resume("a", "s_1");
    gateway.send(&mut stream, &part);
    assert_delivered(&stream, "");
}

#[test]
fn an_answer_that_ends_with_its_headers_is_empty() {
    let mut gateway = gateway(CUT, &["s_0", "s_1"]);
    let support::Answer::Passed { mut exchange, .. } = gateway.try_resume("a", "s_0") else {
        panic!("refused");
    };
    let list = support::fields(&[(":status", "200"), ("content-type", "text/event-stream")]);
    let step = gateway.with(|guard, at| {
        exchange.response(guard, at, &list, true, &support::Sender::upstream(77));
        exchange.close(guard, at, || false)
    });
    assert_eq!(step.outcome.map(|outcome| outcome.result()), Some("empty"));
}

#[test]
fn what_a_cut_kept_from_coming_is_not_missing() {
    let mut gateway = gateway(CUT, &UUIDS[..4]);
    let mut other = gateway.call("a", 2);
    gateway.events(&mut other, &[UUIDS[5]]);
    let sent = [UUIDS[1], UUIDS[3], UUIDS[5], UUIDS[2]];
    assert_cut(&resumed(&mut gateway, UUIDS[0], &sent), &sent[..2], "foreign_stream");
}

#[test]
fn a_leak_of_an_id_that_has_left_the_other_sessions_window() {
    let config = CUT.replacen('{', r#"{"state":{"ids_per_stream":2},"#, 1);
    // UUIDs that begin, and end, with digits too.
    for leaked in [UUIDS[0], "101c04b5-1a34-4234-9234-1234567890ff", UUIDS[3]] {
        let mut gateway = gateway(&config, &["s_0", "s_1"]);
        gateway.initialize("b");
        let mut other = gateway.call("b", 1);
        gateway.events(&mut other, &[leaked, UUIDS[1], UUIDS[2], UUIDS[4], UUIDS[5]]);
        assert_cut(&resumed(&mut gateway, "s_0", &[leaked]), &[], "foreign_session");
        let foreign = "inconsistent;reason=foreign_session;action=rejected";
        assert_eq!(gateway.verdict("a", leaked), foreign);
    }
}
