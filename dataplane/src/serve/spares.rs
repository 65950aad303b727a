//! Buffers between two uses: a worker's connections share them, so an idle one holds none, and a busy one allocates
//! nothing.
#![forbid(unsafe_code)]

use std::cell::RefCell;

/// Buffers of one kind.
#[derive(Debug)]
pub(super) struct Spares {
    buffers: RefCell<Vec<Vec<u8>>>,
    bytes: usize,
    most: usize,
}

impl Spares {
    /// For buffers of `bytes`, of which at most so many are kept.
    pub(super) fn new(bytes: usize, most: usize) -> Self {
        Self { buffers: RefCell::default(), bytes, most }
    }

    /// An empty buffer with room for at least so many bytes.
    pub(super) fn take(&self) -> Vec<u8> {
        self.buffers.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(self.bytes))
    }

    /// Takes a buffer back, if it is one of this kind: what was never made, or has grown beyond twice the size, is dropped.
    pub(super) fn give(&self, mut buffer: Vec<u8>) {
        let mut buffers = self.buffers.borrow_mut();
        if buffers.len() < self.most && (self.bytes..=2 * self.bytes).contains(&buffer.capacity()) {
            buffer.clear();
            buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_is_used_again_and_neither_too_large_nor_too_many_are_kept() {
        let spares = Spares::new(100, 2);
        let mut first = spares.take();
        assert!(first.is_empty() && first.capacity() >= 100);
        first.extend_from_slice(&[1; 80]);
        let place = first.as_ptr();
        spares.give(first);
        spares.give(Vec::new());
        spares.give(Vec::with_capacity(1000));
        let again = spares.take();
        assert!(again.is_empty() && again.as_ptr() == place);
        for _ in 0..3 {
            spares.give(Vec::with_capacity(120));
        }
        assert_eq!(spares.buffers.borrow().len(), 2);
    }
}
