//! The documentation says what the code does.

use mcp_resume_guard::config::Config;
use mcp_resume_guard::ledger::Ledger;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry::{Known, LogLine, Tally, configured_line, message_line};
use mcp_resume_guard::verdict::{Action, Doubt, Fault, ReplayFault, Ruling, Verdict};

const README: &str = include_str!("../README.md");
const VERDICTS: &str = include_str!("../docs/verdicts.md");
const CONFIGURATION: &str = include_str!("../docs/configuration.md");
const OBSERVABILITY: &str = include_str!("../docs/observability.md");

/// The first JSON block of a page.
fn json(page: &str) -> Option<&str> {
    page.split("```json\n").nth(1)?.split("```").next()
}

#[test]
fn the_documented_defaults_are_the_defaults() {
    let documented = json(CONFIGURATION).map(|text| Config::parse(text.as_bytes()));
    assert_eq!(documented, Some(Ok(Config::default())));
}

#[test]
fn the_readmes_configuration_is_accepted() {
    assert!(json(README).is_some_and(|text| Config::parse(text.as_bytes()).is_ok()));
}

#[test]
fn every_reason_is_documented() {
    for fault in Fault::ALL {
        let name = fault.as_str();
        assert!(VERDICTS.contains(&format!("`{name}`")), "{fault:?}");
        assert!(CONFIGURATION.contains(&format!("`{}`", fault.as_str())), "{fault:?}");
    }
    for doubt in Doubt::ALL {
        assert!(VERDICTS.contains(&format!("| `{}` |", doubt.as_str())), "{doubt:?}");
    }
}

#[test]
fn every_result_of_a_replay_is_documented() {
    let results = ReplayFault::ALL.map(ReplayFault::as_str);
    for result in results.into_iter().chain(["complete", "unchecked"]) {
        assert!(VERDICTS.contains(&format!("| `{result}` |")), "{result}");
    }
}

#[test]
fn every_contract_violation_is_documented() {
    for (name, _) in Tally::default().counts() {
        if let Some((_, kind)) = name.split_once("kind=.=") {
            let kind = kind.trim_end_matches(";.;");
            assert!(VERDICTS.contains(&format!("| `{kind}` |")), "{kind}");
        }
    }
}

#[test]
fn every_field_of_the_log_is_documented() {
    let config = Config::default();
    let (ledger, _) = Ledger::join(&SharedData::default(), &config.state, [0; 16]);
    let resumption = LogLine {
        ruling: Ruling {
            verdict: Verdict::Inconsistent(Fault::BelowFloor),
            action: Action::Rejected,
        },
        session: Some(ledger.secret().session(b"a")),
        known: Some(Known { complete: true, streams: 2, owed: Some(17) }),
    };
    for line in [
        resumption.to_json(Some(b"a-request"), 3),
        configured_line(&config, &ledger),
        message_line("refused", "no"),
        message_line("state_kept", "no"),
    ] {
        let fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&line).expect("an object");
        assert!(fields.keys().all(|key| OBSERVABILITY.contains(&format!("`{key}`"))), "{line}");
        let event = fields["event"].as_str().expect("a name");
        assert!(OBSERVABILITY.contains(&format!("| `{event}` |")), "{line}");
    }
}

#[test]
fn the_documented_memory_is_what_the_configurations_take() {
    for row in CONFIGURATION.lines().filter(|line| line.ends_with("MiB |")) {
        let cells: Vec<String> =
            row.split('|').map(|cell| cell.replace([',', ' '], "").replace("MiB", "")).collect();
        let [_, sessions, streams, ids, mib, _] = cells.as_slice() else {
            panic!("not a row: {row}");
        };
        let text = format!(
            r#"{{"state":{{"sessions":{sessions},"streams_per_session":{streams},"ids_per_stream":{ids}}}}}"#
        );
        let config = Config::parse(text.as_bytes()).expect("a valid configuration");
        let (ledger, _) = Ledger::join(&SharedData::default(), &config.state, [0; 16]);
        let most = ledger.max_memory_bytes().div_ceil(1024 * 1024);
        assert_eq!(most.to_string(), *mib, "{row}");
    }
    assert!(README.contains("159 MiB at most with the defaults"));
}
