//! Which freshness a key has, and whether it is cached at all.
//!
//! A policy is an ordered list of glob rules and, behind it, what the accelerator says as a whole; the first rule
//! that says a thing decides it. It is asked when a byte is read, not when it is stored, so a changed rule holds for
//! what is already cached. Asking allocates nothing, and without rules it does not even look at the key.
#![forbid(unsafe_code)]

use forebay_control_api::{AcceleratorSpec, Freshness, Rule};

/// What holds for the keys of one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Compiled>,
    freshness: Freshness,
}

/// What holds for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// How long its bytes are believed.
    pub freshness: Freshness,
    /// `false`: every read goes to the origin, and nothing is kept.
    pub cache: bool,
}

impl Policy {
    /// The rules of the file, then those of the preset, then the accelerator's own freshness, then `strict`.
    ///
    /// # Errors
    /// A rule whose glob cannot be one, or that says nothing.
    pub fn new(spec: &AcceleratorSpec) -> Result<Self, PolicyError> {
        let preset = spec.preset.map(forebay_control_api::Preset::rules).unwrap_or_default();
        let rules = spec.rules.iter().chain(&preset).map(Compiled::new).collect::<Result<_, _>>()?;
        Ok(Self { rules, freshness: spec.freshness.unwrap_or_default() })
    }

    /// What holds where no rule speaks.
    pub fn freshness(&self) -> Freshness {
        self.freshness
    }

    /// The first match per field.
    pub fn decide(&self, key: &[u8]) -> Decision {
        let (mut freshness, mut cache) = (None, None);
        for rule in &self.rules {
            let wanted = (freshness.is_none() && rule.freshness.is_some())
                || (cache.is_none() && rule.cache.is_some());
            if wanted && rule.glob.matches(key) {
                freshness = freshness.or(rule.freshness);
                cache = cache.or(rule.cache);
            }
        }
        Decision { freshness: freshness.unwrap_or(self.freshness), cache: cache.unwrap_or(true) }
    }
}

/// Why a rule cannot be one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// The glob is empty or longer than a key.
    #[error("rule `{0}`: a pattern has 1 to 1024 bytes")]
    Length(String),
    /// Keys have no slash in front.
    #[error("rule `{0}`: keys do not begin with a slash; `**/` in front matches any folder")]
    Slash(String),
    /// Neither freshness nor cache.
    #[error("rule `{0}` says nothing: give it freshness or cache")]
    Empty(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Compiled {
    glob: Glob,
    freshness: Option<Freshness>,
    cache: Option<bool>,
}

impl Compiled {
    fn new(rule: &Rule) -> Result<Self, PolicyError> {
        let pattern = &rule.pattern;
        if !(1..=1024).contains(&pattern.len()) {
            return Err(PolicyError::Length(pattern.clone()));
        }
        if pattern.starts_with('/') {
            return Err(PolicyError::Slash(pattern.clone()));
        }
        if rule.freshness.is_none() && rule.cache.is_none() {
            return Err(PolicyError::Empty(pattern.clone()));
        }
        Ok(Self { glob: Glob::new(pattern), freshness: rule.freshness, cache: rule.cache })
    }
}

/// A pattern over a whole key: `?` is one character but a slash, `*` any number of those, `**` any number of any,
/// and `**/` at the beginning or behind a slash is no folder or any number of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Glob {
    tokens: Vec<Token>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Byte(u8),
    OneCharacter,
    WithinName,
    AcrossNames,
    Folders,
}

impl Glob {
    fn new(pattern: &str) -> Self {
        let mut tokens = Vec::with_capacity(pattern.len());
        let mut rest = pattern.as_bytes();
        while let Some((&first, after)) = rest.split_first() {
            let at_name = matches!(tokens.last(), None | Some(Token::Byte(b'/') | Token::Folders));
            if at_name && let Some(after) = rest.strip_prefix(b"**/") {
                tokens.push(Token::Folders);
                rest = after;
            } else if let Some(after) = rest.strip_prefix(b"**") {
                tokens.push(Token::AcrossNames);
                rest = after;
            } else {
                tokens.push(match first {
                    b'*' => Token::WithinName,
                    b'?' => Token::OneCharacter,
                    byte => Token::Byte(byte),
                });
                rest = after;
            }
        }
        Self { tokens }
    }

    /// Two places to go back to are enough: the latest wildcard within a name and the latest across names. What an
    /// earlier one could try, the later one covers, because it already stands at the leftmost place it can have.
    fn matches(&self, key: &[u8]) -> bool {
        let (mut token, mut at) = (0, 0);
        let mut within: Option<(usize, usize)> = None;
        let mut across: Option<(usize, usize, bool)> = None;
        loop {
            let step = match self.tokens.get(token) {
                None if at == key.len() => return true,
                None => None,
                Some(Token::Byte(byte)) => (key.get(at) == Some(byte)).then_some(1),
                Some(Token::OneCharacter) => character(&key[at..]),
                Some(Token::WithinName) => {
                    within = Some((token, at));
                    Some(0)
                }
                Some(Token::AcrossNames) => {
                    (within, across) = (None, Some((token, at, false)));
                    Some(0)
                }
                Some(Token::Folders) => {
                    (within, across) = (None, Some((token, at, true)));
                    Some(0)
                }
            };
            if let Some(step) = step {
                (token, at) = (token + 1, at + step);
                continue;
            }
            if let Some((wildcard, taken)) = within
                && let Some(step) = character(&key[taken..])
            {
                within = Some((wildcard, taken + step));
                (token, at) = (wildcard + 1, taken + step);
                continue;
            }
            let Some((wildcard, taken, folders)) = across else { return false };
            let next = if folders {
                key[taken..].iter().position(|byte| *byte == b'/').map(|slash| taken + slash + 1)
            } else {
                (taken < key.len()).then_some(taken + 1)
            };
            let Some(next) = next else { return false };
            (within, across) = (None, Some((wildcard, next, folders)));
            (token, at) = (wildcard + 1, next);
        }
    }
}

/// Length of the UTF-8 character in front, unless it is a slash or there is none; a stray byte counts as one.
fn character(key: &[u8]) -> Option<usize> {
    let first = *key.first()?;
    if first == b'/' {
        return None;
    }
    let length = match first {
        0xc0..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xff => 4,
        _ => 1,
    };
    let whole = key.len() >= length && key[1..length].iter().all(|byte| (0x80..0xc0).contains(byte));
    Some(if whole { length } else { 1 })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn matches(pattern: &str, key: &str) -> bool {
        Glob::new(pattern).matches(key.as_bytes())
    }

    #[test]
    fn globs_mean_what_people_expect() {
        for (pattern, yes, no) in [
            ("a", &["a"][..], &["", "b", "aa", "a/"][..]),
            ("*", &["", "a", "abc"], &["a/b", "/"]),
            ("**", &["", "a", "a/b/c", "/"], &[]),
            ("*.parquet", &["a.parquet", ".parquet"], &["a/b.parquet", "a.parquet.crc"]),
            ("**/*.parquet", &["a.parquet", "t/a.parquet", "x/y/a.parquet"], &["a.parquet/b", "t/a.parq"]),
            (
                "**/_delta_log/**",
                &["_delta_log/0.json", "t/_delta_log/x/y"],
                &["_delta_log", "a_delta_log/0"],
            ),
            ("data/**", &["data/", "data/a/b"], &["data", "dat/a", "datab/a"]),
            ("a/**/z", &["a/z", "a/b/z", "a/b/c/z"], &["a/bz", "az", "a/b/c"]),
            ("a**z", &["az", "a/b/z"], &["a/b"]),
            ("?.bin", &["a.bin", "é.bin", "数.bin"], &[".bin", "ab.bin", "/.bin"]),
            ("shard-??.tar", &["shard-01.tar"], &["shard-1.tar", "shard-001.tar"]),
            ("*a*b", &["ab", "xaxb", "aab", "abab"], &["ba", "a/b"]),
            ("*/x*y", &["q/xy", "q/xzzy"], &["q/r/xy", "xy"]),
            ("**/a/**/b", &["a/b", "q/a/b", "a/r/b", "a/a/b/b"], &["b/a", "qa/b"]),
        ] {
            for key in yes {
                assert!(matches(pattern, key), "`{pattern}` should match `{key}`");
            }
            for key in no {
                assert!(!matches(pattern, key), "`{pattern}` should not match `{key}`");
            }
        }
    }

    fn spec(text: &str, rules: &[(&str, Option<Freshness>, Option<bool>)]) -> AcceleratorSpec {
        let mut spec: AcceleratorSpec = text.parse().expect("a spec");
        spec.rules = rules
            .iter()
            .map(|(pattern, freshness, cache)| Rule {
                pattern: (*pattern).to_owned(),
                freshness: *freshness,
                cache: *cache,
            })
            .collect();
        spec
    }

    #[test]
    fn without_rules_the_accelerator_decides() {
        let policy = Policy::new(&spec("abc=s3://bucket", &[])).expect("policy");
        assert_eq!(policy.decide(b"k"), Decision { freshness: Freshness::Strict, cache: true });
        let policy = Policy::new(&spec("abc=s3://bucket,freshness=ttl:60s", &[])).expect("policy");
        assert_eq!(policy.decide(b"k").freshness, Freshness::Ttl(Duration::from_mins(1)));
    }

    #[test]
    fn the_first_match_decides_each_field_by_itself() {
        let ttl = Freshness::Ttl(Duration::from_secs(1));
        let policy = Policy::new(&spec(
            "abc=s3://bucket,preset=training-data",
            &[
                ("tmp/**", None, Some(false)),
                ("tmp/*", Some(ttl), None),
                ("tmp/**", Some(Freshness::Strict), Some(true)),
            ],
        ))
        .expect("policy");
        assert_eq!(policy.decide(b"tmp/a"), Decision { freshness: ttl, cache: false });
        assert_eq!(policy.decide(b"tmp/a/b"), Decision { freshness: Freshness::Strict, cache: false });
        assert_eq!(policy.decide(b"other"), Decision { freshness: Freshness::Immutable, cache: true });
    }

    #[test]
    fn lakehouse_never_caches_logs_and_believes_data() {
        let policy =
            Policy::new(&spec("abc=s3://bucket,preset=lakehouse,freshness=strict", &[])).expect("policy");
        for key in ["t/_delta_log/00001.json", "t/_delta_log/1.checkpoint.parquet", "t/_SUCCESS", "_SUCCESS"]
        {
            assert!(!policy.decide(key.as_bytes()).cache, "{key}");
        }
        assert!(!policy.decide(b"t/metadata/v3.metadata.json").cache);
        let data = policy.decide(b"t/day=1/part-0.parquet");
        assert_eq!(data, Decision { freshness: Freshness::Immutable, cache: true });
        assert_eq!(policy.decide(b"t/readme.csv"), Decision { freshness: Freshness::Strict, cache: true });
    }

    #[test]
    fn rules_that_cannot_be_are_refused() {
        let immutable = Some(Freshness::Immutable);
        for (pattern, freshness, expected) in [
            ("", immutable, PolicyError::Length(String::new())),
            ("/a", immutable, PolicyError::Slash("/a".into())),
            ("a", None, PolicyError::Empty("a".into())),
        ] {
            let error =
                Policy::new(&spec("abc=s3://bucket", &[(pattern, freshness, None)])).expect_err(pattern);
            assert_eq!(error, expected);
        }
        assert!(Policy::new(&spec("abc=s3://bucket", &[(&"a".repeat(1025), immutable, None)])).is_err());
    }

    /// The same meaning, written as the definition reads: every way is tried.
    fn by_definition(tokens: &[Token], key: &[u8]) -> bool {
        let Some((token, rest)) = tokens.split_first() else { return key.is_empty() };
        match token {
            Token::Byte(byte) => key.first() == Some(byte) && by_definition(rest, &key[1..]),
            Token::OneCharacter => character(key).is_some_and(|length| by_definition(rest, &key[length..])),
            Token::WithinName => {
                let name = key.iter().position(|byte| *byte == b'/').unwrap_or(key.len());
                (0..=name).any(|taken| by_definition(rest, &key[taken..]))
            }
            Token::AcrossNames => (0..=key.len()).any(|taken| by_definition(rest, &key[taken..])),
            Token::Folders => (0..=key.len())
                .filter(|taken| *taken == 0 || key[taken - 1] == b'/')
                .any(|taken| by_definition(rest, &key[taken..])),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn matching_is_the_definition(pattern in "([ab/?]|\\*|\\*\\*|\\*\\*/){1,8}", key in "[ab/]{0,10}") {
            let glob = Glob::new(&pattern);
            prop_assert_eq!(glob.matches(key.as_bytes()), by_definition(&glob.tokens, key.as_bytes()));
        }

        #[test]
        fn any_bytes_can_be_asked(pattern in "[a*?/é]{1,12}", key in proptest::collection::vec(any::<u8>(), 0..24)) {
            Glob::new(&pattern).matches(&key);
        }
    }
}
