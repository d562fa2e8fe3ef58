//! Models from the Hugging Face hub, named `hf:OWNER/REPO[@REVISION][:FILE]`.
//!
//! Files are stored in a folder for each repository, inside Skep's cache. A record of the path that a reference
//! resolved to makes later use independent of the network.

mod choice;
mod client;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use self::choice::{Choice, choose};
use self::client::{Description, HubClient, RemoteFile};
use super::entry::CatalogEntry;
use super::record::{self, Record, Source, StoredFile};
use super::reference::{HubReference, Reference};
use super::{checksum, locked, space};
use crate::paths;
use crate::progress::Progress;

const DEFAULT_REVISION: &str = "main";
const CONFIGURATION: &str = "config.json";

/// Pulls a model and records it. The entry, if there is one, says what the file has to be.
pub fn pull(
    hub: &HubReference,
    name: &str,
    entry: Option<&CatalogEntry>,
    progress: &dyn Progress,
) -> Result<Record> {
    let reference = Reference::Hub(hub.clone());
    let folder = paths::cache_subdir(Source::Hub.folder_name())?.join(folder_name(hub));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let _lock = locked(&folder, &hub.repository)?;
    if let Some(record) = record::find(&reference)? {
        return Ok(record);
    }
    let client = HubClient::from_environment()?;
    let (path, files) = on_its_own_thread(receive(&client, hub, name, entry, &folder, progress))?;
    let record = Record { reference: record::key(&reference), path, files };
    record::write(&reference, &record)?;
    Ok(record)
}

/// Returns the path of the config.json of a repository, which is pulled without the weights.
pub fn configuration(hub: &HubReference, progress: &dyn Progress) -> Result<PathBuf> {
    let repository = &hub.repository;
    if let Some(file) = &hub.file {
        bail!(
            "{file} of {repository} is not in the cache, and only config.json can be read without the weights\n  hint: pull \
             the file first with `skep model pull`, or name a repository that has a config.json: hf:OWNER/REPO"
        );
    }
    let revision = hub.revision.as_deref().unwrap_or(DEFAULT_REVISION);
    let path = paths::cache_subdir("hub/configurations")?.join(format!("{}.json", folder_name(hub)));
    if !path.exists() {
        let client = HubClient::from_environment()?;
        let remote = RemoteFile { repository, revision, name: CONFIGURATION };
        let received = on_its_own_thread(async {
            let described = client.describe(remote).await?;
            let step =
                progress.begin(&format!("downloading config.json of {repository}"), Some(described.bytes));
            let advance = |received: u64| step.advance_to(received);
            client.download(remote, &described, &path, &advance, &|| {}).await?;
            step.finish("");
            Ok(())
        });
        received.with_context(|| {
            format!(
                "cannot download config.json of {repository} from the hub\n  hint: give the path of a config.json"
            )
        })?;
    }
    Ok(path)
}

/// A file that belongs to a pull.
struct Wanted {
    name: String,
    target: PathBuf,
    described: Description,
    is_here: bool,
}

/// Receives all files of a model into `folder`, and returns the path of the model and its files.
async fn receive(
    client: &HubClient,
    hub: &HubReference,
    name: &str,
    entry: Option<&CatalogEntry>,
    folder: &Path,
    progress: &dyn Progress,
) -> Result<(PathBuf, Vec<StoredFile>)> {
    let revision = hub.revision.as_deref().unwrap_or(DEFAULT_REVISION);
    let choice = match &hub.file {
        Some(file) => Choice::of_file(file)?,
        None => {
            let files = client.files(&hub.repository, revision).await;
            choose(
                &hub.repository,
                &files.with_context(|| format!("cannot list the files of {} on the hub", hub.repository))?,
            )?
        }
    };
    let mut wanted = Vec::new();
    for name in choice.files() {
        let remote = RemoteFile { repository: &hub.repository, revision, name };
        let described = client.describe(remote).await;
        let described = described.with_context(|| format!("cannot download {name} from the hub"))?;
        let target = folder.join(name);
        let is_here = std::fs::metadata(&target).is_ok_and(|here| here.len() == described.bytes);
        wanted.push(Wanted { name: name.clone(), target, described, is_here });
    }
    if let (Some(entry), [only]) = (entry, wanted.as_slice()) {
        require_expected(entry, &only.described)?;
    }
    let total: u64 = wanted.iter().map(|file| file.described.bytes).sum();
    let lacking = wanted.iter().filter(|file| !file.is_here);
    let lacking: u64 =
        lacking.map(|file| file.described.bytes - client::resumable(&file.target, &file.described)).sum();
    space::require(folder, lacking, name)?;
    let step = progress.begin(&format!("downloading {name}"), Some(total));
    let (mut done, mut files) = (0, Vec::new());
    for Wanted { name, target, described: mut expected, is_here } in wanted {
        if let Some(digest) = entry.and_then(|entry| entry.file.sha256.clone()) {
            // Only entries with one file have a digest.
            expected.sha256 = Some(digest);
        }
        let is_here = is_here && {
            step.note(&format!("checking {name}"));
            let digest = expected.sha256.as_ref();
            digest.is_none_or(|digest| checksum::verify(&target, expected.bytes, digest).is_ok())
        };
        if !is_here {
            if let Some(parent) = target.parent() {
                std::fs::create_dir_all(parent)?;
            }
            let remote = RemoteFile { repository: &hub.repository, revision, name: &name };
            let advance = |received: u64| step.advance_to(done + received);
            let checking = || step.note(&format!("checking {name}"));
            let downloaded = client.download(remote, &expected, &target, &advance, &checking).await;
            downloaded.with_context(|| format!("cannot download {name} from the hub"))?;
        }
        done += expected.bytes;
        step.advance_to(done);
        files.push(StoredFile { path: target, bytes: expected.bytes, sha256: expected.sha256 });
    }
    step.finish(&indicatif::HumanBytes(total).to_string());
    let path = match &choice {
        Choice::Files(names) => names.first().map(|first| folder.join(first)).context("a model has files")?,
        Choice::Folder(_) => folder.to_owned(),
    };
    Ok((path, files))
}

/// Returns an error if the hub has another file than the catalog expects.
fn require_expected(entry: &CatalogEntry, described: &Description) -> Result<()> {
    let bytes_differ = entry.file.bytes.is_some_and(|bytes| bytes != described.bytes);
    let digest_differs = match (&entry.file.sha256, &described.sha256) {
        (Some(expected), Some(stated)) => expected != stated,
        _ => false,
    };
    if bytes_differ || digest_differs {
        bail!(
            "the hub has another file for {} than the catalog expects: {} bytes with the SHA-256 {}\n  hint: check \
             HF_ENDPOINT; hf:OWNER/REPO:FILE takes the file that the hub has now",
            entry.name,
            described.bytes,
            described.sha256.as_deref().unwrap_or("unknown")
        );
    }
    Ok(())
}

/// Returns the name of the folder of a repository in one revision.
fn folder_name(hub: &HubReference) -> String {
    let repository = hub.repository.replace('/', "--");
    match &hub.revision {
        Some(revision) => format!("{repository}@{revision}"),
        None => repository,
    }
}

/// Runs `work` to its end on a new thread, because the caller may be on a thread that must not block.
fn on_its_own_thread<T: Send>(work: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::scope(|scope| scope.spawn(|| runtime.block_on(work)).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
