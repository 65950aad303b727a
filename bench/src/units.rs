//! Sizes, durations and scales as people write them.
//!
//! KB, MB, GB are powers of 1000 and KiB, MiB, GiB powers of 1024, always; a bare K, M, G means the latter, and
//! reports echo plain bytes so that nobody has to guess.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Bytes in one MiB, as a divisor for figures.
pub const MIB: f64 = 1_048_576.0;

/// Parses `100KiB`, `10MB`, `1G`, `4096`.
///
/// # Errors
/// A sentence that names the text and shows the forms that work.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let refuse = || format!("`{text}` is not a size; write for example 4096, 100KiB, 10MB or 1GiB");
    let number: f64 = text[..digits_end].parse().map_err(|_| refuse())?;
    let unit: u64 = match text[digits_end..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(refuse()),
    };
    let bytes = number * unit as f64;
    if bytes.fract() != 0.0 || bytes > 9.0e15 {
        return Err(refuse());
    }
    Ok(bytes as u64)
}

/// Parses `500ms`, `30s`, `2m`, or seconds without a unit.
///
/// # Errors
/// A sentence that names the text and shows the forms that work.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let refuse = || format!("`{text}` is not a duration; write for example 500ms, 30s or 2m");
    let number: f64 = text[..digits_end].parse().map_err(|_| refuse())?;
    let seconds = match &text[digits_end..] {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(refuse()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| refuse())
}

/// How much of the document's amount of work is done; never how fast or how parallel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// The amounts that a machine of two cores does in about half a minute a row.
    Small,
    /// The document's own amounts.
    Full,
    /// A share of the document's amounts, above 0.
    Factor(f64),
}

impl Scale {
    /// The amount for this scale, at least 1.
    pub fn amount(self, full: u64, small: u64) -> u64 {
        match self {
            Self::Small => small,
            Self::Full => full,
            Self::Factor(factor) => ((full as f64 * factor).round() as u64).max(1),
        }
    }
}

impl std::str::FromStr for Scale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "small" => Ok(Self::Small),
            "full" => Ok(Self::Full),
            _ => match text.parse::<f64>() {
                Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(Self::Factor(factor)),
                _ => Err(format!(
                    "`{text}` is not a scale; write small, full, or a factor above 0 such as 0.1"
                )),
            },
        }
    }
}

/// `104857600` as `100MiB`: for headings.
pub fn size_text(bytes: u64) -> String {
    for (unit, name) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{} {name}", bytes / unit);
        }
    }
    format!("{} bytes", grouped(bytes))
}

/// `10000` as `10,000`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_mean_what_they_say() {
        assert_eq!(parse_size("100KiB"), Ok(102_400));
        assert_eq!(parse_size("100K"), Ok(102_400));
        assert_eq!(parse_size("100KB"), Ok(100_000));
        assert_eq!(parse_size("1.5MiB"), Ok(1_572_864));
        assert_eq!(parse_size("77"), Ok(77));
        for bad in ["", "x", "10 apples", "0.3", "-1", "1e3"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_and_scales() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2"), Ok(Duration::from_secs(2)));
        assert!(parse_duration("2 weeks").is_err());
        assert_eq!("0.01".parse::<Scale>().map(|s| s.amount(10_000, 3000)), Ok(100));
        assert_eq!("small".parse::<Scale>().map(|s| s.amount(10_000, 3000)), Ok(3000));
        assert!("0".parse::<Scale>().is_err() && "nan".parse::<Scale>().is_err());
    }

    #[test]
    fn figures_for_people() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(12), "12");
        assert_eq!(size_text(102_400), "100 KiB");
        assert_eq!(size_text(1001), "1,001 bytes");
    }
}
