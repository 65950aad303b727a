//! Lengths of time, as people write them.
//!
//! A number without a unit is refused: whether `60` meant seconds or milliseconds is found out at the worst moment.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A length of time in whole milliseconds. `Display` is exact and parses back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Span {
    /// That many milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// That many seconds. `seconds` below 2^54.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds * 1_000)
    }

    /// The same as a `Duration`.
    pub const fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        span.duration()
    }
}

/// Why a text is not a length of time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// There is no whole number in front, or no unit behind it that we know.
    #[error("`{0}` is not a length of time: write a whole number with a unit: {FORMS}")]
    Form(String),
    /// More milliseconds than 64 bits hold.
    #[error("`{0}` is longer than this program can count")]
    TooLong(String),
}

impl FromStr for Span {
    type Err = SpanError;

    fn from_str(text: &str) -> Result<Self, SpanError> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let factor = UNITS.iter().find(|(name, _)| *name == unit.trim_start()).map(|(_, millis)| *millis);
        let (false, Some(factor)) = (number.is_empty(), factor) else {
            return Err(SpanError::Form(text.to_owned()));
        };
        let too_long = || SpanError::TooLong(text.to_owned());
        let number: u64 = number.parse().map_err(|_| too_long())?;
        number.checked_mul(factor).map(Self).ok_or_else(too_long)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.pad("0s");
        }
        let (name, factor) = UNITS
            .iter()
            .find(|(_, millis)| self.0.is_multiple_of(*millis))
            .expect("a millisecond divides all");
        f.pad(&format!("{}{name}", self.0 / factor))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

const FORMS: &str = "500ms, 60s, 5m, 1h or 7d";

/// Longest first: the order in which `Display` tries them.
const UNITS: &[(&str, u64)] = &[("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

crate::travels_as_text!(Span, "30s");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn people_write_lengths_of_time_in_these_forms() {
        for (text, millis) in [
            ("500ms", 500),
            ("60s", 60_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("7d", 604_800_000),
            ("0s", 0),
        ] {
            assert_eq!(text.parse::<Span>().map(Span::duration), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn a_refusal_shows_the_accepted_forms() {
        for text in ["", "60", "s", "1.5s", "-1s", "60 seconds", "60S"] {
            let error = text.parse::<Span>().expect_err(text).to_string();
            assert!(error.contains("500ms"), "{text}: {error}");
        }
        assert!(matches!("99999999999999999999d".parse::<Span>(), Err(SpanError::TooLong(_))));
        assert!(matches!("18446744073709551615s".parse::<Span>(), Err(SpanError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(millis: u64) {
            prop_assert_eq!(Span(millis).to_string().parse(), Ok(Span(millis)));
        }
    }
}
