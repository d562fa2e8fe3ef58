//! Taking a backup of a data folder, whether or not a host is using it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use skep_store::Snapshot;

use super::{
    ARTIFACTS, BackupFile, DATABASE, FORMAT, KEY, MANIFEST, Manifest, beside, check_room, copy, digest,
    is_empty_or_absent, make_for_owner, now_ms, put_in_place,
};
use crate::progress::Progress;
use crate::server;

/// Interval between progress updates while the database is copied.
const LOOK: Duration = Duration::from_millis(200);

/// Writes a backup of the data folder `data` to the folder `to`, which must be empty or not exist.
pub async fn take(data: &Path, to: &Path, progress: &dyn Progress) -> Result<Manifest> {
    let database = server::database(data);
    if !database.try_exists().with_context(|| format!("cannot read {}", data.display()))? {
        bail!(
            "{} is not the data folder of a host: there is no {}\n  hint: `skep up` prints the folder that it uses; pass it \
             with --data",
            data.display(),
            database.display()
        );
    }
    if !is_empty_or_absent(to)? {
        bail!("{} is not empty\n  hint: choose a folder that does not exist yet", to.display());
    }
    let folder = beside(to, true, ".skep-backup-")?;
    let mut wal = database.clone().into_os_string();
    wal.push("-wal");
    let expected = length(&database) + length(Path::new(&wal));
    let beside_it = artifacts(data)?;
    let artifact_bytes: u64 = beside_it.iter().map(|path| length(path)).sum();
    check_room(folder.path(), expected + artifact_bytes)?;

    let step = progress.begin("copying", Some(expected + artifact_bytes));
    // Everything that was acknowledged before this moment is in the copy.
    let taken_at_ms = now_ms();
    let target = folder.path().join(DATABASE);
    make_for_owner(&target).with_context(|| format!("cannot write {}", target.display()))?;
    let copying = skep_store::snapshot(&database, &target);
    tokio::pin!(copying);
    let snapshot = loop {
        match tokio::time::timeout(LOOK, &mut copying).await {
            Ok(copied) => break copied?,
            Err(_) => step.advance_to(length(&target).min(expected)),
        }
    };
    let Snapshot { schema, agents, sessions, open_turns, deliveries, batches } = snapshot;
    let manifest = tokio::task::block_in_place(|| {
        let (bytes, sha256) = digest(&target)?;
        std::fs::File::open(&target).and_then(|file| file.sync_all()).context("cannot write to the disk")?;
        let mut files = vec![BackupFile { path: DATABASE.to_owned(), bytes, sha256 }];
        let mut done = bytes;
        let mut add = |from: &Path, path: String| -> Result<()> {
            let (bytes, sha256) = match copy(from, &folder.path().join(&path), u64::MAX, step.as_ref(), done)
            {
                Ok(copied) => copied,
                // A host removes compiled code that it no longer needs, and compiles it again.
                Err(_) if path.starts_with(ARTIFACTS) && !from.exists() => return Ok(()),
                Err(error) => return Err(error),
            };
            done += bytes;
            files.push(BackupFile { path, bytes, sha256 });
            Ok(())
        };
        // The key is copied after the database: it is created before anything is sealed with it, and stays.
        let key = data.join(KEY);
        if key.exists() {
            add(&key, KEY.to_owned())?;
        }
        if !beside_it.is_empty() {
            std::fs::create_dir(folder.path().join(ARTIFACTS))?;
        }
        for path in &beside_it {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            add(path, format!("{ARTIFACTS}/{name}"))?;
        }
        let manifest = Manifest {
            format: FORMAT,
            skep: env!("CARGO_PKG_VERSION").to_owned(),
            schema,
            taken_at_ms,
            agents,
            sessions,
            open_turns,
            deliveries,
            batches,
            files,
        };
        let path = folder.path().join(MANIFEST);
        let writing = || format!("cannot write {}", path.display());
        let mut file = make_for_owner(&path).with_context(writing)?;
        serde_json::to_writer_pretty(&mut file, &manifest).with_context(writing)?;
        file.sync_all().with_context(writing)?;
        put_in_place(folder, to, MANIFEST)?;
        Ok::<_, anyhow::Error>(manifest)
    })?;
    step.finish("");
    Ok(manifest)
}

/// Returns the files of compiled code.
fn artifacts(data: &Path) -> Result<Vec<PathBuf>> {
    let folder = data.join(ARTIFACTS);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", folder.display())),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", folder.display()))?;
        if entry.file_type().is_ok_and(|kind| kind.is_file()) && entry.file_name().to_str().is_some() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |found| found.len())
}
