//! The document's own figures, and what must be said beside them.
#![forbid(unsafe_code)]

/// One row of the bulk table.
#[derive(Clone, Copy, Debug)]
pub struct BulkRow {
    /// "Average latency (ms)".
    pub latency_ms: f64,
    /// "QPS".
    pub qps: f64,
    /// "Bandwidth (MB/s)", which are MiB (footnote I3).
    pub bandwidth: f64,
}

/// Bulk, by the intranet name.
pub const BULK_DIRECT: BulkRow = BulkRow { latency_ms: 7.53, qps: 372.0, bandwidth: 36.60 };
/// Bulk, by the accelerated name.
pub const BULK_ACCEL: BulkRow = BulkRow { latency_ms: 3.17, qps: 856.0, bandwidth: 85.14 };
/// How many times the accelerated QPS is the other.
pub const BULK_QPS_RATIO: f64 = 2.3;

/// The download table's columns.
pub const DOWNLOAD_COLUMNS: [&str; 5] = ["Average", "P50", "P90", "P95", "P99"];
/// Download by the intranet name, ms.
pub const DOWNLOAD_DIRECT_MS: [f64; 5] = [113.555, 102.514, 137.896, 163.218, 251.795];
/// Download by the accelerated name, ms.
pub const DOWNLOAD_ACCEL_MS: [f64; 5] = [28.309, 30.503, 36.927, 41.692, 61.646];
/// How many times the mean by the intranet name is the other.
pub const DOWNLOAD_MEAN_RATIO: f64 = 4.0;

/// The names of the rows, as the document writes them.
pub const DIRECT_ROW: &str = "TOS intranet domain name";
/// The accelerated one.
pub const ACCEL_ROW: &str = "TOS accelerated domain name";

/// A footnote's text, by its number.
pub fn footnote(number: &str) -> &'static str {
    match number {
        "I1" => {
            "the document's latency is a mean of whole milliseconds (its QPS and latency then fit 3 jobs): our latency \
             column is the same floored mean, the exact one stands below"
        }
        "I2" => {
            "the document's QPS window is some 200 ms longer than its bandwidth window, as a listing would make it: \
             our QPS counts listing and transfer, our bandwidth the transfer alone"
        }
        "I3" => "100 KB and MB/s are KiB and MiB there: 10,000 x 100 KiB is its 976 MB",
        "I12" => {
            "the document's accelerated mean lies below its median, so a part of its downloads was much faster: look \
             at the histogram, not only at percentiles"
        }
        "I14" => {
            "the document does not say how warm, how many, on what client or how often; this run says it in its head \
             lines"
        }
        _ => "",
    }
}
