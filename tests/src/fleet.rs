//! A fleet as its page tells it: the commands of `docs/cluster.md`, run by a shell in the order of the page.
//!
//! The page is the script. Its first block says where things are; a test puts its own places in. Blocks marked `server`
//! begin with a program that stays: it becomes a child, so that a test can stop, pause and kill exactly it. All others
//! run to their end and must succeed.

use crate::wait::until;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The blocks of a page, by name; each is used by some test, or the page promises what nobody tries.
#[derive(Debug)]
pub struct Page {
    blocks: HashMap<String, String>,
}

impl Page {
    /// Reads the blocks that begin with ```` ```sh NAME ````.
    ///
    /// # Panics
    /// If the page cannot be read, or two blocks have one name.
    pub fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut blocks = HashMap::new();
        let mut current: Option<(String, String)> = None;
        for line in text.lines() {
            match (&mut current, line.strip_prefix("```")) {
                (None, Some(mark)) if mark.starts_with("sh ") => {
                    current = Some((mark["sh ".len()..].trim().to_owned(), String::new()));
                }
                (Some(_), Some(_)) => {
                    let (name, lines) = current.take().expect("seen above");
                    assert!(blocks.insert(name.clone(), lines).is_none(), "two blocks are called {name}");
                }
                (Some((_, lines)), None) => {
                    lines.push_str(line);
                    lines.push('\n');
                }
                _ => {}
            }
        }
        Self { blocks }
    }

    /// The names of all blocks.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.blocks.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}

/// The places of one run of the page.
#[derive(Debug)]
pub struct Fleet {
    page: Page,
    room: PathBuf,
    settings: Vec<(String, String)>,
}

impl Fleet {
    /// A run in `room`, with `settings` in the place of the page's first block.
    pub fn new(page: Page, room: &Path, settings: &[(&str, String)]) -> Self {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        Self { page, room: room.to_owned(), settings }
    }

    fn shell(&self, lines: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", lines]).stdin(Stdio::null());
        // Whatever the developer's own shell holds must not reach the programs.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("AWS_") || text.starts_with("FOREBAY_") {
                command.env_remove(&name);
            }
        }
        let programs = programs();
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.display()));
        command.env("AWS_EC2_METADATA_DISABLED", "true");
        command.envs(self.settings.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a block to its end, whatever comes of it.
    #[track_caller]
    pub fn run(&self, block: &str, environment: &[(&str, &str)]) -> Output {
        let lines = self.page.blocks.get(block).unwrap_or_else(|| panic!("the page has no block `{block}`"));
        let mut command = self.shell(lines);
        command.envs(environment.iter().copied());
        command.output().expect("bash runs")
    }

    /// Runs a block, which must succeed; what it printed.
    #[track_caller]
    pub fn say(&self, block: &str, environment: &[(&str, &str)]) -> String {
        let output = self.run(block, environment);
        let words = crate::node::words(&output);
        assert!(output.status.success(), "block `{block}`: {}\n{words}", output.status);
        words
    }

    /// Runs a command of the operator that is not on the page.
    pub fn operate(&self, line: &str) -> Output {
        self.shell(line).output().expect("bash runs")
    }

    /// Starts the program of a block marked `server`.
    #[track_caller]
    pub fn start(&self, block: &str, environment: &[(&str, &str)]) -> Server {
        let name = format!("server {block}");
        let lines = self.page.blocks.get(&name).unwrap_or_else(|| panic!("the page has no block `{name}`"));
        let log = self.room.join(format!("{block}.log"));
        let out = File::options().create(true).append(true).open(&log).expect("a log file");
        let mut command = self.shell(&format!("exec {lines}"));
        command.envs(environment.iter().copied());
        command.stdout(out.try_clone().expect("a second handle")).stderr(out);
        Server { child: command.spawn().expect("bash runs"), log }
    }
}

/// A running program of the fleet.
#[derive(Debug)]
pub struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Everything it and its predecessors of the same block have printed.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Sends it a signal, e.g. `STOP`.
    pub fn signal(&self, name: &str) {
        // Through kill(1): a test has no other reason to call the kernel by hand.
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -{name} {}", self.child.id());
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().expect("a running child can be killed");
        self.child.wait().expect("a child can be waited for");
    }

    /// SIGTERM, and waits for the end.
    #[track_caller]
    pub fn terminate(mut self) {
        self.signal("TERM");
        until("the program to end", || self.child.try_wait().expect("a child can be waited for"));
    }

    /// Waits until it ends by itself.
    #[track_caller]
    pub fn wait(mut self) -> std::process::ExitStatus {
        until("the program to end", || self.child.try_wait().expect("a child can be waited for"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}---", self.log.display(), self.log());
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Where the programs are: beside `forebay-node`.
fn programs() -> PathBuf {
    let node = crate::node::program();
    let folder = node.parent().expect("a program is in a folder").to_owned();
    assert!(
        folder.join("forebay-control").exists(),
        "{} has no forebay-control: cargo build --workspace --bins, or use tests/run",
        folder.display()
    );
    folder
}
