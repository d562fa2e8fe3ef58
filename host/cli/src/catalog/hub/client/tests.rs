//! Downloads from a hub on this machine that breaks connections, redirects and lies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap as Headers, StatusCode, Uri};
use axum::response::{IntoResponse, Response as Answer};
use futures::StreamExt as _;

use super::*;
use crate::progress::{Progress as _, Silent};

/// SHA-256 of `abcdefgh`, as `sha256sum` prints it.
const DIGEST: &str = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab";

#[derive(Default)]
struct Hub {
    /// Number of answers to GET that break off after half of the file.
    breaks: AtomicU32,
    /// Number of bytes that were asked for with a range.
    resumed: AtomicU32,
}

async fn answer(
    State(hub): State<Arc<Hub>>,
    method: axum::http::Method,
    uri: Uri,
    headers: Headers,
) -> Answer {
    let authorized = headers.get("authorization").is_some_and(|value| value == "Bearer token");
    match uri.path() {
        "/api/models/a/b/revision/main" => {
            r#"{"siblings": [{"rfilename": "config.json"}, {"rfilename": "sub/m.gguf"}], "private": false}"#
                .into_response()
        }
        "/a/gated/resolve/main/m.gguf" if !authorized => StatusCode::UNAUTHORIZED.into_response(),
        "/a/old/resolve/main/m.gguf" => {
            (StatusCode::TEMPORARY_REDIRECT, [("location", "/a/b/resolve/main/sub/m.gguf")]).into_response()
        }
        "/a/b/resolve/main/sub/m.gguf" if method == "HEAD" => {
            let described = [("location", "/store"), ("x-linked-size", "8")];
            (StatusCode::FOUND, described, [("x-linked-etag", format!("\"{DIGEST}\""))]).into_response()
        }
        "/a/b/resolve/main/sub/m.gguf" => (StatusCode::FOUND, [("location", "/store")]).into_response(),
        "/store" => stored(&hub, &headers),
        "/a/lies/resolve/main/m.gguf" => {
            ([("x-linked-etag", format!("\"{DIGEST}\""))], "12345678").into_response()
        }
        "/a/small/resolve/main/config.json" | "/a/gated/resolve/main/m.gguf" => "abcd".into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Sends `abcdefgh`, or the requested end of it.
fn stored(hub: &Hub, headers: &Headers) -> Answer {
    let from =
        headers.get("range").and_then(|range| range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-'));
    if let Some(from) = from.and_then(|from| from.parse::<usize>().ok()) {
        hub.resumed.fetch_add(8 - from as u32, Ordering::Relaxed);
        let range = [("content-range", format!("bytes {from}-7/8"))];
        return (StatusCode::PARTIAL_CONTENT, range, &"abcdefgh"[from..]).into_response();
    }
    let breaks =
        hub.breaks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    if !breaks {
        return "abcdefgh".into_response();
    }
    // The half has to arrive before the connection breaks.
    let half = futures::stream::once(async { Ok(Bytes::from("abcd")) });
    let breaks = futures::stream::once(async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Err(std::io::Error::other("the connection broke"))
    });
    Body::from_stream(half.chain(breaks)).into_response()
}

async fn hub(breaks: u32, token: Option<&str>) -> (HubClient, Arc<Hub>) {
    let hub = Arc::new(Hub { breaks: breaks.into(), ..Hub::default() });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let router = Router::new().fallback(answer).with_state(hub.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (HubClient::new(&format!("http://{address}"), token.map(str::to_owned)).expect("a client"), hub)
}

async fn download(client: &HubClient, repository: &str, file: &str) -> (Result<()>, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("temporary folder");
    let target = dir.path().join("file");
    (client.download(repository, file, &target, |bytes| Silent.begin("", Some(bytes))).await, dir)
}

fn contents(dir: &tempfile::TempDir) -> String {
    std::fs::read_to_string(dir.path().join("file")).expect("a complete file")
}

#[tokio::test]
async fn files_of_a_repository_are_listed() {
    let (client, _) = hub(0, None).await;
    assert_eq!(client.files("a/b").await.expect("a list"), ["config.json", "sub/m.gguf"]);
    let error = client.files("a/none").await.expect_err("no such repository").to_string();
    assert!(error.contains("a/none") && error.contains("hint: check the name"), "{error}");
}

#[tokio::test]
async fn broken_download_resumes_where_it_broke() {
    let (client, hub) = hub(1, None).await;
    let (result, dir) = download(&client, "a/b", "sub/m.gguf").await;
    result.expect("the second attempt completes the file");
    assert_eq!((contents(&dir).as_str(), hub.resumed.load(Ordering::Relaxed)), ("abcdefgh", 4));
    assert!(!dir.path().join("file.part").exists());
}

#[tokio::test]
async fn renamed_repository_and_small_file_are_downloaded() {
    let (client, _) = hub(0, None).await;
    let (result, dir) = download(&client, "a/old", "m.gguf").await;
    result.expect("the hub redirects to the new name");
    assert_eq!(contents(&dir), "abcdefgh");
    let (result, dir) = download(&client, "a/small", "config.json").await;
    result.expect("a file without a digest");
    assert_eq!(contents(&dir), "abcd");
}

#[tokio::test]
async fn file_with_another_digest_is_not_kept() {
    let (client, _) = hub(0, None).await;
    let (result, dir) = download(&client, "a/lies", "m.gguf").await;
    let error = format!("{:#}", result.expect_err("other bytes than described"));
    assert!(error.contains("SHA-256") && error.contains(DIGEST), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

#[tokio::test]
async fn gated_model_needs_a_token() {
    let (client, _) = hub(0, None).await;
    let (result, _dir) = download(&client, "a/gated", "m.gguf").await;
    let error = format!("{:#}", result.expect_err("no token"));
    assert!(error.contains("HF_TOKEN"), "{error}");
    let (client, _) = hub(0, Some("token")).await;
    let (result, dir) = download(&client, "a/gated", "m.gguf").await;
    result.expect("the token is sent");
    assert_eq!(contents(&dir), "abcd");
}

#[test]
fn endpoint_must_be_an_address() {
    for bad in ["", "hub", "file:///tmp"] {
        assert!(HubClient::new(bad, None).is_err(), "{bad:?}");
    }
}
