//! When the ring is entered, and where its thread sleeps.
//!
//! The ring's task runs behind the tasks that are queued already, so what they push goes to the kernel in one call.
//! When it finds itself alone on the thread it submits and waits in one call as well, in the ring: a hit then costs no
//! `epoll_wait`. The runtime's own events still end that wait, because the ring watches the runtime's epoll instance, and
//! the runtime's clocks are late by twice [`WAIT_MAX`] at most. Otherwise, and always when nothing happens, the thread
//! sleeps in the runtime, and an eventfd wakes it for the ring.
//!
//! Reads of a drive are told one a turn, everything else at once. Behind a read are the sums of its blocks and a send, some ten
//! times the work of a request that begins; told all together, reads that finished together would keep new ones from the
//! drive, which would stand still meanwhile, finish the next ones together, and so on.

use std::fs;
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Context, Poll};
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, opcode};
use tokio::time::Instant;

use super::Ring;
use super::operations::{NOBODY, WATCH};
use crate::engine::task;

/// Pieces of pending work that the kernel does in one entry at least (`IO_LOCAL_TW_DEFAULT_MAX`, since 6.12).
const WORK_AT_ONCE: usize = 20;
/// Entries of one turn before other tasks have theirs.
const ROUNDS_MAX: usize = 64;
/// How long one wait in the ring may last, and how long they may follow each other before the runtime looks after its
/// clocks, which tick in milliseconds.
const WAIT_MAX: Duration = Duration::from_millis(1);

/// The ring's task.
pub(super) struct Driver {
    ring: Rc<Ring>,
    /// The runtime's epoll instance.
    epoll: Option<RawFd>,
    /// Since when the runtime has not looked after its clocks for it; `None` while the runtime sleeps for it.
    awake: Option<Instant>,
    /// Marks of the other tasks when it last looked.
    runs: Option<u64>,
    /// It has let the others run once since it was last alone.
    has_let: bool,
    /// What woke the thread last was the ring's, so the next may be as well.
    is_patient: bool,
}

impl Driver {
    pub(super) fn new(ring: Rc<Ring>) -> Self {
        let epoll = epoll_that_watches(ring.eventfd.as_raw_fd());
        if epoll.is_none() {
            tracing::debug!("the runtime's epoll instance is not to be seen: the ring is never waited in");
        }
        Self { ring, epoll, awake: None, runs: None, has_let: false, is_patient: true }
    }

    pub(super) async fn run(mut self) {
        poll_fn(|context| {
            self.visit(context);
            Poll::<()>::Pending
        })
        .await;
    }

    fn visit(&mut self, context: &mut Context<'_>) {
        self.ring.task.borrow_mut().get_or_insert_with(|| context.waker().clone());
        let since = match self.awake {
            Some(since) => since,
            None => match self.wake(context) {
                Some(since) => since,
                None => return,
            },
        };
        let runs = Some(task::runs());
        if self.runs != runs {
            self.runs = runs;
            if self.has_let {
                // They go on and on; the kernel can work meanwhile.
                self.sleep(context);
            } else {
                self.has_let = true;
                context.waker().wake_by_ref();
            }
            return;
        }
        self.has_let = false;
        let may_wait = self.is_patient && !task::take_yielded();
        match self.epoll {
            Some(_) if may_wait && since.elapsed() >= WAIT_MAX => return self.look_up(context),
            Some(epoll) if may_wait => {
                let collected = self.ring.wait(epoll);
                if self.ring.watched.take() {
                    self.is_patient = collected > 1;
                } else if collected > 0 {
                    context.waker().wake_by_ref();
                    return;
                }
            }
            _ => {}
        }
        self.sleep(context);
    }

    /// Begins to stay in the queue, if there is anything to do.
    fn wake(&mut self, context: &mut Context<'_>) -> Option<Instant> {
        let is_rung = self.hear(context);
        if !is_rung && !self.ring.unflushed.get() {
            return None;
        }
        self.is_patient |= is_rung;
        (self.runs, self.has_let) = (None, false);
        self.ring.uring.borrow_mut().completion().disable_eventfd();
        self.awake = Some(Instant::now());
        self.awake
    }

    /// Lets the runtime look after its clocks and events without a sleep, and stays awake: requests come too fast for
    /// one. The runtime does that for a task that yields when the queue is empty.
    fn look_up(&mut self, context: &mut Context<'_>) {
        self.awake = Some(Instant::now());
        (self.runs, self.has_let) = (None, false);
        let _ = pin!(tokio::task::yield_now()).poll(context);
    }

    /// Leaves it to the runtime where the thread sleeps.
    fn sleep(&mut self, context: &mut Context<'_>) {
        self.awake = None;
        self.ring.unwatch();
        let is_done = self.ring.turn();
        // What rang while the task was awake has been heard by nobody, and would keep the eventfd from waking it.
        if !is_done || self.hear(context) {
            self.ring.unflushed.set(true);
            context.waker().wake_by_ref();
        }
    }

    /// Whether the eventfd has rung; from now on it wakes the task when it does.
    fn hear(&self, context: &mut Context<'_>) -> bool {
        let mut is_rung = false;
        while let Poll::Ready(Ok(mut readiness)) = self.ring.eventfd.poll_read_ready(context) {
            readiness.clear_ready();
            is_rung = true;
        }
        is_rung
    }
}

impl Ring {
    /// Submits what is queued and waits until something is done or the runtime has something to do, for
    /// at most [`WAIT_MAX`]. Counts what was done; [`Ring::watched`] tells whether the runtime's events are among it.
    fn wait(&self, epoll: RawFd) -> usize {
        self.uring.borrow_mut().completion().disable_eventfd();
        if !self.is_watching.get() {
            let watch = opcode::PollAdd::new(Fd(epoll), libc::POLLIN as u32).build().user_data(WATCH);
            if !self.try_push(&watch) {
                // A queue so full is no time to wait.
                return 0;
            }
            self.is_watching.set(true);
        }
        self.unflushed.set(false);
        self.watched.set(false);
        if !self.read.borrow().is_empty() {
            self.round();
            return 1;
        }
        self.enters.set(self.enters.get() + 1);
        {
            let uring = self.uring.borrow();
            let time = Timespec::from(WAIT_MAX);
            let args = SubmitArgs::new().timespec(&time);
            // To wait for clients is not to wait for a drive.
            let flags = if uring.params().is_feature_no_iowait() {
                EnterFlags::NO_IOWAIT
            } else {
                EnterFlags::empty()
            };
            pass(uring.submitter().submit_with_args_and_flags(1, &args, flags));
        }
        let collected = self.collect();
        self.refill();
        collected
    }

    /// Ends the watch over the runtime's events. While the thread sleeps in the runtime, an event there would complete
    /// the watch, and its bell ring from inside the kernel's call of another: the kernel puts such a bell off, and was
    /// seen (6.18) to lose every one after the first.
    fn unwatch(&self) {
        while self.is_watching.get() {
            self.try_push(&opcode::AsyncCancel::new(WATCH).build().user_data(NOBODY));
            self.round();
        }
    }

    /// Submits what is queued, collects what is done: one system call, or none if there is nothing to do. False if
    /// it stopped before the end, so that others can run.
    fn turn(&self) -> bool {
        self.unflushed.set(false);
        // What completes while we are here is collected here; a wake-up for it would cost an epoll_wait.
        self.uring.borrow_mut().completion().disable_eventfd();
        let mut rounds = 0;
        while rounds < ROUNDS_MAX {
            rounds += 1;
            let progress = self.round();
            if !self.read.borrow().is_empty() {
                return false;
            }
            if !progress || !self.is_due() {
                break;
            }
        }
        self.uring.borrow_mut().completion().enable_eventfd();
        // What came between the last look and this line made no wake-up. The fence keeps the next look behind the
        // store that enables them, on processors that would not.
        fence(Ordering::SeqCst);
        // The kernel may leave its flag of pending work up when there is none (it is lowered before the work is
        // taken, and only if there is some), so the flag alone must not keep us here. One entry takes at least
        // WORK_AT_ONCE pieces of what is pending; after enough entries without a completion nothing that was pending
        // is, and what comes later wakes us.
        let mut fruitless = 0;
        while self.is_due() {
            if rounds >= ROUNDS_MAX {
                return false;
            }
            rounds += 1;
            if self.round() {
                fruitless = 0;
                if !self.read.borrow().is_empty() {
                    return false;
                }
                continue;
            }
            fruitless += 1;
            if fruitless > self.operations.borrow().in_flight() / WORK_AT_ONCE {
                break;
            }
        }
        true
    }

    /// One entry into the kernel and what it brought. False if that was nothing.
    fn round(&self) -> bool {
        self.enter();
        let collected = self.collect();
        self.refill() > 0 || collected > 0
    }

    fn enter(&self) {
        let (queued, due) = {
            let mut uring = self.uring.borrow_mut();
            let submission = uring.submission();
            (submission.len(), submission.taskrun() || submission.cq_overflow())
        };
        if queued == 0 && !due {
            return;
        }
        self.enters.set(self.enters.get() + 1);
        let uring = self.uring.borrow();
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed, and the entries were made by `try_push`.
        let entered = unsafe { uring.submitter().enter::<libc::sigset_t>(queued as u32, 0, flags, None) };
        pass(entered);
    }

    fn is_due(&self) -> bool {
        let mut uring = self.uring.borrow_mut();
        let submission = uring.submission();
        if submission.taskrun() || submission.cq_overflow() || !submission.is_empty() {
            return true;
        }
        drop(submission);
        !uring.completion().is_empty()
    }

    fn collect(&self) -> usize {
        let mut operations = self.operations.borrow_mut();
        let mut uring = self.uring.borrow_mut();
        let mut collected = 0;
        for completion in uring.completion() {
            collected += 1;
            if completion.user_data() == WATCH {
                self.is_watching.set(false);
                self.watched.set(true);
            } else if operations.is_read(completion.user_data()) {
                self.read.borrow_mut().push_back((completion.user_data(), completion.result()));
                collected -= 1;
            } else {
                operations.complete(completion.user_data(), completion.result(), completion.flags());
            }
        }
        if let Some((user_data, result)) = self.read.borrow_mut().pop_front() {
            operations.complete(user_data, result, 0);
            collected += 1;
        }
        collected
    }

    /// Moves waiting entries into the submission queue.
    fn refill(&self) -> usize {
        let mut backlog = self.backlog.borrow_mut();
        let mut moved = 0;
        while let Some(entry) = backlog.front() {
            if !self.try_push(entry) {
                break;
            }
            backlog.pop_front();
            moved += 1;
        }
        moved
    }
}

/// What may be said of an entry: completions must be collected first, a signal came, the time is over. All are cured by
/// going on. Anything else is a ring that we have broken ourselves.
fn pass(entered: std::io::Result<usize>) {
    if let Err(error) = entered {
        let passing = [libc::EBUSY, libc::EAGAIN, libc::EINTR, libc::ETIME];
        assert!(passing.contains(&error.raw_os_error().unwrap_or(0)), "io_uring_enter: {error}");
    }
}

/// The epoll instance of this process that watches `target`, by what proc(5) tells of each (`tfd`).
fn epoll_that_watches(target: RawFd) -> Option<RawFd> {
    fs::read_dir("/proc/self/fd").ok()?.flatten().find_map(|entry| {
        if fs::read_link(entry.path()).ok()?.as_os_str() != "anon_inode:[eventpoll]" {
            return None;
        }
        let name = entry.file_name();
        let info = fs::read_to_string(std::path::Path::new("/proc/self/fdinfo").join(&name)).ok()?;
        let mut targets = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
        let watches = targets.any(|line| line.split_whitespace().next() == Some(&target.to_string()));
        if watches { name.to_str()?.parse().ok() } else { None }
    })
}
