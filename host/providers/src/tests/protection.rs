//! The circuit breaker and the limits, seen from outside.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use skep_engine::{RemoteModel as _, UpstreamFault};
use tokio::sync::Notify;

use super::{
    ask, model, options, said,
    server::{Part, Server, event, status, stream, stream_head},
    stopped,
};
use crate::{BreakerOptions, UpstreamKind::OpenAi};

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
    let cool_down = Duration::from_millis(100);
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
    while model.problem().is_some() {
        tokio::task::yield_now().await;
    }
    assert!(ask(&*model).await.error().contains("status 500"));
    assert!(model.problem().is_some());
    repaired.store(true, Ordering::SeqCst);
    while model.problem().is_some() {
        tokio::task::yield_now().await;
    }
    assert_eq!(ask(&*model).await.outcome().text, "Hi");
    assert_eq!(model.problem(), None);
    assert!(model.free_slots() > 0);
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
