//! Hosts for tests: one shared host, separate hosts for tests that restart or overload one, and a small
//! client.
//!
//! A host runs in a runtime on its own thread, because a test's runtime is shut down with the test.

use serde_json::{Value, json};
use skep_cli::{
    agent_source::AgentSource,
    catalog, guest_build,
    progress::Silent,
    server,
    server_options::{DataDir, ServerOptions},
};
use skep_model::ExecutorOptions;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Child,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

pub const MODEL: &str = "smollm2-135m";

/// Reports that a test is skipped because something is missing on this machine. With `SKEP_REQUIRE=all` this
/// is a failure.
pub fn skipped(why: &str) {
    assert!(std::env::var_os("SKEP_REQUIRE").is_none_or(|what| what != "all"), "{why}");
    note_skip(why);
}

/// Prints why the test of this thread is skipped, and adds a line to `skipped.txt` in the folder of the tests, because nobody
/// sees what a test that passes prints. `.ci/run` shows the file.
fn note_skip(why: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {}\n", thread.name().unwrap_or("a test"), why.lines().next().unwrap_or_default());
    eprint!("skipped: {line}");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("skipped.txt");
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
    // One write, so that the lines of tests that run at the same time stay whole.
    file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes())).unwrap();
}

/// Programs and libraries that even the machine of `.ci/run` may lack, as it may lack a GPU: they need root and a service of the
/// system, come from the system's packages, or `SKEP_LLAMA_SERVER` has to name them.
const OPTIONAL: [&str; 6] = ["libibverbs", "llama-server", "mount", "pgbouncer", "podman", "systemd-analyze"];

/// Reports that a test is skipped because something among [`OPTIONAL`] is missing or does not work, which is never a failure.
pub fn skipped_without(program: &str) {
    assert!(OPTIONAL.contains(&program), "{program} is required");
    note_skip(&format!("{program} does not work on this machine"));
}

/// A running host.
pub struct Host {
    pub url: String,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Host {
    /// Starts a host whose data lives in `data`, or in memory.
    pub fn start(data: Option<&Path>) -> Host {
        Host::start_with(Host::options(data))
    }

    pub fn options(data: Option<&Path>) -> ServerOptions {
        ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            data: data.map_or(DataDir::InMemory, |path| DataDir::Path(path.to_owned())),
            model: model_path().to_str().unwrap().to_owned(),
            // The expected results of the default model were computed on the CPU.
            executor: ExecutorOptions::default(),
            ..ServerOptions::default()
        }
    }

    pub fn start_with(options: ServerOptions) -> Host {
        let (started_tx, started_rx) = std::sync::mpsc::channel::<SocketAddr>();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.unwrap().block_on(async move {
                let running = server::start(options).await.expect("the host starts");
                started_tx.send(running.address).unwrap();
                let _ = stopped.await;
                running.shutdown().await;
            });
        });
        let address = started_rx.recv().expect("the host started");
        Host { url: format!("http://{address}"), stop: Some(stop), thread: Some(thread) }
    }

    /// Refers to a host that runs in a separate process.
    pub fn elsewhere(url: String) -> Host {
        Host { url, stop: None, thread: None }
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(client().get(self.at(path)).send().await.unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> (u16, Value) {
        answer(client().delete(self.at(path)).send().await.unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        answer(client().post(self.at(path)).json(&body).send().await.unwrap()).await
    }

    /// Posts a request and expects 200.
    pub async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Posts a request and returns the events of the response as (event name, data).
    pub async fn events(&self, path: &str, body: Value) -> Vec<(String, String)> {
        let request = client().post(self.at(path)).header("accept", "text/event-stream").json(&body);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        parse_events(&response.text().await.unwrap())
    }

    /// Deploys one of `tests/guests` under `name`. `extra` is appended to its manifest.
    pub async fn deploy_guest(&self, guest_name: &str, name: &str, extra: &str) -> (u16, Value) {
        let component = tokio::task::spawn_blocking({
            let guest_name = guest_name.to_owned();
            move || guest(&guest_name)
        });
        self.deploy(&format!("name = \"{name}\"\n{extra}"), component.await.unwrap().to_vec()).await
    }

    pub async fn deploy(&self, manifest: &str, component: Vec<u8>) -> (u16, Value) {
        let form = reqwest::multipart::Form::new()
            .text("manifest", manifest.to_owned())
            .part("component", reqwest::multipart::Part::bytes(component).file_name("agent.wasm"));
        answer(client().post(self.at("/v1/agents")).multipart(form).send().await.unwrap()).await
    }

    /// Builds the example in this folder of `examples` and deploys it with its manifest.
    pub async fn deploy_example(&self, folder: &str) {
        let source = example(folder).await;
        let (status, deployed) = self.deploy(&source.manifest_toml, source.component).await;
        assert_eq!(status, 201, "{deployed}");
    }

    /// Sends a message to a session.
    pub async fn message(&self, agent: &str, session: &str, text: &str) -> (u16, Value) {
        self.post(&format!("/v1/agents/{agent}/sessions/{session}/messages"), json!({"text": text})).await
    }

    pub fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// Stops the host and waits until everything is closed.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the host shuts down cleanly");
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        }
    }
}

/// Returns the host that tests share. It lives as long as the process.
pub fn shared() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::start(None))
}

pub fn client() -> reqwest::Client {
    skep_outbound::tls::install_provider();
    reqwest::Client::builder().timeout(std::time::Duration::from_secs(300)).build().unwrap()
}

/// Returns the sum of a metric in the text of `/metrics` over the series with these labels.
pub fn metric(metrics: &str, name: &str, labels: &[&str]) -> f64 {
    let series = metrics.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    });
    series.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Returns the path of the default model. The first call downloads it.
pub fn model_path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| on_plain_thread(|| catalog::resolve(MODEL, &Silent).expect("the default model").path))
}

/// Builds the example in this folder of `examples`.
pub async fn example(folder: &str) -> AgentSource {
    let folder = repository().join("examples").join(folder);
    let built = tokio::task::spawn_blocking(move || AgentSource::load(&folder, None, &Silent)).await;
    built.unwrap().unwrap_or_else(|error| panic!("{error:#}"))
}

/// Returns the component of one of `tests/guests`, built once per process. A test waits only for the guest that it needs.
pub fn guest(name: &str) -> Arc<[u8]> {
    type Component = Arc<OnceLock<Arc<[u8]>>>;
    static BUILT: Mutex<BTreeMap<String, Component>> = Mutex::new(BTreeMap::new());
    let built =
        BUILT.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_default().clone();
    let build = || {
        let target = guest_build::GuestTarget::Example(name.to_owned());
        build_guest(&repository().join("tests/guests"), target)
    };
    built.get_or_init(build).clone()
}

/// Returns the component of one of `tests/guests/components`.
pub fn text_guest(name: &str) -> Vec<u8> {
    let path = repository().join("tests/guests/components").join(name).with_extension("wat");
    wat::parse_file(path).expect("the text is WebAssembly")
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the Rust sources in a folder of the repository, in order, without what builds put there.
pub fn rust_sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !["target", "node_modules", ".venv"].iter().any(|built| path.ends_with(built)) {
                found.extend(rust_sources(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Returns the assistant's text of a chat completion.
pub fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no content: {answer}"))
}

/// Returns the events of a `text/event-stream` body as (event name, data).
pub fn parse_events(body: &str) -> Vec<(String, String)> {
    let events = body.split("\n\n").filter(|event| event.lines().any(|line| line.starts_with("data:")));
    events
        .map(|event| {
            let field = |name: &str| {
                let values = event.lines().filter_map(|line| line.strip_prefix(name));
                values.map(str::trim_start).collect::<Vec<_>>().join("\n")
            };
            (field("event:"), field("data:"))
        })
        .collect()
}

fn build_guest(dir: &Path, target: guest_build::GuestTarget) -> Arc<[u8]> {
    let request = guest_build::BuildRequest { dir: dir.to_owned(), target };
    let built = on_plain_thread(move || guest_build::build(&request, &Silent));
    built.expect("the guest builds").component.into()
}

/// Runs blocking work on a plain thread, because blocking libraries refuse to run on an async runtime's
/// thread.
fn on_plain_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

async fn answer(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
    (status, value)
}

/// A process that is killed when its test ends, however it ends.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
