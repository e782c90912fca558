//! The load generator: does what it reads from standard input, a line of JSON
//! each, and answers each with a line of JSON.
//!
//! It holds the clients of all contestants at once, so that rounds can
//! interleave on connections that stay open.

mod client;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use client::Client;
use futures::stream::{FuturesUnordered, TryStreamExt};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::sse::Ids;

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Command {
    /// Opens connections and begins sessions.
    Prepare {
        name: String,
        gateway: SocketAddr,
        /// Connections, which work side by side.
        connections: usize,
        /// Sessions, dealt out to the connections. With fewer than those, all
        /// connections share one.
        sessions: usize,
        /// Whether each session gets a stream that can be resumed.
        resumable: bool,
    },
    /// Does so much work.
    Run { name: String, work: Work, units: u64 },
    /// Sends an event to each of these in turn, at a calm rate, and tells how
    /// long each took.
    Latency { names: Vec<String>, events: u64, pause_us: u64 },
    /// Closes the connections.
    Drop { name: String },
}

/// What is done, and what a unit of it is.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Work {
    /// A POST with a JSON answer.
    Post,
    /// A resumption that brings an event the client missed, and a new one.
    Resume,
    /// A resumption from an event that was never issued.
    Refuse,
    /// An event, in streams of so many.
    Stream { ids: Ids, events: u64 },
    /// A block of events, 1 MiB, in streams of so many.
    Bulk { blocks: u64, event_bytes: usize },
}

/// What was done.
#[derive(Debug, Default, Serialize)]
struct Done {
    units: u64,
    /// Event ids that came and had not come before.
    events: u64,
    /// Sessions begun.
    sessions: u64,
    /// Values of `mcp-resumption`, and how often they came.
    verdicts: BTreeMap<String, u64>,
    /// The longest that a POST took.
    slowest_us: u64,
    /// How long each event took to come, for each contestant.
    latencies_ns: Vec<Vec<u64>>,
}

impl Done {
    fn add(&mut self, other: Done) {
        self.units += other.units;
        self.events += other.events;
        self.sessions += other.sessions;
        for (verdict, count) in other.verdicts {
            *self.verdicts.entry(verdict).or_default() += count;
        }
        self.slowest_us = self.slowest_us.max(other.slowest_us);
        self.latencies_ns.extend(other.latencies_ns);
    }
}

#[derive(Default)]
struct Load {
    contestants: HashMap<String, Vec<Client>>,
    tickets: u64,
    /// The abstract name of the socket that takes the signals.
    signals: String,
}

/// Does what standard input says, until it ends.
pub async fn serve(signals: String) -> Result<()> {
    let mut load = Load { signals, ..Load::default() };
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let command = serde_json::from_str(&line).context("not a command");
        let done = match command {
            Ok(command) => load.carry_out(command).await,
            Err(error) => Err(error),
        };
        let answer = match done {
            Ok(done) => serde_json::json!({"done": done}),
            Err(error) => serde_json::json!({"error": format!("{error:#}")}),
        };
        println!("{answer}");
    }
    Ok(())
}

impl Load {
    async fn carry_out(&mut self, command: Command) -> Result<Done> {
        match command {
            Command::Prepare { name, gateway, connections, sessions, resumable } => {
                let mut done = Done::default();
                let mut clients = Vec::new();
                for _ in 0..connections {
                    self.tickets += 1;
                    clients.push(Client::open(gateway, &self.signals, self.tickets).await?);
                }
                if sessions < connections {
                    let (first, others) = clients.split_first_mut().context("no connection")?;
                    done.add(first.begin_sessions(1, resumable).await?);
                    for other in others {
                        other.share_session_of(first);
                    }
                } else {
                    let share = sessions / connections;
                    let all =
                        clients.iter_mut().map(|client| client.begin_sessions(share, resumable));
                    done = all.collect::<FuturesUnordered<_>>().try_fold(done, sum).await?;
                }
                self.contestants.insert(name, clients);
                Ok(done)
            }
            Command::Run { name, work, units } => {
                let clients = self.contestants.get_mut(&name).context("not prepared")?;
                let share = units / clients.len() as u64;
                let all = clients.iter_mut().map(|client| client.work(work, share));
                // It polls only those that something came for.
                all.collect::<FuturesUnordered<_>>().try_fold(Done::default(), sum).await
            }
            Command::Latency { names, events, pause_us } => {
                self.latencies(&names, events, Duration::from_micros(pause_us)).await
            }
            Command::Drop { name } => {
                self.contestants.remove(&name);
                Ok(Done::default())
            }
        }
    }

    async fn latencies(&mut self, names: &[String], events: u64, pause: Duration) -> Result<Done> {
        let mut done = Done { latencies_ns: vec![Vec::new(); names.len()], ..Done::default() };
        for name in names {
            self.client(name)?.begin_stream(Ids::Index, events).await?;
        }
        for _ in 0..events {
            // An event of each contestant, so that all meet the same noise.
            for (place, name) in names.iter().enumerate() {
                tokio::time::sleep(pause).await;
                let latency = self.client(name)?.next_event().await?;
                done.latencies_ns[place].push(latency);
            }
        }
        for name in names {
            done.add(self.client(name)?.end_stream().await?);
        }
        Ok(done)
    }

    fn client(&mut self, name: &str) -> Result<&mut Client> {
        let clients = self.contestants.get_mut(name).context("not prepared")?;
        clients.first_mut().context("no connection")
    }
}

async fn sum(mut sum: Done, part: Done) -> Result<Done> {
    sum.add(part);
    Ok(sum)
}
