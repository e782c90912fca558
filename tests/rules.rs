//! The rules of the verdict, in their order, each on both sides of its border.

mod support;

use mcp_resume_guard::telemetry::{Known, LogLine};
use support::{Answer, Gateway};

/// What becomes of a pending call is tested in `settling.rs`.
const EXCLUSIVE: &str = r#"{"history":"exclusive","reject":{"pending_calls":"status"}}"#;
const UUID_A: &str = "550e8400-e29b-41d4-a716-446655440000";
const UUID_B: &str = "6fa459ea-ee8a-3ca4-894e-db77e160355e";
const STREAM_A: &str = "7ZKQ3M5VXN2LB4YTRW6CJHDPAE";

fn inconsistent(reason: &str) -> String {
    format!("inconsistent;reason={reason};action=rejected")
}

fn unverified(reason: &str) -> String {
    format!("unverified;reason={reason};action=passed")
}

/// A session whose standalone stream has issued `1` to `5` with data.
fn gateway(config: &str) -> Gateway {
    let mut gateway = Gateway::new(config);
    gateway.initialize("a");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2", "3", "4", "5"]);
    gateway.end(stream);
    gateway
}

fn ruling(gateway: &mut Gateway, list: &[(&str, &str)]) -> Option<String> {
    let mut all = vec![(":method", "GET"), (":path", "/mcp")];
    all.extend_from_slice(list);
    match gateway.request(&all) {
        Answer::Passed { step, .. } => step.ruling.map(|ruling| ruling.to_string()),
        refused @ Answer::Refused(_) => refused.refusal().map(|(_, header)| header),
    }
}

#[test]
fn rule_1_a_revision_without_sessions_is_none_of_the_guards_business() {
    let mut gateway = gateway(EXCLUSIVE);
    let version = ("mcp-protocol-version", "2026-07-28");
    let cursor = ("last-event-id", "99");
    assert_eq!(ruling(&mut gateway, &[version, cursor]), None);
    assert_eq!(ruling(&mut gateway, &[version, cursor, ("mcp-session-id", "stranger")]), None);
    assert_eq!(
        ruling(&mut gateway, &[version, cursor, ("mcp-session-id", "a")]),
        Some(inconsistent("ahead_of_head"))
    );
    assert_eq!(
        ruling(&mut gateway, &[("mcp-protocol-version", "2025-11-25"), cursor]),
        Some(unverified("session_missing"))
    );
}

#[test]
fn rule_2_headers_that_differ() {
    let mut gateway = gateway(EXCLUSIVE);
    let session = ("mcp-session-id", "a");
    let cursor = ("last-event-id", "5");
    for (list, expected) in [
        (&[session, cursor, cursor][..], "continue".to_owned()),
        (&[session, cursor, ("last-event-id", "4")], inconsistent("malformed_cursor")),
        (&[session, ("last-event-id", "5\u{1}")], inconsistent("malformed_cursor")),
        (&[session, session, cursor], "continue".to_owned()),
        (&[session, ("mcp-session-id", "b"), cursor], inconsistent("malformed_session")),
        (&[("mcp-session-id", "a\u{9}"), cursor], "continue".to_owned()),
    ] {
        assert_eq!(ruling(&mut gateway, list), Some(expected), "{list:?}");
    }
}

#[test]
fn rule_3_a_cursor_longer_than_the_limit() {
    let mut gateway = gateway(r#"{"history":"exclusive","limits":{"event_id_bytes":8}}"#);
    assert_eq!(gateway.verdict("a", "12345678"), inconsistent("ahead_of_head"));
    assert_eq!(gateway.verdict("a", "123456789"), unverified("cursor_too_long"));
}

#[test]
fn rule_4_a_session_that_was_ended() {
    let mut gateway = gateway(EXCLUSIVE);
    gateway.delete("a", "405");
    assert_eq!(gateway.verdict("a", "5"), "continue");
    gateway.delete("a", "204");
    assert_eq!(gateway.verdict("a", "5"), inconsistent("session_terminated"));
    assert_eq!(gateway.verdict("a", "99"), inconsistent("session_terminated"));
    // Every later request of the session, but for its DELETE.
    let post = gateway.request(&[(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")]);
    assert_eq!(post.refusal(), Some((404, inconsistent("session_terminated"))));
    gateway.delete("a", "204");
    // A session that nobody ended goes on.
    gateway.initialize("b");
    assert_eq!(gateway.verdict("b", "x"), inconsistent("never_issued"));
}

#[test]
fn rules_5_and_6_no_session() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &[UUID_A]);
    for (cursor, expected) in [
        (UUID_A, inconsistent("session_missing")),
        (UUID_B, unverified("session_missing")),
        ("5", unverified("session_missing")),
    ] {
        assert_eq!(ruling(&mut gateway, &[("last-event-id", cursor)]), Some(expected), "{cursor}");
    }
}

#[test]
fn rule_7_a_cursor_of_another_session() {
    for config in [EXCLUSIVE, "{}"] {
        let mut gateway = gateway(config);
        gateway.initialize("b");
        let mut stream = gateway.call("b", 1);
        let go: Vec<String> = (0..6).map(|index| format!("{STREAM_A}_{index}")).collect();
        gateway.events(&mut stream, &go.iter().map(String::as_str).collect::<Vec<_>>());
        gateway.events(&mut stream, &[UUID_A]);
        for cursor in [UUID_A, &go[0], &go[1], &go[2], &go[5]] {
            assert_eq!(gateway.verdict("a", cursor), inconsistent("foreign_session"), "{cursor}");
            assert_eq!(
                gateway.verdict("stranger", cursor),
                inconsistent("foreign_session"),
                "{cursor}"
            );
            assert_eq!(gateway.verdict("b", cursor), "continue", "{cursor}");
        }
        // Of the other's sequence, and not issued: by whom is not known.
        let next = format!("{STREAM_A}_6");
        assert_eq!(gateway.verdict("stranger", &next), unverified("unknown_session"));
    }
}

#[test]
fn rule_7_ids_that_every_session_has_are_not_foreign() {
    let mut gateway = gateway(EXCLUSIVE);
    gateway.initialize("b");
    assert_eq!(gateway.verdict("b", "5"), inconsistent("never_issued"));
    assert_eq!(gateway.verdict("stranger", "5"), unverified("unknown_session"));
}

#[test]
fn rule_7_between_sessions_that_were_sent_the_same_id_nothing_is_distinctive() {
    let mut gateway = gateway(EXCLUSIVE);
    gateway.initialize("b");
    gateway.initialize("c");
    let mut on_a = gateway.listen("a");
    let mut on_b = gateway.listen("b");
    gateway.events(&mut on_a, &[UUID_A]);
    gateway.events(&mut on_b, &[UUID_A, UUID_B]);
    // The one that both were sent is no proof for anybody.
    assert_eq!(gateway.verdict("c", UUID_A), inconsistent("never_issued"));
    assert_eq!(gateway.verdict("a", UUID_B), inconsistent("never_issued"));
    assert_eq!(gateway.verdict("c", UUID_B), inconsistent("foreign_session"));
    assert_eq!(gateway.verdict("a", UUID_A), "continue");
    assert_eq!(gateway.verdict("b", UUID_A), "continue");
}

#[test]
fn rule_7_a_range_and_a_single_id_of_one_sequence_are_the_same_sequence() {
    let mut gateway = gateway("{}");
    let ids: Vec<String> = (0..10).map(|index| format!("{STREAM_A}_{index}")).collect();
    let mut on_a = gateway.listen("a");
    gateway.events(&mut on_a, &ids.iter().map(String::as_str).collect::<Vec<_>>());
    let mut on_b = gateway.listen("b");
    gateway.events(&mut on_b, &[&ids[5]]);
    assert_eq!(gateway.verdict("b", &ids[4]), unverified("history_incomplete"));
}

#[test]
fn rule_7_a_renamed_session_is_no_stranger() {
    let mut gateway = gateway("{}");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &[UUID_A]);
    let post = gateway.request(&[(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")]);
    let Answer::Passed { exchange, .. } = post else { panic!("refused") };
    gateway.respond(exchange, &[(":status", "200"), ("mcp-session-id", "renamed")]);
    assert_eq!(gateway.verdict("renamed", UUID_A), unverified("history_incomplete"));
}

#[test]
fn rule_8_a_session_that_is_not_known() {
    let mut gateway = gateway(EXCLUSIVE);
    assert_eq!(gateway.verdict("stranger", "5"), unverified("unknown_session"));
    gateway.restart();
    assert_eq!(gateway.verdict("a", "5"), unverified("unknown_session"));
}

#[test]
fn rule_9_a_cursor_of_two_open_streams() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut one = gateway.call("a", 1);
    gateway.events(&mut one, &["0"]);
    assert_eq!(gateway.verdict("a", "0"), "continue");
    let mut two = gateway.call("a", 2);
    gateway.events(&mut two, &["0", "1"]);
    assert_eq!(gateway.verdict("a", "0"), inconsistent("ambiguous_cursor"));
    // `1` is on the standalone stream, too, which never finishes.
    assert_eq!(gateway.verdict("a", "1"), inconsistent("ambiguous_cursor"));
    gateway.answer(&mut one, "8", 1);
    assert_eq!(gateway.verdict("a", "0"), "continue");
    gateway.answer(&mut two, "9", 2);
    assert_eq!(gateway.verdict("a", "0"), "continue");
    assert_eq!(gateway.verdict("a", "1"), "continue");
}

#[test]
fn rule_9_a_stream_whose_calls_cannot_be_told_is_not_counted() {
    let mut gateway = gateway(EXCLUSIVE);
    for _ in 0..2 {
        let mut stream = gateway.post("a", "not json");
        gateway.events(&mut stream, &["77"]);
    }
    assert_eq!(gateway.verdict("a", "77"), "continue");
}

#[test]
fn rule_9_a_clean_end_is_no_answer() {
    let mut gateway = gateway(EXCLUSIVE);
    for call in [1, 2] {
        let mut stream = gateway.call("a", call);
        gateway.events(&mut stream, &["77"]);
        gateway.end(stream);
    }
    assert_eq!(gateway.verdict("a", "77"), inconsistent("ambiguous_cursor"));
}

#[test]
fn rule_10_more_is_owed_than_the_server_keeps() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"events_per_stream":3}}"#);
    assert_eq!(gateway.verdict("a", "1"), inconsistent("below_floor"));
    assert_eq!(gateway.verdict("a", "2"), "continue");
    assert_eq!(gateway.verdict("a", "5"), "continue");
    // What has no data is not owed.
    let mut stream = gateway.resume("a", "5");
    gateway.priming(&mut stream, "6");
    assert_eq!(gateway.verdict("a", "2"), "continue");
    gateway.events(&mut stream, &["7"]);
    assert_eq!(gateway.verdict("a", "2"), inconsistent("below_floor"));
}

#[test]
fn rule_10_something_is_owed_and_too_old() {
    let mut gateway = gateway(r#"{"history":"exclusive","retention":{"seconds":10}}"#);
    gateway.now_ms += 10_000;
    assert_eq!(gateway.verdict("a", "4"), "continue");
    gateway.now_ms += 1;
    assert_eq!(gateway.verdict("a", "4"), inconsistent("below_floor"));
    assert_eq!(gateway.verdict("a", "5"), "continue");
}

#[test]
fn rule_10_a_finished_stream_has_a_time_of_its_own() {
    let config = r#"{"history":"exclusive","retention":{"seconds":1000,"finished_stream_seconds":10},"reject":{"pending_calls":"status"}}"#;
    let mut gateway = gateway(config);
    let mut stream = gateway.call("a", 1);
    gateway.priming(&mut stream, "x");
    gateway.answer(&mut stream, "y", 1);
    let mut open = gateway.call("a", 2);
    gateway.events(&mut open, &["v", "w"]);
    let mut unknown = gateway.post("a", "?");
    gateway.events(&mut unknown, &["s", "t"]);
    gateway.now_ms += 10_001;
    assert_eq!(gateway.verdict("a", "x"), inconsistent("below_floor"));
    assert_eq!(gateway.verdict("a", "y"), "continue");
    assert_eq!(gateway.verdict("a", "v"), "continue");
    assert_eq!(gateway.verdict("a", "s"), "continue");
    gateway.now_ms += 1_000_000;
    assert_eq!(gateway.verdict("a", "v"), inconsistent("below_floor"));
    assert_eq!(gateway.verdict("a", "s"), inconsistent("below_floor"));
}

#[test]
fn rule_12_issued() {
    let mut gateway = gateway(EXCLUSIVE);
    for cursor in ["1", "3", "5", " 5\t"] {
        assert_eq!(gateway.verdict("a", cursor), "continue", "{cursor}");
    }
    assert_eq!(gateway.verdict("a", "05"), inconsistent("never_issued"));
}

#[test]
fn rule_13_others_may_have_issued_it() {
    let mut shared = gateway("{}");
    assert_eq!(shared.verdict("a", "99"), unverified("history_incomplete"));
    assert_eq!(shared.verdict("a", "5"), "continue");
    // Adopted: it began elsewhere.
    let mut gateway = gateway(EXCLUSIVE);
    let mut stream = gateway.listen("adopted");
    gateway.events(&mut stream, &["3"]);
    assert_eq!(gateway.verdict("adopted", "2"), unverified("history_incomplete"));
    assert_eq!(gateway.verdict("adopted", "3"), "continue");
}

#[test]
fn rule_13_what_the_guard_could_not_see() {
    for (what, event) in [
        ("a blank inside", "id: a b\ndata: x\n\n".to_owned()),
        ("not ASCII", "id: é\ndata: x\n\n".to_owned()),
        ("too long", format!("id: {}\ndata: x\n\n", "x".repeat(4097))),
    ] {
        let mut gateway = gateway(EXCLUSIVE);
        let mut stream = gateway.listen("a");
        gateway.send(&mut stream, &event);
        assert_eq!(gateway.verdict("a", "99"), unverified("history_incomplete"), "{what}");
        assert_eq!(gateway.verdict("a", "5"), "continue", "{what}");
    }
    let mut gateway = gateway(EXCLUSIVE);
    let post = gateway.request(&[(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")]);
    let Answer::Passed { exchange, .. } = post else { panic!("refused") };
    let encoded =
        [(":status", "200"), ("content-type", "text/event-stream"), ("content-encoding", "br")];
    let running = gateway.respond(exchange, &encoded);
    assert!(!running.step.body);
    assert_eq!(gateway.verdict("a", "99"), unverified("history_incomplete"));
}

#[test]
fn rule_13_a_session_id_that_is_issued_again() {
    let mut gateway = gateway(EXCLUSIVE);
    gateway.delete("a", "200");
    gateway.initialize("a");
    assert_eq!(gateway.verdict("a", "5"), "continue");
    assert_eq!(gateway.verdict("a", "99"), unverified("history_incomplete"));
    assert_eq!(gateway.tally.session_ids_reissued, 1);
}

#[test]
fn rule_14_ids_that_have_left_the_window() {
    let mut gateway = Gateway::new(r#"{"history":"exclusive","state":{"ids_per_stream":4}}"#);
    gateway.initialize("a");
    let mut stream = gateway.listen("a");
    let ids: Vec<String> = (0..8).map(|n| format!("id-{n}-x")).collect();
    gateway.events(&mut stream, &ids[..4].iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(gateway.verdict("a", "id-0-x"), "continue");
    assert_eq!(gateway.verdict("a", "nobody"), inconsistent("never_issued"));
    gateway.events(&mut stream, &ids[4..].iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(gateway.verdict("a", "id-7-x"), "continue");
    assert_eq!(gateway.verdict("a", "id-4-x"), "continue");
    assert_eq!(gateway.verdict("a", "id-0-x"), unverified("history_evicted"));
    assert_eq!(gateway.verdict("a", "nobody"), unverified("history_evicted"));
}

#[test]
fn rule_14_streams_that_were_evicted() {
    let mut gateway = Gateway::new(r#"{"history":"exclusive","state":{"streams_per_session":2}}"#);
    gateway.initialize("a");
    let mut standalone = gateway.listen("a");
    gateway.events(&mut standalone, &["s0"]);
    for call in 1..=3u32 {
        let mut stream = gateway.call("a", call);
        gateway.answer(&mut stream, &format!("p{call}-x"), call);
        gateway.end(stream);
    }
    assert_eq!(gateway.tally.streams_evicted, 2);
    assert_eq!(gateway.verdict("a", "p3-x"), "continue");
    assert_eq!(gateway.verdict("a", "s0"), "continue");
    assert_eq!(gateway.verdict("a", "p1-x"), unverified("history_evicted"));
}

#[test]
fn rule_15_past_the_head_of_a_known_sequence() {
    let mut gateway = gateway(EXCLUSIVE);
    assert_eq!(gateway.verdict("a", "6"), inconsistent("ahead_of_head"));
    assert_eq!(gateway.verdict("a", "18446744073709551615"), inconsistent("ahead_of_head"));
    assert_eq!(gateway.verdict("a", "18446744073709551616"), inconsistent("never_issued"));
    assert_eq!(gateway.verdict("a", "0"), inconsistent("never_issued"));
    let mut stream = gateway.call("a", 1);
    gateway.priming(&mut stream, "0/4");
    gateway.events(&mut stream, &["1/4"]);
    assert_eq!(gateway.verdict("a", "2/4"), inconsistent("ahead_of_head"));
    assert_eq!(gateway.verdict("a", "0/5"), inconsistent("never_issued"));
    assert_eq!(gateway.verdict("a", "1/5"), inconsistent("never_issued"));
}

#[test]
fn rule_15_an_evicted_window_of_a_rising_sequence_can_hold_nothing_past_its_head() {
    let mut gateway = Gateway::new(r#"{"history":"exclusive","state":{"ids_per_stream":4}}"#);
    gateway.initialize("a");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["2", "4", "6", "8", "10", "12", "14", "16"]);
    assert_eq!(gateway.verdict("a", "17"), inconsistent("ahead_of_head"));
    assert_eq!(gateway.verdict("a", "2"), unverified("history_evicted"));
    assert_eq!(gateway.verdict("a", "3"), unverified("history_evicted"));
}

#[test]
fn rule_16_never_issued() {
    let mut gateway = gateway(EXCLUSIVE);
    for cursor in ["nobody", UUID_A, "05", "5 5"] {
        assert_eq!(gateway.verdict("a", cursor), inconsistent("never_issued"), "{cursor}");
    }
}

#[test]
fn a_line_of_the_log_tells_what_was_known() {
    let mut gateway = Gateway::new(
        r#"{"history":"exclusive","retention":{"events_per_stream":1},"reject":{"pending_calls":"status"}}"#,
    );
    gateway.initialize("a");
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["7", "8", "9"]);
    let known = |line: Option<LogLine>| line.and_then(|line| line.known);
    let with = |streams, owed| Some(Known { complete: true, streams, owed });
    assert_eq!(known(gateway.log_line("a", "7")), with(1, Some(2)));
    assert_eq!(known(gateway.log_line("a", "x")), with(1, None));
    // Whose it is isn't known, so neither is what follows it.
    let mut other = gateway.call("a", 2);
    gateway.events(&mut other, &["7"]);
    assert_eq!(known(gateway.log_line("a", "7")), with(2, None));
    assert_eq!(known(gateway.log_line("b", "7")), None);
}
