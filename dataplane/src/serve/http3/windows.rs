//! What QUIC may hold of bytes that clients have not acknowledged: a budget, shared by the connections of a worker.
//!
//! QUIC keeps what it sends until the other side has it, and a client that pauses lets it keep as much as the send
//! window allows. With few connections each has a window as large as makes sense; with more, all windows become
//! smaller, so that their sum stays within the budget. A window never goes below what keeps a stream moving; so many
//! connections as that allows are admitted, and no more.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use slab::Slab;

use crate::config::QUIC_WINDOW_BYTES_MIN;

/// The connections of one worker and the window that each has now.
#[derive(Debug)]
pub(in crate::serve) struct Windows<C = quinn::Connection> {
    budget: u64,
    window_max: u64,
    window: Cell<u64>,
    /// `None` while a connection is still shaking hands.
    open: RefCell<Slab<Option<C>>>,
}

/// Something with a send window.
pub(in crate::serve) trait HasWindow {
    /// Sets it, in bytes.
    fn set_window(&self, bytes: u64);
}

impl HasWindow for quinn::Connection {
    fn set_window(&self, bytes: u64) {
        self.set_send_window(bytes);
    }
}

/// A connection's place among the others, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place<C: HasWindow = quinn::Connection> {
    windows: Rc<Windows<C>>,
    key: usize,
}

impl<C: HasWindow> Windows<C> {
    /// Windows of at most `window_max` bytes, and of `budget` bytes together.
    pub(super) fn new(budget: u64, window_max: u64) -> Rc<Self> {
        let window = Cell::new(window_max);
        Rc::new(Self { budget, window_max, window, open: RefCell::default() })
    }

    /// A place for one more connection; `None` if it would leave too little to each.
    pub(super) fn enter(self: &Rc<Self>) -> Option<Place<C>> {
        if (self.open.borrow().len() as u64 + 1) * QUIC_WINDOW_BYTES_MIN > self.budget {
            return None;
        }
        let key = self.open.borrow_mut().insert(None);
        self.share_out();
        Some(Place { windows: Rc::clone(self), key })
    }

    /// Powers of two, so that a window changes rarely although connections come and go.
    fn share_out(&self) {
        let open = self.open.borrow();
        let share = (self.budget / open.len().max(1) as u64).max(1);
        let window = (1_u64 << share.ilog2()).min(self.window_max).max(QUIC_WINDOW_BYTES_MIN);
        if self.window.replace(window) != window {
            for connection in open.iter().filter_map(|(_, connection)| connection.as_ref()) {
                connection.set_window(window);
            }
        }
    }
}

impl<C: HasWindow> Place<C> {
    /// The connection that has it.
    pub(super) fn fill(&self, connection: C) {
        connection.set_window(self.windows.window.get());
        self.windows.open.borrow_mut()[self.key] = Some(connection);
    }
}

impl<C: HasWindow> Drop for Place<C> {
    fn drop(&mut self) {
        let gone = self.windows.open.borrow_mut().remove(self.key);
        self.windows.share_out();
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl HasWindow for Rc<Cell<u64>> {
        fn set_window(&self, bytes: u64) {
            self.set(bytes);
        }
    }

    #[test]
    fn all_windows_together_stay_within_the_budget() {
        let budget = 100 * QUIC_WINDOW_BYTES_MIN;
        let window_max = 16 * QUIC_WINDOW_BYTES_MIN;
        let windows = Windows::new(budget, window_max);
        let mut connections = Vec::new();
        while let Some(place) = windows.enter() {
            let connection = Rc::new(Cell::new(0));
            place.fill(Rc::clone(&connection));
            connections.push((place, connection));
            let together: u64 = connections.iter().map(|(_, connection)| connection.get()).sum();
            assert!(together <= budget, "{} connections may hold {together}", connections.len());
            assert!(connections.iter().all(|(_, window)| window.get() >= QUIC_WINDOW_BYTES_MIN));
        }
        assert_eq!(connections.len(), 100);
        connections.truncate(3);
        assert!(connections.iter().all(|(_, window)| window.get() == window_max), "back to what makes sense");
        assert!(windows.enter().is_some());
    }

    #[test]
    fn connections_that_shake_hands_at_the_same_time_stay_within_the_budget_too() {
        let windows = Windows::new(4 * QUIC_WINDOW_BYTES_MIN, 4 * QUIC_WINDOW_BYTES_MIN);
        let places: Vec<_> = std::iter::from_fn(|| windows.enter()).take(10).collect();
        assert_eq!(places.len(), 4);
        for place in &places {
            let connection = Rc::new(Cell::new(0));
            place.fill(Rc::clone(&connection));
            assert_eq!(connection.get(), QUIC_WINDOW_BYTES_MIN);
        }
    }
}
