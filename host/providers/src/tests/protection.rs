//! The circuit breaker and the limits, seen from outside.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use skep_engine::{Model, RemoteModel as _, UpstreamFault};
use tokio::sync::Notify;

use super::{
    ask, model, options, said,
    server::{Part, Server, event, status, stream, stream_head},
    stopped,
};
use crate::{
    BreakerOptions, Choice, LimitOptions, Member, Route, RouteOptions, UpstreamKind::OpenAi, UpstreamModel,
    UpstreamOptions,
};

#[tokio::test]
async fn a_failing_upstream_gets_no_requests_until_a_trial_succeeds() {
    let works = Arc::new(AtomicBool::new(false));
    let repaired = works.clone();
    let server = Server::always(move || match works.load(Ordering::SeqCst) {
        true => stream(&[said("Hi"), stopped()]),
        false => status(500, "", "down"),
    })
    .await;
    let mut options = options(OpenAi, &server.url);
    options.retries.attempts = 1;
    let cool_down = Duration::from_secs(2);
    options.breaker = BreakerOptions { failures: 3, cool_down, max_cool_down: cool_down };
    let model = model(options);
    for _ in 0..3 {
        assert_eq!(model.problem(), None);
        assert_eq!(ask(&*model).await.fault(), UpstreamFault::Unavailable);
    }
    let problem = model.problem().expect("open");
    assert!(problem.contains("circuit breaker is open") && problem.contains("status 500: down"), "{problem}");
    assert_eq!(model.free_slots(), 0);
    assert!(ask(&*model).await.error().contains("circuit breaker"));
    assert_eq!(server.count(), 3, "nothing is sent while it is open");
    // A failed trial opens it again.
    trial_is_due(&model).await;
    assert!(ask(&*model).await.error().contains("status 500"));
    assert!(model.problem().is_some());
    repaired.store(true, Ordering::SeqCst);
    trial_is_due(&model).await;
    assert_eq!(ask(&*model).await.outcome().text, "Hi");
    assert_eq!(model.problem(), None);
    assert!(model.free_slots() > 0);
}

/// Waits until the breaker lets a request pass as a trial.
async fn trial_is_due(model: &UpstreamModel) {
    let start = Instant::now();
    while let Some(problem) = model.problem() {
        assert!(start.elapsed() < Duration::from_secs(60), "{problem}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_wrong_key_does_not_open_the_breaker() {
    let server = Server::always(|| status(401, "", "who are you?")).await;
    let model = model(options(OpenAi, &server.url));
    for _ in 0..10 {
        assert_eq!(ask(&*model).await.fault(), UpstreamFault::Unavailable);
    }
    assert_eq!((server.count(), model.problem()), (10, None));
}

#[tokio::test]
async fn requests_beyond_those_in_flight_wait_for_their_place() {
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let server = Server::always(move || {
        let done = Part::Bytes(b"data: [DONE]\n\n".to_vec());
        vec![stream_head(), Part::Wait(wait.clone()), event(&said("Hi")), done]
    })
    .await;
    let mut options = options(OpenAi, &server.url);
    options.limits.max_in_flight = 1;
    let model = model(options);
    assert_eq!(model.free_slots(), 1);
    let asked: Vec<_> = (0..3)
        .map(|_| {
            let model = model.clone();
            tokio::spawn(async move { ask(&*model).await.outcome().text.clone() })
        })
        .collect();
    for answered in 1..=3 {
        while server.count() < answered {
            tokio::task::yield_now().await;
        }
        assert_eq!((server.count(), model.free_slots()), (answered, 0));
        go.notify_one();
    }
    for task in asked {
        assert_eq!(task.await.expect("no panic"), "Hi");
    }
}

#[tokio::test]
async fn requests_beyond_the_limits_of_a_minute_are_not_sent_and_a_route_falls_back() {
    let none = LimitOptions { max_wait: Duration::ZERO, ..LimitOptions::default() };
    // An answer has 900 tokens. A request is expected to take about 520, which 100 do not allow.
    for (limits, allowed) in [
        (LimitOptions { requests_per_minute: Some(2), ..none }, 2),
        (LimitOptions { tokens_per_minute: Some(1_000), ..none }, 1),
    ] {
        let counted = json!({"choices": [], "usage": {"prompt_tokens": 400, "completion_tokens": 500}});
        let server = Server::always(move || stream(&[said("Hi"), stopped(), counted.clone()])).await;
        let other = Server::always(|| stream(&[said("from the other"), stopped()])).await;
        let limited = model(UpstreamOptions { limits, ..options(OpenAi, &server.url) });
        for _ in 0..allowed {
            assert_eq!(ask(&*limited).await.outcome().text, "Hi");
        }
        for _ in 0..3 {
            let refused = ask(&*limited).await;
            let UpstreamFault::Busy { retry_after_ms } = refused.fault() else {
                panic!("{:?}", refused.result)
            };
            // The rates recover by a request in 30 s, and by the missing tokens in about 25 s.
            assert!((1..=30_000).contains(&retry_after_ms), "{retry_after_ms}");
            assert!(
                refused.error().contains("rate limit") && refused.events.is_empty(),
                "{}",
                refused.error()
            );
        }
        assert_eq!(server.count(), allowed, "the server is not asked");
        assert_eq!(limited.problem(), None, "the breaker stays closed");

        let there = UpstreamOptions { name: "other".to_owned(), ..options(OpenAi, &other.url) };
        let members = [Model::Remote(limited), Model::Remote(model(there))].map(Member::new).to_vec();
        let route = Route::new(RouteOptions {
            name: "smart".to_owned(),
            choice: Choice::Ordered,
            members,
            first_token: None,
            created_unix_s: 0,
        });
        assert_eq!(ask(&route.expect("valid")).await.outcome().text, "from the other");
        assert_eq!((server.count(), other.count()), (allowed, 1));
    }
}
