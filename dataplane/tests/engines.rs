//! The engines against the real kernel: the same behaviours, `uring` and `portable`.
//!
//! Short counts, cancelled and orphaned operations, interrupted sends, reads beyond the end: an operation gives
//! back what it owned, once, with a count that is true.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::rc::Rc;
use std::time::Duration;

use forebay_dataplane::arena::{Arena, ArenaOptions, Lease, Purpose};
use forebay_dataplane::engine::portable::Portable;
use forebay_dataplane::engine::uring::{Registry, Ring};
use forebay_dataplane::engine::{Engine, Outgoing, SendPolicy, SendWatch, Sends, Slice, Socket, task};
use tokio::runtime::{Builder, LocalOptions};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

fn arena() -> &'static Arena {
    Arena::build(ArenaOptions { bytes: 32 * MIB, reads_bytes: 8 * MIB, fills_bytes: 8 * MIB })
        .expect("memory")
}

/// Runs a behaviour on both engines. A host that refuses io_uring fails the test: it is what we are for.
fn on_both<F: Future<Output = ()>>(behaviour: impl Fn(Engine) -> F) {
    on_these(&["uring", "portable"], behaviour);
}

/// On both engines, and with every body sent zero-copy, though this machine's loopback copies it.
fn on_all<F: Future<Output = ()>>(behaviour: impl Fn(Engine) -> F) {
    on_these(&["uring", "uring, zero-copy", "portable"], behaviour);
}

fn on_these<F: Future<Output = ()>>(engines: &[&str], behaviour: impl Fn(Engine) -> F) {
    for name in engines {
        println!("engine {name}");
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
            .expect("a runtime");
        runtime.block_on(async {
            let sends = if name.contains("zero-copy") { Sends::ZeroCopy } else { Sends::Auto };
            let policy = SendPolicy { sends, ..SendPolicy::default() };
            let engine = match *name {
                "portable" => Engine::Portable(Portable::default()),
                _ => Engine::Uring(Ring::start(policy).expect("io_uring is granted here")),
            };
            tokio::time::timeout(PATIENCE, behaviour(engine.clone())).await.expect("nothing hangs");
            tokio::time::timeout(PATIENCE, returned(&engine))
                .await
                .expect("the network gives everything back");
        });
    }
}

/// Waits until the network has let go of what was sent zero-copy.
async fn returned(engine: &Engine) {
    let Engine::Uring(ring) = engine else { return };
    while ring.counts().lent_bytes > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A connection: the engine's end and a plain one.
async fn connect(engine: &Engine) -> (Socket, TcpStream) {
    let (accepted, peer) = connect_plain(engine).await;
    (engine.adopt(accepted).expect("adopted"), peer)
}

/// The same with a send buffer of a few pages.
async fn connect_small(engine: &Engine) -> (Socket, TcpStream) {
    let (accepted, peer) = connect_plain(engine).await;
    socket2::SockRef::from(&accepted).set_send_buffer_size(32 << 10).expect("a small buffer");
    (engine.adopt(accepted).expect("adopted"), peer)
}

async fn connect_plain(engine: &Engine) -> (std::os::fd::OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    listener.set_nonblocking(true).expect("non-blocking");
    let listener = engine.adopt(listener.into()).expect("a listener");
    let peer = TcpStream::connect(address).expect("a connection");
    peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    (engine.accept(&listener).await.expect("accepted"), peer)
}

/// Reads what is there; true at the end of the stream, however it came.
fn has_ended(peer: &mut TcpStream) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match peer.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn bytes_come_and_go_with_header_and_slices_in_order() {
    let arena = arena();
    on_all(|engine| async move {
        let (socket, mut peer) = connect(&engine).await;
        peer.write_all(b"hello").expect("sent");
        let (received, buffer) = engine.recv(&socket, Vec::with_capacity(64)).await;
        assert_eq!((received.expect("received"), &buffer[..]), (5, &b"hello"[..]));
        // Behind what is there already.
        peer.write_all(b", node").expect("sent");
        let (received, buffer) = engine.recv(&socket, buffer).await;
        assert_eq!((received.expect("received"), &buffer[..]), (6, &b"hello, node"[..]));

        let mut outgoing = Outgoing::header(b"head|".to_vec());
        let mut expected = b"head|".to_vec();
        for fill in 1..=3_u8 {
            let mut lease = arena.grant(Purpose::Fill, 100_000).expect("memory");
            lease.append(&vec![fill; 100_000]);
            outgoing.push(Slice::new(lease.freeze(), 10..90_000));
            expected.extend(vec![fill; 89_990]);
        }
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            peer.read_exact(&mut got).expect("all of it");
            assert!(got == expected, "in order and whole");
            peer
        });
        let (sent, outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        assert_eq!(sent.expect("sent"), 5 + 3 * 89_990);
        assert!(outgoing.is_empty());
        let peer = reader.join().expect("the reader");
        drop(peer);
        let (end, _) = engine.recv(&socket, Vec::with_capacity(8)).await;
        assert_eq!(end.expect("the end of the stream"), 0);
    });
}

/// Waits for the first bytes of a request, as an idle connection does.
async fn first(engine: &Engine, socket: &Socket) -> Vec<u8> {
    let (received, bytes) = engine.recv_first(socket, || Vec::with_capacity(8 << 10)).await;
    assert_eq!(received.expect("received"), bytes.len());
    bytes
}

#[test]
fn first_bytes_come_into_room_that_is_made_when_they_are_there() {
    on_both(|engine| async move {
        let (socket, mut peer) = connect(&engine).await;
        let has_room = Rc::new(std::cell::Cell::new(false));
        let made = Rc::clone(&has_room);
        let mut waiting = std::pin::pin!(engine.recv_first(&socket, || {
            made.set(true);
            let mut room = Vec::with_capacity(64);
            room.extend_from_slice(b"before, ");
            room
        }));
        tokio::select! {
            _ = &mut waiting => panic!("nothing was sent"),
            () = tokio::time::sleep(Duration::from_millis(20)) => assert!(!has_room.get()),
        }
        peer.write_all(b"behind").expect("sent");
        let (received, bytes) = waiting.await;
        assert_eq!((received.expect("received"), &bytes[..]), (6, &b"before, behind"[..]));
        drop(peer);
        assert_eq!(first(&engine, &socket).await, b"", "the end of the stream");
    });
}

/// The kernel's buffers are fewer and smaller: who finds none receives all the same, and what does not fit comes next.
#[test]
fn more_connections_and_bytes_than_there_are_buffers_lose_nothing() {
    on_both(|engine| async move {
        let mut pairs = Vec::new();
        for _ in 0..200 {
            pairs.push(connect(&engine).await);
        }
        for round in 0..3_u8 {
            let waiting: Vec<_> = pairs
                .drain(..)
                .map(|(socket, peer)| {
                    let engine = engine.clone();
                    let task = tokio::task::spawn_local(async move {
                        let mut got = first(&engine, &socket).await;
                        while got.len() < 6000 {
                            let (more, back) = engine.recv(&socket, got).await;
                            assert!(more.expect("received") > 0);
                            got = back;
                        }
                        (socket, got)
                    });
                    (task, peer)
                })
                .collect();
            tokio::task::yield_now().await;
            let mut waiting = waiting;
            for (number, (_, peer)) in waiting.iter_mut().enumerate() {
                peer.write_all(&[round ^ number as u8; 6000]).expect("sent");
            }
            for (number, (task, peer)) in waiting.into_iter().enumerate() {
                let (socket, got) = task.await.expect("ended");
                assert!(got == [round ^ number as u8; 6000], "connection {number}, round {round}");
                pairs.push((socket, peer));
            }
        }
    });
}

/// A buffer that came for a receive which was given up meanwhile is the kernel's again: there are only a few dozen.
#[test]
fn receives_that_are_given_up_lose_no_buffers() {
    on_both(|engine| async move {
        for number in 0..400_u16 {
            let (socket, mut peer) = connect(&engine).await;
            {
                let mut waiting = std::pin::pin!(engine.recv_first(&socket, Vec::new));
                let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                assert!(waiting.as_mut().poll(&mut context).is_pending());
                if number % 2 == 0 {
                    tokio::task::yield_now().await;
                }
                peer.write_all(b"nobody wants it").expect("sent");
                // Submitted, answered, and not looked at.
                tokio::task::yield_now().await;
            }
            drop(socket);
        }
        let chosen = |engine: &Engine| match engine {
            Engine::Uring(ring) => Some(ring.counts().chosen),
            _ => None,
        };
        let before = chosen(&engine);
        let (socket, mut peer) = connect(&engine).await;
        peer.write_all(b"hello").expect("sent");
        assert_eq!(first(&engine, &socket).await, b"hello");
        assert_eq!(chosen(&engine), before.map(|before| before + 1), "there was a buffer left");
    });
}

#[test]
fn an_interrupted_send_counts_what_left_and_goes_on_later() {
    let arena = arena();
    on_all(|engine| async move {
        let (socket, mut peer) = connect(&engine).await;
        // More than any socket buffer takes while nobody reads.
        let mut outgoing = Outgoing::default();
        for fill in 0..8_u8 {
            let mut lease = arena.grant(Purpose::Fill, MIB).expect("memory");
            lease.append(&vec![fill; MIB]);
            outgoing.push(Slice::new(lease.freeze(), 0..MIB));
        }
        let watch = Rc::new(SendWatch::default());
        let interrupter = Rc::clone(&watch);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            interrupter.interrupt();
        });
        watch.begin(0);
        let (sent, mut outgoing) = engine.send(&socket, outgoing, &watch).await;
        let first = sent.expect("a count, not an error");
        assert!(first > 0 && first < 8 * MIB, "some left, not all: {first}");
        assert_eq!(outgoing.len(), 8 * MIB - first);
        watch.end();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; 8 * MIB];
            peer.read_exact(&mut got).expect("all of it");
            got
        });
        engine.writable(&socket).await.expect("room");
        while !outgoing.is_empty() {
            watch.begin(0);
            let (sent, left) = engine.send(&socket, outgoing, &watch).await;
            sent.expect("sent");
            outgoing = left;
        }
        let got = reader.join().expect("the reader");
        assert!(
            got.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / MIB),
            "no byte twice or lost"
        );
    });
    assert_eq!(arena.status().fills_bytes, 0, "every lease came back");
}

#[test]
fn a_dropped_operation_gives_back_its_lease_and_loses_no_descriptor() {
    let arena = arena();
    on_all(|engine| async move {
        // What is left open here is seen at the other end, whatever other threads of this process open meanwhile.
        let mut peers = Vec::new();
        for _ in 0..20 {
            let (socket, peer) = connect(&engine).await;
            peers.push(peer);
            // A receive that nothing answers, and a send that nobody reads.
            let receive = engine.recv(&socket, Vec::with_capacity(64));
            assert!(tokio::time::timeout(Duration::from_millis(1), receive).await.is_err());
            let mut lease = arena.grant(Purpose::Fill, 2 * MIB).expect("memory");
            lease.advance(2 * MIB);
            let lease = lease.freeze();
            let mut outgoing = Outgoing::default();
            for _ in 0..8 {
                outgoing.push(Slice::new(lease.clone(), 0..2 * MIB));
            }
            drop(lease);
            let watch = SendWatch::default();
            let send = engine.send(&socket, outgoing, &watch);
            assert!(tokio::time::timeout(Duration::from_millis(1), send).await.is_err());
            // An accept that is given up, and then answered.
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("an address");
            listener.set_nonblocking(true).expect("non-blocking");
            let listener = engine.adopt(listener.into()).expect("a listener");
            assert!(tokio::time::timeout(Duration::from_millis(1), engine.accept(&listener)).await.is_err());
            peers.extend(TcpStream::connect(address));
        }
        for peer in &mut peers {
            peer.set_nonblocking(true).expect("non-blocking");
        }
        while !peers.is_empty() || arena.status().fills_bytes > 0 {
            peers.retain_mut(|peer| !has_ended(peer));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn drive_reads_fill_exactly_what_the_watermark_says() {
    let arena = arena();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("drive");
    let bytes: Vec<u8> = (0..MIB + 4096).map(|at| (at / 4096 % 251) as u8).collect();
    std::fs::write(&path, &bytes).expect("a file");
    on_both(|engine| {
        let (path, bytes) = (path.clone(), bytes.clone());
        async move {
            let registry = Registry::build(arena);
            if let (Engine::Uring(ring), Ok(registry)) = (&engine, &registry) {
                ring.register(arena, &registry.registered()).expect("registered");
                // Again, with nothing new: no harm.
                ring.register(arena, &registry.registered()).expect("registered");
            }
            let file =
                std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path).expect("opened");
            for (offset, len) in [(0, 4096), (0, MIB), (4096, 65_536), (MIB, 4096), (65_536, 8192)] {
                let lease = arena.grant(Purpose::Read, len).expect("memory");
                let (read, lease) = engine.read_at(file.as_raw_fd(), offset as u64, lease, len).await;
                read.expect("read");
                let lease = lease.freeze();
                assert_eq!(lease.filled(), len);
                assert!(lease.bytes(0..len) == &bytes[offset..offset + len]);
            }
            // Over the end: what is there is there, and the count says so.
            let lease = arena.grant(Purpose::Read, 65_536).expect("memory");
            let (read, lease) = engine.read_at(file.as_raw_fd(), MIB as u64, lease, 65_536).await;
            assert_eq!(read.expect_err("the file ends").kind(), std::io::ErrorKind::UnexpectedEof);
            assert_eq!(lease.filled(), 4096);
        }
    });
}

/// A lease of so many equal bytes, asked for often enough to be lent.
fn hot(arena: &'static Arena, len: usize, byte: u8) -> Lease {
    let mut lease = arena.grant(Purpose::Fill, len).expect("memory");
    lease.append(&vec![byte; len]);
    let lease = lease.freeze();
    while !lease.is_lendable() {
        lease.touch();
    }
    lease
}

#[test]
fn hot_bytes_leave_by_reference_in_order_through_a_full_socket() {
    let arena = arena();
    on_both(|engine| async move {
        let (socket, mut peer) = connect_small(&engine).await;
        let mut outgoing = Outgoing::header(b"head|".to_vec());
        let mut expected = b"head|".to_vec();
        for byte in 1..=4 {
            outgoing.push(Slice::new(hot(arena, MIB, byte), 10..1_000_000));
            expected.extend(vec![byte; 999_990]);
        }
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            peer.read_exact(&mut got).expect("all of it");
            assert!(got == expected, "in order and whole");
        });
        let (sent, mut outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        assert_eq!(sent.expect("sent"), 5 + 4 * 999_990);
        assert!(outgoing.is_empty());
        assert_eq!(outgoing.take_by_reference(), 4 * 999_990);
        reader.join().expect("the reader");
    });
    assert_eq!(arena.status().fills_bytes, 0, "every lease came back");
}

/// Pieces of one object lie one behind the other when they were downloaded in order, and then leave in one call; a piece
/// that lies elsewhere, or begins further on, does not.
#[test]
fn neighbours_leave_by_reference_as_one_and_strangers_apart() {
    let arena = arena();
    on_both(|engine| async move {
        let (socket, mut peer) = connect_small(&engine).await;
        let leases: Vec<_> = (0..6).map(|byte| hot(arena, MIB, byte)).collect();
        // In order; the third again, out of order; two that touch only where they end and begin; a gap.
        let pieces = [
            (0, 0..MIB),
            (1, 0..MIB),
            (2, 0..MIB),
            (2, 5..9),
            (4, 0..MIB),
            (3, 0..MIB),
            (3, MIB - 1..MIB),
            (4, 0..70_000),
            (5, 1..MIB),
        ];
        let mut outgoing = Outgoing::header(b"head|".to_vec());
        let mut expected = b"head|".to_vec();
        for (lease, range) in pieces {
            expected.extend(vec![lease as u8; range.len()]);
            outgoing.push(Slice::new(leases[lease].clone(), range));
        }
        drop(leases);
        let len = expected.len();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            peer.read_exact(&mut got).expect("all of it");
            assert!(got == expected, "in order and whole");
        });
        let (sent, mut outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        assert_eq!(sent.expect("sent"), len);
        assert_eq!(outgoing.take_by_reference(), len as u64 - 5);
        reader.join().expect("the reader");
    });
    assert_eq!(arena.status().fills_bytes, 0, "every lease came back");
}

#[test]
fn a_send_by_reference_that_is_interrupted_or_broken_says_what_left() {
    let arena = arena();
    on_both(|engine| async move {
        let (socket, peer) = connect_small(&engine).await;
        let mut outgoing = Outgoing::header(b"head|".to_vec());
        for byte in 1..=4 {
            outgoing.push(Slice::new(hot(arena, 2 * MIB, byte), 0..2 * MIB));
        }
        let watch = Rc::new(SendWatch::default());
        let interrupter = Rc::clone(&watch);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            interrupter.interrupt();
        });
        watch.begin(0);
        let (sent, outgoing) = engine.send(&socket, outgoing, &watch).await;
        watch.end();
        let first = sent.expect("a count, not an error");
        assert!(first > 0 && first < 8 * MIB, "some left, not all: {first}");
        assert_eq!(outgoing.len(), 5 + 8 * MIB - first);
        drop(peer);
        let (sent, outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        sent.expect_err("the reader is gone");
        drop(outgoing);
    });
    assert_eq!(arena.status().fills_bytes, 0, "every lease came back");
}

/// Loopback copies, and says so with the notification.
#[test]
fn the_kernel_says_that_loopback_copies() {
    let arena = arena();
    on_these(&["uring", "uring, zero-copy"], |engine| async move {
        let Engine::Uring(ring) = &engine else { unreachable!("asked for") };
        let (socket, mut peer) = connect(&engine).await;
        let mut lease = arena.grant(Purpose::Fill, 100_000).expect("memory");
        lease.append(&vec![7; 100_000]);
        let mut outgoing = Outgoing::header(b"head|".to_vec());
        outgoing.push(Slice::new(lease.freeze(), 0..100_000));
        let (sent, mut outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        assert_eq!(sent.expect("sent"), 100_005);
        assert!(outgoing.is_empty());
        let zero_copy = outgoing.take_zero_copy();
        drop(outgoing);
        let mut got = vec![0; 100_005];
        peer.read_exact(&mut got).expect("all of it");
        assert!(got[..5] == *b"head|" && got[5..].iter().all(|byte| *byte == 7));
        returned(&engine).await;
        assert_eq!(arena.status().fills_bytes, 0, "every lease came back");
        // Where the address tells, the kernel is not asked.
        assert!(zero_copy == 0 || zero_copy == 100_005);
        assert_eq!(ring.counts().copied_bytes, zero_copy);
        assert_eq!(ring.counts().stale, 0);
    });
}

/// Memory that was used again at once gave a slow reader the bytes of another object, all of them.
#[test]
fn lent_bytes_stay_what_they_were_until_a_slow_reader_has_them() {
    on_both(|engine| async move {
        let arena = arena();
        let (accepted, mut peer) = connect_plain(&engine).await;
        socket2::SockRef::from(&accepted).set_send_buffer_size(4 * MIB).expect("a large buffer");
        let socket = engine.adopt(accepted).expect("adopted");
        let mut outgoing = Outgoing::header(b"head|".to_vec());
        outgoing.push(Slice::new(hot(arena, 250_000, 7), 0..250_000));
        let (sent, mut outgoing) = engine.send(&socket, outgoing, &SendWatch::default()).await;
        assert_eq!(sent.expect("all of it fits into the socket"), 250_005);
        assert_eq!(outgoing.take_by_reference(), 250_000);
        drop(outgoing);
        // Nobody holds the bytes any more. Everything there is gets other ones.
        assert_eq!(arena.status().fills_bytes, 0);
        assert!(arena.renew_spent(), "what was lent is renewed before it is used again");
        let rest: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Fill, 2 * MIB))
            .map(|mut lease| {
                lease.append(&vec![9; 2 * MIB]);
                lease
            })
            .collect();
        assert_eq!(rest.len(), 4);
        let mut got = vec![0; 250_005];
        peer.read_exact(&mut got).expect("all of it");
        assert!(got[5..].iter().all(|byte| *byte == 7), "what was sent, not what came after");
    });
}

/// A ring's registration keeps the page that was there before: what a drive read brought would be in the slow
/// reader's hands, and what we looked at would be empty.
#[test]
fn a_drive_read_into_renewed_memory_arrives_there() {
    let arena = Arena::build(ArenaOptions { bytes: 8 * MIB, reads_bytes: 2 * MIB, fills_bytes: 2 * MIB })
        .expect("memory");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("drive");
    std::fs::write(&path, vec![5; MIB]).expect("a file");
    let runtime =
        Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async {
        let ring = Ring::start(SendPolicy::default()).expect("io_uring is granted here");
        let engine = Engine::Uring(Rc::clone(&ring));
        let mut registry = Registry::build(arena).expect("registered");
        ring.register(arena, &registry.registered()).expect("registered");
        let file =
            std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path).expect("opened");
        for round in 1..=4 {
            let lease = hot(arena, 2 * MIB, round);
            lease.lend().expect("lent");
            drop(lease);
            assert!(arena.renew_spent());
            assert_eq!(arena.renewals(), u64::from(round));
            if round == 3 {
                // One page in four is more than a sixteenth: the registry takes the new one.
                registry.refresh(arena).expect("registered anew");
                ring.register(arena, &registry.registered()).expect("registered anew");
            }
            let lease = arena.grant(Purpose::Read, MIB).expect("memory");
            assert!(lease.lease().renewal() > 0, "the page that was renewed is lent again");
            let (read, lease) = engine.read_at(file.as_raw_fd(), 0, lease, MIB).await;
            read.expect("read");
            assert!(lease.freeze().bytes(0..MIB).iter().all(|byte| *byte == 5), "round {round}");
        }
    });
}

#[test]
fn an_idle_ring_makes_no_system_calls() {
    let runtime =
        Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async {
        let ring = Ring::start(SendPolicy::default()).expect("io_uring is granted here");
        let engine = Engine::Uring(Rc::clone(&ring));
        let (socket, mut peer) = connect(&engine).await;
        let waiting = tokio::task::spawn_local({
            let engine = engine.clone();
            async move { engine.recv(&socket, Vec::with_capacity(8)).await.0.expect("received") }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        let before = ring.counts().enters;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(ring.counts().enters, before, "an idle ring is left alone");
        peer.write_all(b"x").expect("sent");
        assert_eq!(waiting.await.expect("a task"), 1);
        assert_eq!(ring.counts().stale, 0);
    });
}

/// The ring watched the runtime's epoll instance while the thread slept there. Each of the runtime's events then rang
/// the ring's bell from inside the kernel's own call; the kernel (6.18) put that off, and lost every one but the first:
/// what completed afterwards woke nobody.
#[test]
fn a_completion_wakes_the_thread_after_events_of_the_runtime() {
    on_both(|engine| async move {
        let (socket, mut peer) = connect(&engine).await;
        let mut buffer = Vec::with_capacity(64);
        for round in 0..20 {
            let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
            let mut receiving = Box::pin(engine.recv(&socket, buffer));
            tokio::select! {
                biased;
                _ = &mut receiving => panic!("nothing was sent"),
                () = tokio::time::sleep(Duration::from_millis(3)) => {}
            }
            // Asleep by now; woken by another thread, which is an event of the runtime.
            std::thread::spawn(move || sender.blocking_send(round).expect("somebody waits"));
            assert_eq!(receiver.recv().await, Some(round));
            tokio::time::sleep(Duration::from_millis(3)).await;
            peer.write_all(b"x").expect("sent");
            let (received, back) = receiving.await;
            assert_eq!(received.expect("received"), 1);
            buffer = back;
        }
    });
}

/// A thread that waits in the ring is not away from the runtime: its clocks, its sockets and messages of other threads
/// are heard while requests come through the ring without a pause.
#[test]
fn the_runtime_is_heard_while_the_ring_is_busy() {
    on_both(|engine| async move {
        let (socket, mut peer) = connect(&engine).await;
        let echoes = engine.clone();
        let echo = task::spawn(async move {
            loop {
                let (received, buffer) = echoes.recv(&socket, Vec::with_capacity(64)).await;
                if received.expect("received") == 0 {
                    return;
                }
                let (sent, _) = echoes.send(&socket, Outgoing::header(buffer), &SendWatch::default()).await;
                sent.expect("sent");
            }
        });
        let (done, ended) = tokio::sync::oneshot::channel();
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let client = std::thread::spawn(move || {
            let mut ended = ended;
            let mut byte = [7; 1];
            let mut number = 0_u32;
            while ended.try_recv().is_err() {
                peer.write_all(&byte).expect("sent");
                peer.read_exact(&mut byte).expect("echoed");
                number += 1;
                if number.is_multiple_of(64) {
                    sender.send(number).expect("somebody waits");
                }
            }
        });
        let plain = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let address = plain.local_addr().expect("an address");
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let pinger = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
            pinger.send_to(b"ping", address).expect("sent");
            let mut datagram = [0; 8];
            assert_eq!(plain.recv(&mut datagram).await.expect("received"), 4);
            receiver.recv().await.expect("the client goes on");
        }
        done.send(()).expect("the client goes on");
        echo.await.expect("a task");
        client.join().expect("a client");
    });
}

/// Small socket buffers and many senders once left the kernel's flag of pending work up with no work behind it, and
/// the ring's task went round for it for ever: nothing else ran, and every client waited.
#[test]
fn many_large_sends_through_small_buffers_all_end() {
    const CONNECTIONS: usize = 48;
    let (done, ended) = std::sync::mpsc::channel();
    // In a thread of its own: a ring that goes round for ever would keep a timeout of its runtime from firing.
    std::thread::spawn(move || {
        let arena = arena();
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
            .expect("a runtime");
        runtime.block_on(async {
            let engine = Engine::Uring(Ring::start(SendPolicy::default()).expect("io_uring is granted here"));
            let mut lease = arena.grant(Purpose::Fill, MIB).expect("memory");
            lease.append(&vec![7; MIB]);
            let lease = lease.freeze();
            let mut senders = Vec::new();
            for _ in 0..CONNECTIONS {
                let (socket, mut peer) = connect_small(&engine).await;
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 100_000];
                    while peer.read(&mut buffer).is_ok_and(|count| count > 0) {}
                });
                let (engine, lease) = (engine.clone(), lease.clone());
                senders.push(tokio::task::spawn_local(async move {
                    for _ in 0..20 {
                        let mut outgoing = Outgoing::header(b"head".to_vec());
                        outgoing.push(Slice::new(lease.clone(), 0..MIB));
                        let (sent, left) = engine.send(&socket, outgoing, &SendWatch::default()).await;
                        assert_eq!(sent.expect("sent"), MIB + 4);
                        assert!(left.is_empty());
                    }
                }));
            }
            for sender in senders {
                sender.await.expect("a sender");
            }
        });
        done.send(()).expect("somebody waits");
    });
    ended.recv_timeout(Duration::from_mins(2)).expect("every send ends");
}

#[test]
fn a_burst_beyond_the_queue_is_answered_whole() {
    let arena = arena();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("drive");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
    for block in 0..64_u64 {
        file.write_all_at(&[block as u8; 4096], block * 4096).expect("written");
    }
    on_both(|engine| {
        let file = std::fs::File::open(&path).expect("opened");
        async move {
            // More at once than the submission queue holds.
            let reads: Vec<_> = (0..1900_u64)
                .map(|index| {
                    let (engine, file) = (engine.clone(), file.as_raw_fd());
                    tokio::task::spawn_local(async move {
                        let lease = arena.grant(Purpose::Read, 4096).expect("memory");
                        let block = index % 64;
                        let (read, lease) = engine.read_at(file, block * 4096, lease, 4096).await;
                        read.expect("read");
                        assert!(lease.freeze().bytes(0..4096).iter().all(|byte| u64::from(*byte) == block));
                    })
                })
                .collect();
            for read in reads {
                read.await.expect("a read");
            }
        }
    });
}
