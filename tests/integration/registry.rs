//! Agents in an OCI registry: pushed, pulled and deployed by the binary, against a registry that the test
//! starts.

use crate::harness::{guest, shared};
use axum::{
    Router,
    body::Bytes,
    extract::{Path, Query, Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    process::{Output, Stdio},
    sync::{Arc, Mutex},
};

const USER: &str = "ada";
const PASSWORD: &str = "lovelace";

/// A registry that keeps one repository in memory, following the OCI distribution specification.
#[derive(Clone, Default)]
struct Registry(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    blobs: HashMap<String, Vec<u8>>,
    manifests: HashMap<String, Vec<u8>>,
    /// Uploads by session.
    uploads: Vec<Vec<u8>>,
    /// Whether requests without a login are rejected.
    is_private: bool,
}

impl Registry {
    /// Starts the registry and returns its address.
    async fn start(&self) -> String {
        let routes = Router::new()
            .route("/v2/", get(|| async {}))
            .route("/v2/agents/it/blobs/uploads/", any(upload))
            .route("/v2/agents/it/blobs/{digest}", any(blob))
            .route("/v2/agents/it/manifests/{reference}", any(manifest))
            .layer(middleware::from_fn_with_state(self.clone(), authorize))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(self.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        address
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap()
    }

    fn manifest(&self, tag: &str) -> Value {
        serde_json::from_slice(&self.kept().manifests[tag]).unwrap()
    }

    /// Stores another manifest under a tag.
    fn retag(&self, tag: &str, manifest: &Value) {
        self.kept().manifests.insert(tag.to_owned(), manifest.to_string().into_bytes());
    }
}

async fn authorize(State(registry): State<Registry>, request: Request, next: Next) -> Response {
    // "ada:lovelace"
    let known =
        request.headers().get(header::AUTHORIZATION).is_some_and(|value| value == "Basic YWRhOmxvdmVsYWNl");
    if registry.kept().is_private && !known {
        return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"it\"")])
            .into_response();
    }
    next.run(request).await
}

async fn upload(
    State(registry): State<Registry>,
    method: Method,
    Query(query): Query<HashMap<String, String>>,
    body: Bytes,
) -> Response {
    let mut kept = registry.kept();
    if method == Method::POST {
        kept.uploads.push(Vec::new());
    }
    let session = query.get("session").map_or(kept.uploads.len() - 1, |session| session.parse().unwrap());
    kept.uploads[session].extend_from_slice(&body);
    let Some(digest) = query.get("digest") else {
        let range = format!("0-{}", kept.uploads[session].len().saturating_sub(1));
        let location = format!("/v2/agents/it/blobs/uploads/?session={session}");
        let headers = [(header::LOCATION, location), (header::RANGE, range)];
        return (StatusCode::ACCEPTED, headers).into_response();
    };
    let content = std::mem::take(&mut kept.uploads[session]);
    if digest_of(&content) != *digest {
        return StatusCode::BAD_REQUEST.into_response();
    }
    kept.blobs.insert(digest.clone(), content);
    let location = format!("/v2/agents/it/blobs/{digest}");
    (StatusCode::CREATED, [(header::LOCATION, location)]).into_response()
}

async fn blob(State(registry): State<Registry>, Path(digest): Path<String>) -> Response {
    match registry.kept().blobs.get(&digest) {
        Some(content) => content.clone().into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn manifest(
    State(registry): State<Registry>,
    Path(reference): Path<String>,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut kept = registry.kept();
    if method == Method::PUT {
        assert_eq!(headers[header::CONTENT_TYPE], "application/vnd.oci.image.manifest.v1+json");
        let location = format!("/v2/agents/it/manifests/{reference}");
        kept.manifests.insert(reference, body.to_vec());
        return (StatusCode::CREATED, [(header::LOCATION, location)]).into_response();
    }
    match kept.manifests.get(&reference) {
        Some(content) => {
            let headers = [
                ("content-type", "application/vnd.oci.image.manifest.v1+json".to_owned()),
                ("docker-content-digest", digest_of(content)),
            ];
            (headers, content.clone()).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn digest_of(content: &[u8]) -> String {
    let hex: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Runs the binary as `user`, or without a login.
async fn skep(user: Option<(&str, &str)>, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).stdin(Stdio::null());
    // Ignore the credentials of the person who runs the tests.
    command
        .env("DOCKER_CONFIG", std::env::temp_dir().join("no-docker-config"))
        .env_remove("SKEP_REGISTRY_PASSWORD");
    if let Some((name, password)) = user {
        command.args(["--username", name]).env("SKEP_REGISTRY_PASSWORD", password);
    }
    command.output().await.unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Creates a folder with a component and its manifest. Returns it with the path of the component.
fn agent_folder(name: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let component = folder.path().join("it.wasm");
    std::fs::write(&component, guest("noop")).unwrap();
    let manifest = format!("name = \"{name}\"\n[limits]\nmemory_mb = 7\n");
    std::fs::write(folder.path().join("agent.toml"), manifest).unwrap();
    let component = component.to_str().unwrap().to_owned();
    (folder, component)
}

#[tokio::test]
async fn a_pushed_agent_is_deployed_unchanged() {
    let registry = Registry::default();
    let address = registry.start().await;
    let (folder, component) = tokio::task::spawn_blocking(|| agent_folder("from-registry")).await.unwrap();
    let name = format!("oci://{address}/agents/it:1");

    let pushed = skep(None, &["push", &component, &name, "--json"]).await;
    assert!(pushed.status.success(), "{}", said(&pushed));
    let pushed: Value = serde_json::from_slice(&pushed.stdout).unwrap();
    let described = registry.manifest("1");
    assert_eq!(pushed["digest"], digest_of(described.to_string().as_bytes()));
    assert_eq!(described["artifactType"], "application/vnd.skep.agent.v1");
    assert_eq!(described["config"]["mediaType"], "application/vnd.wasm.config.v0+json");
    assert_eq!(described["layers"][0]["mediaType"], "application/wasm");
    assert_eq!(described["layers"][0]["digest"], digest_of(&std::fs::read(&component).unwrap()));

    let host = shared();
    let deployed = skep(None, &["deploy", &name, "--url", &host.url, "--json"]).await;
    assert!(deployed.status.success(), "{}", said(&deployed));
    let (_, agent) = host.get("/v1/agents/from-registry").await;
    assert_eq!(agent["limits"]["memory_mb"], 7, "{agent}");
    assert_eq!(host.message("from-registry", "s", "hi").await.0, 200);

    let output = folder.path().join("pulled");
    let pull = ["pull", &name, "--output", output.to_str().unwrap()];
    let pulled = skep(None, &pull).await;
    assert!(pulled.status.success(), "{}", said(&pulled));
    assert_eq!(std::fs::read(output.join("from-registry.wasm")).unwrap(), std::fs::read(&component).unwrap());
    let manifest = std::fs::read_to_string(output.join("agent.toml")).unwrap();
    assert_eq!(manifest, std::fs::read_to_string(folder.path().join("agent.toml")).unwrap());
    let again = skep(None, &pull).await;
    assert!(!again.status.success() && said(&again).contains("--output"), "{}", said(&again));
}

#[tokio::test]
async fn a_registry_login_is_sent_or_the_error_asks_for_it() {
    let registry = Registry::default();
    let address = registry.start().await;
    registry.kept().is_private = true;
    let (_folder, component) = tokio::task::spawn_blocking(|| agent_folder("private")).await.unwrap();
    let name = format!("oci://{address}/agents/it:1");

    for user in [None, Some((USER, "wrong"))] {
        let refused = skep(user, &["push", &component, &name]).await;
        assert!(!refused.status.success());
        assert!(said(&refused).contains("docker login"), "{}", said(&refused));
    }
    assert!(registry.kept().blobs.is_empty());
    let pushed = skep(Some((USER, PASSWORD)), &["push", &component, &name]).await;
    assert!(pushed.status.success(), "{}", said(&pushed));
}

#[tokio::test]
async fn without_certificate_authorities_the_error_says_what_to_install() {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["pull", "oci://127.0.0.1:9/agents/it:1"]).stdin(Stdio::null());
    command.env("SSL_CERT_FILE", "/nonexistent").env_remove("SSL_CERT_DIR");
    let refused = command.output().await.unwrap();
    let said = said(&refused);
    assert!(!refused.status.success() && said.contains("needs certificate authorities"), "{said}");
    assert!(said.contains("hint: install ca-certificates"), "{said}");
}

#[tokio::test]
async fn content_that_differs_from_its_manifest_is_never_deployed() {
    let registry = Registry::default();
    let address = registry.start().await;
    let (_folder, component) = tokio::task::spawn_blocking(|| agent_folder("tampered")).await.unwrap();
    let pushed = skep(None, &["push", &component, &format!("oci://{address}/agents/it:good")]).await;
    assert!(pushed.status.success(), "{}", said(&pushed));
    let good = registry.manifest("good");
    let digest = good["layers"][0]["digest"].as_str().unwrap().to_owned();

    let mut huge = good.clone();
    huge["layers"][0]["size"] = json!(1_u64 << 40);
    registry.retag("huge", &huge);
    let mut foreign = good.clone();
    foreign["layers"][1]["mediaType"] = json!("text/plain");
    registry.retag("foreign", &foreign);
    // The blob keeps its length, with one bit flipped.
    registry.kept().blobs.get_mut(&digest).unwrap()[9] ^= 1;

    let host = shared();
    for (tag, expected) in
        [("huge", "are allowed"), ("foreign", "is not an agent"), ("good", "igest"), ("absent", "absent")]
    {
        let name = format!("oci://{address}/agents/it:{tag}");
        let refused = skep(None, &["deploy", &name, "--url", &host.url]).await;
        assert!(!refused.status.success(), "{tag} was deployed");
        assert!(said(&refused).contains(expected), "{tag}: {}", said(&refused));
    }
    assert_eq!(host.get("/v1/agents/tampered").await.0, 404);
}
