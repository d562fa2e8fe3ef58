//! Webhooks from the command line, against a receiver that fails, and the log of the failures.

use crate::durability::tiny_model;
use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// A host that is killed when the test finishes.
struct Up {
    child: Child,
    url: String,
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn up(model: &Path, folder: &Path, toml: &str) -> Up {
    std::fs::write(folder.join("skep.toml"), toml).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args([
            "up",
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
            "--log-level",
            "warn",
            "--ephemeral",
            "--model",
        ])
        .arg(model)
        .arg("--config")
        .arg(folder.join("skep.toml"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(folder.join("log")).unwrap())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let address =
        |line: String| line.split_whitespace().find(|word| word.starts_with("http://")).map(str::to_owned);
    let url = lines.find_map(address).expect("`skep up` prints its URL");
    std::thread::spawn(move || lines.for_each(drop));
    Up { child, url: url.trim_end_matches('/').to_owned() }
}

/// Starts a receiver that answers each request with the next of these responses, repeating the last one.
fn receiver(answers: &'static [&'static str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (mut stream, answer) = (stream.unwrap(), answers[number.min(answers.len() - 1)]);
            let mut seen = Vec::new();
            let mut bytes = [0; 4096];
            while !seen.ends_with(b"}") {
                match stream.read(&mut bytes).unwrap_or(0) {
                    0 => break,
                    count => seen.extend_from_slice(&bytes[..count]),
                }
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

fn skep(up: &Up, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(arguments)
        .env("SKEP_URL", &up.url)
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

#[test]
fn a_failing_webhook_is_reported_in_the_log_the_list_and_the_test() {
    let (model, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    const FAILING: &str = "HTTP/1.1 503 Busy\r\ncontent-length: 9\r\nconnection: close\r\n\r\nnot today";
    const FINE: &str = "HTTP/1.1 204 Fine\r\nconnection: close\r\n\r\n";
    let url = receiver(&[FAILING]);
    let up = up(model.path(), folder.path(), "[outbound]\nallow_private = [\"127.0.0.0/8\"]\n");
    let refused = skep(&up, &["webhook", "add", "http://169.254.169.254/hook", "*"]);
    assert!(!refused.status.success() && said(&refused).contains("allow_private"), "{}", said(&refused));

    let added = skep(&up, &["webhook", "add", &url, "order.*", "--json"]);
    assert!(added.status.success(), "{}", said(&added));
    let added: serde_json::Value = serde_json::from_slice(&added.stdout).unwrap();
    let id = added["id"].as_str().unwrap();
    assert!(said(&skep(&up, &["webhook", "list"])).contains("never"));
    let test = skep(&up, &["webhook", "test", id]);
    assert!(!test.status.success(), "the test event was not accepted");
    let told = said(&test);
    assert!(
        told.contains("answered HTTP 503 in ") && told.contains("not today") && told.contains("not accepted"),
        "{told}"
    );
    assert!(!std::fs::read_to_string(folder.path().join("log")).unwrap().contains("a webhook is failing"));

    // The test event has already failed, so the next failure logs nothing new. A first success and another
    // failure would.
    let other = receiver(&[FINE, FAILING]);
    let added = skep(&up, &["webhook", "add", &other, "order.*", "--json"]);
    let added: serde_json::Value = serde_json::from_slice(&added.stdout).unwrap();
    let other_id = added["id"].as_str().unwrap();
    let test = skep(&up, &["webhook", "test", other_id]);
    assert!(test.status.success() && said(&test).contains("answered HTTP 204"), "{}", said(&test));
    let sent = skep(&up, &["event", "send", "order.paid", "{}"]);
    assert!(sent.status.success(), "{}", said(&sent));
    let begun = Instant::now();
    loop {
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        let list = said(&skep(&up, &["webhook", "list"]));
        let is_logged =
            log.lines().any(|line| line.contains("a webhook is failing") && line.contains(other_id));
        if is_logged && list.matches("HTTP 503").count() >= 2 && list.contains("1 waiting") {
            assert_eq!(log.matches("a webhook is failing").count(), 1, "{log}");
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{list}\n{log}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
