//! The front door of `forebay-control`.
//!
//! It is two programs in one: `serve` is the control plane, everything else is an operator's command that asks it, or
//! asks one node through its admin door. An error is printed once, with its causes. Exit codes: 0 done; 1 it was tried
//! and failed; 2 what was asked cannot be.
//!
//! ```text
//!   serve   the process: store opened, socket bound, nodes watched
//!   http    thin: who asks, what, and the answer          (OpenAPI from the same handlers)
//!   service the verbs: validate, one transaction, plan, publish
//!   store   one ordered file
//!   (the planner and every word on the wire are in control/api: nodes use them too)
//! ```
#![forbid(unsafe_code)]

mod client;
mod error;
mod http;
mod node;
mod operator;
mod serve;
mod service;
mod store;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// The control plane of Forebay nodes, and the operator's commands
#[derive(Debug, Parser)]
#[command(name = "forebay-control", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the control plane
    Serve(serve::Options),
    /// Print the `OpenAPI` document of the control plane
    Openapi,
    #[command(flatten)]
    Operator(operator::Command),
    /// Ask or tell one node through its admin door
    #[command(subcommand)]
    Node(node::Command),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("forebay-control: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<String> {
    let mut runtime = match command {
        // Its requests wait for the drive on other threads; two that talk are plenty.
        Command::Serve(_) => {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            runtime.worker_threads(2).max_blocking_threads(16);
            runtime
        }
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    runtime.enable_all().build()?.block_on(async {
        match command {
            Command::Serve(options) => {
                start_logs()?;
                serve::run(options).await.map(|()| String::new())
            }
            Command::Openapi => Ok(http::document()),
            Command::Operator(command) => operator::run(command).await,
            Command::Node(command) => node::run(command).await,
        }
    })
}

/// Sentences go to standard error, filtered by `FOREBAY_LOG`, as a node's do.
fn start_logs() -> Result<()> {
    let text = std::env::var("FOREBAY_LOG").unwrap_or_default();
    let filter = tracing_subscriber::EnvFilter::try_new(if text.is_empty() { "info" } else { &text })
        .with_context(|| format!("FOREBAY_LOG: `{text}` is not a filter; write a level such as info"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    Ok(())
}
