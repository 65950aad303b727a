//! How long a cached byte may be believed, and which keys are cached at all.
//!
//! A rule is a glob over the key and says one or both of two things; the first rule that says a thing decides it
//! (`first match per field`). A preset is nothing but a list of such rules under a name, so that a preset and rules
//! of one's own mix without a second mechanism. Matching itself is the node's work.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::span::{Span, SpanError};
use crate::word::suggestion;

/// When the node must ask the origin before it serves a cached byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Freshness {
    /// Every read is confirmed by the origin; readers of one object share one question at a time.
    #[default]
    Strict,
    /// A confirmation is good for this long, above zero.
    Ttl(Duration),
    /// Never asked again: the key is never overwritten.
    Immutable,
}

/// Why a text is not a freshness.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FreshnessError {
    /// None of the three words.
    #[error("`{0}` is not a freshness: write strict, ttl:60s or immutable")]
    Word(String),
    /// `ttl:` with something that is no length of time.
    #[error("in `{text}`")]
    Ttl {
        /// The whole text.
        text: String,
        /// What is wrong behind the colon.
        #[source]
        source: SpanError,
    },
    /// `ttl:0s` would be `strict` under another name.
    #[error("`ttl:0s` believes nothing for no time: write strict")]
    Zero,
}

impl FromStr for Freshness {
    type Err = FreshnessError;

    fn from_str(text: &str) -> Result<Self, FreshnessError> {
        match text {
            "strict" => Ok(Self::Strict),
            "immutable" => Ok(Self::Immutable),
            _ => {
                let span = text.strip_prefix("ttl:").ok_or_else(|| FreshnessError::Word(text.to_owned()))?;
                let span: Span =
                    span.parse().map_err(|source| FreshnessError::Ttl { text: text.to_owned(), source })?;
                if span.duration().is_zero() {
                    Err(FreshnessError::Zero)
                } else {
                    Ok(Self::Ttl(span.duration()))
                }
            }
        }
    }
}

impl fmt::Display for Freshness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strict => f.pad("strict"),
            Self::Ttl(ttl) => {
                let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
                f.pad(&format!("ttl:{}", Span::from_millis(millis)))
            }
            Self::Immutable => f.pad("immutable"),
        }
    }
}

impl Serialize for Freshness {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Freshness {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error: FreshnessError| match error {
            FreshnessError::Ttl { ref source, .. } => de::Error::custom(format!("{error}: {source}")),
            other => de::Error::custom(other),
        })
    }
}

crate::travels_as_text!(Freshness, "ttl:1m");

/// One rule: what holds for the keys that `pattern` matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// A glob over the whole key: `*` within one name, `**` across slashes, `?` one character.
    #[serde(rename = "match")]
    pub pattern: String,
    /// How long bytes are believed, if this rule says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freshness: Option<Freshness>,
    /// Whether bytes are kept, if this rule says so; `false` sends every read to the origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<bool>,
}

/// A named list of rules for a kind of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Samples and shards that are written once: everything immutable.
    TrainingData,
    /// Weights and their side files under versioned names: everything immutable.
    ModelWeights,
    /// Tables: data files immutable; logs, pointers and markers never cached; the rest as the accelerator says.
    Lakehouse,
}

impl Preset {
    /// Every preset of this version.
    pub const ALL: [Self; 3] = [Self::TrainingData, Self::ModelWeights, Self::Lakehouse];

    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::TrainingData => "training-data",
            Self::ModelWeights => "model-weights",
            Self::Lakehouse => "lakehouse",
        }
    }

    /// The rules it stands for, in order.
    pub fn rules(self) -> Vec<Rule> {
        let immutable = |pattern: &str| Rule {
            pattern: pattern.to_owned(),
            freshness: Some(Freshness::Immutable),
            cache: None,
        };
        let never = |pattern: &str| Rule { pattern: pattern.to_owned(), freshness: None, cache: Some(false) };
        match self {
            Self::TrainingData | Self::ModelWeights => vec![immutable("**")],
            Self::Lakehouse => LAKEHOUSE_NEVER
                .iter()
                .map(|p| never(p))
                .chain(LAKEHOUSE_DATA.iter().map(|p| immutable(p)))
                .collect(),
        }
    }
}

/// Why a text is not a preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// It is one, but needs what this version does not have.
    #[error(
        "the preset `checkpoints` keeps what is written through the node, which this version does not do; \
         leave the preset away: checkpoints are then cached when they are first read"
    )]
    Checkpoints,
    /// None of ours.
    #[error("`{word}` is not a preset: {help}")]
    Unknown {
        /// What was written.
        word: String,
        /// What may have been meant.
        help: String,
    },
}

impl FromStr for Preset {
    type Err = PresetError;

    fn from_str(text: &str) -> Result<Self, PresetError> {
        if text == "checkpoints" {
            return Err(PresetError::Checkpoints);
        }
        Self::ALL.into_iter().find(|preset| preset.word() == text).ok_or_else(|| PresetError::Unknown {
            word: text.to_owned(),
            help: suggestion(text, &Self::ALL.map(Self::word)),
        })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl Serialize for Preset {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

impl<'de> Deserialize<'de> for Preset {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

crate::travels_as_text!(Preset, "lakehouse");

/// What Delta, Iceberg, Hudi, Hive and the Hadoop committers rewrite or watch for. These stand before the data
/// files, because a Delta checkpoint under `_delta_log` is a Parquet file as well.
const LAKEHOUSE_NEVER: &[&str] = &[
    "**/_delta_log/**",
    "**/.hoodie/**",
    "**/metadata/*.metadata.json",
    "**/version-hint.text",
    "**/_temporary/**",
    "**/__magic/**",
    "**/_SUCCESS",
    "**/_started_*",
    "**/_committed_*",
    "**/*_$folder$",
];

const LAKEHOUSE_DATA: &[&str] = &["**/*.parquet", "**/*.orc", "**/*.avro"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freshness_has_three_words() {
        for (text, freshness) in [
            ("strict", Freshness::Strict),
            ("immutable", Freshness::Immutable),
            ("ttl:60s", Freshness::Ttl(Duration::from_mins(1))),
            ("ttl:500ms", Freshness::Ttl(Duration::from_millis(500))),
        ] {
            assert_eq!(text.parse(), Ok(freshness));
            assert_eq!(text.parse::<Freshness>().expect("parsed").to_string().parse(), Ok(freshness));
        }
        assert_eq!(Freshness::Ttl(Duration::from_mins(1)).to_string(), "ttl:1m");
    }

    #[test]
    fn freshness_that_says_nothing_is_refused() {
        assert!(matches!("".parse::<Freshness>(), Err(FreshnessError::Word(_))));
        assert!(matches!("60s".parse::<Freshness>(), Err(FreshnessError::Word(_))));
        assert!(matches!("ttl:60".parse::<Freshness>(), Err(FreshnessError::Ttl { .. })));
        assert_eq!("ttl:0s".parse::<Freshness>(), Err(FreshnessError::Zero));
    }

    #[test]
    fn presets_are_named_and_the_one_we_cannot_honour_is_refused() {
        for preset in Preset::ALL {
            assert_eq!(preset.to_string().parse(), Ok(preset));
            assert!(!preset.rules().is_empty());
        }
        let error = "checkpoints".parse::<Preset>().expect_err("not yet").to_string();
        assert!(error.contains("this version does not"), "{error}");
        let error = "lakehose".parse::<Preset>().expect_err("misspelt").to_string();
        assert!(error.contains("`lakehouse`?"), "{error}");
    }

    #[test]
    fn lakehouse_logs_come_before_data_files() {
        let rules = Preset::Lakehouse.rules();
        let first_data = rules.iter().position(|rule| rule.freshness.is_some()).expect("data rules");
        assert!(rules[..first_data].iter().all(|rule| rule.cache == Some(false)));
        assert!(rules[first_data..].iter().all(|rule| rule.cache.is_none()));
    }
}
