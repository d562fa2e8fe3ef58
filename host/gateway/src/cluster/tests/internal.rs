//! The internal routes: only hosts may use them, and what they say is what the runtime of the other host did.

use super::{
    super::{
        Cluster, ClusterKey, ClusterOptions, DrainRequests, HttpPeers,
        key::{Nonce, Signed, SignedBody, say_protocol},
        link::now_ms,
        routes,
    },
    HERE, Script, THERE, ask, gateway, key, serve,
};
use crate::{
    GatewayOptions, routes_of,
    tests::{
        fixture::{Server, TestResponse, until_idle},
        turns::echo,
    },
};
use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Request},
};
use futures::StreamExt;
use serde_json::json;
use skep_engine::{
    Affinity, Priority,
    chat::{ChatEvent, ChatMessage, ChatOptions, Input},
};
use skep_runtime::{
    CLUSTER_PROTOCOL, GenerationEvent, GenerationFailure, HostRole, Invocation, Manifest, Member, Origin,
    PeerError, PeerGeneration, PeerInvocation, Peers, RemoteEvent, RunEvent, TurnAddress,
};
use std::sync::Arc;

const MESSAGES: &str = "/v1/agents/echo/sessions/s/messages";

/// Starts the host that is asked, with the agent echo.
async fn there() -> (Server, Router, DrainRequests) {
    let server = Server::start().await;
    server.host.deploy(Manifest::from_toml("name = \"echo\"").unwrap(), echo(), "tester").await.unwrap();
    let mut gateway = gateway(&server.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let drain = DrainRequests::default();
    let options =
        ClusterOptions { key: key(), number: THERE, drain: drain.clone(), pages: None, role: HostRole::All };
    gateway.cluster = Some(Arc::new(Cluster::new(options, Script::new(vec![None]))));
    (server, routes_of(gateway), drain)
}

fn signed(body: &[u8]) -> Signed {
    Signed { nonce: Nonce::new(), receiver: THERE, time_ms: now_ms(), body: SignedBody::of(body) }
}

/// Sends a body to an internal route with this signature.
async fn send(routes: &Router, path: &str, body: &str, key: &ClusterKey, signed: &Signed) -> TestResponse {
    let mut headers = HeaderMap::new();
    key.sign(&Method::POST, path, &mut headers, signed);
    say_protocol(&mut headers);
    let mut request = Request::post(path).body(Body::from(body.to_owned())).unwrap();
    *request.headers_mut() = headers;
    ask(routes, request).await
}

#[tokio::test]
async fn a_host_whose_version_is_too_far_away_is_refused_with_a_named_error() {
    let (_server, routes, drain) = there().await;
    let send = async |path: &'static str, signed: Signed, protocol: i64| {
        let mut request = Request::post(path).body(Body::from("{\"text\": \"hi\"}")).unwrap();
        key().sign(&Method::POST, path, request.headers_mut(), &signed);
        request.headers_mut().insert("x-skep-cluster-protocol", HeaderValue::from(protocol));
        ask(&routes, request).await
    };
    let asked = || signed(b"{\"text\": \"hi\"}");
    let passed_on = || Signed { body: SignedBody::Streamed, ..signed(b"") };
    for protocol in [CLUSTER_PROTOCOL - 2, CLUSTER_PROTOCOL + 2] {
        let refused = send(routes::DRAIN, asked(), protocol).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.json()["code"]),
            (503, &json!("cluster_versions_apart"))
        );
        assert!(
            refused.text.contains(&format!("speaks version {protocol} of the protocol")),
            "{}",
            refused.text
        );
        assert!(
            refused.headers.contains_key("x-skep-cluster-proof"),
            "the other host knows who has refused it"
        );
        let refused = send(MESSAGES, passed_on(), protocol).await;
        let code = &refused.error()["code"];
        assert_eq!((refused.status.as_u16(), code), (503, &json!("cluster_versions_apart")));
    }
    assert!(!*drain.0.borrow(), "nothing was done");
    for protocol in [CLUSTER_PROTOCOL - 1, CLUSTER_PROTOCOL + 1] {
        let answer = send(MESSAGES, passed_on(), protocol).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    assert_eq!(send(routes::DRAIN, asked(), CLUSTER_PROTOCOL + 1).await.status, 202);
}

#[tokio::test]
async fn internal_routes_require_the_key_of_the_cluster() {
    let (_server, routes, drain) = there().await;
    let body = json!({"agent": "echo", "session": "s", "turn": "t"}).to_string();
    for path in routes::ROUTES {
        let plain = ask(&routes, Request::post(path).body(Body::from(body.clone())).unwrap()).await;
        assert_eq!((plain.status.as_u16(), &plain.error()["code"]), (401, &json!("cluster_key_required")));
        let other = ClusterKey::new(&[b'o'; 32]).unwrap();
        let forged = send(&routes, path, &body, &other, &signed(body.as_bytes())).await;
        assert_eq!(forged.error()["code"], "cluster_signature_refused", "{path}");
        assert!(!forged.headers.contains_key("x-skep-cluster-proof"), "nothing proves the key to a stranger");
    }
    assert!(!*drain.0.borrow(), "nobody has asked");
}

#[tokio::test]
async fn a_signature_counts_once_for_one_host_one_body_and_a_short_time() {
    let (_server, routes, drain) = there().await;
    let early = now_ms() - 31_000;
    let late = now_ms() + 40_000;
    for (wrong, expected) in [
        (Signed { time_ms: early, ..signed(b"") }, "the clocks of the two hosts are 31 s apart"),
        (Signed { time_ms: late, ..signed(b"") }, "synchronize them"),
        (Signed { receiver: HERE, ..signed(b"") }, "the request is for host 1, and host 2 answers here now"),
        (Signed { body: SignedBody::Streamed, ..signed(b"") }, "signed in the wrong way"),
    ] {
        let refused = send(&routes, routes::DRAIN, "", &key(), &wrong).await;
        assert_eq!(refused.status, 401);
        assert!(refused.text.contains(expected), "{}", refused.text);
    }
    let changed = send(&routes, routes::DRAIN, "x", &key(), &signed(b"")).await;
    assert_eq!(changed.json()["code"], "cluster_signature_refused", "{}", changed.text);
    assert!(!*drain.0.borrow(), "nobody has asked");
    let once = signed(b"");
    assert_eq!(send(&routes, routes::DRAIN, "", &key(), &once).await.status, 202);
    drain.asked().await;
    let again = send(&routes, routes::DRAIN, "", &key(), &once).await;
    assert!(again.status == 401 && again.text.contains("was sent before"), "{}", again.text);
}

#[tokio::test]
async fn a_signature_for_an_internal_route_is_not_valid_for_a_clients_route() {
    let (_server, routes, _) = there().await;
    let body = json!({"text": "hi"}).to_string();
    let refused = send(&routes, MESSAGES, &body, &key(), &signed(body.as_bytes())).await;
    assert_eq!(refused.error()["code"], "cluster_signature_refused", "{}", refused.text);
}

#[tokio::test]
async fn without_a_cluster_there_are_no_internal_routes() {
    let server = Server::start().await;
    let answer = send(&server.router, routes::DRAIN, "", &key(), &signed(b"")).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!("route_not_found")));
    assert!(!answer.headers.contains_key("x-skep-host"));
    let drained = server.post("/v1/cluster/hosts/1/drain", &json!({})).await;
    assert_eq!((drained.status.as_u16(), &drained.error()["code"]), (409, &json!("not_clustered")));
    let hosts = server.get("/v1/cluster").await.json()["hosts"].take();
    assert_eq!((hosts.as_array().map(Vec::len), &hosts[0]["this"]), (Some(1), &json!(true)), "{hosts}");
    assert_eq!((&hosts[0]["state"], &hosts[0]["models"]), (&json!("serving"), &json!(["tiny"])), "{hosts}");
}

fn invocation(agent: &str, text: &str) -> PeerInvocation {
    PeerInvocation::from(&Invocation {
        principal: "local".to_owned(),
        key: None,
        agent: agent.to_owned(),
        session: "s".to_owned(),
        text: text.to_owned(),
        data: None,
        origin: Origin::Direct,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: Some("k".to_owned()),
        detached: false,
    })
}

fn code(error: PeerError) -> String {
    match error {
        PeerError::Moved => "moved".to_owned(),
        PeerError::Refused { code, status, .. } => format!("{code} {status}"),
        PeerError::Unreached(why) => format!("unreached: {why}"),
        PeerError::Broken(why) => why,
    }
}

#[tokio::test]
async fn a_turn_runs_at_another_host_and_is_followed_there() {
    let (server, routes, drain) = there().await;
    let (member, _stop) = serve(routes).await;
    let peers = HttpPeers::new(key());
    let run = peers.invoke(member.clone(), invocation("echo", "hello")).await.map_err(code).unwrap();
    let turn = run.turn_id.clone();
    let events: Vec<_> = run.events.collect().await;
    let outcome = events.iter().find_map(|event| match event {
        Ok(RemoteEvent::Event { event: RunEvent::Done(outcome), .. }) => Some(outcome),
        Ok(RemoteEvent::Ended { outcome, .. }) => Some(outcome),
        _ => None,
    });
    let outcome = outcome.expect("the turn ends");
    assert_eq!((outcome.text.as_str(), outcome.turn), ("hello", 1));
    assert!(events.iter().all(Result::is_ok), "{} events", events.len());
    let address = TurnAddress { agent: "echo".to_owned(), session: "s".to_owned(), turn: turn.clone() };
    let followed = peers.follow(member.clone(), address).await.map_err(code).unwrap();
    assert_eq!(followed.turn_id, turn);
    assert!(followed.events.collect::<Vec<_>>().await.len() >= 2, "all events from the first on");
    assert_eq!(server.host.turn("echo", "s", &turn).await.unwrap().id, turn);
    // Errors are those of the other host.
    let missing = TurnAddress { agent: "echo".to_owned(), session: "s".to_owned(), turn: "nope".to_owned() };
    let refused = peers.cancel(member.clone(), missing).await.map_err(code);
    assert_eq!(refused, Err("turn_not_found 404".to_owned()));
    let refused = peers.invoke(member.clone(), invocation("nobody", "hello")).await.map(drop).map_err(code);
    assert_eq!(refused, Err("agent_not_found 404".to_owned()));
    // The other host has another key, or is another one by now.
    let stranger = HttpPeers::new(ClusterKey::new(&[b'o'; 32]).unwrap());
    let error = stranger.invoke(member.clone(), invocation("echo", "hello")).await.map(drop).map_err(code);
    assert!(error.unwrap_err().contains("without the proof of the cluster's key"));
    let replaced = Member { number: THERE + 1, ..member.clone() };
    let error = peers.invoke(replaced, invocation("echo", "hello")).await.map(drop).map_err(code);
    assert!(error.unwrap_err().contains("without the proof of the cluster's key"));
    assert!(!*drain.0.borrow());
    let here = ClusterOptions {
        key: key(),
        number: HERE,
        drain: DrainRequests::default(),
        pages: None,
        role: HostRole::All,
    };
    let here = Cluster::new(here, Script::new(vec![None]));
    here.drain(&member).await.unwrap();
    drain.asked().await;
}

/// Asks the other host for an answer of a model, and returns what arrives.
async fn generated(
    peers: &HttpPeers,
    member: &Member,
    model: &str,
    options: &ChatOptions,
) -> Vec<GenerationEvent> {
    let input = Input::Messages(vec![ChatMessage::user("hello ".repeat(20))]);
    let question = PeerGeneration::new(model, &input, options);
    let events = peers.generate(member.clone(), question).await.map_err(code).unwrap();
    events.map(|event| event.map_err(code).unwrap()).collect().await
}

#[tokio::test]
async fn a_model_answers_another_host_and_only_with_the_cluster_key() {
    let (server, routes, _) = there().await;
    let (member, _stop) = serve(routes).await;
    let peers = HttpPeers::new(key());
    let affinity = Affinity { tenant: "t".into(), session: Some("s".into()), ..Affinity::default() };
    let options = ChatOptions { max_tokens: Some(8), ignore_eos: true, affinity, ..ChatOptions::default() };
    for is_repeated in [false, true] {
        let events = generated(&peers, &member, "tiny", &options).await;
        let [GenerationEvent::Event(first), .., GenerationEvent::Event(last)] = &events[..] else {
            panic!("{events:?}")
        };
        let ChatEvent::Started { cached_tokens, .. } = &**first else { panic!("{first:?}") };
        let ChatEvent::Finished(outcome) = &**last else { panic!("{last:?}") };
        assert_eq!(outcome.usage.completion_tokens, 8);
        assert_eq!(*cached_tokens > 0, is_repeated, "the pages of the session stay with the model");
        let said = |event: &GenerationEvent| match event {
            GenerationEvent::Event(event) => match &**event {
                ChatEvent::Text { delta, .. } => delta.clone(),
                _ => String::new(),
            },
            GenerationEvent::Failed(failure) => panic!("{failure:?}"),
        };
        assert_eq!(events.iter().map(said).collect::<String>(), outcome.text);
    }
    let failure = |events: Vec<GenerationEvent>| match events.into_iter().next() {
        Some(GenerationEvent::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    };
    let absent = failure(generated(&peers, &member, "none", &options).await);
    assert_eq!(absent, GenerationFailure::Absent {});
    let long = ChatOptions { max_tokens: Some(1 << 20), ..options.clone() };
    let overflow = failure(generated(&peers, &member, "tiny", &long).await);
    assert!(matches!(overflow, GenerationFailure::ContextOverflow { .. }), "{overflow:?}");
    // Whoever hangs up ends the generation. The engine may have produced everything before this task runs again, so one
    // generation of several that was cut off is proof: without cancellation there would be none.
    let endless = ChatOptions { max_tokens: Some(3_000), ..options };
    let mut is_cut_off = false;
    for _ in 0..20 {
        let before = server.engine.stats().generated_tokens;
        let question = PeerGeneration::new("tiny", &Input::Text("hello".to_owned()), &endless);
        let mut events = peers.generate(member.clone(), question).await.map_err(code).unwrap();
        events.next().await.unwrap().unwrap();
        drop(events);
        until_idle(&server.engine).await;
        is_cut_off = server.engine.stats().generated_tokens < before + 3_000;
        if is_cut_off {
            break;
        }
    }
    assert!(is_cut_off, "no generation ends with its caller");
    let stranger = HttpPeers::new(ClusterKey::new(&[b'o'; 32]).unwrap());
    let question = PeerGeneration::new("tiny", &Input::Text("hello".to_owned()), &ChatOptions::default());
    let error = stranger.generate(member, question).await.map(drop).map_err(code);
    assert!(error.unwrap_err().contains("without the proof of the cluster's key"));
}
