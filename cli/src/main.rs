//! `mcp-resume-guard`: what an operator asks beside the gateway, with the
//! filter's own code for an answer.
//!
//! * `check-config FILE`: would the filter take this configuration?
//! * `explain`: why was this resumption refused, and what is to be done?
//! * `schema`: the JSON Schema of the configuration.

mod check;
mod explain;

use std::fs;
use std::io::{self, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use mcp_resume_guard::config::Config;

/// Checks a configuration of mcp-resume-guard before it is deployed, and explains its verdicts.
#[derive(Parser)]
#[command(version = env!("CARGO_PKG_VERSION"))]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what the filter would say of a configuration: exit code 0 if it takes it, 1 if it refuses
    /// it, 2 if there is none
    CheckConfig {
        /// JSON or YAML: the configuration itself, or an envoy.yaml, WasmPlugin, EnvoyFilter or
        /// EnvoyExtensionPolicy that has it, or a list of them; `-` is standard input
        file: String,
    },
    /// Say why a resumption got its verdict, and what to do
    Explain {
        /// A line of the access log or of Envoy's log, the answer's JSON or its header
        /// `mcp-resumption`; without, standard input is read
        text: Vec<String>,
    },
    /// Print the JSON Schema of the configuration
    Schema,
}

/// The exit code where there is no answer.
const NO_ANSWER: u8 = 2;

fn main() -> ExitCode {
    let (answer, code) = match run(Arguments::parse().command) {
        Ok((answer, is_well)) => (answer, if is_well { 0 } else { 1 }),
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::from(NO_ANSWER);
        }
    };
    // Who reads only the first lines of it has closed the pipe by now.
    let _ = io::stdout().write_all(answer.as_bytes());
    ExitCode::from(code)
}

/// What is printed, and whether all is well.
fn run(command: Command) -> Result<(String, bool)> {
    Ok(match command {
        Command::CheckConfig { file } => {
            let text = if file == "-" { stdin()? } else { read(&file)? };
            let mut answer = String::new();
            let mut is_well = true;
            for configuration in check::configurations(&text).with_context(|| file.clone())? {
                let said = match configuration.check() {
                    Ok(meaning) => format!("accepted: {meaning}"),
                    Err(problem) => {
                        is_well = false;
                        format!("refused: {problem}")
                    }
                };
                answer += &format!("{file}: {}: {said}\n", configuration.place);
            }
            (answer, is_well)
        }
        Command::Explain { text } => {
            let text = if text.is_empty() { stdin()? } else { text.join(" ") };
            (explain::explain(&text)?.join("\n\n") + "\n", true)
        }
        Command::Schema => {
            (serde_json::to_string_pretty(&schemars::schema_for!(Config))? + "\n", true)
        }
    })
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(file).with_context(|| file.to_owned())
}

fn stdin() -> Result<String> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).context("standard input")?;
    Ok(text)
}
