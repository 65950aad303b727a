//! The front door of `forebay-control`.
//!
//! In this version it holds the operator's commands for one node's admin door. An error is printed once, with its
//! causes. Exit codes: 0 done; 1 it was tried and failed; 2 what was asked cannot be.
#![forbid(unsafe_code)]

mod client;
mod node;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The operator's commands for Forebay nodes
#[derive(Debug, Parser)]
#[command(name = "forebay-control", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Ask or tell one node through its admin door
    #[command(subcommand)]
    Node(node::Command),
}

fn main() -> ExitCode {
    let Cli { command: Command::Node(command) } = Cli::parse();
    let done = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(node::run(command)));
    match done {
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
