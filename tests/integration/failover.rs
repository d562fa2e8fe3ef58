//! Two hosts on one PostgreSQL database, of which one stands by: the first one is cut off by a network that fails, or
//! stopped, and the other one takes its place. Nothing is lost or doubled, and the first one does no harm when it is back. And
//! one host whose database moves to another server.

use crate::{
    durability::Process,
    harness::{Host, model_path},
    postgres_server::Server,
};
use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    time::Duration,
};

/// A network between a host and its server that can fail.
struct Network {
    port: u16,
    /// The port of the server that it leads to.
    server_port: Arc<AtomicU16>,
    is_up: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Network {
    fn to(server_port: u16) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let network = Network {
            port: listener.local_addr().unwrap().port(),
            server_port: Arc::new(AtomicU16::new(server_port)),
            is_up: Arc::new(AtomicBool::new(true)),
            connections: Arc::default(),
        };
        let (is_up, connections) = (network.is_up.clone(), network.connections.clone());
        let server_port = network.server_port.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if !is_up.load(Ordering::Acquire) {
                    continue;
                }
                let server = TcpStream::connect(("127.0.0.1", server_port.load(Ordering::Acquire)));
                let Ok(server) = server else { continue };
                let copies = |stream: &TcpStream| (stream.try_clone().unwrap(), stream.try_clone().unwrap());
                let ((client, from_client), (server, from_server)) = (copies(&client), copies(&server));
                connections
                    .lock()
                    .unwrap()
                    .extend([from_client.try_clone().unwrap(), from_server.try_clone().unwrap()]);
                std::thread::spawn(move || carry(from_client, server));
                std::thread::spawn(move || carry(from_server, client));
            }
        });
        network
    }

    fn fail(&self) {
        self.is_up.store(false, Ordering::Release);
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn recover(&self) {
        self.is_up.store(true, Ordering::Release);
    }

    /// Leads to another server, as an address does that follows the primary.
    fn lead_to(&self, server_port: u16) {
        self.fail();
        self.server_port.store(server_port, Ordering::Release);
        self.recover();
    }

    /// Returns the address of a server's database behind this network.
    fn url_of(&self, server: &Server) -> String {
        server.url().replace(&format!(":{}/", server.port()), &format!(":{}/", self.port))
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = [0; 16 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn up(database: &str, data: &Path) -> (Process, Host) {
    let process = Process::with(Stdio::piped(), &["--database", database], model_path(), data);
    let host = Host::elsewhere(process.url.clone());
    (process, host)
}

/// Starts a host that waits until it gets the database.
fn up_in_the_end(database: &str, data: &Path) -> (Process, Host) {
    let process = Process::with(Stdio::inherit(), &["--database", database, "--standby"], model_path(), data);
    let host = Host::elsewhere(process.url.clone());
    (process, host)
}

async fn turns(host: &Host) -> u64 {
    host.get("/v1/agents/counter/sessions/one").await.1["turns"].as_u64().unwrap()
}

fn signal(process: &Process, name: &str) {
    assert!(Command::new("kill").args([name, &process.id().to_string()]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_was_cut_off_and_replaced_ends_without_doing_harm() {
    let Some(server) = tokio::task::spawn_blocking(Server::start).await.unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let data = |name: &str| folder.path().join(name);
    let network = Network::to(server.port());
    let (first, host) = up(&network.url_of(&server), &data("first"));
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    for _ in 0..3 {
        assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    }

    // The second host works on the same session, and ends, so the lock of the database is free again.
    network.fail();
    let (second, other) = up(&server.url(), &data("second"));
    assert_eq!(other.message("counter", "one", "increment n").await.0, 200);
    assert_eq!(turns(&other).await, 4);
    second.terminate();

    network.recover();
    let said = first.until_failed();
    assert!(said.contains("another host has taken over the database"), "{said}");
    let (third, host) = up(&server.url(), &data("first"));
    assert_eq!(turns(&host).await, 4);
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    third.terminate();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_continues_by_itself_when_a_standby_becomes_the_primary() {
    let Some(server) = tokio::task::spawn_blocking(Server::start).await.unwrap() else { return };
    let (server, follower) = tokio::task::spawn_blocking(move || {
        let follower = server.follower();
        (server, follower)
    })
    .await
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let network = Network::to(server.port());
    let (process, host) = up(&network.url_of(&server), &folder.path().join("data"));
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    for _ in 0..3 {
        assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    }

    server.stop();
    follower.promote();
    network.lead_to(follower.port());
    let mut refused = 0;
    while host.message("counter", "one", "increment n").await.0 != 200 {
        refused += 1;
        assert!(refused < 1_000, "the host does not continue");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(turns(&host).await, 4, "nothing is lost, and what was refused was not done");
    process.terminate();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_stopped_is_replaced_and_ends_when_it_wakes_up() {
    let Some(server) = tokio::task::spawn_blocking(Server::start).await.unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let data = |name: &str| folder.path().join(name);
    let (first, host) = up(&server.url(), &data("first"));
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    assert_eq!(host.message("counter", "one", "increment n").await.0, 200);
    signal(&first, "-STOP");
    let (second, other) = up_in_the_end(&server.url(), &data("second"));
    assert_eq!(other.message("counter", "one", "increment n").await.0, 200);
    signal(&first, "-CONT");
    let said = first.until_failed();
    assert!(said.contains("another host has taken over the database"), "{said}");
    assert_eq!(other.message("counter", "one", "increment n").await.0, 200);
    assert_eq!(turns(&other).await, 3);
    second.terminate();
}

#[test]
fn a_host_stands_by_only_for_a_database_on_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["up", "--listen", "127.0.0.1:0", "--standby", "--data"])
        .arg(folder.path())
        .arg("--model")
        .arg(model_path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("stand by only for a PostgreSQL database"), "{said}");
}
