//! A decode host and a prefill host over loopback, with a real engine at the prefill host; and a balancer in front of a host.

use super::{
    super::{Cluster, ClusterOptions, ClusterPages, DrainRequests, PageOptions, PageStage, routes},
    HERE, Script, THERE, answered_by, ask, ended, gateway, key, member,
    passing::{message, with_echo},
    serve,
};
use crate::{AccessOptions, GatewayOptions, routes_of, tests::fixture::Server};
use axum::{
    Router,
    body::{Body, Bytes},
    http::{Method, Request, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use futures::{StreamExt, stream};
use serde_json::json;
use skep_engine::{
    Affinity, Engine, GenerateRequest, PageNamer, PagePeers, PageQuestion, PageRead, PageSink, PrefillOrder,
    Priority,
};
use skep_runtime::{HostRole, Member, NewApiKey, Role, Tenant, TokensInFlight, WorkingHost};
use skep_transfer::{AgentOptions, TransferAgent};
use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{io::AsyncReadExt, net::TcpListener, sync::watch};

/// The key that names pages at both hosts.
const NAMES: [u8; 32] = [5; 32];
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of pages of the prompt.
const PAGES: usize = 8;

fn options(stage: PageStage) -> PageOptions {
    PageOptions { disk: None, names: PageNamer::new(NAMES), stage }
}

/// A host that computes prompts for others.
struct PrefillHost {
    server: Server,
    pages: ClusterPages,
    routes: Router,
}

async fn prefill_host() -> PrefillHost {
    let server = Server::start().await;
    let pages = ClusterPages::new(&key(), options(PageStage::Prefill));
    let routes = of_role(&server, HostRole::Prefill, Some(pages.clone()), vec![None]);
    PrefillHost { server, pages, routes }
}

/// Returns the routes of a host with a role, that knows these other hosts.
fn of_role(
    server: &Server,
    role: HostRole,
    pages: Option<ClusterPages>,
    hosts: Vec<Option<Member>>,
) -> Router {
    let owners = Script::new(hosts);
    let mut gateway = gateway(&server.host, GatewayOptions::default(), THERE, owners.clone());
    let options = ClusterOptions { key: key(), number: THERE, drain: DrainRequests::default(), pages, role };
    gateway.cluster = Some(Arc::new(Cluster::new(options, owners)));
    routes_of(gateway)
}

/// Returns the pages of a decode host that knows this prefill host.
fn decode_host(member: &Member) -> ClusterPages {
    let pages = ClusterPages::new(&key(), options(PageStage::Decode { min_tokens: 64 }));
    assert!(pages.prefill_view("tiny").is_none(), "it knows nobody yet");
    let host = WorkingHost { member: member.clone(), tokens: TokensInFlight::default() };
    pages.meet_prefill(move |model| if model == "tiny" { vec![host.clone()] } else { Vec::new() });
    pages
}

fn order(engine: &Engine, first: usize, within: Duration) -> PrefillOrder {
    let names = PageNamer::new(NAMES);
    let tokens: Vec<u32> = (0..PAGES as u32 * 16).map(|token| token % 97 + 1).collect();
    let (layout, payload_bytes) = engine.page_layout(&names).unwrap();
    let all = names.prefixes("t", &tokens, 16);
    let question = PageQuestion { layout, payload_bytes, names: all[first..].to_vec() };
    let affinity = Affinity { tenant: "t".into(), ..Affinity::default() };
    let (model, priority) = ("tiny".into(), Priority::default());
    PrefillOrder { model, affinity, priority, tokens, names: all, first, question, within }
}

async fn fetch(pages: &ClusterPages, order: PrefillOrder) -> Vec<Vec<u8>> {
    let mut prefilled = pages.prefill(order).expect("nothing else is fetched");
    let (mut found, until) = (Vec::new(), Instant::now() + PATIENCE);
    loop {
        assert!(Instant::now() < until, "the pages do not end");
        match prefilled.pages.poll() {
            PageRead::Page(page) => found.push(page),
            PageRead::NotYet => tokio::time::sleep(Duration::from_millis(1)).await,
            PageRead::Ended => return found,
        }
    }
}

/// A sink that keeps everything.
#[derive(Debug, Default)]
struct Kept(Mutex<Vec<Vec<u8>>>);

impl PageSink for Kept {
    fn first_page(&self) -> usize {
        0
    }

    fn put(&self, _page: usize, bytes: Vec<u8>) -> bool {
        self.0.lock().unwrap().push(bytes);
        true
    }
}

/// Returns the pages that an engine computes for a prompt.
async fn computed(engine: &Engine, tokens: Vec<u32>) -> Vec<Vec<u8>> {
    let kept = Arc::<Kept>::default();
    let sink: Arc<dyn PageSink> = kept.clone();
    let mut running = engine.prefill(GenerateRequest::new(tokens), sink).unwrap();
    while let Some(event) = running.next().await {
        event.unwrap();
    }
    std::mem::take(&mut *kept.0.lock().unwrap())
}

/// Waits until a prefill host holds nothing for others.
async fn holds_nothing(pages: &ClusterPages) {
    let until = Instant::now() + PATIENCE;
    while pages.held_for_others() != (0, 0, 0) {
        assert!(Instant::now() < until, "{:?}", pages.held_for_others());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn the_pages_of_an_order_are_those_that_the_engine_computes() {
    let there = prefill_host().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let here = decode_host(&member);
    let view = here.prefill_view("tiny").expect("there is one");
    assert_eq!((view.min_tokens, view.tokens_ahead, view.tokens_per_s), (64, 0, None));
    assert!(here.prefill_view("other").is_none());
    let engine = &there.server.engine;
    let all = order(engine, 0, PATIENCE);
    let expected = computed(engine, all.tokens.clone()).await;
    assert_eq!(expected.len(), PAGES);
    let found = fetch(&here, all).await;
    assert!(found == expected, "{} pages", found.len());
    assert!(here.prefill_view("tiny").is_some_and(|view| view.tokens_per_s.is_some()), "its rate is known");
    let found = fetch(&here, order(engine, 5, PATIENCE)).await;
    assert!(found.len() == PAGES - 5 && found[0] == expected[5], "{} pages", found.len());
    // The notice ends the lease long before its time.
    holds_nothing(&there.pages).await;
}

/// Returns the memory that a host shares with a helper that cannot start.
fn without_a_library(name: &str) -> TransferAgent {
    TransferAgent::start(AgentOptions {
        name: name.to_owned(),
        library: "/nowhere/libnixl_capi.so".into(),
        program: "/nowhere/skep".into(),
        arguments: Vec::new(),
        environment: Vec::new(),
        ring_bytes: 1 << 20,
    })
    .unwrap()
}

#[tokio::test]
async fn the_pages_of_an_order_come_over_http_while_a_host_has_no_helper() {
    let there = prefill_host().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let all = order(&there.server.engine, 0, PATIENCE);
    let expected = computed(&there.server.engine, all.tokens.clone()).await;
    for has_helper in [false, true] {
        if has_helper {
            there.pages.transfer_by(without_a_library("there/1"));
        }
        let here = decode_host(&member);
        here.transfer_by(without_a_library("here/1"));
        let found = fetch(&here, order(&there.server.engine, 0, PATIENCE)).await;
        assert!(found == expected, "{} pages", found.len());
        holds_nothing(&there.pages).await;
    }
    // A transfer that has ended lends nothing.
    let part = serde_json::from_value(json!({ "transfer": "gone", "from": 3, "held": 3 })).unwrap();
    assert_eq!(there.pages.lend_transfer(&part).await.unwrap_err().code, "transfer_not_found");
}

#[tokio::test]
async fn an_order_that_is_given_up_leaves_nothing_behind() {
    let there = prefill_host().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let here = decode_host(&member);
    drop(here.prefill(order(&there.server.engine, 0, PATIENCE)).expect("nothing else is fetched"));
    let until = Instant::now() + PATIENCE;
    while there.server.engine.stats().prompt_tokens == 0 {
        assert!(Instant::now() < until, "the order does not arrive");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    holds_nothing(&there.pages).await;
    assert!(here.prefill_view("tiny").is_some(), "the host did nothing wrong");
}

#[tokio::test]
async fn a_host_with_another_layout_or_without_the_model_refuses_and_rests() {
    let there = prefill_host().await;
    let (member, _stop) = serve(there.routes.clone()).await;
    let mut other_layout = order(&there.server.engine, 0, PATIENCE);
    other_layout.question.layout.0[0] ^= 1;
    let mut other_size = order(&there.server.engine, 0, PATIENCE);
    other_size.question.payload_bytes += 1;
    let other_model = PrefillOrder { model: "other".into(), ..order(&there.server.engine, 0, PATIENCE) };
    for wrong in [other_layout, other_size] {
        let here = decode_host(&member);
        assert!(fetch(&here, wrong).await.is_empty());
        assert!(here.prefill_view("tiny").is_none(), "it is not asked again for a while");
    }
    assert!(fetch(&decode_host(&member), other_model).await.is_empty());
    holds_nothing(&there.pages).await;
}

#[tokio::test]
async fn a_host_that_is_gone_or_silent_is_not_waited_for() {
    let engine = crate::tests::fixture::tiny_engine("tiny");
    let gone = decode_host(&ended().await);
    assert!(fetch(&gone, order(&engine, 0, PATIENCE)).await.is_empty());
    assert!(gone.prefill_view("tiny").is_none());
    // One that takes the order, says that it begins, and then says nothing.
    let answer = |request: Request<Body>| async move {
        let (parts, _) = request.into_parts();
        let signed = key().verify(&parts.method, &parts.uri, &parts.headers).unwrap().unwrap();
        let begun = json!({ "started": { "reused_tokens": 0 } }).to_string() + "\n";
        let lines = stream::iter([Ok::<_, Infallible>(Bytes::from(begun))]).chain(stream::pending());
        let mut response: Response = Body::from_stream(lines).into_response();
        key().prove(signed.nonce, StatusCode::OK, response.headers_mut());
        response
    };
    let routes = Router::new()
        .route(routes::PREFILL, post(answer))
        .route(routes::PREFILL_PAGES, post(std::future::pending::<()>));
    let (member, _stop): (Member, watch::Sender<bool>) = serve(routes).await;
    let silent = decode_host(&member);
    let begun = Instant::now();
    assert!(fetch(&silent, order(&engine, 0, Duration::from_millis(300))).await.is_empty());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(silent.prefill_view("tiny").is_none(), "others do not wait for it as well");
}

#[tokio::test]
async fn a_prefill_host_answers_clients_only_about_itself() {
    let there = prefill_host().await;
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    assert_eq!(ask(&there.routes, get("/healthz")).await.status, 200);
    assert_eq!(ask(&there.routes, get("/v1/cluster")).await.status, 200);
    let chat = Request::post("/v1/chat/completions").header("content-type", "application/json");
    let answer = ask(&there.routes, chat.body(Body::from("{}")).unwrap()).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (421, &json!("prefill_host")));
    assert_eq!(ask(&there.routes, get("/v1/models")).await.status, 421);
}

#[tokio::test]
async fn a_balancer_passes_requests_to_a_host_that_answers_and_streams_its_answer() {
    let (one, two) = (Server::start().await, Server::start().await);
    let serving = gateway(&two.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let (there, _stop) = serve(routes_of(serving)).await;
    let gone = Member { number: 3, ..ended().await };
    let balancer = of_role(&one, HostRole::Balancer, None, vec![Some(gone.clone()), Some(there)]);
    let before = two.engine.stats().prompt_tokens;
    for is_streamed in [false, true] {
        let body = json!({
            "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 3, "stream": is_streamed,
        });
        let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
        let answer = ask(&balancer, request.body(Body::from(body.to_string())).unwrap()).await;
        assert_eq!((answer.status.as_u16(), answered_by(&answer)), (200, "2"), "{}", answer.text);
        assert_eq!(answer.text.contains("data: [DONE]"), is_streamed);
    }
    assert!(two.engine.stats().prompt_tokens > before);
    assert_eq!(one.engine.stats().prompt_tokens, 0, "the balancer computes nothing");
    let own = ask(&balancer, Request::get("/healthz").body(Body::empty()).unwrap()).await;
    assert_eq!(own.status, 200);
    let nobody = of_role(&one, HostRole::Balancer, None, vec![Some(gone)]);
    let answer = ask(&nobody, Request::get("/v1/models").body(Body::empty()).unwrap()).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (503, &json!("host_gone")));
}

/// Returns the routes of a balancer to which these are the places of all sessions.
fn balancer(server: &Server, access: AccessOptions, owners: Arc<Script>) -> Router {
    let options = GatewayOptions { access, ..GatewayOptions::default() };
    let mut gateway = gateway(&server.host, options, HERE, owners.clone());
    let (drain, role) = (DrainRequests::default(), HostRole::Balancer);
    let options = ClusterOptions { key: key(), number: HERE, drain, pages: None, role };
    gateway.cluster = Some(Arc::new(Cluster::new(options, owners)));
    routes_of(gateway)
}

#[tokio::test]
async fn a_balancer_gives_a_message_to_another_host_when_the_owner_of_its_session_is_gone() {
    let (one, two) = (Server::start().await, with_echo().await);
    let serving = gateway(&two.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let (there, _stop) = serve(routes_of(serving)).await;
    let hosts = vec![Some(ended().await), None, Some(there)];
    let routes = balancer(&one, AccessOptions::default(), Script::new(hosts));
    let answer = ask(&routes, message(&[])).await;
    assert_eq!((answer.status.as_u16(), answered_by(&answer)), (200, "2"), "{}", answer.text);
    assert_eq!(answer.json()["text"], "hello");
}

#[tokio::test]
async fn a_host_without_keys_requires_them_of_the_clients_of_a_balancer_that_does() {
    let (one, two) = (Server::start().await, Server::start().await);
    let access = AccessOptions { local_names_only: true, ..AccessOptions::default() };
    let options = GatewayOptions { access, ..GatewayOptions::default() };
    let serving = routes_of(gateway(&two.host, options, THERE, Script::new(vec![None])));
    let (there, _stop) = serve(serving.clone()).await;
    let access = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let routes = balancer(&one, access, Script::new(vec![Some(there)]));
    let new = NewApiKey {
        tenant: Tenant::new("acme").unwrap(),
        role: Role::Read,
        agents: None,
        name: String::new(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    let created = format!("Bearer {}", two.host.keys().create(new).await.unwrap().1);
    let get = |path: &str, name: &str, key: Option<&str>| {
        let request = Request::get(path).header("host", name);
        let request = key.into_iter().fold(request, |request, key| request.header("authorization", key));
        request.body(Body::empty()).unwrap()
    };
    for (path, name, key, expected) in [
        ("/v1/agents", "localhost", None, 401),
        ("/v1/webhooks", "localhost", None, 401),
        ("/v1/agents", "skep.example", Some(created.as_str()), 200),
        ("/v1/webhooks", "skep.example", Some(created.as_str()), 403),
    ] {
        let answer = ask(&routes, get(path, name, key)).await;
        assert_eq!(
            (answer.status.as_u16(), answered_by(&answer)),
            (expected, "2"),
            "{path}: {}",
            answer.text
        );
    }
    // Its own clients are those of its machine, and cannot say what only hosts say.
    assert_eq!(ask(&serving, get("/v1/webhooks", "localhost", None)).await.status, 200);
    assert_eq!(ask(&serving, get("/v1/agents", "skep.example", None)).await.status, 421);
    let mut forged = get("/v1/agents", "skep.example", None);
    forged.headers_mut().insert("x-skep-cluster-needs-key", "1".parse().unwrap());
    assert_eq!(ask(&serving, forged).await.status, 421);
}

/// Returns the address of a host that gets requests and ends without an answer.
async fn breaking() -> Member {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let member = Member { number: HERE, ..member(&listener) };
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            assert!(connection.read(&mut [0; 4096]).await.unwrap() > 0);
        }
    });
    member
}

#[tokio::test]
async fn a_balancer_repeats_only_what_changes_nothing() {
    let (one, two) = (Server::start().await, Server::start().await);
    let serving = gateway(&two.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let (there, _stop) = serve(routes_of(serving)).await;
    let breaking = breaking().await;
    for (method, path, expected) in [
        (Method::GET, "/v1/agents", 200),
        (Method::GET, "/a/route/of/an/agent", 503),
        (Method::POST, "/v1/messages", 503),
    ] {
        let owners = Script::new(vec![Some(breaking.clone()), Some(there.clone())]);
        let routes = balancer(&one, AccessOptions::default(), owners);
        let request = Request::builder().method(method).uri(path).header("idempotency-key", "k");
        let answer = ask(&routes, request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status.as_u16(), expected, "{path}: {}", answer.text);
    }
}
