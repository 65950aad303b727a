//! The document's workloads as amounts: how many objects of what size, asked by how many, and in what way.
//!
//! Two of the five so far. A workload is data; `run` drives it and `report` shows it.
#![forbid(unsafe_code)]

use crate::origin::catalog::Dataset;
use crate::origin::model::Class;
use crate::units::Scale;

/// Which of the document's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// "Bulk data operations": `tosutil cp -r` of many small objects.
    Bulk,
    /// "Measuring response latency during downloads": one object of about 10 MB, again and again.
    Download,
}

impl Row {
    /// The command's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::Download => "download",
        }
    }

    /// The document's heading.
    pub fn section(self) -> &'static str {
        match self {
            Self::Bulk => "Bulk data operations",
            Self::Download => "Measuring response latency during downloads",
        }
    }
}

/// One workload with its amounts.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Which.
    pub row: Row,
    /// What the objects' names begin with.
    pub prefix: String,
    /// Distinct objects.
    pub objects: u64,
    /// Requests in a block.
    pub count: u64,
    /// Bytes of each object.
    pub size: u64,
    /// Requests under way at once.
    pub concurrency: usize,
    /// Share of the document's amount.
    pub scale: f64,
}

/// What the command line changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes {
    /// Distinct objects.
    pub objects: Option<u64>,
    /// Requests in a block.
    pub count: Option<u64>,
    /// Bytes of each object.
    pub size: Option<u64>,
    /// Requests under way at once.
    pub concurrency: Option<usize>,
}

impl Workload {
    /// The document's amounts at a scale, then the changes.
    ///
    /// # Errors
    /// Names the amount that cannot be.
    pub fn new(row: Row, scale: Scale, changes: Changes) -> Result<Self, String> {
        let (full, small, size, concurrency) = match row {
            // Three jobs: what the document's own latency and QPS multiply to.
            Row::Bulk => (10_000, 3000, 100 << 10, 3),
            Row::Download => (2000, 600, 10 << 20, 1),
        };
        let count = changes.count.or(match row {
            Row::Bulk => changes.objects,
            Row::Download => None,
        });
        let count = count.unwrap_or_else(|| scale.amount(full, small));
        let objects = changes.objects.unwrap_or(match row {
            Row::Bulk => count,
            Row::Download => 1,
        });
        let workload = Self {
            row,
            prefix: format!("{}/", row.name()),
            objects,
            count,
            size: changes.size.unwrap_or(size),
            concurrency: changes.concurrency.unwrap_or(concurrency),
            scale: count as f64 / full as f64,
        };
        if workload.objects == 0 || workload.count == 0 {
            return Err("--objects and --count: at least 1".to_owned());
        }
        if workload.concurrency == 0 || workload.concurrency > 1024 {
            return Err("--concurrency: 1 to 1024".to_owned());
        }
        Ok(workload)
    }

    /// As the emulator is told.
    pub fn dataset(&self, bucket: &str) -> Dataset {
        Dataset {
            bucket: bucket.to_owned(),
            prefix: self.prefix.clone(),
            count: self.objects,
            size: self.size,
            class: Class::Hot,
            version: 1,
        }
    }

    /// Whether names are listed before the transfer, as the document's tool does.
    pub fn lists(&self) -> bool {
        self.row == Row::Bulk
    }

    /// Seconds that one direct block takes under the emulator's profile: for plans and progress.
    pub fn direct_seconds(&self) -> f64 {
        let each_ms = 6.7 + 10.2 * self.size as f64 / crate::units::MIB;
        each_ms / 1000.0 * self.count as f64 / self.concurrency as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_amounts_are_the_full_scale() {
        let bulk = Workload::new(Row::Bulk, Scale::Full, Changes::default()).expect("valid");
        assert_eq!((bulk.objects, bulk.count, bulk.size, bulk.concurrency), (10_000, 10_000, 102_400, 3));
        assert!((bulk.direct_seconds() - 25.7).abs() < 1.0);
        let download = Workload::new(Row::Download, Scale::Factor(0.05), Changes::default()).expect("valid");
        assert_eq!((download.objects, download.count, download.concurrency), (1, 100, 1));
        assert!((download.direct_seconds() - 10.9).abs() < 0.3);
    }

    #[test]
    fn amounts_can_be_changed_but_not_to_nothing() {
        let changes = Changes { objects: Some(20), count: Some(60), ..Changes::default() };
        let bulk = Workload::new(Row::Bulk, Scale::Small, changes).expect("valid");
        assert_eq!((bulk.objects, bulk.count), (20, 60));
        let none = Changes { count: Some(0), ..Changes::default() };
        assert!(Workload::new(Row::Download, Scale::Small, none).is_err());
        let crowd = Changes { concurrency: Some(5000), ..Changes::default() };
        assert!(Workload::new(Row::Bulk, Scale::Small, crowd).is_err());
    }
}
