//! The SDK, its WIT and the examples that are embedded in the binary, so that `skep new` and `skep demo` work
//! without a checkout. If the checkout that this binary was built from exists, the demo and the builds of agents use
//! its files instead.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use include_dir::{Dir, include_dir};
use sha2::{Digest as _, Sha256};

use crate::paths;

static SDK: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../guest-sdk");
static WIT: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../wit");

/// The example that `skep demo` talks to.
const DEMO: &str = "room-service";

/// An agent of the folder `examples` in Rust, which `skep new --example` copies.
pub struct Example {
    pub name: &'static str,
    /// The subject that it shows, in a few words.
    pub summary: &'static str,
    files: Dir<'static>,
}

/// The examples, from simple to special.
pub static EXAMPLES: [Example; 11] = [
    Example {
        name: "hello",
        summary: "a function, a conversation and a counter",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/hello"),
    },
    Example {
        name: "bike-shop",
        summary: "instructions and a tool, without a function",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/bike-shop"),
    },
    Example {
        name: DEMO,
        summary: "a tool for a small model, state, and answers that stick to the facts",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/room-service"),
    },
    Example {
        name: "concierge",
        summary: "several tools that the model chooses from, and a list of messages to measure it",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/concierge"),
    },
    Example {
        name: "events",
        summary: "events between sessions",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/events"),
    },
    Example {
        name: "approval",
        summary: "a tool that a person approves first",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/approval"),
    },
    Example {
        name: "two-agents",
        summary: "an agent that calls the tool of another agent, with types",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/two-agents"),
    },
    Example {
        name: "http-secret",
        summary: "requests to an API, with a key that the agent never sees",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/http-secret"),
    },
    Example {
        name: "mcp-both-ways",
        summary: "a tool of an MCP server, and a tool for MCP clients",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/mcp-both-ways"),
    },
    Example {
        name: "extraction",
        summary: "documents into a Rust type, with a measured accuracy",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/extraction"),
    },
    Example {
        name: "code-reviewer",
        summary: "a diff reviewed hunk by hunk in a batch",
        files: include_dir!("$CARGO_MANIFEST_DIR/../../examples/code-reviewer"),
    },
];

impl Example {
    /// Returns the example with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        EXAMPLES.iter().find(|example| example.name == name)
    }

    /// Returns the text files of the example with their paths in its folder, sorted.
    pub fn files(&'static self) -> Vec<(&'static Path, &'static str)> {
        let mut files = Vec::new();
        collect(&self.files, &mut files);
        files.sort();
        files
    }
}

fn collect<'a>(dir: &'a Dir<'_>, into: &mut Vec<(&'a Path, &'a str)>) {
    into.extend(dir.files().filter_map(|file| Some((file.path(), file.contents_utf8()?))));
    dir.dirs().filter(|dir| !dir.path().ends_with("target")).for_each(|dir| collect(dir, into));
}

/// An agent for benchmarks: its name, and the text of its two files.
pub struct BenchAgent {
    name: &'static str,
    cargo_toml: &'static str,
    lib_rs: &'static str,
}

/// An agent that does no inference, to measure everything else.
pub static NOOP: BenchAgent = BenchAgent {
    name: "noop",
    cargo_toml: include_str!("../templates/noop/Cargo.toml.in"),
    lib_rs: include_str!("../templates/noop/lib.rs.in"),
};

/// An agent that takes all it can get.
pub static HOSTILE: BenchAgent = BenchAgent {
    name: "hostile",
    cargo_toml: include_str!("../templates/hostile/Cargo.toml.in"),
    lib_rs: include_str!("../templates/hostile/lib.rs.in"),
};

/// An agent that does one of everything that has an effect outside.
pub static STORM: BenchAgent = BenchAgent {
    name: "storm",
    cargo_toml: include_str!("../templates/storm/Cargo.toml.in"),
    lib_rs: include_str!("../templates/storm/lib.rs.in"),
};

/// Manifest that makes the unpacked folders one workspace, with the example in it.
const WORKSPACE: &str =
    "[workspace]\nresolver = \"3\"\nmembers = [\"examples/*\"]\nexclude = [\"guest-sdk\"]\n";

/// Folders with the SDK, the WIT and the examples, laid out as in the project's repository.
#[derive(Debug, Clone)]
pub struct SourceTree {
    root: PathBuf,
}

impl SourceTree {
    /// Returns the checkout that this binary was built from, if it still exists, and otherwise the embedded
    /// copy, which is unpacked once.
    pub fn locate() -> Result<Self> {
        if let Some(checkout) = checkout() {
            return Ok(Self { root: checkout });
        }
        unpack(&paths::cache_subdir("sdk")?)
    }

    /// Returns the folder of `skep-sdk`.
    pub fn sdk(&self) -> PathBuf {
        self.root.join("guest-sdk")
    }

    /// Returns the folder of the example that `skep demo` talks to.
    pub fn demo(&self) -> PathBuf {
        self.root.join("examples").join(DEMO)
    }
}

/// Returns the relative path from a folder to the SDK, if both are in the checkout that this binary was built
/// from.
pub fn sdk_beside(folder: &Path) -> Option<PathBuf> {
    let root = checkout()?;
    let inside = std::path::absolute(folder).ok()?;
    // The folder itself may not exist yet, but one of its ancestors does.
    let above = inside.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let (above, real) = above?;
    let inside = real.join(inside.strip_prefix(above).ok()?);
    let depth = inside.strip_prefix(&root).ok()?.components().count();
    Some(std::iter::repeat_n("..", depth).collect::<PathBuf>().join("guest-sdk"))
}

/// Returns the files of the WIT package of agents: the one that names the package first, so that all of them one after
/// the other are a document, and the others in the order of their names.
pub fn wit() -> Vec<(&'static str, &'static str)> {
    let package = WIT.get_dir("skep-agent").into_iter().flat_map(Dir::files);
    let mut files: Vec<_> = package
        .filter_map(|file| Some((file.path().file_name()?.to_str()?, file.contents_utf8()?)))
        .filter(|(name, _)| name.ends_with(".wit"))
        .collect();
    let names_package = |text: &str| text.lines().any(|line| line.starts_with("package "));
    files.sort_by_key(|(name, text)| (!names_package(text), *name));
    files
}

/// Copies the embedded SDK, and the WIT that it is built with, into a folder. Returns the folder of the SDK.
pub fn vendor_sdk(folder: &Path) -> Result<PathBuf> {
    for (name, dir) in [("guest-sdk", &SDK), ("wit", &WIT)] {
        let target = folder.join(name);
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        dir.extract(&target).with_context(|| format!("cannot unpack into {}", target.display()))?;
    }
    Ok(folder.join("guest-sdk"))
}

/// Writes the files of a benchmark agent that depends on `tree`'s SDK, and returns its folder.
pub fn unpack_bench_agent(agent: &BenchAgent, tree: &SourceTree) -> Result<PathBuf> {
    let dir = paths::cache_subdir("bench")?.join(agent.name);
    for (path, text) in [("Cargo.toml", agent.cargo_toml), ("src/lib.rs", agent.lib_rs)] {
        write_if_changed(&dir.join(path), &text.replace("{{sdk}}", &toml_path(&tree.sdk())))?;
    }
    Ok(dir)
}

/// Returns a path as the inside of a TOML basic string.
pub fn toml_path(path: &Path) -> String {
    path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"")
}

fn checkout() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().ok()?;
    let complete = ["guest-sdk/Cargo.toml", "wit", "examples/room-service/Cargo.toml"];
    complete.iter().all(|part| root.join(part).exists()).then_some(root)
}

/// Unpacks the embedded files, once, into a folder of `parent` that is named after their content.
fn unpack(parent: &Path) -> Result<SourceTree> {
    let demo = Example::named(DEMO).context("the binary has no demo")?;
    let parts = [("guest-sdk", &SDK), ("wit", &WIT), ("examples/room-service", &demo.files)];
    let mut hasher = Sha256::new();
    hasher.update(WORKSPACE);
    for (name, dir) in parts {
        hasher.update(name);
        digest(dir, &mut hasher);
    }
    let key: String = hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let root = parent.join(key);
    let _lock = paths::lock(&parent.join("unpack.lock"), || {})?;
    if root.exists() {
        return Ok(SourceTree { root });
    }
    let work = tempfile::Builder::new().prefix("unpacking-").tempdir_in(parent)?;
    for (name, dir) in parts {
        let target = work.path().join(name);
        std::fs::create_dir_all(&target)?;
        dir.extract(&target).with_context(|| format!("cannot unpack into {}", target.display()))?;
    }
    std::fs::write(work.path().join("Cargo.toml"), WORKSPACE)?;
    std::fs::rename(work.keep(), &root)
        .with_context(|| format!("cannot put the SDK at {}", root.display()))?;
    Ok(SourceTree { root })
}

fn digest(dir: &Dir<'_>, hasher: &mut Sha256) {
    for file in dir.files() {
        hasher.update(file.path().to_string_lossy().as_bytes());
        hasher.update((file.contents().len() as u64).to_le_bytes());
        hasher.update(file.contents());
    }
    for dir in dir.dirs() {
        digest(dir, hasher);
    }
}

/// Writes a file only if its text changed, so that cargo does not build again because of a newer file time.
fn write_if_changed(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|before| before == text) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacked_tree_is_complete_and_unpacked_once() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let tree = unpack(parent.path()).expect("unpacked");
        for file in
            ["guest-sdk/macros/Cargo.toml", "wit/skep-agent/agent.wit", "examples/room-service/agent.toml"]
        {
            assert!(tree.root.join(file).is_file(), "{file}");
        }
        let mark = tree.sdk().join("mark");
        std::fs::write(&mark, b"").expect("file");
        assert_eq!(unpack(parent.path()).expect("there already").root, tree.root);
        assert!(mark.exists());
    }

    #[test]
    fn paths_survive_toml() {
        let path = Path::new(r#"C:\a "b""#);
        let text = format!("path = \"{}\"", toml_path(path));
        let table: toml::Table = toml::from_str(&text).expect("valid TOML");
        assert_eq!(table["path"].as_str(), path.to_str());
    }
}
