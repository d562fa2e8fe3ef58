//! A webhook receiver: an HTTP server that records the requests it receives and sends scripted
//! responses.

use super::fixture::until;
use serde_json::Value;
use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

pub(super) struct Receiver {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Message>>>,
    _serving: JoinSet<()>,
}

/// A received request.
#[derive(Clone)]
pub(super) struct Message {
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Receiver {
    /// Starts a receiver. Each answer is a status, optionally followed by headers; after the last
    /// one, the answer is 200.
    pub(super) async fn answering(answers: impl IntoIterator<Item = &'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("the listener is bound");
        let seen: Arc<Mutex<Vec<Message>>> = Arc::default();
        let answers: Arc<Mutex<VecDeque<&str>>> = Arc::new(Mutex::new(answers.into_iter().collect()));
        let mut serving = JoinSet::new();
        let kept = seen.clone();
        serving.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let message = read(stream, async |message| {
                    kept.lock().expect("no test panics while holding the lock").push(message);
                    answers
                        .lock()
                        .expect("no test panics while holding the lock")
                        .pop_front()
                        .unwrap_or("200")
                });
                message.await;
            }
        });
        Receiver { address, seen, _serving: serving }
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    pub(super) fn count(&self) -> usize {
        self.seen.lock().expect("no test panics while holding the lock").len()
    }

    /// Waits until `count` requests have arrived, and returns all of them.
    pub(super) async fn received(&self, count: usize) -> Vec<Message> {
        until(async || (self.count() >= count).then_some(())).await;
        self.seen.lock().expect("no test panics while holding the lock").clone()
    }
}

impl Message {
    pub(super) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_else(|| panic!("there is no header {name}"))
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    /// Verifies the signature as the specification tells receivers to.
    pub(super) fn verify(&self, secret: &str) {
        let key = base64::Engine::decode(
            &base64::engine::general_purpose::STANDARD,
            secret.strip_prefix("whsec_").expect("a secret"),
        );
        let mut signed =
            format!("{}.{}.", self.header("webhook-id"), self.header("webhook-timestamp")).into_bytes();
        signed.extend(&self.body);
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &key.expect("base64"));
        let signature = self.header("webhook-signature").strip_prefix("v1,").expect("the first version");
        let signature = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, signature);
        let verified = ring::hmac::verify(&key, &signed, &signature.expect("base64"));
        verified.expect("the signature matches the secret");
    }
}

async fn read(mut stream: TcpStream, answer: impl AsyncFnOnce(Message) -> &'static str) {
    let mut reader = BufReader::new(&mut stream);
    let mut headers = Vec::new();
    let mut line = String::new();
    while reader.read_line(&mut line).await.is_ok_and(|bytes| bytes > 0) && !line.trim().is_empty() {
        if let Some((name, value)) = line.split_once(':') {
            headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
        line.clear();
    }
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length = length.map_or(0, |(_, value)| value.parse().expect("a number"));
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).await.is_err() {
        return;
    }
    let status = answer(Message { headers, body }).await;
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    // An error means that the client has gone, which is fine.
    let _ = stream.write_all(head.as_bytes()).await;
}
