//! What the operator wants of the fleet: accelerators and policies.
//!
//! An accelerator is the same thing here and on a node's command line ([`AcceleratorSpec`]); in the control plane it
//! names a policy instead of carrying rules, so that one policy serves many. [`Accelerator::spec`] puts the two
//! together again, and with it every check of the command line holds here as well.

use std::error::Error as _;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::name::PolicyName;
use crate::rule::{Freshness, FreshnessError, Preset, Rule};
use crate::size::ByteSize;
use crate::spec::{
    AcceleratorName, AcceleratorSpec, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, OriginSpec, SpecError,
};
use crate::word::suggestion;

/// Rules in one policy at most.
pub const RULES_MAX: usize = 256;
/// Holders of one extent group at most.
pub const REPLICAS_MAX: u8 = 8;

/// A bucket name that clients use, bound to the store behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Accelerator {
    /// The bucket name that clients use.
    pub name: AcceleratorName,
    /// The store behind it.
    pub origin: OriginSpec,
    /// `http(s)://host[:port]` of an S3 service that is not AWS's own; path style.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The region that S3 requests are signed for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// The rules that its keys follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// Freshness of keys that no rule speaks of; `strict` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freshness: Option<Freshness>,
    /// Rules that stand behind those of the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// Unit of download and caching where no rule says it: a power of two, 64 KiB to 4 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extent: Option<ByteSize>,
}

impl Accelerator {
    /// What a node does with it: the accelerator and the rules of its policy, checked as a command line is.
    ///
    /// # Errors
    /// A value that is good as text but not for this origin.
    pub fn spec(&self, policy: Option<&Policy>) -> Result<AcceleratorSpec, SpecError> {
        let mut spec = AcceleratorSpec::new(self.name.clone(), self.origin.clone());
        for (key, value) in [("endpoint", &self.endpoint), ("region", &self.region)] {
            if let Some(value) = value {
                spec.set(key, value)?;
            }
        }
        if let Some(extent) = policy.and_then(Policy::extent).or(self.extent) {
            spec.set("extent", &extent.to_string())?;
        }
        spec.freshness = self.freshness;
        spec.preset = self.preset;
        if let Some(policy) = policy {
            spec.rules = policy.rules.iter().filter_map(PolicyRule::rule).collect();
        }
        Ok(spec)
    }

    /// The same as one said on a command line. Its rules have no place here.
    pub fn from_spec(spec: &AcceleratorSpec, policy: Option<PolicyName>) -> Self {
        Self {
            name: spec.name.clone(),
            origin: spec.origin.clone(),
            endpoint: spec.endpoint.as_deref().map(str::to_owned),
            region: spec.region.as_deref().map(str::to_owned),
            policy,
            freshness: spec.freshness,
            preset: spec.preset,
            extent: spec.extent,
        }
    }
}

/// An ordered list of rules under a name, and how many nodes hold what it governs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Policy {
    /// What accelerators call it.
    pub name: PolicyName,
    /// Nodes that hold each extent group, 1 to 8.
    #[serde(default = "one")]
    pub replicas: u8,
    /// In order: the first rule that says a thing decides it.
    #[serde(default)]
    pub rules: Vec<PolicyRule>,
}

fn one() -> u8 {
    1
}

impl Policy {
    /// The extent size that the policy asks for, if it does.
    pub fn extent(&self) -> Option<ByteSize> {
        self.rules.iter().find_map(|rule| rule.extent)
    }

    /// Whether a node can follow it.
    ///
    /// # Errors
    /// The first thing that it cannot.
    pub fn check(&self) -> Result<(), PolicyProblem> {
        if !(1..=REPLICAS_MAX).contains(&self.replicas) {
            return Err(PolicyProblem::Replicas(self.replicas));
        }
        if self.rules.len() > RULES_MAX {
            return Err(PolicyProblem::TooMany(self.rules.len()));
        }
        self.rules.iter().try_for_each(PolicyRule::check)
    }
}

/// One rule: what holds for the keys that a glob matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyRule {
    /// A glob over the whole key: `*` within one name, `**` across slashes, `?` one character.
    #[serde(rename = "match")]
    pub pattern: String,
    /// How long bytes are believed, if this rule says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freshness: Option<Freshness>,
    /// Unit of download and caching, if this rule says so. In this version only on `**`: a node cuts all objects of
    /// an accelerator alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extent: Option<ByteSize>,
    /// Whether bytes are kept, if this rule says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<Admission>,
}

/// Whether bytes are kept once they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// At the first read.
    Always,
    /// Never: every read goes to the origin.
    Never,
}

impl FromStr for Admission {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            _ => Err(format!("`{text}` is not an admission: {}", suggestion(text, &["always", "never"]))),
        }
    }
}

impl PolicyRule {
    /// The part of it that a node decides key by key; `None` when it speaks of the extent alone.
    fn rule(&self) -> Option<Rule> {
        (self.freshness.is_some() || self.admission.is_some()).then(|| Rule {
            pattern: self.pattern.clone(),
            freshness: self.freshness,
            cache: self.admission.map(|admission| admission == Admission::Always),
        })
    }

    fn check(&self) -> Result<(), PolicyProblem> {
        let pattern = || self.pattern.clone();
        if !(1..=1024).contains(&self.pattern.len()) {
            return Err(PolicyProblem::Length(pattern()));
        }
        if self.pattern.starts_with('/') {
            return Err(PolicyProblem::Slash(pattern()));
        }
        if self.freshness.is_none() && self.extent.is_none() && self.admission.is_none() {
            return Err(PolicyProblem::Empty(pattern()));
        }
        let Some(extent) = self.extent else { return Ok(()) };
        let fits = (EXTENT_BYTES_MIN..=EXTENT_BYTES_MAX).contains(&extent.bytes());
        if !fits || !extent.bytes().is_power_of_two() {
            return Err(PolicyProblem::Extent { pattern: pattern(), extent });
        }
        if self.pattern == "**" { Ok(()) } else { Err(PolicyProblem::ExtentOfSome(pattern())) }
    }
}

impl FromStr for PolicyRule {
    type Err = String;

    /// `MATCH,key=value...` with the keys `freshness`, `extent` and `admission`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let pattern = parts.next().unwrap_or_default().to_owned();
        let mut rule = Self { pattern, freshness: None, extent: None, admission: None };
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!(
                    "`{part}` is not a key=value pair; a pattern with a comma goes into a file"
                ));
            };
            let wrong = |why: &dyn fmt::Display| format!("{key}: {why}");
            match key.trim() {
                "freshness" => {
                    rule.freshness =
                        Some(value.parse().map_err(|why: FreshnessError| match why.source() {
                            Some(source) => format!("{key}: {why}: {source}"),
                            None => wrong(&why),
                        })?);
                }
                "extent" => rule.extent = Some(value.parse().map_err(|why| wrong(&why))?),
                "admission" => rule.admission = Some(value.parse().map_err(|why| wrong(&why))?),
                other => {
                    let help = suggestion(other, &["freshness", "extent", "admission"]);
                    return Err(format!("a rule has no key `{other}`; {help}"));
                }
            }
        }
        rule.check().map_err(|problem| problem.to_string())?;
        Ok(rule)
    }
}

impl fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.pattern)?;
        if let Some(freshness) = &self.freshness {
            write!(f, ",freshness={freshness}")?;
        }
        if let Some(extent) = &self.extent {
            write!(f, ",extent={extent}")?;
        }
        match self.admission {
            Some(Admission::Always) => f.write_str(",admission=always"),
            Some(Admission::Never) => f.write_str(",admission=never"),
            None => Ok(()),
        }
    }
}

/// Why a policy cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyProblem {
    /// None, or too many holders.
    #[error("{0} replicas: say 1 to {REPLICAS_MAX}")]
    Replicas(u8),
    /// A list that nobody can read.
    #[error("{0} rules: a policy has at most {RULES_MAX}; join them by wider globs")]
    TooMany(usize),
    /// The glob is empty or longer than a key.
    #[error("rule `{0}`: a pattern has 1 to 1024 bytes")]
    Length(String),
    /// Keys have no slash in front.
    #[error("rule `{0}`: keys do not begin with a slash; `**/` in front matches any folder")]
    Slash(String),
    /// It says nothing.
    #[error("rule `{0}` says nothing: give it freshness, extent or admission")]
    Empty(String),
    /// No extent has this size.
    #[error("rule `{pattern}`: {extent} is not a power of two from 64KiB to 4MiB")]
    Extent {
        /// The glob.
        pattern: String,
        /// What was asked for.
        extent: ByteSize,
    },
    /// An extent size for a part of the keys.
    #[error(
        "rule `{0}`: this version cuts all objects of an accelerator alike; put the extent on the rule `**`, \
         or give those keys an accelerator of their own"
    )]
    ExtentOfSome(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> PolicyRule {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_rule_is_a_glob_and_what_it_says() {
        for text in [
            "**/*.parquet,freshness=immutable",
            "**,extent=256KiB",
            "tmp/**,freshness=strict,admission=never",
        ] {
            assert_eq!(rule(text).to_string(), text);
        }
        for (text, words) in [
            ("**", "says nothing"),
            (",freshness=strict", "1 to 1024"),
            ("/a,freshness=strict", "slash"),
            ("a*,extent=1MiB", "rule `**`"),
            ("**,extent=3MiB", "power of two"),
            ("**,frshness=strict", "`freshness`?"),
            ("**,freshness=ttl:60", "whole number with a unit"),
            ("**,admission=maybe", "always, never"),
            ("a,b,freshness=strict", "into a file"),
        ] {
            let error = text.parse::<PolicyRule>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_policy_and_its_accelerator_come_to_what_a_command_line_says() {
        let said: AcceleratorSpec =
            "data=s3://bucket-1,endpoint=http://h:9000,region=eu-1,freshness=ttl:60s,preset=lakehouse,extent=64KiB"
                .parse()
                .expect("a spec");
        let accelerator = Accelerator::from_spec(&said, Some("tables".parse().expect("name")));
        assert_eq!(accelerator.spec(None), Ok(said));

        let policy = Policy {
            name: "tables".parse().expect("name"),
            replicas: 2,
            rules: vec![rule("tmp/**,admission=never"), rule("**,extent=256KiB")],
        };
        assert_eq!(policy.check(), Ok(()));
        let spec = accelerator.spec(Some(&policy)).expect("both");
        assert_eq!(spec.extent_bytes(), 256 << 10);
        let rule = Rule { pattern: "tmp/**".into(), freshness: None, cache: Some(false) };
        assert_eq!(spec.rules, [rule]);
    }

    #[test]
    fn what_a_command_line_refuses_is_refused_here() {
        let mut accelerator: Accelerator =
            serde_json::from_str(r#"{"name":"data","origin":"http://h/x","region":"eu-1"}"#).expect("words");
        let error = accelerator.spec(None).expect_err("a region of a plain web server").to_string();
        assert!(error.contains("belongs to s3://"), "{error}");
        accelerator.region = None;
        accelerator.extent = Some(ByteSize::new(3));
        assert!(accelerator.spec(None).is_err());
        let error = serde_json::from_str::<Accelerator>(r#"{"name":"d","origin":"s3://bucket"}"#);
        assert!(error.expect_err("name").to_string().contains("3 to 63"));
    }

    #[test]
    fn a_policy_has_bounds() {
        let mut policy = Policy { name: "p".parse().expect("name"), replicas: 0, rules: Vec::new() };
        assert_eq!(policy.check(), Err(PolicyProblem::Replicas(0)));
        policy.replicas = 9;
        assert_eq!(policy.check(), Err(PolicyProblem::Replicas(9)));
        policy.replicas = 8;
        policy.rules = vec![rule("**,admission=always"); RULES_MAX + 1];
        assert_eq!(policy.check(), Err(PolicyProblem::TooMany(257)));
    }
}
