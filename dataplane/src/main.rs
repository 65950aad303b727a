//! The front door of `forebay-node`.
//!
//! Thin: the command line becomes a configuration, the configuration goes to the room that does the work. An error
//! is printed once, with its causes. Exit codes: 0 done; 1 it was tried and failed; 2 what was asked cannot be.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Parser;
use forebay_control_api::ByteSize;
use forebay_dataplane::config::{self, Cli, Command, Config, FormatArgs, HostFacts, Limits, Settings};
use forebay_dataplane::engine::probe;
use forebay_dataplane::logs;
use forebay_dataplane::store::Superblock;
use forebay_dataplane::store::format::{self, FormatOptions, FormatReport, Inspection, WipeReport};
use forebay_dataplane::tls::Certificates;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(settings) => serve(*settings),
        Command::Doctor => Ok(probe::report().to_string()),
        Command::CheckConfig(settings) => check_config(*settings),
        Command::Format(arguments) => format_drive(arguments),
        Command::Wipe(drive) => format::wipe(&drive.path).map(|report| wiped(&report)).map_err(failed),
        Command::Inspect(drive) => {
            format::inspect(&drive.path).map(|report| inspected(&report)).map_err(failed)
        }
    };
    match done {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err((code, error)) => {
            eprintln!("forebay-node: {error:#}");
            ExitCode::from(code)
        }
    }
}

/// What to print, or an exit code with the reason.
type Done = Result<String, (u8, anyhow::Error)>;

const FAILED: u8 = 1;
const CANNOT_BE: u8 = 2;

fn failed(error: impl Into<anyhow::Error>) -> (u8, anyhow::Error) {
    (FAILED, error.into())
}

fn cannot_be(error: impl Into<anyhow::Error>) -> (u8, anyhow::Error) {
    (CANNOT_BE, error.into())
}

fn load(settings: Settings) -> Result<Config, (u8, anyhow::Error)> {
    Config::load(settings, &|name| std::env::var(name).ok(), &HostFacts::probe()).map_err(cannot_be)
}

fn serve(settings: Settings) -> Done {
    let filter = std::env::var(logs::VARIABLE).ok();
    logs::start(filter.as_deref()).map_err(cannot_be)?;
    let config = load(settings)?;
    Limits::derive(&config).map_err(cannot_be)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    forebay_dataplane::serve::run(&config).map_err(failed)?;
    Ok(String::new())
}

fn check_config(settings: Settings) -> Done {
    let config = load(settings)?;
    let limits = Limits::derive(&config).map_err(cannot_be)?;
    if let Some(files) = &config.tls_files {
        Certificates::open(files).map_err(cannot_be)?;
    }
    Ok(config::check_report(&config, &limits))
}

fn format_drive(arguments: FormatArgs) -> Done {
    let options = FormatOptions {
        path: arguments.path,
        size: arguments.size.map(ByteSize::bytes),
        force: arguments.force,
        node: None,
    };
    let FormatReport { path, is_device, is_new, overwritten, superblock } =
        format::format(&options).map_err(failed)?;
    let what = match (is_device, is_new) {
        (true, _) => "device formatted",
        (false, true) => "file made and formatted",
        (false, false) => "file formatted",
    };
    let over = overwritten.map(|found| format!(" over {found}")).unwrap_or_default();
    Ok(format!("{}: {what}{over}\n{}", path.display(), drive_lines(&superblock)))
}

fn wiped(report: &WipeReport) -> String {
    match report {
        WipeReport::Cleared { drive: Some(drive), copies } => {
            format!("drive {drive}: {copies} superblocks cleared\n")
        }
        WipeReport::Cleared { drive: None, copies } => format!("{copies} damaged superblocks cleared\n"),
        WipeReport::NoneFound => "there is no Forebay superblock; nothing was written\n".to_owned(),
    }
}

fn inspected(report: &Inspection) -> String {
    let mut text = format!("size      {:#}\n", ByteSize::new(report.bytes));
    if let Some(foreign) = report.foreign {
        let _ = writeln!(text, "mark of   {foreign}");
    }
    if let Some(usage) = &report.usage {
        let _ = writeln!(text, "it is     {usage}");
    }
    for (at, copy) in report.copies.iter().enumerate() {
        let _ = match copy {
            Ok(superblock) => writeln!(text, "copy {at}    generation {}", superblock.generation),
            Err(error) => writeln!(text, "copy {at}    {error}"),
        };
    }
    let newest = report.copies.iter().flatten().max_by_key(|superblock| superblock.generation);
    text.push_str(&newest.map(drive_lines).unwrap_or_default());
    text
}

fn drive_lines(superblock: &Superblock) -> String {
    let geometry = &superblock.geometry;
    format!(
        "drive     {}\nnode      {}\ncapacity  {:#} in {} segments of {:#}\n",
        superblock.drive,
        superblock.node,
        ByteSize::new(geometry.capacity()),
        geometry.segments(),
        ByteSize::new(u64::from(geometry.segment_bytes())),
    )
}
