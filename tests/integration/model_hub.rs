//! A hub of models on this machine: its routes, the storage that it redirects to, and the faults of both. Commands are
//! run against it with a cache of their own.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderName, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use futures::StreamExt as _;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Bytes that the storage sends at once.
const CHUNK: usize = 64 << 10;
/// The access token that the gated repository `gated/model` wants.
pub const TOKEN: &str = "hf_secret";

/// A hub, and the storage of its large files at another address.
pub struct ModelHub {
    pub url: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    storage_url: Mutex<String>,
    files: Mutex<HashMap<String, Arc<Vec<u8>>>>,
    /// Faults of the next answers of the storage, the first one first.
    faults: Mutex<Vec<Fault>>,
    seen: Mutex<Vec<Seen>>,
}

/// A fault of an answer of the storage.
#[derive(Clone)]
pub enum Fault {
    /// The connection is cut after this number of bytes.
    Cut(usize),
    /// The connection stays open, and nothing more comes after this number of bytes.
    Stall(usize),
    /// Other bytes come than the hub describes.
    Corrupt,
    /// Something happens after this number of bytes; then the rest comes.
    Then(usize, Arc<dyn Fn() + Send + Sync>),
}

/// A request for the contents of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub host: String,
    pub path: String,
    pub from: Option<usize>,
    pub authorized: bool,
}

impl ModelHub {
    pub fn start() -> ModelHub {
        let shared = Arc::new(Shared::default());
        let url = serve(&shared);
        *shared.storage_url.lock().unwrap() = serve(&shared);
        ModelHub { url, shared }
    }

    /// Adds or replaces a file, named `OWNER/REPO/FILE`.
    pub fn put(&self, name: &str, content: Vec<u8>) {
        self.shared.files.lock().unwrap().insert(name.to_owned(), Arc::new(content));
    }

    /// Lets the next answer of the storage go wrong.
    pub fn fail_next(&self, fault: Fault) {
        self.shared.faults.lock().unwrap().push(fault);
    }

    /// Returns the requests to the storage since the last call.
    pub fn stored_requests(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.shared.seen.lock().unwrap())
    }
}

/// Returns bytes that are not compressible and differ between seeds.
pub fn content(bytes: usize, seed: u8) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let words = (0..bytes.div_ceil(8)).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).to_le_bytes()
    });
    words.take(bytes).collect()
}

pub fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Variables that would lead the commands elsewhere.
const LEADING: [&str; 10] = [
    "HF_TOKEN",
    "HF_HOME",
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
];

/// A cache of its own, and the hub that it is filled from.
pub struct Cache {
    pub folder: tempfile::TempDir,
    pub endpoint: String,
}

impl Cache {
    pub fn of(hub: &ModelHub) -> Cache {
        Cache { folder: tempfile::tempdir().unwrap(), endpoint: hub.url.clone() }
    }

    pub fn home(&self) -> &Path {
        self.folder.path()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        for variable in LEADING {
            command.env_remove(variable);
        }
        // The user's own token must not be found.
        command.env("HOME", self.home()).env("SKEP_HOME", self.home()).env("HF_ENDPOINT", &self.endpoint);
        command.args(arguments).stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command that must succeed, and returns what it printed.
    pub fn printed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.printed(arguments)).unwrap()
    }

    /// Runs a command that must fail, and returns its error.
    pub fn error(&self, arguments: &[&str]) -> String {
        failed(&self.run(arguments))
    }

    /// Starts a pull and waits until some of the file is here; then kills it.
    pub fn kill_pull_after(&self, reference: &str, partial: &Path, bytes: u64) {
        let mut pull = self.command(&["model", "pull", reference]).stderr(Stdio::null()).spawn().unwrap();
        wait_until(|| fs::metadata(partial).is_ok_and(|file| file.len() >= bytes));
        pull.kill().unwrap();
        pull.wait().unwrap();
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn failed(output: &Output) -> String {
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}

pub fn wait_until(mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "it does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn serve(shared: &Arc<Shared>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(answer).with_state(shared.clone());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
    });
    format!("http://{address}")
}

async fn answer(State(shared): State<Arc<Shared>>, method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let path = uri.path().trim_start_matches('/').to_owned();
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if let Some(name) = path.strip_prefix("store/") {
        let host = uri
            .host()
            .map(str::to_owned)
            .or_else(|| headers.get(header::HOST).and_then(|host| host.to_str().ok()).map(str::to_owned));
        let from = headers
            .get(header::RANGE)
            .and_then(|range| range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let seen = Seen {
            host: host.unwrap_or_default(),
            path: name.to_owned(),
            from,
            authorized: bearer.is_some(),
        };
        shared.seen.lock().unwrap().push(seen);
        return stored(&shared, name, from);
    }
    let refused = |status: StatusCode, code: &'static str| {
        (status, [(HeaderName::from_static("x-error-code"), code)]).into_response()
    };
    if path.contains("gated/model") && bearer != Some(&format!("Bearer {TOKEN}")) {
        return match bearer {
            None => refused(StatusCode::UNAUTHORIZED, "GatedRepo"),
            Some(_) => refused(StatusCode::FORBIDDEN, "GatedRepo"),
        };
    }
    if let Some(rest) = path.strip_prefix("api/models/") {
        let repository = rest.split("/revision/").next().unwrap();
        let files = shared.files.lock().unwrap();
        let prefix = format!("{repository}/");
        let mut names: Vec<_> = files.keys().filter_map(|name| name.strip_prefix(&prefix)).collect();
        names.sort_unstable();
        let siblings: Vec<_> = names.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
        return match siblings.is_empty() {
            true => refused(StatusCode::UNAUTHORIZED, "RepoNotFound"),
            false => serde_json::json!({"siblings": siblings}).to_string().into_response(),
        };
    }
    let Some((repository, rest)) = path.split_once("/resolve/") else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let file = rest.split_once('/').map_or("", |(_, file)| file);
    let name = format!("{repository}/{file}");
    let Some(content) = shared.files.lock().unwrap().get(&name).cloned() else {
        return refused(StatusCode::NOT_FOUND, "EntryNotFound");
    };
    if !file.ends_with(".gguf") && !file.ends_with(".safetensors") {
        let etag = format!("\"{}\"", &sha256(&content)[..40]);
        return ([(header::ETAG, etag)], content.to_vec()).into_response();
    }
    let location = format!("{}/store/{name}", shared.storage_url.lock().unwrap());
    let mut response = (StatusCode::FOUND, [(header::LOCATION, location)]).into_response();
    if method == Method::HEAD {
        let headers = response.headers_mut();
        headers.insert("x-linked-size", content.len().into());
        headers.insert("x-linked-etag", format!("\"{}\"", sha256(&content)).parse().unwrap());
    }
    response
}

/// Sends a file of the storage from a byte on, with the next fault.
fn stored(shared: &Arc<Shared>, name: &str, from: Option<usize>) -> Response {
    let Some(content) = shared.files.lock().unwrap().get(name).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let fault = {
        let mut faults = shared.faults.lock().unwrap();
        (!faults.is_empty()).then(|| faults.remove(0))
    };
    let mut rest = content[from.unwrap_or(0).min(content.len())..].to_vec();
    if matches!(fault, Some(Fault::Corrupt)) {
        rest.iter_mut().for_each(|byte| *byte ^= 1);
    }
    let (bytes, total) = (rest.len(), content.len());
    let chunks: Vec<(usize, Bytes)> = {
        let rest = Bytes::from(rest);
        (0..bytes).step_by(CHUNK).map(|at| (at, rest.slice(at..bytes.min(at + CHUNK)))).collect()
    };
    let body = futures::stream::iter(chunks).then(move |(at, chunk)| {
        let fault = fault.clone();
        async move {
            let reached = |limit: usize| at <= limit && limit < at + CHUNK;
            match fault {
                Some(Fault::Cut(limit)) if reached(limit) => {
                    // The bytes that were sent before have to arrive first.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    Err(std::io::Error::other("the connection is cut"))
                }
                Some(Fault::Stall(limit)) if reached(limit) => std::future::pending().await,
                Some(Fault::Then(limit, happens)) if reached(limit) => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    happens();
                    Ok(chunk)
                }
                _ => Ok(chunk),
            }
        }
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, bytes.into());
    if let Some(from) = from {
        headers.insert(header::CONTENT_RANGE, format!("bytes {from}-{}/{total}", total - 1).parse().unwrap());
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    response
}
