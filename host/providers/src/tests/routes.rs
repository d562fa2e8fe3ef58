//! Routes: who is asked, in which order, and when the next one is.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt as _, future::BoxFuture};
use skep_engine::{
    Affinity, Constraint, EngineError, Model, ModelDigest, RemoteInfo, RemoteModel, Unreported,
    UpstreamFault,
    chat::{
        ChatEvent, ChatFinish, ChatMessage, ChatOptions, ChatOutcome, Image, ImageSource, Input,
        RemoteStream, Routed, ToolSpec,
    },
};

use super::{
    Heard, ask, hear, model, options, said,
    server::{Reply, Server, event, status, stream, stream_head},
    stopped,
};
use crate::{
    Choice, Conditions, CostEstimate, Member, Route, RouteOptions, UpstreamKind::OpenAi,
    UpstreamModelOptions, UpstreamOptions,
};

fn member(name: &str, server: &Server, change: impl FnOnce(&mut UpstreamModelOptions)) -> Member {
    let mut options = UpstreamOptions { name: name.to_owned(), ..options(OpenAi, &server.url) };
    options.retries.attempts = 1;
    change(&mut options.models[0]);
    Member::new(Model::Remote(model(options)))
}

fn route(choice: Choice, members: Vec<Member>) -> Route {
    let name = "smart".to_owned();
    Route::new(RouteOptions { name, choice, members, first_token: None, created_unix_s: 0 }).expect("valid")
}

fn says(text: &'static str) -> impl Fn() -> Reply + Send + Sync {
    move || stream(&[said(text), stopped()])
}

fn routed(heard: &Heard) -> (String, u32) {
    let routed = |event: &ChatEvent| match event {
        ChatEvent::Routed(Routed { model, attempts }) => Some((model.clone(), *attempts)),
        _ => None,
    };
    let all: Vec<_> = heard.events.iter().filter_map(routed).collect();
    assert!(all.len() == 1 && routed(&heard.events[0]).is_some(), "sent once and first: {:?}", heard.events);
    assert!(matches!(heard.events[1], ChatEvent::Started { .. }), "{:?}", heard.events);
    let started = heard.events.iter().filter(|event| matches!(event, ChatEvent::Started { .. }));
    assert_eq!(started.count(), 1);
    all[0].clone()
}

async fn asked(route: &Route, text: &str, options: ChatOptions) -> Heard {
    hear(route.ask(vec![ChatMessage::user(text)].into(), options)).await
}

#[tokio::test]
async fn a_failure_before_any_output_falls_back() {
    let faults: [fn() -> Reply; 4] = [
        || status(500, "", "x"),
        || status(429, "retry-after: 60\r\n", "x"),
        || status(401, "", "x"),
        || vec![stream_head()],
    ];
    for fault in faults {
        let (bad, good) = (Server::always(fault).await, Server::always(says("from b")).await);
        let route = route(Choice::Ordered, vec![member("a", &bad, |_| ()), member("b", &good, |_| ())]);
        let heard = ask(&route).await;
        assert_eq!(heard.outcome().text, "from b");
        assert_eq!((routed(&heard), bad.count()), (("b/m".to_owned(), 2), 1));
    }
    let closed = Server::always(says("x")).await;
    let (gone, good) = (member("a", &closed, |_| ()), Server::always(says("from b")).await);
    drop(closed);
    let heard = ask(&route(Choice::Ordered, vec![gone, member("b", &good, |_| ())])).await;
    assert_eq!(heard.outcome().text, "from b");
}

#[tokio::test]
async fn a_route_leaves_a_model_that_is_slow_to_start() {
    let stall = || vec![stream_head(), super::server::Part::Stall(Arc::default())];
    let (slow, good) = (Server::always(stall).await, Server::always(says("from b")).await);
    let mut impatient = options(OpenAi, &slow.url);
    impatient.timeouts.first_token = std::time::Duration::from_millis(50);
    let slow = Member::new(Model::Remote(model(impatient)));
    let heard = ask(&route(Choice::Ordered, vec![slow, member("b", &good, |_| ())])).await;
    assert_eq!((heard.outcome().text.as_str(), routed(&heard)), ("from b", ("b/m".to_owned(), 2)));
}

/// A model of this host, which takes a while to load and then answers or stalls.
struct Home {
    info: RemoteInfo,
    load: Duration,
    answers: bool,
}

impl Home {
    fn member(load: Duration, answers: bool) -> Member {
        let digest = ModelDigest::remote("", "home");
        let info = RemoteInfo { name: "home".to_owned(), digest, context_length: None, created_unix_s: 0 };
        Member::new(Model::Remote(Arc::new(Home { info, load, answers })))
    }
}

impl RemoteModel for Home {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn is_local(&self) -> bool {
        true
    }

    fn ready(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async {
            tokio::time::sleep(self.load).await;
            Ok(())
        })
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        // An engine has read the prompt, but it is too busy to continue.
        let started = ChatEvent::Started { prompt_tokens: 1, cached_tokens: 0, cache_write_tokens: 0 };
        let text = ChatEvent::Text { delta: "from home".to_owned(), logprobs: Vec::new() };
        let outcome = ChatEvent::Finished(ChatOutcome::remote("from home".to_owned(), ChatFinish::Stop));
        match self.answers {
            true => Box::pin(futures::stream::iter([started, text, outcome].map(Ok))),
            false => Box::pin(futures::stream::iter([Ok(started)]).chain(futures::stream::pending())),
        }
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

#[tokio::test]
async fn a_route_leaves_a_model_of_this_host_that_is_slow_to_start_but_not_while_it_is_loaded() {
    let within = |home: Member, other: Member| {
        let options = route(Choice::Ordered, vec![home, other]).options().clone();
        Route::new(RouteOptions { first_token: Some(Duration::from_millis(500)), ..options }).expect("valid")
    };
    let answers = || Home::member(Duration::ZERO, true);
    let begun = std::time::Instant::now();
    let heard = ask(&within(Home::member(Duration::ZERO, false), answers())).await;
    assert_eq!((heard.outcome().text.as_str(), routed(&heard).1), ("from home", 2));
    assert!(begun.elapsed().as_millis() >= 500, "it has its time");
    let heard = ask(&within(Home::member(Duration::from_millis(800), true), answers())).await;
    assert_eq!(routed(&heard).1, 1, "a load does not count");
}

#[tokio::test]
async fn the_usage_of_a_model_that_its_route_left_is_kept_under_its_name() {
    let cut = || vec![stream_head(), event(&said("{\"n\": 1"))];
    let counted = serde_json::json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}});
    let whole = move || stream(&[said("{\"n\": 1}"), stopped(), counted.clone()]);
    let (bad, good) = (Server::always(cut).await, Server::always(whole).await);
    let route = route(Choice::Ordered, vec![member("a", &bad, |_| ()), member("b", &good, |_| ())]);
    let unreported = Unreported::kept();
    let options = ChatOptions {
        output: Some(Constraint::JsonObject),
        unreported: unreported.clone(),
        ..ChatOptions::default()
    };
    let heard = asked(&route, "Hello", options).await;
    assert_eq!(heard.outcome().usage.completion_tokens, 4);
    let [left] = &unreported.uses()[..] else { panic!("{:?}", unreported.uses()) };
    assert_eq!((left.model.as_str(), left.usage.completion_tokens, left.is_estimate), ("a/m", 2, true));
    assert!(left.usage.prompt_tokens > 0, "{left:?}");
}

#[tokio::test]
async fn a_failure_after_the_first_output_or_a_refusal_does_not_fall_back() {
    let good = Server::always(says("from b")).await;
    let cut = Server::always(|| vec![stream_head(), event(&said("from a"))]).await;
    let route_of = |server: &Server| {
        route(Choice::Ordered, vec![member("a", server, |_| ()), member("b", &good, |_| ())])
    };
    let heard = ask(&route_of(&cut)).await;
    assert_eq!((heard.text().as_str(), heard.fault()), ("from a", UpstreamFault::CutOff));
    assert_eq!(routed(&heard), ("a/m".to_owned(), 1));
    let refuses = Server::always(|| status(400, "", "x")).await;
    assert_eq!(ask(&route_of(&refuses)).await.fault(), UpstreamFault::Refused);
    assert_eq!(good.count(), 0);
}

#[tokio::test]
async fn when_all_models_fail_the_error_names_each() {
    let down = Server::always(|| status(500, "", "burning")).await;
    let busy = Server::always(|| status(429, "retry-after: 60\r\n", "full")).await;
    let heard =
        ask(&route(Choice::Ordered, vec![member("a", &down, |_| ()), member("b", &busy, |_| ())])).await;
    assert_eq!(heard.fault(), UpstreamFault::Busy { retry_after_ms: 60_000 });
    let error = heard.error();
    assert!(error.contains("a/m: ") && error.contains("burning") && error.contains("b/m: "), "{error}");
    assert!(heard.events.is_empty());
}

#[tokio::test]
async fn a_prompt_that_is_too_long_goes_to_a_longer_context_only() {
    let overflow =
        || status(400, "", "{\"error\": {\"message\": \"x\", \"code\": \"context_length_exceeded\"}}");
    let (small, same, large) =
        (Server::always(overflow).await, Server::always(says("no")).await, Server::always(says("yes")).await);
    let members = vec![
        member("a", &small, |model| model.context_length = Some(100)),
        member("b", &same, |model| model.context_length = Some(100)),
        member("c", &large, |model| model.context_length = Some(1000)),
    ];
    let heard = ask(&route(Choice::Ordered, members)).await;
    assert_eq!((heard.outcome().text.as_str(), same.count()), ("yes", 0));
}

#[tokio::test]
async fn conditions_decide_which_model_is_asked() {
    let server = Server::always(says("x")).await;
    let with = |name: &str, conditions: Conditions| Member { conditions, ..member(name, &server, |_| ()) };
    let priced = Member {
        cost: CostEstimate::new(|prompt, _| Some(prompt as f64)),
        ..with("cheap", Conditions { max_price: Some(40.0), ..Conditions::default() })
    };
    let members = vec![
        with(
            "short",
            Conditions { max_prompt_tokens: Some(20), tools: Some(false), ..Conditions::default() },
        ),
        with("tools", Conditions { tools: Some(true), ..Conditions::default() }),
        with("tenant", Conditions { tenants: Some(vec!["acme".into()]), ..Conditions::default() }),
        with("long", Conditions { min_prompt_tokens: Some(100), ..Conditions::default() }),
        priced,
        with("unpriced", Conditions { max_price: Some(1e9), ..Conditions::default() }),
        member("no-tools", &server, |model| model.capabilities.tools = false),
        member("any", &server, |_| ()),
    ];
    let route = route(Choice::Ordered, members);
    let tool = ToolSpec { name: "f".into(), description: String::new(), parameters: serde_json::json!({}) };
    let tools = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
    let tenant = |tenant: &str| Affinity { tenant: tenant.into(), ..Affinity::default() };
    let acme = ChatOptions { affinity: tenant("acme"), ..ChatOptions::default() };
    let (brief, modest) = ("x".repeat(4), "x".repeat(100));
    let (medium, long) = ("x".repeat(200), "x".repeat(4000));
    for (text, options, expected) in [
        (&brief, ChatOptions::default(), "short/m"),
        (&brief, tools, "tools/m"),
        (&medium, acme, "tenant/m"),
        (&modest, ChatOptions::default(), "cheap/m"),
        (&medium, ChatOptions::default(), "no-tools/m"),
        (&long, ChatOptions::default(), "long/m"),
    ] {
        assert_eq!(routed(&asked(&route, text, options).await).0, expected);
    }
}

#[tokio::test]
async fn a_price_ceiling_counts_the_answer_that_a_request_may_get() {
    let server = Server::always(says("x")).await;
    let dear = Member {
        cost: CostEstimate::new(|prompt, output| Some((prompt + 10 * output) as f64)),
        conditions: Conditions { max_price: Some(1_000.0), ..Conditions::default() },
        ..member("dear", &server, |_| ())
    };
    let route = route(Choice::Ordered, vec![dear, member("any", &server, |_| ())]);
    for (max_tokens, expected) in [(Some(50), "dear/m"), (Some(200), "any/m"), (None, "any/m")] {
        let options = ChatOptions { max_tokens, ..ChatOptions::default() };
        assert_eq!(routed(&asked(&route, "Hello", options).await).0, expected, "{max_tokens:?}");
    }
}

#[tokio::test]
async fn a_price_ceiling_counts_the_longest_answer_of_the_model_if_a_request_names_no_limit() {
    let server = Server::always(says("x")).await;
    for (max_output, max_tokens, expected) in [
        (Some(50), None, "dear/m"),
        (Some(200), None, "any/m"),
        (Some(200), Some(50), "dear/m"),
        (Some(4_000), None, "any/m"),
        (None, None, "dear/m"),
    ] {
        // Only the last bound is above the price of 512 tokens.
        let most = if max_output.is_none_or(|most| most > 512) { 10_000.0 } else { 1_000.0 };
        let dear = Member {
            cost: CostEstimate::new(|prompt, output| Some((prompt + 10 * output) as f64)),
            conditions: Conditions { max_price: Some(most), ..Conditions::default() },
            ..member("dear", &server, |model| model.max_output = max_output)
        };
        let route = route(Choice::Ordered, vec![dear, member("any", &server, |_| ())]);
        let options = ChatOptions { max_tokens, ..ChatOptions::default() };
        let heard = asked(&route, "Hello", options).await;
        assert_eq!(routed(&heard).0, expected, "{max_output:?} {max_tokens:?}");
    }
}

#[tokio::test]
async fn a_request_that_no_model_takes_is_an_error_with_every_reason() {
    let server = Server::always(says("x")).await;
    let short = Conditions { max_prompt_tokens: Some(1), ..Conditions::default() };
    let of_acme = Conditions { tenants: Some(vec!["acme".into()]), ..Conditions::default() };
    let with = |name: &str, conditions| Member { conditions, ..member(name, &server, |_| ()) };
    let route = route(Choice::Ordered, vec![with("a", short), with("b", of_acme)]);
    let of = |tenant: &str| Affinity { tenant: tenant.into(), ..Affinity::default() };
    let affinity = of("other");
    let heard = asked(&route, "Hello", ChatOptions { affinity, ..ChatOptions::default() }).await;
    assert!(matches!(heard.result, Err(EngineError::InvalidRequest { .. })));
    let error = heard.error();
    assert!(
        error.contains("a/m: about") && error.contains("b/m: it does not serve the tenant \"other\""),
        "{error}"
    );
    let affinity = of("acme");
    let heard = asked(&route, "Hello", ChatOptions { affinity, ..ChatOptions::default() }).await;
    assert_eq!(routed(&heard), ("b/m".to_owned(), 1));
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn weights_share_the_sessions_and_a_session_stays() {
    let server = Server::always(says("x")).await;
    let weighted = |name: &str, weight| Member { weight, ..member(name, &server, |_| ()) };
    let route = route(Choice::Weighted, vec![weighted("a", 3), weighted("b", 1), weighted("never", 0)]);
    let mut shares = BTreeMap::new();
    for session in 0..200 {
        let session = Some(format!("session {session}"));
        let affinity = Affinity { session, ..Affinity::default() };
        let options = || ChatOptions { affinity: affinity.clone(), ..ChatOptions::default() };
        let first = routed(&asked(&route, "x", options()).await).0;
        if shares.len() < 2 {
            assert_eq!(routed(&asked(&route, "x", options()).await).0, first);
        }
        *shares.entry(first).or_insert(0) += 1;
    }
    assert_eq!(shares.values().sum::<i32>(), 200);
    assert!((120..=180).contains(&shares["a/m"]) && shares.len() == 2, "{shares:?}");
}

#[tokio::test]
async fn a_route_in_a_route_counts_all_attempts() {
    let (bad, good) = (Server::always(|| status(500, "", "x")).await, Server::always(says("yes")).await);
    let inner = route(Choice::Ordered, vec![member("a", &bad, |_| ()), member("b", &good, |_| ())]);
    let other = member("c", &bad, |_| ());
    let outer = route(Choice::Ordered, vec![other, Member::new(Model::Remote(Arc::new(inner)))]);
    let heard = ask(&outer).await;
    assert_eq!((heard.outcome().text.as_str(), routed(&heard)), ("yes", ("b/m".to_owned(), 3)));
    assert!(outer.free_slots() > 0 && outer.problem().is_none());
}

fn picture() -> Input {
    let source = ImageSource::Url("https://a.example/cat.png".to_owned().into());
    let image = Image { at: 0, part: 0, source, detail: None };
    vec![ChatMessage { images: vec![image], ..ChatMessage::user("Look.") }].into()
}

#[tokio::test]
async fn a_request_with_images_goes_to_a_model_that_takes_images() {
    let server = Server::always(says("x")).await;
    let sees = |model: &mut UpstreamModelOptions| model.capabilities.images = true;
    let only_text = Conditions { images: Some(false), ..Conditions::default() };
    let only_images = Conditions { images: Some(true), ..Conditions::default() };
    let with = |name: &str, conditions| Member { conditions, ..member(name, &server, sees) };
    let members = vec![
        member("blind", &server, |_| ()),
        with("text", only_text),
        with("images", only_images.clone()),
        with("both", Conditions::default()),
    ];
    let mixed = route(Choice::Ordered, members);
    let heard = hear(mixed.ask(picture(), ChatOptions::default())).await;
    assert_eq!(routed(&heard).0, "images/m");
    assert_eq!(server.request(0).body["messages"][0]["content"][0]["type"], "image_url");
    assert_eq!(routed(&ask(&mixed).await).0, "blind/m");

    let ordered = route(Choice::Ordered, vec![with("images", only_images), member("blind", &server, |_| ())]);
    assert_eq!(routed(&ask(&ordered).await).0, "blind/m", "the request has no images");
    let blind = route(Choice::Ordered, vec![member("blind", &server, |_| ())]);
    let error = blind.accepts(&picture()).expect_err("nobody sees").to_string();
    assert!(error.contains("`messages[0].content[0]`") && error.contains("accepts only text"), "{error}");
}

#[tokio::test]
async fn a_text_is_continued_by_the_next_model_after_a_failure_and_never_by_one_that_cannot() {
    let piece = |text: &str, finish: serde_json::Value| serde_json::json!({"choices": [{"index": 0, "text": text, "finish_reason": finish}]});
    let usage = || serde_json::json!({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}});
    let texts = move || {
        stream(&[piece(" a", serde_json::Value::Null), piece(" time", serde_json::json!("length")), usage()])
    };
    let (down, good) = (Server::always(|| status(500, "", "x")).await, Server::always(texts).await);
    let messages_only =
        UpstreamOptions { name: "c".to_owned(), ..options(crate::UpstreamKind::Anthropic, &good.url) };
    let messages_only = Member::new(Model::Remote(model(messages_only)));
    let members = vec![messages_only, member("a", &down, |_| ()), member("b", &good, |_| ())];
    let route = route(Choice::Ordered, members);
    let heard = hear(route.ask(Input::Text("Once upon".to_owned()), ChatOptions::default())).await;
    assert_eq!((heard.outcome().text.as_str(), routed(&heard)), (" a time", ("b/m".to_owned(), 2)));
    let outcome = heard.outcome();
    assert_eq!(
        (outcome.finish.as_str(), outcome.usage.prompt_tokens, outcome.usage.completion_tokens),
        ("length", 2, 2)
    );
    let request = good.request(0);
    assert!(
        request.head.starts_with("POST /v1/completions ") && request.body["prompt"] == "Once upon",
        "{request:?}"
    );
    assert_eq!((down.count(), good.count()), (1, 1));
}
