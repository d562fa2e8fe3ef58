//! Shuts down a server with a real listener while a response is in flight.

use super::fixture::Server;
use crate::{GatewayOptions, serve};
use serde_json::json;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
};

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

async fn run(server: &Server, drain: Duration) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let shutdown = async {
        let _ = stopped.await;
    };
    let options = GatewayOptions { drain, ..GatewayOptions::default() };
    Running { address, stop, serving: tokio::spawn(serve(listener, server.host.clone(), options, shutdown)) }
}

/// Requests a stream and reads until its first event.
async fn begin(address: SocketAddr, max_tokens: u32) -> (TcpStream, String) {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "ignore_eos": true,
                      "stream": true});
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    stream.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains("data: ") {
        assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0);
    }
    (stream, String::from_utf8(read).unwrap())
}

async fn rest(mut stream: TcpStream, mut text: String) -> String {
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn a_response_in_flight_is_finished_before_shutdown() {
    let server = Server::start().await;
    let running = run(&server, Duration::from_secs(60)).await;
    let (stream, text) = begin(running.address, 400).await;
    running.stop.send(()).unwrap();
    let text = rest(stream, text).await;
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("data: [DONE]"), "{text}");
    running.serving.await.unwrap().unwrap();
    assert!(TcpStream::connect(running.address).await.is_err(), "the listener is closed");
}

#[tokio::test]
async fn a_response_that_exceeds_the_drain_timeout_ends_with_an_error() {
    let server = Server::start().await;
    let running = run(&server, Duration::ZERO).await;
    let (stream, text) = begin(running.address, 3500).await;
    running.stop.send(()).unwrap();
    running.serving.await.unwrap().unwrap();
    let text = rest(stream, text).await;
    assert!(text.contains("\"code\":\"shutting_down\"") && !text.contains("[DONE]"), "{text}");
}
