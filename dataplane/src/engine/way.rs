//! How a body leaves: copied into the socket, by reference, or zero-copy.
//!
//! *Copied* holds nothing once the send is done. *By reference* ([`reference`](super::reference)) spares the copy even
//! between processes of one host, at the price of a new page for what was lent, so it is for hot bytes. *Zero-copy*
//! (`IORING_OP_SENDMSG_ZC`) lets the network read the leases where they lie, until the peer has acknowledged them; they
//! come back with a notification that nobody waits for. Where the path copies all the same (loopback, veth, a device
//! without scatter-gather), the notification says so (`IORING_SEND_ZC_REPORT_USAGE`), and that peer is not asked again.
#![forbid(unsafe_code)]

use std::cell::Cell;

use super::Outgoing;

/// Which of the ways the operator allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sends {
    /// Zero-copy where the kernel does not copy; else hot bytes by reference, and the rest copied.
    #[default]
    Auto,
    /// Everything is copied.
    Copy,
    /// Zero-copy whatever the kernel says of it: to measure, and to test where every path copies.
    ZeroCopy,
    /// Hot bytes by reference, whoever the peer is; the rest copied.
    Reference,
}

/// What sends may do, and how much the network may hold of what they send zero-copy.
#[derive(Clone, Copy, Debug)]
pub struct SendPolicy {
    /// The ways that are allowed.
    pub sends: Sends,
    /// Most bytes of one ring that the network may hold, zero-copy; beyond it bodies go another way. One send may exceed it.
    pub zero_copy_bytes_max: u64,
    /// Most of them for one connection.
    pub zero_copy_bytes_per_connection_max: u64,
}

impl Default for SendPolicy {
    /// Everything that spares a copy, with room for a few bodies.
    fn default() -> Self {
        Self {
            sends: Sends::Auto,
            zero_copy_bytes_max: 64 << 20,
            zero_copy_bytes_per_connection_max: 8 << 20,
        }
    }
}

/// Bodies below it are copied: a notification costs more than the copy of so little. Bytes.
const ZERO_COPY_BYTES_MIN: usize = 16 << 10;
/// Bodies below it are not sent by reference: two system calls cost more than a small copy in a batch. Bytes.
const REFERENCE_BYTES_MIN: usize = 32 << 10;

/// One of the ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Copy,
    Reference,
    ZeroCopy,
}

/// What is known of the path to one peer, and what it holds.
#[derive(Debug, Default)]
pub(super) struct Path {
    /// Whether the kernel copies what is sent zero-copy; `None` as long as it has not said so.
    copies: Cell<Option<bool>>,
    /// Bytes sent zero-copy that have not been given back.
    held: Cell<u64>,
}

impl Path {
    /// A path inside of this host, where bytes are copied once in any case.
    pub(super) fn within_host() -> Self {
        Self { copies: Cell::new(Some(true)), held: Cell::new(0) }
    }

    /// What a notification says. One byte copied is a path that copies: parts of one send share a fate but by accident.
    pub(super) fn learn(&self, copies: bool) {
        self.copies.set(Some(copies));
    }

    pub(super) fn hold(&self, bytes: u64) {
        self.held.set(self.held.get() + bytes);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.held.set(self.held.get() - bytes);
    }
}

/// What a ring can do at this moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    /// Whether the kernel takes zero-copy sends at all.
    pub(super) zero_copy: bool,
    /// Bytes that the network holds, zero-copy, of all connections.
    pub(super) held: u64,
}

/// The way of a send.
pub(super) fn choose(policy: &SendPolicy, means: Means, path: &Path, outgoing: &Outgoing) -> Way {
    let is_wanted = match policy.sends {
        Sends::Auto => path.copies.get() != Some(true),
        Sends::ZeroCopy => true,
        Sends::Copy | Sends::Reference => false,
    };
    let len = outgoing.len() as u64;
    // One send goes in any case, or a worker with a small share would copy large bodies for ever.
    let has_room = path.held.get() + len <= policy.zero_copy_bytes_per_connection_max
        && (means.held == 0 || means.held + len <= policy.zero_copy_bytes_max);
    if is_wanted && has_room && means.zero_copy && outgoing.body_len() >= ZERO_COPY_BYTES_MIN {
        Way::ZeroCopy
    } else if by_reference(policy.sends, outgoing) {
        Way::Reference
    } else {
        Way::Copy
    }
}

/// Whether a send that is not zero-copy goes by reference: all of the body is hot, and enough of it to be worth the calls.
pub(super) fn by_reference(sends: Sends, outgoing: &Outgoing) -> bool {
    matches!(sends, Sends::Auto | Sends::Reference)
        && outgoing.body_len() >= REFERENCE_BYTES_MIN
        && outgoing.body.iter().all(|slice| slice.lease.is_lendable())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, ArenaOptions, Purpose};
    use crate::engine::Slice;

    const MEANS: Means = Means { zero_copy: true, held: 0 };

    fn outgoing(arena: &'static Arena, len: usize, is_hot: bool) -> Outgoing {
        let mut lease = arena.grant(Purpose::Fill, len).expect("memory");
        lease.advance(len);
        let lease = lease.freeze();
        while is_hot && !lease.is_lendable() {
            lease.touch();
        }
        let mut outgoing = Outgoing::header(b"head".to_vec());
        outgoing.push(Slice::new(lease, 0..len));
        outgoing
    }

    fn arena() -> &'static Arena {
        Arena::build(ArenaOptions { bytes: 16 << 20, reads_bytes: 4 << 20, fills_bytes: 4 << 20 })
            .expect("memory")
    }

    #[test]
    fn a_peer_is_asked_until_its_path_is_found_to_copy() {
        let arena = arena();
        let (cold, hot) = (outgoing(arena, 100_000, false), outgoing(arena, 100_000, true));
        let (path, auto) = (Path::default(), SendPolicy::default());
        assert_eq!(choose(&auto, MEANS, &path, &hot), Way::ZeroCopy, "nobody knows");
        path.learn(false);
        assert_eq!(choose(&auto, MEANS, &path, &cold), Way::ZeroCopy);
        path.learn(true);
        assert_eq!(choose(&auto, MEANS, &path, &cold), Way::Copy);
        assert_eq!(choose(&auto, MEANS, &path, &hot), Way::Reference);
        let here = Path::within_host();
        assert_eq!(choose(&auto, MEANS, &here, &hot), Way::Reference);
        let none = Means { zero_copy: false, ..MEANS };
        assert_eq!(choose(&auto, none, &Path::default(), &hot), Way::Reference);
        assert_eq!(choose(&auto, none, &Path::default(), &cold), Way::Copy);
    }

    #[test]
    fn small_bodies_and_heads_are_copied() {
        let arena = arena();
        let auto = SendPolicy::default();
        for len in [1, ZERO_COPY_BYTES_MIN - 1] {
            assert_eq!(choose(&auto, MEANS, &Path::default(), &outgoing(arena, len, true)), Way::Copy);
        }
        assert_eq!(choose(&auto, MEANS, &Path::default(), &Outgoing::header(vec![0; 99_999])), Way::Copy);
    }

    #[test]
    fn what_the_network_holds_is_bounded_for_a_connection_and_for_all() {
        let arena = arena();
        let body = outgoing(arena, 100_000, false);
        let policy = SendPolicy {
            zero_copy_bytes_per_connection_max: 200_008,
            zero_copy_bytes_max: 300_012,
            ..SendPolicy::default()
        };
        let path = Path::default();
        path.hold(100_004);
        assert_eq!(choose(&policy, MEANS, &path, &body), Way::ZeroCopy);
        path.hold(1);
        assert_eq!(choose(&policy, MEANS, &path, &body), Way::Copy);
        path.give_back(1);
        assert_eq!(choose(&policy, Means { held: 200_008, ..MEANS }, &path, &body), Way::ZeroCopy);
        assert_eq!(choose(&policy, Means { held: 200_009, ..MEANS }, &path, &body), Way::Copy);
        let small = SendPolicy { zero_copy_bytes_max: 1, ..SendPolicy::default() };
        assert_eq!(choose(&small, MEANS, &path, &body), Way::ZeroCopy, "one goes");
        assert_eq!(choose(&small, Means { held: 1, ..MEANS }, &path, &body), Way::Copy);
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let arena = arena();
        let (cold, hot) = (outgoing(arena, 100_000, false), outgoing(arena, 100_000, true));
        for (sends, here, away) in [
            (Sends::Copy, Way::Copy, Way::Copy),
            (Sends::ZeroCopy, Way::ZeroCopy, Way::ZeroCopy),
            (Sends::Reference, Way::Reference, Way::Reference),
        ] {
            let policy = SendPolicy { sends, ..SendPolicy::default() };
            assert_eq!(choose(&policy, MEANS, &Path::within_host(), &hot), here, "{sends:?}");
            assert_eq!(choose(&policy, MEANS, &Path::default(), &hot), away, "{sends:?}");
            assert_eq!(by_reference(sends, &hot), sends == Sends::Reference);
        }
        assert!(by_reference(Sends::Auto, &hot) && !by_reference(Sends::Auto, &cold));
    }
}
