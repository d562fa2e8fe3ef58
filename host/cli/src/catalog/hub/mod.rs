//! Models from the Hugging Face hub, named `hf:OWNER/REPO[:FILE]`.
//!
//! Files are stored in a folder for each repository, inside Skep's cache. A record of the path that a reference
//! resolved to makes later use independent of the network.

mod client;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use self::client::HubClient;
use super::ResolvedModel;
use crate::paths;
use crate::progress::Progress;

/// Small files that are pulled with a safetensors model if the repository has them.
const COMPANIONS: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Resolves `OWNER/REPO[:FILE]` to a model, and pulls it if it is not in the cache.
pub fn resolve(reference: &str, progress: &dyn Progress) -> Result<ResolvedModel> {
    let (repository, file) = parse(reference)?;
    let record = record_path(reference)?;
    let name = name_of(reference)?;
    if let Some(path) = recorded(&record) {
        return Ok(ResolvedModel { name, path });
    }
    let folder = paths::cache_subdir("hub")?.join(repository.replace('/', "--"));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let waiting = || eprintln!("  - another process is pulling {repository}; waiting for it");
    let _lock = paths::lock(&folder.with_extension("lock"), waiting)?;
    let hub = HubClient::from_environment()?;
    let path = on_its_own_thread(pull(&hub, repository, file, &folder, progress))?;
    std::fs::write(&record, format!("hf:{reference}\n{}\n", path.display()))
        .with_context(|| format!("cannot write {}", record.display()))?;
    Ok(ResolvedModel { name, path })
}

/// Returns the name that requests use for the model `OWNER/REPO[:FILE]`.
pub fn name_of(reference: &str) -> Result<String> {
    let (repository, file) = parse(reference)?;
    let name = file.map_or(repository, |file| file.trim_end_matches(".gguf"));
    Ok(name.rsplit('/').next().unwrap_or(name).to_owned())
}

/// Returns the references that were pulled before, with their paths.
pub fn pulled() -> Result<Vec<ResolvedModel>> {
    let Ok(entries) = std::fs::read_dir(paths::cache_dir()?.join("hub/resolved")) else {
        return Ok(Vec::new());
    };
    let mut models: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            let path = recorded(&entry.path())?;
            let text = std::fs::read_to_string(entry.path()).ok()?;
            Some(ResolvedModel { name: text.lines().next()?.to_owned(), path })
        })
        .collect();
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// The files of a repository that have to be pulled.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// One file that is the whole model.
    Single(String),
    /// A folder of weights with their companions.
    Folder(Vec<String>),
}

fn parse(reference: &str) -> Result<(&str, Option<&str>)> {
    let (repository, file) = match reference.split_once(':') {
        Some((repository, file)) => (repository, Some(file)),
        None => (reference, None),
    };
    let parts: Vec<_> = repository.split('/').collect();
    let sound = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', '\0']);
    let file_sound = file.is_none_or(|file| file.split('/').all(sound));
    if parts.len() != 2 || !parts.iter().all(|part| sound(part)) || !file_sound {
        bail!("\"hf:{reference}\" is not of the form hf:OWNER/REPO or hf:OWNER/REPO:FILE");
    }
    Ok((repository, file))
}

fn choose(repository: &str, files: &[String]) -> Result<Choice> {
    let ggufs: Vec<_> = files.iter().filter(|file| file.ends_with(".gguf")).cloned().collect();
    if let [only] = ggufs.as_slice() {
        return Ok(Choice::Single(only.clone()));
    }
    let weights = files.iter().filter(|file| file.ends_with(".safetensors") && !file.contains('/'));
    let companions = files.iter().filter(|file| COMPANIONS.contains(&file.as_str()));
    let folder: Vec<_> = companions.chain(weights).cloned().collect();
    if folder.iter().any(|file| file.ends_with(".safetensors"))
        && folder.iter().any(|file| file == "config.json")
    {
        return Ok(Choice::Folder(folder));
    }
    if ggufs.is_empty() {
        bail!("the model {repository} has neither a .gguf file nor safetensors with a config.json");
    }
    bail!(
        "the model {repository} has several .gguf files\n  hint: choose one with hf:{repository}:FILE, where FILE is one of {}",
        ggufs.join(", ")
    )
}

/// Pulls a model into `folder` and returns its path: a file, or the folder itself.
async fn pull(
    hub: &HubClient,
    repository: &str,
    file: Option<&str>,
    folder: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf> {
    let choice = match file {
        Some(file) => Choice::Single(file.to_owned()),
        None => {
            let files = hub.files(repository).await;
            choose(
                repository,
                &files.with_context(|| format!("cannot list the files of {repository} on the hub"))?,
            )?
        }
    };
    let (files, path) = match &choice {
        Choice::Single(file) => (std::slice::from_ref(file), folder.join(file)),
        Choice::Folder(files) => (files.as_slice(), folder.to_owned()),
    };
    for file in files {
        let target = folder.join(file);
        if target.exists() {
            continue;
        }
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        let begin = |bytes| progress.begin(&format!("downloading {file}"), Some(bytes));
        let downloaded = hub.download(repository, file, &target, begin).await;
        downloaded.with_context(|| format!("cannot download {file} from the hub"))?;
    }
    Ok(path)
}

/// Runs `work` to its end on a new thread, because the caller may be on a thread that must not block.
fn on_its_own_thread<T: Send>(work: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::scope(|scope| scope.spawn(|| runtime.block_on(work)).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn record_path(reference: &str) -> Result<PathBuf> {
    Ok(paths::cache_subdir("hub/resolved")?.join(reference.replace(['/', ':'], "--")))
}

fn recorded(record: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(record).ok()?;
    let path = PathBuf::from(text.lines().nth(1)?);
    path.exists().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_is_owner_repository_and_perhaps_a_file() {
        assert_eq!(parse("a/b").expect("well formed"), ("a/b", None));
        assert_eq!(parse("a/b:c/d.gguf").expect("well formed"), ("a/b", Some("c/d.gguf")));
        for bad in ["", "a", "a/b/c", "../b", "a/b:", "a/b:../c"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn single_gguf_wins_and_several_must_be_chosen_from() {
        let files = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            choose("a/b", &files(&["m.gguf", "README.md"])).expect("one"),
            Choice::Single("m.gguf".into())
        );
        let error = choose("a/b", &files(&["m-q4.gguf", "m-q8.gguf"])).expect_err("two").to_string();
        assert!(error.contains("hf:a/b:FILE") && error.contains("m-q8.gguf"), "{error}");
        let folder = choose("a/b", &files(&["config.json", "model.safetensors", "onnx/x.safetensors"]))
            .expect("folder");
        assert_eq!(folder, Choice::Folder(files(&["config.json", "model.safetensors"])));
        assert!(choose("a/b", &files(&["README.md"])).is_err());
    }
}
