//! The world outside the host: a small HTTP server in the process of the benchmark, which no kill affects. It
//! counts the effects of orders, receives the events of a webhook, and is an MCP server with one tool.
//!
//! It answers a little late, after delays that depend on the order, so that kills also fall between a request
//! and its answer.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Maximum delay before an effect is counted, and after it.
const MAX_DELAY_MS: u64 = 12;
const MAX_BODY_BYTES: usize = 1 << 20;

/// Handle to the server, which stops with the runtime.
pub struct Outside {
    pub url: String,
    counted: Mutex<Counted>,
    /// Grows with everything that happens, so that kills can be timed between two events.
    pub ticks: watch::Sender<u64>,
}

#[derive(Default)]
struct Counted {
    effects: HashMap<(String, String), Effect>,
    /// Ids of webhook messages, by the order that their events are about.
    hooks: HashMap<String, BTreeSet<String>>,
}

#[derive(Default)]
struct Effect {
    requests: u32,
    keys: BTreeSet<String>,
}

struct Request {
    method: String,
    path: String,
    key: Option<String>,
    webhook_id: Option<String>,
    body: Vec<u8>,
}

impl Outside {
    /// Starts the server on a free port of this machine.
    pub async fn start() -> Result<Arc<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on this machine")?;
        let url = format!("http://{}", listener.local_addr()?);
        let outside = Arc::new(Self { url, counted: Mutex::default(), ticks: watch::Sender::new(0) });
        let server = outside.clone();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let server = server.clone();
                tokio::spawn(async move { server.serve(connection).await });
            }
        });
        Ok(outside)
    }

    /// Returns how often an effect happened. Requests with the same idempotency key count once.
    pub fn effects(&self, kind: &str, id: &str) -> usize {
        let counted = self.counted();
        counted.effects.get(&(kind.to_owned(), id.to_owned())).map_or(0, |effect| match effect.keys.len() {
            0 => effect.requests as usize,
            keys => keys,
        })
    }

    /// Returns how many messages the webhook received about an order; a message that is sent again counts
    /// once.
    pub fn hooks(&self, id: &str) -> usize {
        self.counted().hooks.get(id).map_or(0, BTreeSet::len)
    }

    /// Wakes those who wait for the next request to the server.
    pub fn tick(&self) {
        self.ticks.send_modify(|ticks| *ticks += 1);
    }

    fn counted(&self) -> std::sync::MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(&self, connection: TcpStream) {
        let mut connection = BufReader::new(connection);
        while let Some(request) = read(&mut connection).await {
            let (status, body) = self.answer(request).await;
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            if connection.get_mut().write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.is_err() {
                return;
            }
            self.tick();
        }
    }

    async fn answer(&self, request: Request) -> (&'static str, String) {
        let Request { method, path, key, webhook_id, body } = request;
        let segments: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        match (method.as_str(), segments.as_slice()) {
            ("POST", ["effect", kind, id]) => {
                self.count(kind, id, key).await;
                ("200 OK", "{}".to_owned())
            }
            ("POST", ["hook"]) => {
                let event: Value = serde_json::from_slice(&body).unwrap_or_default();
                let about = event["data"]["id"].as_str().unwrap_or_default().to_owned();
                pause(&about, 0).await;
                self.counted().hooks.entry(about.clone()).or_default().extend(webhook_id);
                pause(&about, 1).await;
                ("200 OK", "{}".to_owned())
            }
            ("POST", ["mcp"]) => self.mcp(&serde_json::from_slice(&body).unwrap_or_default()).await,
            _ => ("405 Method Not Allowed", "{}".to_owned()),
        }
    }

    async fn count(&self, kind: &str, id: &str, key: Option<String>) {
        pause(id, 0).await;
        {
            let mut counted = self.counted();
            let effect = counted.effects.entry((kind.to_owned(), id.to_owned())).or_default();
            effect.requests += 1;
            effect.keys.extend(key);
        }
        pause(id, 1).await;
    }

    async fn mcp(&self, message: &Value) -> (&'static str, String) {
        let result = match message["method"].as_str().unwrap_or_default() {
            "initialize" => json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "outside", "version": "1"},
            }),
            "tools/list" => json!({"tools": [{
                "name": "record",
                "description": "Counts an order.",
                "inputSchema": {
                    "type": "object",
                    "properties": {"id": {"type": "string"}, "url": {"type": "string"}},
                    "required": ["id"],
                },
            }]}),
            "tools/call" => {
                let id = message["params"]["arguments"]["id"].as_str().unwrap_or_default();
                self.count("mcp", id, None).await;
                json!({"content": [{"type": "text", "text": "done"}]})
            }
            _ if message["id"].is_null() => return ("202 Accepted", String::new()),
            _ => json!({}),
        };
        ("200 OK", json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string())
    }
}

/// Waits for a short time that depends on the id.
async fn pause(id: &str, which: u64) {
    let sum = id
        .bytes()
        .fold(which.wrapping_mul(7_919), |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    tokio::time::sleep(Duration::from_millis((sum >> 3) % MAX_DELAY_MS)).await;
}

/// Reads a request. `None` means that the client is gone, or does not speak HTTP.
async fn read(connection: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    connection.read_line(&mut line).await.ok().filter(|bytes| *bytes > 0)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let mut request = Request { method, path, key: None, webhook_id: None, body: Vec::new() };
    let mut length = 0;
    loop {
        line.clear();
        connection.read_line(&mut line).await.ok().filter(|bytes| *bytes > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        let value = value.trim().to_owned();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "idempotency-key" => request.key = Some(value),
            "webhook-id" => request.webhook_id = Some(value),
            _ => {}
        }
    }
    if length > MAX_BODY_BYTES {
        return None;
    }
    request.body = vec![0; length];
    connection.read_exact(&mut request.body).await.ok()?;
    Some(request)
}
