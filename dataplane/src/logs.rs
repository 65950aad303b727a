//! Where our sentences go: to standard error, one line each, filtered by `FOREBAY_LOG`.
//!
//! Standard output belongs to what was asked for (banner, reports), so that a pipe gets nothing else.
#![forbid(unsafe_code)]

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// The variable that chooses what is logged, e.g. `debug` or `forebay_dataplane::fill=trace,info`.
pub const VARIABLE: &str = "FOREBAY_LOG";

/// Why nothing will be logged.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter cannot be read.
    #[error("{VARIABLE}: `{text}` is not a filter; write a level such as info, or MODULE=LEVEL pairs")]
    Filter {
        /// What was written.
        text: String,
        /// Why not.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
}

/// Starts logging for this process; a second call changes nothing. `filter` is the text of [`VARIABLE`], if it is
/// set; without it everything from `info` up is logged.
///
/// # Errors
/// A filter that cannot be read.
pub fn start(filter: Option<&str>) -> Result<(), LogError> {
    let filter = parse(filter)?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    // An error only says that somebody was here before, such as another test of this process.
    let _ = subscriber.try_init();
    Ok(())
}

fn parse(filter: Option<&str>) -> Result<EnvFilter, LogError> {
    let text = filter.filter(|text| !text.is_empty()).unwrap_or("info");
    EnvFilter::try_new(text).map_err(|source| LogError::Filter { text: text.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_modules_with_levels() {
        assert_eq!(parse(None).expect("the default").to_string(), "info");
        assert_eq!(parse(Some("")).expect("the default").to_string(), "info");
        assert_eq!(parse(Some("debug")).expect("a level").to_string(), "debug");
        assert!(parse(Some("forebay_dataplane::fill=trace,info")).is_ok());
        let error = parse(Some("forebay=loud")).expect_err("no level").to_string();
        assert!(error.contains("FOREBAY_LOG"), "{error}");
    }
}
