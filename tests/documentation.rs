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
const RUNBOOK: &str = include_str!("../docs/runbook.md");

/// The kinds of contract violations.
fn kinds() -> impl Iterator<Item = &'static str> {
    let names = Tally::default().counts().into_iter().map(|(name, _)| name);
    names.filter_map(|name| Some(name.split_once("kind=.=")?.1.trim_end_matches(";.;")))
}

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
fn every_reason_and_violation_has_one_entry_in_the_runbook() {
    let faults = Fault::ALL.map(Fault::as_str);
    let doubts = Doubt::ALL.map(Doubt::as_str);
    for name in faults.into_iter().chain(doubts).chain(kinds()) {
        let heading = format!("### `{name}`");
        assert_eq!(RUNBOOK.lines().filter(|line| *line == heading).count(), 1, "{name}");
    }
}

#[test]
fn the_runbooks_configurations_are_accepted() {
    let blocks: Vec<&str> = RUNBOOK.split("```json\n").skip(1).collect();
    assert!(blocks.len() >= 3);
    let members =
        RUNBOOK.split("```").step_by(2).flat_map(|text| text.split('`').skip(1).step_by(2));
    let members = members.filter(|text| text.starts_with('"') && text.contains(": "));
    let members: Vec<String> = members.map(|text| format!("{{{text}}}")).collect();
    assert!(members.len() >= 10);
    let blocks = blocks.iter().filter_map(|block| block.split("```").next());
    for text in blocks.chain(members.iter().map(String::as_str)) {
        assert_eq!(Config::parse(text.as_bytes()).err(), None, "{text}");
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
    for kind in kinds() {
        assert!(VERDICTS.contains(&format!("| `{kind}` |")), "{kind}");
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
        resumption.to_json(Some(b"8df04497-00ea-4acb-a546-46ffb1888074"), 3),
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
