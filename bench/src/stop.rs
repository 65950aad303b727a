//! One flag that SIGINT and SIGTERM set, so that whoever runs children or has files can put them away first.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};

static STOP: AtomicBool = AtomicBool::new(false);

/// Listens for both signals on a thread of its own; the flag they set.
///
/// # Errors
/// The thread or the handlers cannot be made.
pub fn on_signals() -> Result<&'static AtomicBool> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("starting the signal thread")?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt()).context("listening for SIGINT")?,
            signal(SignalKind::terminate()).context("listening for SIGTERM")?,
        )
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    STOP.store(true, Ordering::Relaxed);
                }
            });
        })
        .context("starting the signal thread")?;
    Ok(&STOP)
}
