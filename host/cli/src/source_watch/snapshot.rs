//! The files in an agent's folder that are its source, and a digest of them.
//!
//! Files that tools make are not source: hidden files, the folders of builds and of installed packages, and
//! the component that a build command writes.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use skep_runtime::Manifest;

/// Folders with files that tools made.
const MADE: [&str; 6] = ["target", "node_modules", "__pycache__", "venv", "dist", "build"];
const MAX_FILES: usize = 20_000;
/// Larger files are compared by length and time.
const MAX_READ_BYTES: u64 = 1 << 20;

/// Location of an agent's source.
#[derive(Debug, Clone)]
pub(super) enum Sources {
    /// A folder with an `agent.toml`.
    Folder(PathBuf),
    /// A component, and the `agent.toml` beside it.
    File(PathBuf),
}

/// State of the source at one time.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) digest: u64,
    /// All folders in which a change may matter.
    pub(super) dirs: Vec<PathBuf>,
}

impl Sources {
    /// Finds out whether a path is the folder of an agent or a component, and makes it absolute.
    pub(super) fn find(path: &Path) -> Result<Self> {
        let path = path.canonicalize().with_context(|| format!("cannot watch {}", path.display()))?;
        Ok(if path.is_dir() { Sources::Folder(path) } else { Sources::File(path) })
    }

    /// Returns the folder that contains all changes.
    pub(super) fn root(&self) -> &Path {
        match self {
            Sources::Folder(dir) => dir,
            Sources::File(path) => path.parent().unwrap_or(path),
        }
    }

    /// Computes the digest of the source files, and lists their folders.
    pub(super) fn scan(&self) -> Result<Snapshot> {
        let mut scan = Scan { hasher: DefaultHasher::new(), dirs: Vec::new(), files: 0, except: None };
        match self {
            Sources::Folder(dir) => {
                let component = component_of(dir);
                match component {
                    Some(Component::Built(path)) => scan.except = Some(path),
                    Some(Component::Given(path)) => scan.file(&path),
                    None => {}
                }
                scan.folder(dir)?;
            }
            Sources::File(path) => {
                scan.dirs.push(self.root().to_path_buf());
                scan.file(path);
                scan.file(&path.with_file_name("agent.toml"));
            }
        }
        Ok(Snapshot { digest: scan.hasher.finish(), dirs: scan.dirs })
    }
}

/// The component that the manifest names.
enum Component {
    /// Made by the manifest's own command.
    Built(PathBuf),
    /// Made by somebody else; it is source, wherever it is.
    Given(PathBuf),
}

/// Returns the component in the manifest. A manifest that cannot be read counts as a change like others: the
/// build that follows reports what is wrong.
fn component_of(dir: &Path) -> Option<Component> {
    let manifest = std::fs::read_to_string(dir.join("agent.toml")).ok()?;
    let manifest = Manifest::from_toml(&manifest).ok()?;
    let path = dir.join(manifest.component?);
    Some(if manifest.build.is_some() { Component::Built(path) } else { Component::Given(path) })
}

struct Scan {
    hasher: DefaultHasher,
    dirs: Vec<PathBuf>,
    files: usize,
    except: Option<PathBuf>,
}

impl Scan {
    fn folder(&mut self, dir: &Path) -> Result<()> {
        self.dirs.push(dir.to_path_buf());
        // A folder that is gone by now is not in the digest either.
        let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort_unstable();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') || name.ends_with('~') || self.except.as_ref() == Some(&path) {
                continue;
            }
            // A link to a folder could lead to a cycle.
            if path.is_dir() && !path.is_symlink() {
                if !MADE.contains(&&*name) {
                    self.folder(&path)?;
                }
                continue;
            }
            self.files += 1;
            if self.files > MAX_FILES {
                bail!(
                    "{} has more than {MAX_FILES} files; pass the folder of the agent alone",
                    dir.display()
                );
            }
            self.file(&path);
        }
        Ok(())
    }

    fn file(&mut self, path: &Path) {
        path.hash(&mut self.hasher);
        let Ok(metadata) = path.metadata() else { return 0.hash(&mut self.hasher) };
        metadata.len().hash(&mut self.hasher);
        if metadata.len() > MAX_READ_BYTES {
            metadata.modified().ok().hash(&mut self.hasher);
        } else {
            std::fs::read(path).ok().hash(&mut self.hasher);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_output_is_not_source_but_a_given_component_is() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("in a folder")).expect("folder");
            std::fs::write(path, text).expect("file");
        };
        let digest = || Sources::find(dir.path()).expect("a folder").scan().expect("few files").digest;
        let differs = |name: &str, text: &str| {
            let before = digest();
            write(name, text);
            before != digest()
        };
        write("agent.toml", "name = \"x\"\ncomponent = \"out.wasm\"\n[build]\ncommand = \"make\"");
        for made in [".git/HEAD", "node_modules/a/index.js", "target/x", "app.py~", "out.wasm"] {
            assert!(!differs(made, "one"), "{made}");
        }
        for source in ["src/lib.rs", "app.py", "agent.toml"] {
            assert!(differs(source, "name = \"x\""), "{source}");
            assert!(!differs(source, "name = \"x\""), "{source}");
            assert!(differs(source, "name = \"y\""), "{source}");
        }
        write("agent.toml", "name = \"x\"\ncomponent = \"target/out.wasm\"");
        assert!(differs("target/out.wasm", "two"));
    }
}
