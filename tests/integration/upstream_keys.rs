//! The key of an upstream, in a host that logs everything and whose upstreams repeat the key wherever they can: nothing that
//! the host writes or answers contains it.

use crate::{
    durability::tiny_model,
    harness::{Host, client},
    scripted_upstream::{Asked, ScriptedUpstream, answered, chunk, refused},
    upstreams::nowhere,
};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderValue, StatusCode},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader, Read, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

const KEY: &str = "sk-7Hc2vQx9ZtKe41-never-shown";
/// The key in base64, without its last characters, which depend on what follows.
const KEY_BASE64: &str = "c2stN0hjMnZReDladEtlNDEtbmV2ZXItc2hvd2";
/// The models of the upstream, each of which answers differently.
const MODELS: [&str; 6] = ["good", "refusing", "failing", "breaking", "mistyped", "redirecting"];

/// Everything that was written or answered, with the place where it was.
type Written = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// Returns an answer of the upstream, which repeats the request's credentials.
fn echo(asked: &Asked) -> Response {
    let sent = asked.headers["authorization"].to_str().unwrap();
    let complaint = format!("Incorrect API key provided: {sent}. You sent {}", sent.repeat(3));
    match asked.body["model"].as_str().unwrap() {
        "good" => answered(&[json!({"reasoning_content": "Hm."}), json!({"content": "Hello."})]),
        "refusing" => refused(StatusCode::UNAUTHORIZED, &complaint),
        "failing" => (StatusCode::INTERNAL_SERVER_ERROR, complaint).into_response(),
        "breaking" => {
            let error = json!({"error": {"message": complaint}});
            let body = format!("{}data: {error}\n\n", chunk(json!({"content": "Hel"})));
            ([("content-type", "text/event-stream")], body).into_response()
        }
        "mistyped" => {
            let content_type = HeaderValue::from_str(&format!("text/{KEY}")).unwrap();
            ([("content-type", content_type)], complaint).into_response()
        }
        _ => (StatusCode::FOUND, [("location", format!("/v1/{KEY}"))], complaint).into_response(),
    }
}

/// Starts a server that takes traces and webhooks, and returns its address.
async fn collector(written: &Written) -> String {
    async fn take(State(written): State<Written>, uri: axum::http::Uri, body: Bytes) {
        written.lock().unwrap().push((format!("sent to {uri}"), body.to_vec()));
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new().fallback(take).with_state(written.clone());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

/// A host that logs everything.
struct Up {
    child: Child,
    host: Host,
    output: Vec<JoinHandle<()>>,
}

impl Up {
    fn start(folder: &Path, written: &Written) -> Up {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--listen", "127.0.0.1:0", "--threads", "1"])
            .args(["--log-level", "trace", "--log-format", "json"])
            .arg("--model")
            .arg(folder.join("tiny"))
            .arg("--config")
            .arg(folder.join("skep.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = child.stderr.take().unwrap();
        let all = written.clone();
        let log = std::thread::spawn(move || {
            let mut text = Vec::new();
            log.read_to_end(&mut text).unwrap();
            all.lock().unwrap().push(("the log".to_owned(), text));
        });
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        let url = loop {
            let before = said.len();
            assert!(stdout.read_line(&mut said).unwrap() > 0, "`skep up` prints its URL");
            let url = said[before..].split_whitespace().find(|word| word.starts_with("http://"));
            if let Some(url) = url {
                break url.trim_end_matches('/').to_owned();
            }
        };
        let all = written.clone();
        let stdout = std::thread::spawn(move || {
            stdout.read_to_string(&mut said).unwrap();
            all.lock().unwrap().push(("standard output".to_owned(), said.into_bytes()));
        });
        Up { child, host: Host::elsewhere(url), output: vec![log, stdout] }
    }

    /// Stops the host like a supervisor would, and waits for all of its output.
    async fn stop(mut self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let stopped = move || {
            assert!(self.child.wait().unwrap().success());
            self.output.into_iter().for_each(|output| output.join().unwrap());
        };
        tokio::task::spawn_blocking(stopped).await.unwrap();
    }
}

/// Sends a request, and keeps the whole answer.
async fn keep(written: &Written, request: reqwest::RequestBuilder) -> String {
    let request = request.timeout(Duration::from_secs(20)).build().unwrap();
    let place = format!("answer to {} {}", request.method(), request.url());
    let response = client().execute(request).await.unwrap();
    let mut text = format!("{} {:?}\n", response.status(), response.headers());
    text.push_str(&response.text().await.unwrap());
    written.lock().unwrap().push((place, text.clone().into_bytes()));
    text
}

fn keep_files(written: &Written, folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            keep_files(written, &path);
        } else {
            let body = std::fs::read(&path).unwrap();
            written.lock().unwrap().push((path.display().to_string(), body));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_an_upstream_is_in_nothing_that_the_host_writes_or_answers() {
    let written = Written::default();
    let upstream = ScriptedUpstream::start(echo).await;
    let collector = collector(&written).await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("tiny")).unwrap();
    tiny_model(&folder.path().join("tiny"));
    let gone = nowhere();
    let common = "kind = \"openai\"\nkey = \"secret:FAR\"\nattempts = 1\nbreaker_failures = 1000";
    let models = MODELS.map(|name| format!("{{ name = \"{name}\" }}")).join(", ");
    let settings = format!(
        "data = \"data\"\n\
         [grants]\nmodels = [\"*\", \"far/*\", \"gone/*\"]\n\
         [outbound]\nallow_private = [\"127.0.0.1\"]\n\
         [telemetry]\notlp_endpoint = \"{collector}\"\n\
         [[webhook]]\nurl = \"{collector}/hook\"\ntopics = [\"skep.turn.failed\"]\n\
         secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n\
         [[upstream]]\nname = \"far\"\nurl = \"{}\"\n{common}\nmodels = [{models}]\n\
         [[upstream]]\nname = \"gone\"\nurl = \"{gone}\"\n{common}\nmodels = [{{ name = \"m\" }}]\n\
         [[route]]\nname = \"any\"\nmodels = [{{ model = \"gone/m\" }}, {{ model = \"far/refusing\" }}, {{ model = \"far/good\" }}]\n",
        upstream.url,
    );
    std::fs::write(folder.path().join("skep.toml"), settings).unwrap();
    let up = Up::start(folder.path(), &written);
    let host = &up.host;

    let mut set = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["secret", "set", "FAR", "--url", &host.url])
        .args(["--to", upstream.url.trim_end_matches("/v1"), "--to", gone.trim_end_matches("/v1")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    set.stdin.take().unwrap().write_all(KEY.as_bytes()).unwrap();
    let set = tokio::task::spawn_blocking(move || set.wait_with_output().unwrap()).await.unwrap();
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    written.lock().unwrap().extend([("set".to_owned(), set.stdout), ("set".to_owned(), set.stderr)]);

    let grants = "[grants]\nmodels = [\"far/*\", \"gone/*\", \"any\"]";
    let (status, deployed) = host.deploy_guest("generate", "talker", grants).await;
    assert_eq!(status, 201, "{deployed}");
    let names = MODELS.map(|name| format!("far/{name}"));
    let mut complaints = String::new();
    for model in names.iter().map(String::as_str).chain(["gone/m", "any"]) {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        for stream in [false, true] {
            let chat = json!({"model": model, "messages": messages, "stream": stream});
            complaints
                .push_str(&keep(&written, client().post(host.at("/v1/chat/completions")).json(&chat)).await);
        }
        let run = client().post(host.at(&format!("/ai/run/{model}"))).json(&json!({"messages": messages}));
        keep(&written, run).await;
        let session = model.replace('/', "-");
        let message = json!({"text": "Hello", "data": {"model": model, "conversation": "c"}});
        let path = host.at(&format!("/v1/agents/talker/sessions/{session}/messages"));
        complaints.push_str(&keep(&written, client().post(&path).json(&message)).await);
        let streamed = client().post(&path).header("accept", "text/event-stream").json(&message);
        keep(&written, streamed).await;
    }
    let asked = upstream.asked();
    let sent = |asked: &Asked| asked.headers["authorization"] == format!("Bearer {KEY}").as_str();
    assert!(asked.len() > 25 && asked.iter().all(sent), "the key was sent {} times", asked.len());
    assert!(complaints.contains("Hello.") && complaints.contains("Bearer [key]"), "{complaints}");

    // Read everything that the host exposes.
    let document: Value = host.get("/openapi.json").await.1;
    let mut read = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path =
            path.replace("{agent}", "talker").replace("{session}", "far-refusing").replace("{turn}", "1");
        if methods.get("get").is_some() && !path.contains('{') {
            keep(&written, client().get(host.at(&path))).await;
            read += 1;
        }
    }
    assert!(read > 15, "{read} routes");
    // A turn's failure is delivered in the background.
    while !written.lock().unwrap().iter().any(|(place, _)| place.contains("/hook")) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    up.stop().await;
    keep_files(&written, folder.path());

    let written = written.lock().unwrap();
    let is_in = |place: &str, text: &str| {
        let found = written.iter().filter(|(known, _)| known.contains(place));
        found.into_iter().any(|(_, body)| String::from_utf8_lossy(body).contains(text))
    };
    // Check that the searched output is complete.
    for (place, text) in [
        ("the log", "TRACE"),
        ("the log", "Bearer [key]"),
        ("/v1/traces", "far/refusing"),
        ("/hook", "skep.turn.failed"),
        ("skep.db", "SQLite"),
    ] {
        assert!(is_in(place, text), "{text} is missing in {place}");
    }
    for (place, body) in written.iter() {
        let text = String::from_utf8_lossy(body);
        for key in [KEY, KEY_BASE64] {
            if let Some(at) = text.find(key) {
                let from = text.floor_char_boundary(at.saturating_sub(300));
                panic!("{place} has the key: {}", &text[from..at + key.len()]);
            }
        }
    }
}
