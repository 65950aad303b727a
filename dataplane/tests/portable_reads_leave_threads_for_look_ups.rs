//! Name look-ups share the pool of the portable engine with drive reads. However many reads are wanted at once, threads
//! are left for them.
//!
//! Alone in its process, because it counts threads.

use std::future::poll_fn;
use std::os::fd::AsRawFd;
use std::task::Poll;

use forebay_dataplane::arena::{Arena, ArenaOptions, Purpose};
use forebay_dataplane::engine::Engine;
use forebay_dataplane::engine::portable::{Portable, READS_MAX};
use tokio::runtime::{Builder, LocalOptions};

const MIB: usize = 1 << 20;
const NAME: &str = "pool-under-test";
/// Threads in the pool of a worker.
const POOL: usize = 8;
const READS: usize = 16;

#[test]
fn portable_reads_leave_threads_for_look_ups() {
    const { assert!(READS_MAX < POOL) };
    let file = tempfile::tempfile().expect("a file");
    file.set_len(2 * MIB as u64).expect("space");
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(POOL)
        .thread_name(NAME)
        .build_local(LocalOptions::default())
        .expect("a runtime");
    runtime.block_on(async {
        let arena =
            Arena::build(ArenaOptions { bytes: 64 * MIB, reads_bytes: 40 * MIB, fills_bytes: 8 * MIB })
                .expect("memory");
        let engine = Engine::Portable(Portable);
        let mut reads = Vec::new();
        for _ in 0..READS {
            let lease = arena.grant(Purpose::Read, 2 * MIB).expect("memory to read into");
            reads.push(Box::pin(engine.read_at(file.as_raw_fd(), 0, lease, 2 * MIB)));
        }
        // All begin in one turn, so that hardly a thread is free again when the next one is asked for.
        poll_fn(|context| {
            for read in &mut reads {
                assert!(read.as_mut().poll(context).is_pending(), "a read ends in a later turn");
            }
            Poll::Ready(())
        })
        .await;
        let threads = std::fs::read_dir("/proc/self/task")
            .expect("the threads of this process")
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.trim() == NAME)
            .count();
        assert!((1..=READS_MAX).contains(&threads), "{threads} threads read");
        assert_eq!(tokio::task::spawn_blocking(|| 7).await.expect("a look-up"), 7);
        for read in reads {
            let (result, lease) = read.await;
            result.expect("a read");
            assert_eq!(lease.filled(), 2 * MIB);
        }
    });
}
