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

/// SHA-256 of `abcdefgh`, as `sha256sum` prints it.
const DIGEST: &str = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab";

#[derive(Default)]
struct Hub {
    /// Number of answers to GET that break off after half of the file.
    breaks: AtomicU32,
    /// Number of answers to GET that say that the storage is busy.
    busy: AtomicU32,
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
    let takes = |left: &AtomicU32| {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    };
    if takes(&hub.busy) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    if !takes(&hub.breaks) {
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
    (download_to(&dir, client, repository, file).await, dir)
}

async fn download_to(
    dir: &tempfile::TempDir,
    client: &HubClient,
    repository: &str,
    file: &str,
) -> Result<()> {
    let remote = RemoteFile { repository, revision: "main", name: file };
    let described = client.describe(remote).await?;
    client.download(remote, &described, &dir.path().join("file"), &|_| {}, &|| {}).await
}

fn contents(dir: &tempfile::TempDir) -> String {
    std::fs::read_to_string(dir.path().join("file")).expect("a complete file")
}

#[tokio::test]
async fn files_of_a_repository_are_listed() {
    let (client, _) = hub(0, None).await;
    assert_eq!(client.files("a/b", "main").await.expect("a list"), ["config.json", "sub/m.gguf"]);
    let error = client.files("a/none", "main").await.expect_err("no such repository").to_string();
    assert!(error.contains("a/none") && error.contains("hint: check the name"), "{error}");
}

#[tokio::test]
async fn broken_download_resumes_where_it_broke() {
    let (client, hub) = hub(1, None).await;
    let (result, dir) = download(&client, "a/b", "sub/m.gguf").await;
    result.expect("the second attempt completes the file");
    assert_eq!((contents(&dir).as_str(), hub.resumed.load(Ordering::Relaxed)), ("abcdefgh", 4));
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1, "only the file is left");
}

#[tokio::test]
async fn busy_storage_is_asked_again() {
    let (client, hub) = self::hub(0, None).await;
    hub.busy.store(1, Ordering::Relaxed);
    let (result, dir) = download(&client, "a/b", "sub/m.gguf").await;
    result.expect("the second answer has the file");
    assert_eq!(contents(&dir), "abcdefgh");
}

#[tokio::test]
async fn a_partial_download_of_other_contents_is_not_resumed() {
    for (etag, resumed) in [(Some(DIGEST), 4), (Some("another"), 0), (None, 0)] {
        let (client, hub) = self::hub(0, None).await;
        let dir = tempfile::tempdir().expect("temporary folder");
        // The start of other contents would give a file with a wrong digest.
        let start = if resumed > 0 { "abcd" } else { "xxxx" };
        std::fs::write(dir.path().join("file.part"), start).expect("file");
        if let Some(etag) = etag {
            std::fs::write(dir.path().join("file.part.etag"), etag).expect("file");
        }
        download_to(&dir, &client, "a/b", "sub/m.gguf")
            .await
            .unwrap_or_else(|error| panic!("{etag:?}: {error:#}"));
        assert_eq!(
            (contents(&dir).as_str(), hub.resumed.load(Ordering::Relaxed)),
            ("abcdefgh", resumed),
            "{etag:?}"
        );
    }
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
