//! Servers outside of a host that outlive it: one for requests and webhooks, and one with tools.

use super::{fixture::Setup, tools, web};
use crate::{RuntimeOptions, ServedTool, ToolHints, ToolServer, ToolServerError};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    future::{Future, ready},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Requested by the test itself, after all earlier requests.
const BARRIER: &str = "/barrier";
/// Stops the server.
const END: &str = "/end";

/// The servers, which run in a separate thread.
pub(super) struct Outside {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    bank: Arc<Bank>,
}

/// A request that was answered with 200.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) path: String,
    headers: Vec<(String, String)>,
    pub(super) body: String,
}

/// A server with the tool `pay`, which must not be called twice.
#[derive(Debug, Default)]
struct Bank {
    paid: AtomicUsize,
}

impl Outside {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("the listener is bound");
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let kept = seen.clone();
        std::thread::spawn(move || {
            // Requests are handled one after the other, so an answered request and all earlier ones
            // have been counted.
            for stream in listener.incoming().map_while(Result::ok) {
                let Some((request, stream)) = read(stream) else { continue };
                match request.path.as_str() {
                    END => return,
                    BARRIER => {}
                    _ => kept.lock().expect("no test panics while holding the lock").push(request),
                }
                answer(stream);
            }
        });
        Outside { address, seen, bank: Arc::default() }
    }

    /// Returns a setup with which hosts may reach the servers and agents may call each other.
    pub(super) fn setup(&self) -> Setup {
        let bank: Arc<dyn ToolServer> = self.bank.clone();
        let options = RuntimeOptions {
            granted_tools: tools::granting(&["agent:*/*", "mcp:*/*", "http/fetch"]).granted_tools,
            ..web::granting(&["*"])
        };
        Setup { tool_servers: [("bank".to_owned(), bank)].into(), ..Setup::from(options) }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns how often `pay` was called.
    pub(super) fn paid(&self) -> usize {
        self.bank.paid.load(Ordering::Acquire)
    }

    /// Returns how many requests for this path have arrived so far.
    pub(super) fn count(&self, path: &str) -> usize {
        self.seen().iter().filter(|request| request.path == path).count()
    }

    /// Returns the webhooks for this path by the ids that receivers see, each once regardless of
    /// how often it was sent.
    pub(super) fn webhooks(&self, path: &str) -> BTreeSet<(String, String)> {
        let sent = self.seen().into_iter().filter(|request| request.path == path);
        sent.map(|request| {
            let body: Value = serde_json::from_str(&request.body).expect("JSON");
            (request.header("webhook-id"), body["type"].as_str().expect("a type").to_owned())
        })
        .collect()
    }

    /// Returns everything that has arrived so far.
    pub(super) fn seen(&self) -> Vec<Seen> {
        self.ask(BARRIER);
        self.seen.lock().expect("no test panics while holding the lock").clone()
    }

    /// Resets all counts.
    pub(super) fn forget(&self) {
        self.ask(BARRIER);
        self.seen.lock().expect("no test panics while holding the lock").clear();
        self.bank.paid.store(0, Ordering::Release);
    }

    fn ask(&self, path: &str) {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        write!(stream, "GET {path} HTTP/1.1\r\n\r\n").expect("the server reads");
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.ask(END);
    }
}

impl Seen {
    fn header(&self, name: &str) -> String {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone()).unwrap_or_else(|| panic!("there is no header {name}"))
    }
}

/// Reads a complete request, or returns `None` if it is cut off.
fn read(stream: TcpStream) -> Option<(Seen, TcpStream)> {
    stream.set_read_timeout(Some(Duration::from_secs(30))).ok()?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = Vec::new();
    loop {
        line.clear();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.split_once(':') {
            Some((name, value)) => headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned())),
            None if line.trim().is_empty() => break,
            None => return None,
        }
    }
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let mut body = vec![0; length.map_or(Some(0), |(_, value)| value.parse().ok())?];
    reader.read_exact(&mut body).ok()?;
    let body = String::from_utf8_lossy(&body).into_owned();
    Some((Seen { path, headers, body }, reader.into_inner()))
}

fn answer(mut stream: TcpStream) {
    // The client may have died meanwhile.
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nwell");
}

type ToolFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ToolServerError>> + Send + 'a>>;

impl ToolServer for Bank {
    fn tools(&self) -> ToolFuture<'_, Arc<[ServedTool]>> {
        let pay = ServedTool {
            name: "pay".into(),
            description: String::new(),
            input_schema: json!({"type": "object"}),
            output_schema: None,
            hints: ToolHints::default(),
        };
        Box::pin(ready(Ok([pay].into())))
    }

    fn call<'a>(&'a self, _tool: &'a str, arguments: Value) -> ToolFuture<'a, Value> {
        Box::pin(async move {
            self.paid.fetch_add(1, Ordering::AcqRel);
            Ok(arguments)
        })
    }
}
