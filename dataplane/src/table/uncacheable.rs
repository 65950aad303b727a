//! Objects that cannot be kept, remembered for a minute, so that a read of one is not preceded by a question.
//!
//! A record says only "ask the origin for it": it cannot make an answer old, and at worst keeps an object out of the
//! cache that has become fit for it. All records live equally long, so their order is that of their ends. They are
//! few in each shard, which is why they are searched one by one.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::{Meter, ObjectKey};

/// How long a record is believed.
pub(super) const LIFE: Duration = Duration::from_mins(1);
/// Most records of a shard; the oldest goes.
pub(super) const RECORDS_MAX: usize = 64;

/// The records of one shard.
#[derive(Debug, Default)]
pub(super) struct Uncacheable(VecDeque<Record>);

#[derive(Debug)]
struct Record {
    hash: u64,
    key: ObjectKey,
    until: Instant,
}

impl Record {
    fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.key.path.len()) as u64
    }
}

impl Uncacheable {
    /// Whether a record of the object is believed at `now`.
    pub(super) fn has(&self, hash: u64, accelerator: u16, path: &[u8], now: Instant) -> bool {
        self.0
            .iter()
            .any(|record| record.hash == hash && record.until > now && record.key.is(accelerator, path))
    }

    /// Makes or renews the record of an object.
    pub(super) fn note(&mut self, hash: u64, key: &ObjectKey, now: Instant, meter: &Meter) {
        self.forget(hash, key.accelerator, &key.path, meter);
        while self.0.len() >= RECORDS_MAX || self.0.front().is_some_and(|oldest| oldest.until <= now) {
            self.drop_oldest(meter);
        }
        let record = Record { hash, key: key.clone(), until: now + LIFE };
        meter.bytes.fetch_add(record.bytes(), Ordering::Relaxed);
        meter.kept_bytes.fetch_add(record.bytes(), Ordering::Relaxed);
        self.0.push_back(record);
    }

    /// Drops the record of an object.
    pub(super) fn forget(&mut self, hash: u64, accelerator: u16, path: &[u8], meter: &Meter) {
        self.retain(meter, |record| record.hash != hash || !record.key.is(accelerator, path));
    }

    /// Drops the records of an accelerator.
    pub(super) fn forget_all(&mut self, accelerator: u16, meter: &Meter) {
        self.retain(meter, |record| record.key.accelerator != accelerator);
    }

    /// Drops the oldest record; false if there is none.
    pub(super) fn drop_oldest(&mut self, meter: &Meter) -> bool {
        self.0.pop_front().inspect(|record| give_back(record, meter)).is_some()
    }

    fn retain(&mut self, meter: &Meter, stays: impl Fn(&Record) -> bool) {
        self.0.retain(|record| {
            let stays = stays(record);
            if !stays {
                give_back(record, meter);
            }
            stays
        });
    }
}

fn give_back(record: &Record, meter: &Meter) {
    meter.bytes.fetch_sub(record.bytes(), Ordering::Relaxed);
    meter.kept_bytes.fetch_sub(record.bytes(), Ordering::Relaxed);
}
