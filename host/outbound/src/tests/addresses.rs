//! Requests whose names and addresses lead to private networks are denied.

use super::*;
use crate::Resolve;
use futures::future::BoxFuture;
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A resolver that returns the first list, then the second and so on; it repeats the last one.
#[derive(Clone)]
struct Scripted {
    answers: Arc<Vec<Vec<IpAddr>>>,
    asked: Arc<AtomicUsize>,
}

impl Scripted {
    fn new(answers: &[&[&str]]) -> Self {
        let parse = |list: &&[&str]| list.iter().map(|address| address.parse().expect(address)).collect();
        Scripted { answers: Arc::new(answers.iter().map(parse).collect()), asked: Arc::default() }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn client(&self, addresses: AddressPolicy) -> Client {
        Client::new(Options { addresses, resolve: Arc::new(self.clone()), ..Options::default() })
    }
}

impl Resolve for Scripted {
    fn resolve(&self, _host: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let answer = self.answers[asked.min(self.answers.len() - 1)].clone();
        Box::pin(
            async move { Ok(answer.into_iter().map(|address| SocketAddr::new(address, port)).collect()) },
        )
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn every_notation_of_a_local_address_is_denied() {
    let server = Server::answering(|_| OK).await;
    let client = Client::new(Options::default());
    let port = server.port();
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0x7f.1",
        "127.0.0.1.",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
    ] {
        let url = format!("http://{host}:{port}/");
        let error = client.send(get(&url), &everywhere(), &bounds()).await.expect_err(host);
        assert!(matches!(error, OutboundError::AddressDenied { .. }), "{host}: {error}");
    }
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn cloud_metadata_is_denied_by_address_and_by_name() {
    let scripted = Scripted::new(&[&["169.254.169.254"]]);
    let client = scripted.client(allowing(&["10.0.0.0/8"]));
    for url in [
        "http://169.254.169.254/latest/meta-data",
        "http://metadata.google.internal/",
        "http://[fd00:ec2::254]/",
    ] {
        let error = client.send(get(url), &everywhere(), &bounds()).await.expect_err(url);
        assert!(matches!(error, OutboundError::AddressDenied { .. }), "{url}: {error}");
    }
}

#[tokio::test]
async fn dns_rebinding_cannot_bypass_the_address_check() {
    // The port must be free at both addresses.
    let outside = loop {
        let outside = Server::answering(|_| OK).await;
        if std::net::TcpListener::bind(("127.0.0.2", outside.port())).is_ok() {
            break outside;
        }
    };
    let inside = Server::at(&format!("127.0.0.2:{}", outside.port()), |_| OK, server::Then::Close).await;
    // The first answer is allowed, all later ones are not.
    let scripted = Scripted::new(&[&["127.0.0.1"], &["127.0.0.2"]]);
    let client = scripted.client(allowing(&["127.0.0.1"]));
    let url = format!("http://rebound.example:{}/", outside.port());
    client.send(get(&url), &everywhere(), &bounds()).await.expect("the first answer is allowed");
    assert_eq!(
        (scripted.asked(), outside.connections()),
        (1, 1),
        "one lookup, and a connection to its result"
    );
    let error = client.send(get(&url), &everywhere(), &bounds()).await.expect_err("rebound");
    assert!(matches!(error, OutboundError::AddressDenied { .. }), "{error}");
    assert_eq!(inside.connections(), 0);
}

#[tokio::test]
async fn a_name_with_one_private_address_is_denied() {
    let outside = Server::answering(|_| OK).await;
    let scripted = Scripted::new(&[&["127.0.0.1", "10.0.0.1"]]);
    let client = scripted.client(allowing(&["127.0.0.1"]));
    let url = format!("http://both.example:{}/", outside.port());
    let error = client.send(get(&url), &everywhere(), &bounds()).await.expect_err("one of two is private");
    assert!(error.to_string().contains("10.0.0.1"), "{error}");
    assert_eq!(outside.connections(), 0);
}

#[tokio::test]
async fn an_address_that_is_allowed_for_one_port_is_denied_for_others() {
    let (allowed, other) = (Server::answering(|_| OK).await, Server::answering(|_| OK).await);
    let range = format!("127.0.0.1:{}", allowed.port());
    let scripted = Scripted::new(&[&["127.0.0.1"]]);
    let client = scripted.client(allowing(&[&range]));
    for host in ["127.0.0.1", "name.example"] {
        let url = |server: &Server| format!("http://{host}:{}/", server.port());
        client.send(get(&url(&allowed)), &everywhere(), &bounds()).await.expect("its port is allowed");
        let error = client
            .send(get(&url(&other)), &everywhere(), &bounds())
            .await
            .expect_err("its port is not allowed");
        assert_eq!(error.code(), "address_denied");
    }
    assert_eq!(other.connections(), 0);
}

#[tokio::test]
async fn a_name_with_no_address_or_with_hundreds_is_refused() {
    let many = (0..100).map(|last| format!("127.0.0.{last}")).collect::<Vec<_>>();
    let many = many.iter().map(String::as_str).collect::<Vec<_>>();
    for answer in [&[], many.as_slice()] {
        let client = Scripted::new(&[answer]).client(allowing(&["127.0.0.0/8"]));
        let error =
            client.send(get("http://x.example/"), &everywhere(), &bounds()).await.expect_err("unusable");
        assert_eq!(error.code(), "unresolved");
    }
}
