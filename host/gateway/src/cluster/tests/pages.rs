//! KV pages that one host gives to another over loopback: they arrive as they were written, and what is wrong, missing, erased
//! or late does not.

use super::{
    super::{
        Cluster, ClusterKey, ClusterOptions, ClusterPages, DrainRequests,
        key::{Nonce, Signed, SignedBody},
        link::now_ms,
        routes,
    },
    Script, THERE, ask, gateway, key, serve,
};
use crate::{GatewayOptions, PageFigures, PageOptions, routes_of, tests::fixture::Server};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Method, Request, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use futures::StreamExt;
use serde_json::json;
use skep_engine::{
    Digest, DiskTier, EraseFilter, PagePeers, PageQuestion, PageRead, PageWrite, SealingSecret, TierOptions,
    TransitSeal,
};
use skep_runtime::{HostRole, Member};
use skep_transfer::{AgentOptions, TransferAgent};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::sync::watch;

const PAGE_BYTES: usize = 3_000;
const PATIENCE: Duration = Duration::from_secs(60);

fn tier(folder: &Path) -> Arc<DiskTier> {
    let options = TierOptions { name_key: Some(SealingSecret([5; 32])), ..TierOptions::for_tests(folder) };
    Arc::new(DiskTier::open(options).unwrap())
}

/// Returns recognizable contents of a page.
fn contents(name: &Digest) -> Vec<u8> {
    name.0.iter().copied().cycle().take(PAGE_BYTES).collect()
}

/// Returns the question for this many pages.
fn question(tier: &DiskTier, pages: u32) -> PageQuestion {
    let tokens: Vec<u32> = (0..pages * 16).collect();
    let names = tier.keys().prefixes("t", &tokens, 16);
    PageQuestion { layout: tier.keys().layout("weights", "form"), payload_bytes: PAGE_BYTES, names }
}

/// Writes the pages of a question.
fn write(tier: &DiskTier, PageQuestion { layout, payload_bytes, names }: &PageQuestion) {
    let (keys, layout) = (tier.keys(), tier.layout(*layout, *payload_bytes).unwrap());
    for (at, name) in names.iter().enumerate() {
        assert!(tier.write(PageWrite {
            layout,
            prefix: *name,
            parent: at.checked_sub(1).map(|before| names[before]),
            tenant: keys.tenant("t"),
            owner: keys.owner(Some("agent"), Some("s")),
            bytes: contents(name),
        }));
    }
    tier.flush();
}

/// A host that gives pages.
struct There {
    tier: Arc<DiskTier>,
    pages: ClusterPages,
    routes: Router,
    server: Server,
    _folder: TempDir,
}

async fn there() -> There {
    let (server, folder) = (Server::start().await, tempfile::tempdir().unwrap());
    let tier = tier(folder.path());
    let pages = ClusterPages::new(&key(), PageOptions::of(tier.clone()));
    let mut gateway = gateway(&server.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let drain = DrainRequests::default();
    let options =
        ClusterOptions { key: key(), number: THERE, drain, pages: Some(pages.clone()), role: HostRole::All };
    gateway.cluster = Some(Arc::new(Cluster::new(options, Script::new(vec![None]))));
    There { tier, pages, routes: routes_of(gateway), server, _folder: folder }
}

/// Returns the pages of a host that asks this one.
fn here(other: &Member, key: &ClusterKey) -> (ClusterPages, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let pages = ClusterPages::new(key, PageOptions::of(tier(folder.path())));
    assert!(!pages.are_there(), "it knows nobody yet");
    let others = vec![other.clone()];
    pages.meet(move || others.clone());
    assert!(pages.are_there());
    (pages, folder)
}

async fn fetch(pages: &ClusterPages, question: &PageQuestion) -> Vec<Vec<u8>> {
    let mut stream = pages.fetch(question.clone()).expect("nothing else is fetched");
    let mut found = Vec::new();
    loop {
        match stream.poll() {
            PageRead::Page(page) => found.push(page),
            PageRead::NotYet => tokio::time::sleep(Duration::from_millis(1)).await,
            PageRead::Ended => return found,
        }
    }
}

#[tokio::test]
async fn pages_arrive_as_they_were_written() {
    let there = there().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let (pages, _folder) = here(&member, &key());
    let asked = question(&there.tier, 40);
    write(&there.tier, &PageQuestion { names: asked.names[..30].to_vec(), ..asked.clone() });
    let expected: Vec<Vec<u8>> = asked.names[..30].iter().map(contents).collect();
    assert_eq!(fetch(&pages, &asked).await, expected);
    let bytes = 30 * asked.image_bytes() as u64;
    let fetched =
        PageFigures { questions: 1, fetched_pages: 30, fetched_bytes: bytes, ..PageFigures::default() };
    assert_eq!(pages.figures(), fetched);
    let until = Instant::now() + PATIENCE;
    while there.pages.figures()
        != (PageFigures { given_pages: 30, given_bytes: bytes, ..PageFigures::default() })
    {
        assert!(Instant::now() < until, "{:?}", there.pages.figures());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Neither the end of a prefix without its beginning, nor other weights, formats and tenants.
    let other = |names: Vec<Digest>, layout, payload_bytes| PageQuestion { layout, payload_bytes, names };
    let tokens: Vec<u32> = (0..640).collect();
    for asked in [
        other(asked.names[30..].to_vec(), asked.layout, PAGE_BYTES),
        other(asked.names.clone(), there.tier.keys().layout("other", "form"), PAGE_BYTES),
        other(asked.names.clone(), asked.layout, PAGE_BYTES + 1),
        other(there.tier.keys().prefixes("other", &tokens, 16), asked.layout, PAGE_BYTES),
    ] {
        assert!(fetch(&pages, &asked).await.is_empty());
    }
    assert_eq!((pages.figures().questions, pages.figures().missed), (5, 4));
    assert!(pages.are_there(), "a host without a page is asked again");
}

#[tokio::test]
async fn pages_arrive_over_http_while_there_is_no_helper() {
    let there = there().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let (pages, _folder) = here(&member, &key());
    for pages in [&there.pages, &pages] {
        let agent = TransferAgent::start(AgentOptions {
            name: "test".to_owned(),
            library: "/nowhere/libnixl_capi.so".into(),
            program: "/nowhere/skep".into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            ring_bytes: 1 << 20,
        });
        pages.transfer_by(agent.unwrap());
    }
    let asked = question(&there.tier, 30);
    write(&there.tier, &asked);
    let expected: Vec<Vec<u8>> = asked.names.iter().map(contents).collect();
    assert_eq!(fetch(&pages, &asked).await, expected);
    assert_eq!(pages.figures().missed, 0);
}

#[tokio::test]
async fn erased_pages_are_not_given() {
    let there = there().await;
    let asked = question(&there.tier, 40);
    write(&there.tier, &asked);
    let mut images = there.pages.give(&asked.encode()).unwrap().into_data_stream();
    assert_eq!(images.next().await.unwrap().unwrap().len(), asked.image_bytes());
    let tier = there.tier.clone();
    tokio::task::spawn_blocking(move || tier.forget(EraseFilter::All)).await.unwrap();
    // One that waits for the network may have been sent, and not those that were read ahead.
    let later = images.count().await;
    assert!(later <= 3, "{later} pages were given after they were erased");
    let (member, _stop) = serve(there.routes.clone()).await;
    let (pages, _folder) = here(&member, &key());
    assert!(fetch(&pages, &asked).await.is_empty());
}

#[tokio::test]
async fn a_host_with_another_key_gets_nothing_and_rests() {
    let there = there().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let (pages, _folder) = here(&member, &ClusterKey::new(&[b'o'; 32]).unwrap());
    let asked = question(&there.tier, 4);
    write(&there.tier, &asked);
    assert!(fetch(&pages, &asked).await.is_empty());
    assert!(!pages.are_there(), "it is not asked again for a while");
    assert_eq!(there.pages.figures(), PageFigures::default());
}

/// Serves a host that has the key, says that it has all pages, and gives these bytes.
async fn liar(body: Vec<u8>) -> (Member, watch::Sender<bool>) {
    let answer = move |request: Request<Body>| {
        let body = body.clone();
        async move {
            let (parts, _) = request.into_parts();
            let signed = key().verify(&parts.method, &parts.uri, &parts.headers).unwrap().unwrap();
            let mut response: Response = match parts.uri.path() {
                routes::PAGES_COUNT => json!({ "pages": 1_000_000 }).to_string().into_response(),
                _ => body.into_response(),
            };
            key().prove(signed.nonce, StatusCode::OK, response.headers_mut());
            response
        }
    };
    let routes = Router::new()
        .route(routes::PAGES_COUNT, post(answer.clone()))
        .route(routes::PAGES_READ, post(answer));
    serve(routes).await
}

#[tokio::test]
async fn pages_that_are_not_those_that_were_asked_for_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question(&tier(folder.path()), 3);
    let seal = TransitSeal::new(&SealingSecret(key().derived("kv pages in transit")));
    let image = |name: &Digest| seal.seal(asked.layout, *name, &contents(name)).unwrap();
    let [one, two, three] = [image(&asked.names[0]), image(&asked.names[1]), image(&asked.names[2])];
    let mut changed = two.clone();
    changed[2_000] ^= 1;
    let strange = TransitSeal::new(&SealingSecret([1; 32]));
    let forged = strange.seal(asked.layout, asked.names[1], &contents(&asked.names[1])).unwrap();
    let other_layout = seal.seal(Digest([9; 32]), asked.names[1], &contents(&asked.names[1])).unwrap();
    let all = [one.clone(), two.clone(), three.clone()].concat();
    for (what, body, expected, is_asked_again) in [
        ("all of them", all.clone(), 3, true),
        ("more than that", [all, one.clone()].concat(), 3, true),
        ("nothing", Vec::new(), 0, true),
        ("a half", [one.clone(), two[..1_500].to_vec()].concat(), 1, true),
        ("two in the wrong order", [two, one.clone()].concat(), 0, false),
        ("a changed one", [one.clone(), changed, three.clone()].concat(), 1, false),
        ("one of another key", [one.clone(), forged, three.clone()].concat(), 1, false),
        ("one of another layout", [one, other_layout, three].concat(), 1, false),
        ("something else", vec![7; 3 * asked.image_bytes()], 0, false),
    ] {
        let (member, _stop) = liar(body).await;
        let (pages, _folder) = here(&member, &key());
        let found = fetch(&pages, &asked).await;
        let expected: Vec<Vec<u8>> = asked.names[..expected].iter().map(contents).collect();
        assert!(found == expected, "{what}: {} pages", found.len());
        assert_eq!(pages.are_there(), is_asked_again, "{what}");
        assert_eq!(pages.figures().missed, u64::from(found.len() < 3), "{what}");
    }
}

#[tokio::test]
async fn a_host_that_does_not_answer_is_not_waited_for_again() {
    let questions = Arc::new(AtomicUsize::new(0));
    let counter = questions.clone();
    let count = move || {
        counter.fetch_add(1, Ordering::AcqRel);
        std::future::pending::<()>()
    };
    let silent = Router::new().route(routes::PAGES_COUNT, post(count));
    let (member, _stop) = serve(silent).await;
    let (pages, folder) = here(&member, &key());
    let asked = question(&tier(&folder.path().join("other")), 4);
    let begun = Instant::now();
    assert!(fetch(&pages, &asked).await.is_empty());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(!pages.are_there());
    assert!(fetch(&pages, &asked).await.is_empty());
    // The first question may come too late to be counted.
    assert!(questions.load(Ordering::Acquire) <= 1, "it is not asked again");
}

#[tokio::test]
async fn answers_with_pages_are_bounded() {
    let there = there().await;
    let asked = question(&there.tier, 200);
    write(&there.tier, &asked);
    let body = asked.encode();
    let given: Vec<Body> = (0..4).map(|_| there.pages.give(&body).unwrap()).collect();
    assert_eq!(there.pages.give(&body).unwrap_err().code, "pages_busy");
    drop(given);
    let until = Instant::now() + PATIENCE;
    while there.pages.give(&body).is_err() {
        assert!(Instant::now() < until, "answers that nobody reads do not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends a body to an internal route as another host does.
async fn send(routes: &Router, path: &str, body: &[u8]) -> Response {
    let signed =
        Signed { nonce: Nonce::new(), receiver: THERE, time_ms: now_ms(), body: SignedBody::of(body) };
    let mut headers = HeaderMap::new();
    key().sign(&Method::POST, path, &mut headers, &signed);
    let mut request = Request::post(path).body(Body::from(body.to_vec())).unwrap();
    *request.headers_mut() = headers;
    tower::ServiceExt::oneshot(routes.clone(), request).await.unwrap()
}

#[tokio::test]
async fn questions_that_cannot_be_read_are_refused_and_hosts_without_pages_say_so() {
    let there = there().await;
    let asked = question(&there.tier, 3);
    write(&there.tier, &asked);
    let code = async |routes: &Router, path: &str, body: &[u8]| {
        let answer = send(routes, path, body).await;
        let status = answer.status().as_u16();
        let text = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        (status, json["code"].as_str().unwrap_or_default().to_owned())
    };
    let mut many = asked.encode();
    many[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    for path in [routes::PAGES_COUNT, routes::PAGES_READ, routes::PAGES_LEND] {
        for body in [b"{}".as_slice(), &many, &asked.encode()[..60]] {
            assert_eq!(code(&there.routes, path, body).await, (400, "invalid_question".to_owned()), "{path}");
        }
        let unsigned =
            ask(&there.routes, Request::post(path).body(Body::from(asked.encode())).unwrap()).await;
        assert_eq!(unsigned.error()["code"], "cluster_key_required");
    }
    assert_eq!(code(&there.routes, routes::PAGES_COUNT, &asked.encode()).await.0, 200);
    // It has pages, and no helper that could lend them.
    let refused = code(&there.routes, routes::PAGES_LEND, &asked.encode()).await;
    assert_eq!(refused, (404, "transfer_off".to_owned()));
    assert_eq!(code(&there.routes, routes::PAGES_RETURN, b"[]").await, (400, "invalid_json".to_owned()));
    let ended = json!({"loan": "one that there is not"}).to_string();
    assert_eq!(code(&there.routes, routes::PAGES_RETURN, ended.as_bytes()).await.0, 204);
    let without = gateway(&there.server.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let refused = code(&routes_of(without), routes::PAGES_READ, &asked.encode()).await;
    assert_eq!(refused, (404, "pages_off".to_owned()));
}
