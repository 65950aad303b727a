//! Bounded waiting. A test never sleeps for a guess: it asks until the answer is there or patience ends.

use std::time::Duration;
use tokio::time::Instant;

/// How long a test waits for something that must happen. Generous, because it is never the measure of
/// anything: a healthy node answers in milliseconds, and a loaded machine must not fail a test.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Asks `question` again and again until it answers `Some`; panics with `what` when [`PATIENCE`] ends.
#[track_caller]
pub fn until<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {} s in vain for: {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(10));
    }
}
