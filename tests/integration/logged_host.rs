//! A host in a process of its own, whose log of requests is read over HTTP and through the binary; and an upstream that
//! refuses everything.

use crate::{
    durability::{Process, tiny_model},
    harness::{client, guest},
};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    process::{Command, Output, Stdio},
    time::Duration,
};
use tempfile::TempDir;

/// A host in a process of its own, with a small model of random weights.
pub struct Logged {
    folder: TempDir,
    pub process: Process,
    /// The key that requests are sent with.
    key: Option<String>,
}

impl Logged {
    pub fn start(settings: &str) -> Logged {
        let folder = tempfile::tempdir().unwrap();
        Self::start_in(folder, settings)
    }

    /// Starts a host in this folder, whose database may exist.
    pub fn start_in(folder: TempDir, settings: &str) -> Logged {
        let model = folder.path().join("tiny");
        std::fs::create_dir_all(&model).unwrap();
        tiny_model(&model);
        let config = folder.path().join("skep.toml");
        std::fs::write(&config, settings).unwrap();
        let process = Process::configured(&config, &model, &folder.path().join("data"));
        Logged { folder, process, key: None }
    }

    pub fn data(&self) -> std::path::PathBuf {
        self.folder.path().join("data")
    }

    /// Stops the host in order, and returns its folder.
    pub fn stop(self) -> TempDir {
        self.process.terminate();
        self.folder
    }

    pub fn with_key(&mut self, key: &str) -> &Self {
        self.key = Some(key.to_owned());
        self
    }

    /// Creates a key in the data folder.
    pub fn create_key(&self, arguments: &[&str]) -> String {
        let data = self.data();
        let arguments = [&["key", "create", "--data", data.to_str().unwrap()], arguments].concat();
        String::from_utf8(self.skep(&arguments, "").stdout).unwrap().trim().to_owned()
    }

    /// Runs `skep` with this standard input. It must succeed.
    pub fn skep(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(arguments).env("SKEP_URL", &self.process.url).env("NO_COLOR", "1");
        command.env("SKEP_API_KEY", self.key.as_deref().unwrap_or_default());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let request = client().request(method, format!("{}{path}", self.process.url));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.request(reqwest::Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        answer(self.request(reqwest::Method::POST, path).json(&body)).await
    }

    pub async fn chat(&self, text: &str) -> Value {
        let (status, said) = self.post("/v1/chat/completions", question("default", text)).await;
        assert_eq!(status, 200, "{said}");
        said
    }

    /// Returns the records of a query, once there are this many. Records are stored in the background.
    pub async fn records(&self, query: &str, count: usize) -> Vec<Value> {
        for _ in 0..1_500 {
            let (status, page) = self.get(&format!("/v1/requests?limit=1000{query}")).await;
            assert_eq!(status, 200, "{page}");
            let records = page["data"].as_array().unwrap();
            assert!(records.len() <= count, "more than {count}: {page}");
            if records.len() == count {
                return records.clone();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{count} records of {query:?} never came: {:?}", self.get("/v1/requests").await);
    }

    pub async fn deploy(&self, name: &str, guest_name: &'static str) {
        let component = tokio::task::spawn_blocking(move || guest(guest_name)).await.unwrap();
        let form = reqwest::multipart::Form::new()
            .text("manifest", format!("name = \"{name}\""))
            .part("component", reqwest::multipart::Part::bytes(component.to_vec()).file_name("agent.wasm"));
        let deployed =
            self.request(reqwest::Method::POST, "/v1/agents").multipart(form).send().await.unwrap();
        assert_eq!(deployed.status(), 201, "{}", deployed.text().await.unwrap());
    }

    pub async fn message(&self, agent: &str, session: &str, message: Value) {
        let (status, said) =
            self.post(&format!("/v1/agents/{agent}/sessions/{session}/messages"), message).await;
        assert_eq!(status, 200, "{said}");
    }
}

pub fn question(model: &str, text: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4})
}

pub async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Starts a server that refuses every request with this status, and returns its address.
pub fn refuser(status: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut reader = BufReader::new(connection.unwrap());
            let (mut length, mut line) = (0, String::new());
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    address
}
