//! Hosts of a cluster: processes on one PostgreSQL server, with a model of random weights.

use crate::{
    durability::tiny_model,
    harness::{client, guest, metric, parse_events},
    ports::unused_address,
    postgres_server::Server,
};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Time in which everything happens that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The database and everything that the hosts share.
pub struct Site {
    pub server: Server,
    folder: TempDir,
    /// An admin's key, if the hosts require keys.
    pub key: Option<String>,
    started: AtomicUsize,
}

impl Site {
    /// Starts a database for hosts that require keys, or not; `None` if there is no PostgreSQL.
    pub async fn start(keys_required: bool) -> Option<Site> {
        tokio::task::spawn_blocking(move || Site::prepare(keys_required)).await.unwrap()
    }

    fn prepare(keys_required: bool) -> Option<Site> {
        let server = Server::start()?;
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tiny")).unwrap();
        tiny_model(&folder.path().join("tiny"));
        // A session begins at the host that gets its first message, so that the tests know its owner.
        let settings = "[cluster]\nplacement = \"here\"\n[secrets]\nkey_file = \"secrets.key\"\n\
                        [grants]\nhosts = [\"*\"]\nmodels = [\"*\"]\ntools = [\"agent:gate/*\"]\n\
                        [outbound]\nallow_private = [\"127.0.0.0/8\"]\n";
        std::fs::write(folder.path().join("skep.toml"), settings).unwrap();
        private(&folder.path().join("cluster.key"), &"the key of this cluster ".repeat(2));
        private(&folder.path().join("secrets.key"), "0123456789abcdef0123456789abcdef");
        let key = keys_required.then(|| {
            let mut create = Command::new(env!("CARGO_BIN_EXE_skep"));
            create.args(["key", "create", "--role", "admin", "--database", &server.url()]);
            let output = create.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        });
        Some(Site { server, folder, key, started: AtomicUsize::new(0) })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the folder of the model of random weights.
    pub fn model(&self) -> PathBuf {
        self.path("tiny")
    }

    /// Writes the key of a cluster, and returns its file.
    pub fn key_file(&self, name: &str, key: &str) -> PathBuf {
        private(&self.path(name), key);
        self.path(name)
    }

    /// Returns the command of a host that is not one of the cluster yet.
    pub fn command(&self) -> Command {
        let mut command = self.command_without_model();
        command.arg("--model").arg(self.model());
        command
    }

    fn command_without_model(&self) -> Command {
        let number = self.started.fetch_add(1, Ordering::AcqRel);
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(["up", "--threads", "1", "--log-level", "warn", "--database", &self.server.url()]);
        command.args(["--auth", if self.key.is_some() { "required" } else { "off" }]);
        command.arg("--config").arg(self.path("skep.toml"));
        command.arg("--data").arg(self.path(&format!("data-{number}")));
        command.env_remove("SKEP_CLUSTER_KEY").stdin(Stdio::null());
        command
    }

    /// Starts a host.
    pub async fn node(&self) -> Node {
        self.node_with(&self.path("cluster.key")).await
    }

    /// Starts a host with this key of a cluster.
    pub async fn node_with(&self, cluster_key: &Path) -> Node {
        self.joined(self.command(), cluster_key).await
    }

    /// Starts a host with this variable in its environment.
    pub async fn node_with_variable(&self, name: &str, value: &str) -> Node {
        let mut command = self.command();
        command.env(name, value);
        self.joined(command, &self.path("cluster.key")).await
    }

    /// Starts a host without a model.
    pub async fn gateway(&self) -> Node {
        let mut command = self.command_without_model();
        command.args(["--role", "gateway"]);
        self.joined(command, &self.path("cluster.key")).await
    }

    /// Starts a host with the model under this name, and no other one.
    pub async fn node_with_model(&self, name: &str) -> Node {
        let mut command = self.command_without_model();
        command.arg("--model").arg(format!("{name}={}", self.model().display()));
        self.joined(command, &self.path("cluster.key")).await
    }

    /// Starts a host with this role and these further arguments. Unless it is a balancer, it has the model, or one of another folder.
    pub async fn node_as(&self, role: &str, model: Option<&Path>, arguments: &[&str]) -> Node {
        self.joined(self.command_as(role, model, arguments), &self.path("cluster.key")).await
    }

    /// Does the same with this variable in its environment.
    pub async fn node_as_with(&self, role: &str, arguments: &[&str], (name, value): (&str, &str)) -> Node {
        let mut command = self.command_as(role, None, arguments);
        command.env(name, value);
        self.joined(command, &self.path("cluster.key")).await
    }

    fn command_as(&self, role: &str, model: Option<&Path>, arguments: &[&str]) -> Command {
        let mut command = self.command_without_model();
        match (role, model) {
            ("balancer", _) => {}
            (_, Some(folder)) => drop(command.arg("--model").arg(format!("tiny={}", folder.display()))),
            (_, None) => drop(command.arg("--model").arg(self.model())),
        }
        command.args(["--role", role]).args(arguments);
        command
    }

    /// Starts a host of the cluster.
    async fn joined(&self, mut command: Command, cluster_key: &Path) -> Node {
        command.arg("--cluster").arg("--cluster-key-file").arg(cluster_key);
        let log = self.path(&format!("log-{}", self.started.load(Ordering::Acquire)));
        let (key, listen) = (self.key.clone(), unused_address());
        command.args(["--listen", &listen]);
        let started = tokio::task::spawn_blocking(move || Node::start(command, log, key));
        let mut node = started.await.unwrap();
        node.number = node.own_number().await;
        node
    }

    /// Starts three hosts.
    pub async fn nodes(&self) -> [Node; 3] {
        // The first one makes the tables.
        let first = self.node().await;
        let (second, third) = tokio::join!(self.node(), self.node());
        [first, second, third]
    }
}

/// Writes a file that only its owner can read.
fn private(path: &Path, text: &str) {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

/// A host, which is killed when the test finishes.
pub struct Node {
    child: Child,
    log: PathBuf,
    key: Option<String>,
    http: reqwest::Client,
    pub url: String,
    /// The number under which the database knows this start of the host.
    pub number: u64,
}

impl Node {
    fn start(mut command: Command, log: PathBuf, key: Option<String>) -> Node {
        let mut child = command.stdout(Stdio::piped()).stderr(File::create(&log).unwrap()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let address = |line: String| {
            line.split_whitespace().find(|word| word.starts_with("http://")).map(str::to_owned)
        };
        let url = lines.find_map(address);
        let url = url.unwrap_or_else(|| panic!("{}", std::fs::read_to_string(&log).unwrap()));
        std::thread::spawn(move || lines.for_each(drop));
        Node { child, log, key, http: client(), url: url.trim_end_matches('/').to_owned(), number: 0 }
    }

    async fn own_number(&self) -> u64 {
        let listed = self.ok(Method::GET, "/v1/cluster", Value::Null).await;
        let own = listed["hosts"].as_array().unwrap().iter().find(|host| host["this"] == true);
        own.unwrap_or_else(|| panic!("{listed}"))["number"].as_u64().unwrap()
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Returns the text of `/metrics`.
    pub async fn metrics(&self) -> String {
        self.metrics_while_it_lives().await.expect("the host answers")
    }

    /// Returns the text of `/metrics`, or `None` if the host has ended.
    async fn metrics_while_it_lives(&self) -> Option<String> {
        let ask = || self.request(Method::GET, "/metrics").send();
        let answer = match ask().await {
            Ok(answer) => answer,
            // The host may have closed a connection that was open from before.
            Err(_) => ask().await.ok()?,
        };
        answer.text().await.ok()
    }

    /// Returns the sum of a metric over the series with this label.
    pub async fn metric(&self, name: &str, label: &str) -> u64 {
        metric(&self.metrics().await, name, &[label]) as u64
    }

    /// Returns the sum of a metric, or 0 if the host has ended.
    pub async fn metric_while_it_lives(&self, name: &str) -> u64 {
        self.metrics_while_it_lives().await.map_or(0, |metrics| metric(&metrics, name, &[]) as u64)
    }

    /// Sends a request with a body, unless it is null, and returns the status, the body and the host that answered.
    pub async fn ask(&self, method: Method, path: &str, body: Value) -> (u16, Value, u64) {
        let request = self.request(method, path);
        let request = if body.is_null() { request } else { request.json(&body) };
        let response = request.send().await.unwrap();
        let (status, host) = (response.status().as_u16(), answered_by(&response));
        let text = response.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)), host)
    }

    /// Sends a request that must succeed, and returns the answer.
    pub async fn ok(&self, method: Method, path: &str, body: Value) -> Value {
        let (status, answer, _) = self.ask(method, path, body).await;
        assert!((200..300).contains(&status), "{path}: {status} {answer}");
        answer
    }

    pub async fn get(&self, path: &str) -> (u16, Value, u64) {
        self.ask(Method::GET, path, Value::Null).await
    }

    /// Sends a message to a session such as `state/sessions/one`, whose turn must end well, and returns the answer and the host
    /// that answered.
    pub async fn say(&self, session: &str, text: &str) -> (Value, u64) {
        let path = format!("/v1/agents/{session}/messages");
        let (status, answer, host) = self.ask(Method::POST, &path, json!({ "text": text })).await;
        assert_eq!(status, 200, "{answer}");
        (answer, host)
    }

    /// Sends a message whose turn continues on its own, and returns the path of the turn and the host that accepted it.
    pub async fn begin(&self, session: &str, text: &str) -> (String, u64) {
        let path = format!("/v1/agents/{session}/messages?detach=true");
        let (status, accepted, host) = self.ask(Method::POST, &path, json!({ "text": text })).await;
        assert_eq!(status, 202, "{accepted}");
        (accepted["url"].as_str().unwrap().to_owned(), host)
    }

    /// Sends a message, and returns the events of its turn and the host that answered.
    pub async fn stream(&self, session: &str, text: &str) -> (Vec<(String, String)>, u64) {
        let request = self.request(Method::POST, &format!("/v1/agents/{session}/messages"));
        let request = request.header("accept", "text/event-stream").json(&json!({ "text": text }));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        let host = answered_by(&response);
        (parse_events(&response.text().await.unwrap()), host)
    }

    /// Deploys one of `tests/guests` under this name.
    pub async fn deploy(&self, guest_name: &'static str, name: &str, manifest: &str) {
        let component = tokio::task::spawn_blocking(move || guest(guest_name)).await.unwrap();
        let form = reqwest::multipart::Form::new()
            .text("manifest", format!("name = \"{name}\"\n{manifest}"))
            .part("component", reqwest::multipart::Part::bytes(component.to_vec()).file_name("agent.wasm"));
        let deployed = self.request(Method::POST, "/v1/agents").multipart(form).send().await.unwrap();
        assert_eq!(deployed.status(), 201, "{}", deployed.text().await.unwrap());
    }

    /// Waits until the host knows these agents, which were deployed at another one.
    pub async fn knows(&self, agents: &[&str]) {
        for agent in agents {
            until(async || self.get(&format!("/v1/agents/{agent}")).await.0 == 200).await;
        }
    }

    /// Returns the process that this host has started with an argument.
    pub fn process_with(&self, argument: &str) -> Option<u32> {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|process: &u32| {
            let read =
                |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
            read("status").contains(&parent) && read("cmdline").split('\0').any(|found| found == argument)
        })
    }

    /// Sends a signal such as `-STOP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Kills the process with SIGKILL, so that none of its code runs again.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the process has exited, and returns its status and its log.
    pub async fn exited(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + PATIENCE;
        loop {
            let log = std::fs::read_to_string(&self.log).unwrap();
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), log);
            }
            assert!(Instant::now() < until, "the host runs: {log}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the number of the host that answered.
pub fn answered_by(response: &Response) -> u64 {
    let number = response.headers().get("x-skep-host").unwrap_or_else(|| panic!("{response:?}"));
    number.to_str().unwrap().parse().unwrap()
}

/// Waits until this is true.
pub async fn until(what: impl AsyncFn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !what().await {
        assert!(Instant::now() < end, "it did not happen in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
