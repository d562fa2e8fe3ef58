//! The files of the console and the guides, embedded and compressed once, or read from a folder.

use super::ConsoleOptions;
use axum::body::Bytes;
use flate2::{Compression, write::GzEncoder};
use include_dir::{Dir, include_dir};
use serde_json::json;
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    path::{Component, Path},
    sync::LazyLock,
};

pub(super) const INDEX: &str = "index.html";
/// The list of the guides.
const GUIDES: &str = "guides/index.json";
/// Maximum size of a file that is read from a folder.
const MAX_BYTES: u64 = 4 << 20;

static UI: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/ui");
static GUIDE_FOLDERS: [(&str, Dir<'_>); 2] = [
    ("host", include_dir!("$CARGO_MANIFEST_DIR/../guide")),
    ("sdk", include_dir!("$CARGO_MANIFEST_DIR/../../guest-sdk/guide")),
];

/// The embedded files by path.
static EMBEDDED: LazyLock<HashMap<String, Asset>> = LazyLock::new(embedded);

/// A file as it is sent.
#[derive(Clone)]
pub(super) struct Asset {
    pub(super) kind: &'static str,
    pub(super) etag: String,
    pub(super) plain: Bytes,
    /// The compressed form, if it is smaller.
    pub(super) gzip: Option<Bytes>,
}

/// Returns a file of the console by its path below `/ui/`.
pub(super) fn find(console: &ConsoleOptions, path: &str) -> Option<Asset> {
    match console {
        ConsoleOptions::Off => None,
        ConsoleOptions::Folder(folder) if !path.starts_with("guides/") => read(folder, path),
        ConsoleOptions::Folder(_) | ConsoleOptions::Embedded => EMBEDDED.get(path).cloned(),
    }
}

/// Reads a file below the folder.
fn read(folder: &Path, path: &str) -> Option<Asset> {
    let path = Path::new(path);
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    let file = folder.join(path);
    let is_read = is_plain && file.metadata().is_ok_and(|found| found.is_file() && found.len() <= MAX_BYTES);
    let bytes = is_read.then(|| std::fs::read(&file).ok()).flatten()?;
    Some(asset(kind(path)?, bytes.into()))
}

fn embedded() -> HashMap<String, Asset> {
    let mut assets = HashMap::new();
    let mut guides = Vec::new();
    let mut pending = vec![&UI];
    while let Some(folder) = pending.pop() {
        pending.extend(folder.dirs());
        for file in folder.files() {
            if let (Some(path), Some(kind)) = (file.path().to_str(), kind(file.path())) {
                assets.insert(path.to_owned(), asset(kind, Bytes::from_static(file.contents())));
            }
        }
    }
    for (set, folder) in &GUIDE_FOLDERS {
        for file in folder.files() {
            let (Some(path), Some(kind)) = (file.path().to_str(), kind(file.path())) else { continue };
            if let Some(page) = path.strip_suffix(".md") {
                let text = file.contents_utf8().unwrap_or_default();
                let title = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or(page);
                guides.push((format!("{set}/{page}"), title.to_owned()));
            }
            assets.insert(format!("guides/{set}/{path}"), asset(kind, Bytes::from_static(file.contents())));
        }
    }
    guides.sort();
    let list: Vec<_> = guides.iter().map(|(id, title)| json!({"id": id, "title": title})).collect();
    assets.insert(GUIDES.to_owned(), asset("application/json", json!(list).to_string().into()));
    assets
}

/// Returns the media type of a file. Files of other types are not served.
fn kind(path: &Path) -> Option<&'static str> {
    Some(match path.extension()?.to_str()? {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "md" => "text/markdown; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        _ => return None,
    })
}

fn asset(kind: &'static str, plain: Bytes) -> Asset {
    let mut hasher = DefaultHasher::new();
    plain.hash(&mut hasher);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let written = encoder.write_all(&plain).and_then(|()| encoder.finish());
    let gzip = written.ok().filter(|gzip| gzip.len() < plain.len()).map(Bytes::from);
    Asset { kind, etag: format!("\"{:016x}\"", hasher.finish()), plain, gzip }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_files_are_small_and_complete() {
        let size = |asset: &Asset| asset.gzip.as_ref().map_or(asset.plain.len(), Bytes::len);
        let is_guide = |path: &String| path.starts_with("guides/");
        let bytes: usize =
            EMBEDDED.iter().filter(|(path, _)| !is_guide(path)).map(|(_, asset)| size(asset)).sum();
        assert!(bytes < 300 << 10, "the console has {bytes} bytes compressed");
        for path in [INDEX, "app.js", GUIDES, "guides/host/README.md", "guides/sdk/README.md"] {
            assert!(EMBEDDED.contains_key(path), "{path}");
        }
        assert!(
            !EMBEDDED[INDEX].plain.windows(7).any(|text| text == b"onclick"),
            "the policy forbids inline scripts"
        );
    }

    #[test]
    fn a_folder_gives_only_files_below_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("ui")).unwrap();
        std::fs::write(folder.path().join("ui/app.js"), "1").unwrap();
        std::fs::write(folder.path().join("secret.js"), "2").unwrap();
        std::fs::write(folder.path().join("ui/key.pem"), "3").unwrap();
        let ui = folder.path().join("ui");
        assert!(read(&ui, "app.js").is_some());
        let absolute = folder.path().join("secret.js");
        for path in ["../secret.js", "key.pem", "", "none.js", absolute.to_str().unwrap()] {
            assert!(read(&ui, path).is_none(), "{path}");
        }
    }
}
