//! Detects changes in the source of an agent, for `skep up --watch`.
//!
//! Notifications of the file system only trigger a check. Whether anything is different is decided by the
//! contents (`snapshot`), so that a build that writes into its own folder, or an editor that saves the same
//! text again, is not a change.

mod snapshot;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;

use snapshot::{Snapshot, Sources};

/// A change is reported when nothing has followed it for this long: editors and version control write several
/// files.
const QUIET: Duration = Duration::from_millis(80);
/// Maximum time between two checks of a folder that is written to all the time.
const MAX_UNQUIET: Duration = Duration::from_secs(2);

/// The sources of several agents.
pub struct SourceWatch {
    agents: Vec<Watched>,
    watcher: RecommendedWatcher,
    /// Folders that the file system reports on; folders of builds are not among them.
    watched_dirs: HashSet<PathBuf>,
    touched: Arc<Touched>,
}

/// An agent whose source differs from what was last reported.
pub struct Change {
    /// The path as it was given.
    pub path: PathBuf,
    /// Time when the first of the changes was reported.
    pub since: Instant,
}

struct Watched {
    path: PathBuf,
    sources: Sources,
    last: Snapshot,
}

/// Agents that were reported and not checked yet. There are no more entries than agents.
#[derive(Default)]
struct Touched {
    agents: Mutex<BTreeMap<usize, Instant>>,
    woken: Notify,
}

impl SourceWatch {
    /// Starts watching: whatever changes from here on is a change.
    pub fn new(paths: &[PathBuf]) -> Result<Self> {
        let mut agents = Vec::with_capacity(paths.len());
        for path in paths {
            let sources = Sources::find(path)?;
            agents.push(Watched { path: path.clone(), last: sources.scan()?, sources });
        }
        let touched = Arc::new(Touched::default());
        let (reported, roots) = (touched.clone(), roots(&agents));
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            reported.take(&roots, event);
        });
        let watcher = watcher.context("the file system does not report changes")?;
        let mut watch = SourceWatch { agents, watcher, watched_dirs: HashSet::new(), touched };
        for index in 0..watch.agents.len() {
            watch.look_at(index)?;
        }
        Ok(watch)
    }

    /// Waits until sources have changed and nothing has followed for a while.
    pub async fn changes(&mut self) -> Result<Vec<Change>> {
        loop {
            self.touched.woken.notified().await;
            let deadline = tokio::time::Instant::now() + MAX_UNQUIET;
            while tokio::time::timeout(QUIET, self.touched.woken.notified()).await.is_ok() {
                if tokio::time::Instant::now() >= deadline {
                    break;
                }
            }
            let touched = std::mem::take(&mut *self.touched.lock());
            let mut changes = Vec::new();
            for (index, since) in touched {
                if self.look_at(index)? {
                    changes.push(Change { path: self.agents[index].path.clone(), since });
                }
            }
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    /// Returns whether the agent's source has changed. New folders are watched from here on.
    fn look_at(&mut self, index: usize) -> Result<bool> {
        let agent = &mut self.agents[index];
        let mut now = agent.sources.scan()?;
        // Files that came into a new folder before it was watched are not reported, so it is scanned once
        // more.
        while watch_dirs(&mut self.watcher, &mut self.watched_dirs, &now.dirs) {
            now = agent.sources.scan()?;
        }
        let has_changed = now.digest != agent.last.digest;
        agent.last = now;
        Ok(has_changed)
    }
}

impl Touched {
    /// Records an event; called by the watcher's own thread.
    fn take(&self, roots: &[PathBuf], event: notify::Result<notify::Event>) {
        let touched: Vec<usize> = match event {
            // Reading changes nothing.
            Ok(event) if matches!(event.kind, EventKind::Access(_)) => return,
            Ok(event) => (0..roots.len())
                .filter(|index| {
                    event.need_rescan() || event.paths.iter().any(|path| path.starts_with(&roots[*index]))
                })
                .collect(),
            // Some events were lost, so all agents have to be checked.
            Err(_) => (0..roots.len()).collect(),
        };
        if touched.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut agents = self.lock();
        for index in touched {
            agents.entry(index).or_insert(now);
        }
        self.woken.notify_one();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Instant>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn roots(agents: &[Watched]) -> Vec<PathBuf> {
    agents.iter().map(|agent| agent.sources.root().to_path_buf()).collect()
}

/// Watches the folders, and returns whether any of them was not watched yet.
fn watch_dirs(watcher: &mut RecommendedWatcher, watched: &mut HashSet<PathBuf>, dirs: &[PathBuf]) -> bool {
    let mut any = false;
    for dir in dirs {
        // A folder that is already gone is not watched.
        if !watched.contains(dir) && watch_dir(watcher, dir) {
            watched.insert(dir.clone());
            any = true;
        }
    }
    any
}

fn watch_dir(watcher: &mut RecommendedWatcher, dir: &Path) -> bool {
    match watcher.watch(dir, RecursiveMode::NonRecursive) {
        Ok(()) => true,
        Err(error) => {
            if dir.is_dir() {
                tracing::warn!("cannot watch {} for changes: {error}", dir.display());
            }
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits far longer than a change takes, so that a missed change fails the test.
    async fn within<T>(future: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(30), future).await.expect("the change is seen within 30 s")
    }

    #[tokio::test]
    async fn only_the_agent_that_changed_is_reported_and_builds_are_not_changes() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        for agent in [&first, &second] {
            std::fs::create_dir_all(agent.join("src")).expect("folder");
            std::fs::write(agent.join("agent.toml"), "name = \"x\"").expect("file");
            std::fs::write(agent.join("src/lib.rs"), "one").expect("file");
        }
        let mut watch = SourceWatch::new(&[first.clone(), second.clone()]).expect("folders");

        std::fs::create_dir_all(first.join("target/debug")).expect("folder");
        std::fs::write(first.join("target/debug/out"), "built").expect("file");
        std::fs::write(first.join("src/lib.rs"), "one").expect("the same text again");
        std::fs::write(second.join("src/lib.rs"), "two").expect("file");
        let changes = within(watch.changes()).await.expect("readable");
        assert_eq!(changes.iter().map(|change| &change.path).collect::<Vec<_>>(), [&second]);

        std::fs::create_dir_all(first.join("src/new/deeper")).expect("folder");
        std::fs::write(first.join("src/new/deeper/mod.rs"), "new").expect("file");
        let changes = within(watch.changes()).await.expect("readable");
        assert_eq!(changes.iter().map(|change| &change.path).collect::<Vec<_>>(), [&first]);
        std::fs::write(first.join("src/new/deeper/mod.rs"), "changed").expect("a file in a new folder");
        let changes = within(watch.changes()).await.expect("readable");
        assert_eq!(changes.iter().map(|change| &change.path).collect::<Vec<_>>(), [&first]);
    }
}
