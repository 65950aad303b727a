//! How the node speaks with a control plane: seven settings that make sense together or not at all.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use forebay_control_api::{ByteSize, NodeId, WEIGHT_MAX, Zone};
use http::Uri;

use super::{ConfigError, Drive, Settings};

/// Which control plane, and as whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// `http(s)://host[:port]`.
    pub url: Uri,
    /// One line: a token of role `node`. Read anew for each question.
    pub token_file: PathBuf,
    /// Unique in the fleet, the same after a restart.
    pub node: NodeId,
    /// Nodes of one zone fail together.
    pub zone: Zone,
    /// Share of the objects beside the other nodes' weights.
    pub weight: u32,
    /// URL that other nodes ask; `None` for the first listen address.
    pub advertise: Option<String>,
    /// Where the last state is kept.
    pub state: PathBuf,
}

/// What is said of the control plane and nothing else.
pub(super) fn taken_from(settings: &mut Settings) -> Settings {
    Settings {
        control: settings.control.take(),
        token_file: settings.token_file.take(),
        node_id: settings.node_id.take(),
        zone: settings.zone.take(),
        weight: settings.weight.take(),
        advertise: settings.advertise.take(),
        state_dir: settings.state_dir.take(),
        ..Settings::default()
    }
}

/// Takes the settings together. `host_name` is what the node is called if nothing is said.
pub(super) fn control_of(
    settings: &Settings,
    drives: &[Drive],
    memory: ByteSize,
    host_name: Option<&str>,
) -> Result<Option<ControlConfig>, ConfigError> {
    let Some(url) = &settings.control else {
        let orphans = [
            ("token-file", settings.token_file.is_some()),
            ("node-id", settings.node_id.is_some()),
            ("zone", settings.zone.is_some()),
            ("weight", settings.weight.is_some()),
            ("advertise", settings.advertise.is_some()),
            ("state-dir", settings.state_dir.is_some()),
        ];
        return match orphans.into_iter().find(|(_, is_said)| *is_said) {
            None => Ok(None),
            Some((setting, _)) => Err(bad(
                setting,
                "it says how this node speaks with a control plane, and there is none; give --control URL as well",
            )),
        };
    };
    let token_file = settings.token_file.clone().ok_or_else(|| {
        bad(
            "control",
            "it needs --token-file FILE with a token of role node; make one with `forebay-control token add --role \
             node --out FILE`",
        )
    })?;
    let node = match &settings.node_id {
        Some(node) => node.clone(),
        None => {
            host_name.map(str::to_ascii_lowercase).and_then(|name| name.parse().ok()).ok_or_else(|| {
                bad(
                    "node-id",
                    "this host's name cannot be a node's id; give --node-id NAME, unique in the fleet",
                )
            })?
        }
    };
    let room = drives.iter().map(|drive| drive.bytes).fold(memory.bytes(), u64::saturating_add);
    let weight =
        settings.weight.unwrap_or(u32::try_from(room >> 30).unwrap_or(WEIGHT_MAX).clamp(1, WEIGHT_MAX));
    if !(1..=WEIGHT_MAX).contains(&weight) {
        return Err(bad(
            "weight",
            format!("{weight} is not 1 to {WEIGHT_MAX}; usually it is the GiB of the cache"),
        ));
    }
    let advertise = settings.advertise.as_deref().map(|text| plain_url("advertise", text)).transpose()?;
    let beside_a_drive = drives
        .iter()
        .map(|drive| &drive.path)
        .filter(|path| !path.starts_with("/dev"))
        .find_map(|path| path.parent());
    let folder = settings.state_dir.clone().or_else(|| beside_a_drive.map(Into::into)).ok_or_else(|| {
        bad(
            "state-dir",
            "there is no drive file beside which the control plane's last state could be kept; give --state-dir DIR",
        )
    })?;
    Ok(Some(ControlConfig {
        url: plain_url("control", url)?.parse().expect("it was a moment ago"),
        token_file,
        state: folder.join(format!("forebay-{node}.state")),
        node,
        zone: settings.zone.clone().unwrap_or_default(),
        weight,
        advertise,
    }))
}

/// Whether there is a folder for the state, as seen from here.
pub(super) fn check_folder(control: &ControlConfig) -> Result<(), ConfigError> {
    let folder = control.state.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => Err(bad(
            "state-dir",
            format!("{} is no folder; make it, readable by this node's user alone", folder.display()),
        )),
        _ => Ok(()),
    }
}

/// Scheme and host, perhaps a port.
fn plain_url(setting: &'static str, text: &str) -> Result<String, ConfigError> {
    let url = text.parse::<Uri>().ok().filter(|url| {
        matches!(url.scheme_str(), Some("http" | "https"))
            && url.host().is_some_and(|host| !host.is_empty())
            && matches!(url.path(), "" | "/")
            && url.query().is_none()
            && !text.contains('@')
    });
    match url {
        Some(_) => Ok(text.trim_end_matches('/').to_owned()),
        None => Err(bad(setting, format!("`{text}` is not http://HOST[:PORT] or https://HOST[:PORT]"))),
    }
}

fn bad(setting: &'static str, why: impl Into<String>) -> ConfigError {
    ConfigError::Control { setting, why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            control: Some("http://10.0.0.1:7080/".into()),
            token_file: Some("/etc/forebay/token".into()),
            state_dir: Some("/var/lib/forebay".into()),
            ..Settings::default()
        }
    }

    fn control(settings: &Settings) -> Result<Option<ControlConfig>, String> {
        control_of(settings, &[], ByteSize::gib(3), Some("Node-A")).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_said_follows_from_the_host() {
        let control = control(&settings()).expect("good").expect("there");
        assert_eq!(control.url, "http://10.0.0.1:7080");
        assert_eq!((control.node.as_str(), control.weight), ("node-a", 3));
        assert_eq!(control.state, PathBuf::from("/var/lib/forebay/forebay-node-a.state"));
        let drive = Drive { path: "/cache/file".into(), size: None, bytes: 5 << 30, exists: true };
        let beside = Settings { state_dir: None, ..settings() };
        let control = control_of(&beside, &[drive], ByteSize::gib(3), None).expect_err("no name");
        assert!(control.to_string().contains("--node-id"), "{control}");
    }

    #[test]
    fn a_drive_file_has_the_state_beside_it_and_a_device_has_not() {
        let drive = |path: &str| Drive { path: path.into(), size: None, bytes: 5 << 30, exists: true };
        let beside = Settings { state_dir: None, ..settings() };
        let of = |drives: &[Drive]| control_of(&beside, drives, ByteSize::gib(3), Some("a"));
        let control = of(&[drive("/dev/nvme0n1"), drive("/cache/file")]).expect("good").expect("there");
        assert_eq!((control.state, control.weight), ("/cache/forebay-a.state".into(), 13));
        let error = of(&[drive("/dev/nvme0n1")]).expect_err("nowhere").to_string();
        assert!(error.contains("--state-dir"), "{error}");
    }

    #[test]
    fn a_state_needs_a_folder() {
        let room = tempfile::tempdir().expect("a folder");
        let at = |folder: PathBuf| {
            let said = Settings { state_dir: Some(folder), ..settings() };
            check_folder(&control(&said).expect("good").expect("there"))
        };
        assert!(at(room.path().into()).is_ok() && at(PathBuf::new()).is_ok());
        let error = at(room.path().join("missing")).expect_err("missing").to_string();
        assert!(error.contains("state-dir") && error.contains("missing is no folder; make it"), "{error}");
    }

    #[test]
    fn settings_that_make_no_sense_alone_are_refused() {
        let alone = Settings { zone: Some(Zone::default()), ..Settings::default() };
        assert!(control(&alone).expect_err("alone").contains("give --control"));
        assert_eq!(control(&Settings::default()), Ok(None));
        let without = Settings { token_file: None, ..settings() };
        assert!(control(&without).expect_err("no token").contains("token add --role"));
        for url in ["10.0.0.1:7080", "ftp://h", "http://h/path", "http://u@h", "http://h?x"] {
            let odd = Settings { control: Some(url.into()), ..settings() };
            assert!(control(&odd).expect_err(url).contains(url));
            let odd = Settings { advertise: Some(url.into()), ..settings() };
            assert!(control(&odd).expect_err(url).contains("advertise"));
        }
        for weight in [0, WEIGHT_MAX + 1] {
            let odd = Settings { weight: Some(weight), ..settings() };
            assert!(control(&odd).expect_err("a weight").contains("weight"));
        }
    }
}
