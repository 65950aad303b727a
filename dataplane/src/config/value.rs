//! The small languages of single settings: core lists, addresses, drives, secrets.
//!
//! Each is a type with `FromStr` and an exact `Display`; clap and the file reader both go through these.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use forebay_control_api::{ByteSize, SizeError, suggestion};

use crate::engine::Sends;

/// Which cores get a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreChoice {
    /// As the machine suggests; see [`super::HostFacts::core_map`].
    Auto,
    /// These, in this order; a core that is named several times has as many workers.
    These(Vec<usize>),
}

/// How sockets and drives are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineChoice {
    /// `uring` where the kernel grants it, else `portable`, loudly.
    Auto,
    /// `io_uring` or nothing.
    Uring,
    /// epoll and a bounded pool of reading threads.
    Portable,
}

impl EngineChoice {
    const WORDS: [&str; 3] = ["auto", "uring", "portable"];
}

/// More than any machine has cores.
const WORKERS_MAX: usize = 8_192;

const SENDS: [(&str, Sends); 4] = [
    ("auto", Sends::Auto),
    ("copy", Sends::Copy),
    ("zero-copy", Sends::ZeroCopy),
    ("reference", Sends::Reference),
];

/// Where the admin door is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AdminAddr {
    /// An address of this machine.
    Tcp(SocketAddr),
    /// A socket file, made with mode 0600.
    Unix(PathBuf),
}

/// One `--drive`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveArg {
    /// Device or file.
    pub path: PathBuf,
    /// Size of a file that is not there yet.
    pub size: Option<ByteSize>,
}

/// A text that no log and no `Debug` shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<str>);

impl Secret {
    /// Hides a text.
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// The text, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A key that clients sign with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientKey {
    /// Sent in the clear with each request.
    pub access_key: Box<str>,
    /// Never sent.
    pub secret_key: Secret,
}

impl ClientKey {
    /// Checks what a signature's header can carry: visible ASCII without `/`, `,` and `=` in the access key.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn new(access_key: &str, secret_key: &str) -> Result<Self, &'static str> {
        let visible =
            |text: &str| !text.is_empty() && text.len() <= 256 && text.bytes().all(|b| b.is_ascii_graphic());
        if !visible(access_key) || access_key.contains(['/', ',', '=']) {
            return Err("an access key has 1 to 256 visible ASCII characters and none of / , =");
        }
        if !visible(secret_key) {
            return Err("a secret key has 1 to 256 visible ASCII characters");
        }
        Ok(Self { access_key: access_key.into(), secret_key: Secret::new(secret_key) })
    }
}

/// Which answers over HTTP/1.1 say that there is HTTP/3 (RFC 7838).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AltSvc {
    /// Those over HTTPS. Only there does a client know whom it hears: 2.1 of the RFC wants that before it follows.
    Https,
    /// Those in plain text as well, for clients that check the certificate when they follow.
    All,
    /// None.
    None,
}

impl AltSvc {
    const WORDS: [&str; 3] = ["https", "all", "none"];
}

impl FromStr for AltSvc {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "https" => Ok(Self::Https),
            "all" => Ok(Self::All),
            "none" => Ok(Self::None),
            _ => Err(ValueError::AltSvc { word: text.to_owned(), help: suggestion(text, &Self::WORDS) }),
        }
    }
}

impl fmt::Display for AltSvc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Self::WORDS[*self as usize])
    }
}

/// Why a text is not a value of its setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Of `cores`.
    #[error("`{0}` is not a list of cores: write auto, or numbers and ranges such as 0,1,4-7")]
    Cores(String),
    /// Of `listen`.
    #[error(
        "`{0}` is not an address: write 127.0.0.1:7070, [::1]:7070, localhost:7070, or :7070 for all of IPv4"
    )]
    Listen(String),
    /// Of `admin`.
    #[error("`{0}` is not an admin address: write 127.0.0.1:7071 or unix:/path/to/socket")]
    Admin(String),
    /// Of `engine`.
    #[error("`{word}` is not an engine: {help}")]
    Engine {
        /// What was written.
        word: String,
        /// What may have been meant.
        help: String,
    },
    /// Of `send`.
    #[error("`{word}` is no way of sending: {help}")]
    Send {
        /// What was written.
        word: String,
        /// What may have been meant.
        help: String,
    },
    /// Of `alt-svc`.
    #[error("`{word}` does not say which answers: {help}")]
    AltSvc {
        /// What was written.
        word: String,
        /// What may have been meant.
        help: String,
    },
    /// Of `drive`.
    #[error("`{0}` is not a drive: write PATH, or path=PATH,size=SIZE")]
    Drive(String),
    /// Of `drive`: an unknown key.
    #[error("`{0}` is not a key of a drive: write path=PATH,size=SIZE")]
    DriveKey(String),
    /// Of `drive`: its size.
    #[error(transparent)]
    Size(SizeError),
}

/// Reads a listen address.
///
/// # Errors
/// Anything that is not an IP address, `localhost` or nothing, with a port.
pub(super) fn parse_listen(text: &str) -> Result<SocketAddr, ValueError> {
    let bad = || ValueError::Listen(text.to_owned());
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let port: u16 = port.parse().map_err(|_| bad())?;
    match host {
        "" | "*" => Ok(SocketAddr::from(([0, 0, 0, 0], port))),
        "localhost" => Ok(SocketAddr::from(([127, 0, 0, 1], port))),
        _ => Err(bad()),
    }
}

impl FromStr for CoreChoice {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let bad = || ValueError::Cores(text.to_owned());
        // The kernel counts to 8,192 at most; a slip such as 0-99999999 must not become a list of that length.
        let number = |part: &str| part.trim().parse().ok().filter(|core| *core < WORKERS_MAX).ok_or_else(bad);
        let mut cores: Vec<usize> = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(bad());
            }
            for core in first..=last {
                if cores.len() == WORKERS_MAX {
                    return Err(bad());
                }
                cores.push(core);
            }
        }
        Ok(Self::These(cores))
    }
}

impl fmt::Display for CoreChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::These(cores) => f.pad(&core_list(cores)),
        }
    }
}

/// `0,1,4-7`: runs of three and more become ranges.
pub(super) fn core_list(cores: &[usize]) -> String {
    let mut parts = Vec::new();
    let mut rest = cores;
    while let Some(&first) = rest.first() {
        let run = rest.iter().enumerate().take_while(|(at, core)| **core == first + at).count();
        if run >= 3 {
            parts.push(format!("{first}-{}", first + run - 1));
            rest = &rest[run..];
        } else {
            parts.push(first.to_string());
            rest = &rest[1..];
        }
    }
    parts.join(",")
}

impl FromStr for EngineChoice {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "portable" => Ok(Self::Portable),
            _ => Err(ValueError::Engine { word: text.to_owned(), help: suggestion(text, &Self::WORDS) }),
        }
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Self::WORDS[*self as usize])
    }
}

impl FromStr for Sends {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        SENDS.iter().find(|(word, _)| *word == text).map(|(_, sends)| *sends).ok_or_else(|| {
            ValueError::Send { word: text.to_owned(), help: suggestion(text, &SENDS.map(|(word, _)| word)) }
        })
    }
}

impl fmt::Display for Sends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = SENDS.iter().find(|(_, sends)| sends == self).map(|(word, _)| *word);
        f.pad(word.expect("every way has a word"))
    }
}

impl FromStr for AdminAddr {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bad = || ValueError::Admin(text.to_owned());
        match text.strip_prefix("unix:") {
            // 107: the kernel's room for a socket's path, less the closing zero.
            Some(path) if (1..=107).contains(&path.len()) => Ok(Self::Unix(path.into())),
            Some(_) => Err(bad()),
            None => parse_listen(text).map(Self::Tcp).map_err(|_| bad()),
        }
    }
}

impl fmt::Display for AdminAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for DriveArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bad = || ValueError::Drive(text.to_owned());
        if !text.starts_with("path=") && !text.starts_with("size=") {
            // A path may hold commas and equals signs; one that looks like the long form is written in it.
            return if text.is_empty() { Err(bad()) } else { Ok(Self { path: text.into(), size: None }) };
        }
        let (mut path, mut size) = (None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(bad)?;
            match key {
                "path" if path.is_none() && !value.is_empty() => path = Some(PathBuf::from(value)),
                "size" if size.is_none() => size = Some(value.parse().map_err(ValueError::Size)?),
                "path" | "size" => return Err(bad()),
                _ => return Err(ValueError::DriveKey(key.to_owned())),
            }
        }
        Ok(Self { path: path.ok_or_else(bad)?, size })
    }
}

impl fmt::Display for DriveArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.size {
            Some(size) => write!(f, "path={},size={size}", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cores_are_numbers_and_ranges() {
        let these = |cores: &[usize]| Ok(CoreChoice::These(cores.to_vec()));
        assert_eq!("auto".parse(), Ok(CoreChoice::Auto));
        assert_eq!("0".parse(), these(&[0]));
        assert_eq!("0,1,4-7".parse(), these(&[0, 1, 4, 5, 6, 7]));
        assert_eq!("3,1".parse(), these(&[3, 1]));
        for text in ["", "a", "1,", "4-2", "-1", "1-", "0-99999999", "1 2"] {
            assert!(matches!(text.parse::<CoreChoice>(), Err(ValueError::Cores(_))), "{text}");
        }
        assert_eq!("1,0-2,1".parse(), these(&[1, 0, 1, 2, 1]));
        let many = ["0-8191"; 2].join(",");
        assert!(matches!(many.parse::<CoreChoice>(), Err(ValueError::Cores(_))));
    }

    #[test]
    fn addresses_have_a_port() {
        for (text, address) in [
            ("127.0.0.1:7070", "127.0.0.1:7070"),
            ("[::1]:80", "[::1]:80"),
            (":7070", "0.0.0.0:7070"),
            ("*:7070", "0.0.0.0:7070"),
            ("localhost:1", "127.0.0.1:1"),
        ] {
            assert_eq!(parse_listen(text), Ok(address.parse().expect("an address")), "{text}");
        }
        for text in ["", "7070", "host:7070", "127.0.0.1", "127.0.0.1:70700", "::1"] {
            assert!(parse_listen(text).is_err(), "{text}");
        }
        assert_eq!("unix:/run/f.sock".parse(), Ok(AdminAddr::Unix("/run/f.sock".into())));
        assert!("unix:".parse::<AdminAddr>().is_err());
        assert!(format!("unix:/{}", "a".repeat(107)).parse::<AdminAddr>().is_err());
    }

    #[test]
    fn a_drive_is_a_path_or_a_path_with_a_size() {
        assert_eq!("/dev/nvme0n1".parse(), Ok(DriveArg { path: "/dev/nvme0n1".into(), size: None }));
        let sized = DriveArg { path: "/c/f".into(), size: Some(ByteSize::gib(1)) };
        assert_eq!("path=/c/f,size=1GiB".parse(), Ok(sized.clone()));
        assert_eq!("size=1GiB,path=/c/f".parse(), Ok(sized.clone()));
        assert_eq!(sized.to_string().parse(), Ok(sized));
        assert_eq!("a,b".parse(), Ok(DriveArg { path: "a,b".into(), size: None }));
        for text in [
            "",
            "path=",
            "size=1GiB",
            "path=/a,size=1G",
            "path=/a,path=/b",
            "path=/a,seize=1GiB",
            "path=/a,b",
        ] {
            assert!(text.parse::<DriveArg>().is_err(), "{text}");
        }
    }

    #[test]
    fn secrets_do_not_show() {
        let key = ClientKey::new("AKID", "very-secret").expect("a key");
        assert!(!format!("{key:?}").contains("very-secret"));
        assert_eq!(key.secret_key.reveal(), "very-secret");
        assert!(ClientKey::new("A/B", "s").is_err());
        assert!(ClientKey::new("", "s").is_err());
        assert!(ClientKey::new("A", "with space").is_err());
    }

    #[test]
    fn engines_have_three_words() {
        for word in EngineChoice::WORDS {
            assert_eq!(word.parse::<EngineChoice>().expect("an engine").to_string(), word);
        }
        assert!("urign".parse::<EngineChoice>().expect_err("misspelt").to_string().contains("`uring`?"));
    }

    #[test]
    fn ways_of_sending_have_four_words() {
        for (word, sends) in SENDS {
            assert_eq!(word.parse::<Sends>().expect("a way").to_string(), word);
            assert_eq!(sends.to_string(), word);
        }
        assert!("zerocopy".parse::<Sends>().expect_err("misspelt").to_string().contains("`zero-copy`?"));
    }

    proptest! {
        #[test]
        fn core_lists_parse_back(cores in proptest::collection::btree_set(0usize..64, 1..20)) {
            let choice = CoreChoice::These(cores.into_iter().collect());
            prop_assert_eq!(choice.to_string().parse(), Ok(choice));
        }

        #[test]
        fn no_text_panics(text in ".{0,16}") {
            let _ = (text.parse::<CoreChoice>(), text.parse::<AdminAddr>(), text.parse::<DriveArg>());
        }
    }
}
