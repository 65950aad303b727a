//! Sizes in bytes, as people write them.
//!
//! `KiB` is 1024 and `KB` is 1000, always: a cache that takes one for the other is seven percent off at a gigabyte.
//! A bare letter (`8G`) means either, depending on whom one asks, so it is refused with the two readings.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes, 0 to `u64::MAX`. `Display` is exact and parses back; `{:#}` rounds to one decimal for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

impl ByteSize {
    /// That many bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// That many KiB (1,024 bytes). `count` below 2^54.
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// That many MiB (1,048,576 bytes). `count` below 2^44.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// That many GiB. `count` below 2^34.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// There is no number in front.
    #[error("`{0}` is not a size: write a whole number of bytes, or one with a unit: {FORMS}")]
    Number(String),
    /// The unit is none of ours.
    #[error("`{text}` has the unknown unit `{unit}`: write {FORMS}")]
    Unit {
        /// The whole text.
        text: String,
        /// What stands behind the number.
        unit: String,
    },
    /// `8G`: both readings exist.
    #[error("`{text}` is ambiguous: write `{number}{letter}iB` (1024) or `{number}{letter}B` (1000)")]
    Letter {
        /// The whole text.
        text: String,
        /// The number in front.
        number: String,
        /// K, M, G or T.
        letter: char,
    },
    /// More than 64 bits hold.
    #[error("`{0}` is more than 2^64 bytes")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start();
        if number.is_empty() || unit.starts_with(['.', ',', '_']) {
            return Err(SizeError::Number(text.to_owned()));
        }
        let factor = if unit.is_empty() || unit.eq_ignore_ascii_case("b") {
            1
        } else if let Some((_, factor)) = UNITS.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name)) {
            *factor
        } else if let Some(letter) = lone_letter(unit) {
            return Err(SizeError::Letter { text: text.to_owned(), number: number.to_owned(), letter });
        } else {
            return Err(SizeError::Unit { text: text.to_owned(), unit: unit.to_owned() });
        };
        let too_large = || SizeError::TooLarge(text.to_owned());
        let number: u64 = number.parse().map_err(|_| too_large())?;
        number.checked_mul(factor).map(Self).ok_or_else(too_large)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.iter().find(|(_, factor)| self.0 != 0 && self.0.is_multiple_of(*factor));
        if let Some((name, factor)) = exact {
            return f.pad(&format!("{}{name}", self.0 / factor));
        }
        if f.alternate()
            && let Some((name, factor)) =
                UNITS.iter().find(|(name, factor)| name.ends_with("iB") && self.0 >= *factor)
        {
            return f.pad(&format!("{:.1}{name}", self.0 as f64 / *factor as f64));
        }
        f.pad(&self.0.to_string())
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a size such as {FORMS}")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size cannot be negative"))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

const FORMS: &str = "64KiB, 4MiB, 8GiB, 1TiB (1024), 100KB, 100MB, 8GB, 1TB (1000) or 100000";

/// Largest first, binary before decimal: the order in which `Display` tries them.
const UNITS: &[(&str, u64)] = &[
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

fn lone_letter(unit: &str) -> Option<char> {
    let mut letters = unit.chars();
    let letter = letters.next()?.to_ascii_uppercase();
    (letters.next().is_none() && "KMGT".contains(letter)).then_some(letter)
}

crate::travels_as_text!(ByteSize, "64KiB");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn people_write_sizes_in_these_forms() {
        for (text, bytes) in [
            ("0", 0),
            ("100000", 100_000),
            ("1B", 1),
            ("64KiB", 65_536),
            ("64kib", 65_536),
            ("4MiB", 4 << 20),
            ("8GiB", 8 << 30),
            ("2TiB", 2 << 40),
            ("100KB", 100_000),
            ("100MB", 100_000_000),
            ("1GB", 1_000_000_000),
            (" 4 MiB ", 4 << 20),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn a_refusal_shows_the_accepted_forms() {
        for text in ["", "KiB", "-1", "1.5GiB", "1_000", "four", "4 XiB", "4MiBs"] {
            let error = text.parse::<ByteSize>().expect_err(text).to_string();
            assert!(error.contains("64KiB"), "{text}: {error}");
        }
        let error = "8G".parse::<ByteSize>().expect_err("ambiguous").to_string();
        assert!(error.contains("8GiB") && error.contains("8GB"), "{error}");
        for text in ["18446744073709551616", "99999999999TiB"] {
            assert_eq!(text.parse::<ByteSize>(), Err(SizeError::TooLarge(text.to_owned())));
        }
    }

    #[test]
    fn display_is_exact_and_the_alternate_form_is_round() {
        assert_eq!(ByteSize(65_536).to_string(), "64KiB");
        assert_eq!(ByteSize(100_000_000).to_string(), "100MB");
        assert_eq!(ByteSize(65_537).to_string(), "65537");
        assert_eq!(format!("{:#}", ByteSize((1 << 20) + (1 << 19) + 1)), "1.5MiB");
        assert_eq!(format!("{:#}", ByteSize(17)), "17");
        assert_eq!(ByteSize(0).to_string(), "0");
    }

    #[test]
    fn json_takes_text_and_plain_numbers() {
        assert_eq!(serde_json::from_str::<ByteSize>("\"4MiB\"").expect("text"), ByteSize::mib(4));
        assert_eq!(serde_json::from_str::<ByteSize>("4096").expect("number"), ByteSize(4096));
        assert!(serde_json::from_str::<ByteSize>("-4").is_err());
        assert_eq!(serde_json::to_string(&ByteSize::gib(8)).expect("json"), "\"8GiB\"");
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(bytes: u64) {
            prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_panics(text in ".{0,24}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
