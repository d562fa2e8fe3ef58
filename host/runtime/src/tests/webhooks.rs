//! Tests of webhooks against a real receiver, which checks signatures and sends scripted responses.

use super::{
    fixture::{Host, Setup, invocation, until},
    receiver::Receiver,
    store_faults::every_third_time,
    waker::waker,
};
use crate::{
    Clock, DeadLetterTarget, Event, Invocation, NewWebhook, RuntimeOptions, SealingKey, TopicPattern,
};
use serde_json::json;
use skep_outbound::AddressPolicy;
use skep_store::Moment;
use std::time::Duration;

/// Starts a host that may reach `receiver`, and returns it with its clock.
async fn start(receiver: &Receiver) -> (Host, Clock) {
    let clock = Clock::at(1_800_000_000_000);
    (Host::with(Setup::at(&clock, options(receiver))).await, clock)
}

fn options(receiver: &Receiver) -> RuntimeOptions {
    let addresses = AddressPolicy { allow_private: vec![receiver.address().parse().expect("an address")] };
    let outbound = skep_outbound::Options { addresses, ..skep_outbound::Options::default() };
    RuntimeOptions { outbound, ..RuntimeOptions::default() }
}

fn to(url: String, topic: &str) -> NewWebhook {
    NewWebhook { url, topics: vec![TopicPattern::new(topic).expect("a pattern")], secret: None }
}

async fn publish(host: &Host, id: &str) {
    host.agents.publish(event(id)).await.expect("taken");
}

fn event(id: &str) -> Event {
    Event {
        id: Some(id.into()),
        source: "shop".into(),
        topic: "order.paid".into(),
        data: Some(json!({"order_id": "o-7"}).into()),
        at_ms: Some(1_700_000_000_000),
        principal: "local".into(),
    }
}

#[tokio::test]
async fn a_signed_event_is_retried_until_the_receiver_accepts_it() {
    let receiver = Receiver::answering(["503\r\nretry-after: 60", "302\r\nlocation: /", "204"]).await;
    let (host, clock) = start(&receiver).await;
    let (_, secret) = host.agents.add_webhook(to(receiver.url(), "order.*")).await.expect("added");
    publish(&host, "1").await;
    receiver.received(1).await;
    until(async || {
        clock.advance(1_000);
        (receiver.count() == 2).then_some(())
    })
    .await;
    assert!(clock.now_ms() >= 1_800_000_060_000, "the receiver asked to wait a minute");
    until(async || {
        clock.advance(10_000);
        (receiver.count() == 3).then_some(())
    })
    .await;
    let messages = receiver.received(3).await;
    for message in &messages {
        message.verify(&secret);
        assert_eq!(message.header("webhook-id"), messages[0].header("webhook-id"));
    }
    assert_eq!(
        messages[2].json(),
        json!({
            "type": "order.paid", "timestamp": "2023-11-14T22:13:20Z", "id": "1", "source": "shop",
            "data": {"order_id": "o-7"},
        })
    );
    until(async || (host.agents.events(None, 1).await.expect("listed")[0].pending == 0).then_some(())).await;
    assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_sent_once_despite_database_faults() {
    for at in [Moment::Begin, Moment::Write, Moment::Commit, Moment::Committed] {
        let receiver = Receiver::answering(["503"]).await;
        let (host, clock) = start(&receiver).await;
        host.agents.add_webhook(to(receiver.url(), "order.*")).await.expect("added");
        host.store().faults().choose(every_third_time(at));
        for id in ["1", "2", "3", "4"] {
            // The publisher sees the fault and publishes again.
            until(async || {
                let event = Event { at_ms: None, data: None, ..event(id) };
                host.agents.publish(event).await.ok()
            })
            .await;
        }
        until(async || {
            // Postponed deliveries become due.
            clock.advance(10_000);
            tokio::time::sleep(Duration::from_millis(5)).await;
            let events = host.agents.events(None, 10).await.expect("listed");
            (events.len() == 4 && events.iter().all(|event| event.pending == 0)).then_some(())
        })
        .await;
        host.store().faults().end();
        assert_eq!(receiver.count(), 5, "{at:?}: each event once, and the refused one twice");
        assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
    }
}

#[tokio::test]
async fn an_event_that_is_never_accepted_becomes_a_dead_letter() {
    let receiver = Receiver::answering(["500"; 10]).await;
    let (host, clock) = start(&receiver).await;
    let (webhook, _) = host.agents.add_webhook(to(receiver.url(), "order.paid")).await.expect("added");
    publish(&host, "1").await;
    let dead = until(async || {
        clock.advance(4_000_000);
        host.agents.dead_letters(None, 10).await.expect("listed").pop()
    })
    .await;
    assert_eq!((dead.attempts, dead.to), (10, DeadLetterTarget::Webhook(webhook.id)));
    assert!(dead.error.contains("HTTP 500"), "{}", dead.error);
    assert_eq!(receiver.count(), 10);
    host.agents.redeliver(dead.id).await.expect("the dead letter exists");
    // The receiver answers 200 after its scripted responses.
    receiver.received(11).await;
    until(async || host.agents.dead_letters(None, 10).await.expect("listed").is_empty().then_some(())).await;
    let gone = host.agents.redeliver(dead.id).await.expect_err("the event was delivered");
    assert_eq!(gone.code(), "dead_letter_not_found");
}

#[tokio::test]
async fn an_address_that_answers_gone_receives_no_more_events() {
    let receiver = Receiver::answering(["410"]).await;
    let (host, _clock) = start(&receiver).await;
    host.agents.add_webhook(to(receiver.url(), "*")).await.expect("added");
    publish(&host, "1").await;
    let why = until(async || host.agents.webhooks()[0].disabled.clone()).await;
    assert!(why.contains("HTTP 410"), "{why}");
    publish(&host, "2").await;
    assert_eq!(host.agents.events(None, 1).await.expect("listed")[0].pending, 0);
    assert_eq!(receiver.count(), 1);
}

#[tokio::test]
async fn replaced_webhooks_apply_at_once_and_those_that_stay_are_untouched() {
    let receiver = Receiver::answering(["410"]).await;
    let (host, _clock) = start(&receiver).await;
    let configured = |path: &str, topic: &str| NewWebhook {
        secret: Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into()),
        ..to(format!("{}{path}", receiver.url()), topic)
    };
    let (added, _) =
        host.agents.add_webhook(to(format!("{}added", receiver.url()), "none")).await.expect("added");
    host.agents
        .set_webhooks(&[configured("one", "order.*"), configured("two", "none")])
        .await
        .expect("valid");
    publish(&host, "1").await;
    receiver.received(1).await;
    let disabled = async || {
        let all = host.agents.webhooks();
        all.into_iter().find(|webhook| webhook.url.ends_with("one")).expect("listed").disabled
    };
    until(async || disabled().await).await;
    host.agents.set_webhooks(&[configured("one", "order.*")]).await.expect("valid");
    let urls = || host.agents.webhooks().into_iter().map(|webhook| webhook.url).collect::<Vec<_>>();
    assert_eq!(urls().len(), 2, "the added one stays: {:?}", urls());
    assert!(disabled().await.is_some(), "what did not change stays as it is");
    let invalid = NewWebhook { url: "no address".into(), ..configured("one", "*") };
    host.agents.set_webhooks(&[configured("three", "*"), invalid]).await.expect_err("not an address");
    assert!(!urls().iter().any(|url| url.ends_with("three")), "nothing changes: {:?}", urls());
    host.agents.set_webhooks(&[configured("one", "*")]).await.expect("valid");
    assert_eq!(disabled().await, None, "another topic is another attempt");
    publish(&host, "2").await;
    receiver.received(2).await;
    host.agents.set_webhooks(&[]).await.expect("valid");
    assert_eq!(host.agents.webhooks()[0].id, added.id);
    assert_eq!(host.store().webhooks().await.expect("read").len(), 1);
}

#[tokio::test]
async fn non_public_addresses_are_not_connected_to() {
    let receiver = Receiver::answering([]).await;
    let clock = Clock::at(1_800_000_000_000);
    // A configured webhook is only tried, because its name may resolve differently later.
    let webhooks = vec![to(receiver.url(), "*")];
    let options = RuntimeOptions { webhooks, ..RuntimeOptions::default() };
    let host = Host::with(Setup::at(&clock, options)).await;
    publish(&host, "1").await;
    let dead = until(async || {
        clock.advance(4_000_000);
        host.agents.dead_letters(None, 10).await.expect("listed").pop()
    })
    .await;
    assert!(dead.error.contains("loopback"), "{}", dead.error);
    let port = receiver.url().rsplit(':').next().expect("a port").to_owned();
    for refused in
        [receiver.url(), format!("http://localhost:{port}"), "http://169.254.169.254/latest".to_owned()]
    {
        let error = host.agents.add_webhook(to(refused.clone(), "*")).await.expect_err(&refused);
        assert_eq!(error.code(), "invalid_webhook");
        assert!(error.to_string().contains("allow_private = ["), "{error}");
    }
    assert_eq!(host.agents.webhooks().len(), 1);
    assert_eq!(receiver.count(), 0);
}

#[tokio::test]
async fn webhooks_survive_a_restart_and_configured_ones_follow_the_file() {
    let (receiver, clock) = (Receiver::answering([]).await, Clock::at(1_800_000_000_000));
    let data = tempfile::tempdir().expect("a folder");
    let sealing_key = SealingKey::File(data.path().join("secrets.key"));
    let options = RuntimeOptions { sealing_key, ..options(&receiver) };
    let host = Host::with(Setup::at(&clock, options.clone())).await;
    host.deploy("w", "", waker()).await.expect("deploys");
    let (added, secret) = host.agents.add_webhook(to(receiver.url(), "skep.turn.*")).await.expect("added");
    let stored = host.store().webhooks().await.expect("read").remove(0).sealed_secret;
    assert!(!stored.contains("whsec_"), "{stored}");
    let configured = to(format!("{}configured", receiver.url()), "order.*");
    let with = RuntimeOptions { webhooks: vec![configured.clone()], ..options.clone() };
    let host = host.restart_with(Setup::at(&clock, with)).await;
    let listed = host.agents.webhooks();
    assert_eq!(listed.len(), 2);
    let of_config =
        listed.iter().find(|webhook| webhook.is_configured).expect("the configured webhook exists");
    let refused =
        host.agents.remove_webhook(&of_config.id).await.expect_err("the webhook is configured in the file");
    assert!(refused.to_string().contains("skep.toml"), "{refused}");
    host.answer("w", "s", "n").await;
    let payload = receiver.received(1).await.remove(0);
    payload.verify(&secret);
    let payload = payload.json();
    assert_eq!((&payload["type"], &payload["data"]["agent"]), (&json!("skep.turn.done"), &json!("w")));
    assert_eq!((&payload["data"]["tenant"], &payload["data"]["session"]), (&json!("local"), &json!("s")));
    let of_tenant = Invocation { principal: "acme".into(), ..invocation("w", "acme/s", "n") };
    let handle = host.agents.invoke(of_tenant).await.expect("taken");
    handle.outcome().await.expect("the turn succeeds");
    let payload = receiver.received(2).await.remove(1).json();
    assert_eq!((&payload["data"]["tenant"], &payload["data"]["session"]), (&json!("acme"), &json!("s")));
    let host = host.restart_with(options).await;
    assert_eq!(host.agents.webhooks().len(), 1, "the webhook is no longer in the file");
    host.agents.remove_webhook(&added.id).await.expect("the webhook exists");
    assert_eq!(host.agents.remove_webhook(&added.id).await.expect_err("gone").code(), "webhook_not_found");
}

#[tokio::test]
async fn invalid_webhooks_are_refused() {
    let receiver = Receiver::answering([]).await;
    let (host, _clock) = start(&receiver).await;
    let fine = to("https://example.com/hook".into(), "*");
    for (refused, why) in [
        (to("example.com".into(), "*"), "cannot be requested"),
        (NewWebhook { topics: vec![], ..fine.clone() }, "1 to 32 topics"),
        (NewWebhook { topics: vec![fine.topics[0].clone(); 33], ..fine.clone() }, "1 to 32 topics"),
        (NewWebhook { secret: Some("short".into()), ..fine.clone() }, "24 to 64 bytes"),
    ] {
        let error = host.agents.add_webhook(refused).await.expect_err(why);
        assert!(error.code() == "invalid_webhook" && error.to_string().contains(why), "{error}");
    }
}

#[tokio::test]
async fn a_webhook_shows_its_last_attempt_and_the_time_of_the_next() {
    let receiver = Receiver::answering(["503", "204"]).await;
    let (host, clock) = start(&receiver).await;
    let (added, _) = host.agents.add_webhook(to(receiver.url(), "order.*")).await.expect("added");
    let state = async || host.agents.webhook_states().await.expect("read").remove(0);
    let fresh = state().await;
    assert_eq!((fresh.webhook.last_try, fresh.waiting, fresh.next_try_at_ms), (None, 0, None));
    publish(&host, "1").await;
    let failed = until(async || Some(state().await).filter(|state| state.webhook.last_try.is_some())).await;
    let last = failed.webhook.last_try.expect("an attempt was made");
    assert_eq!((last.status, last.at_ms), (Some(503), 1_800_000_000_000));
    assert!(last.error.expect("the attempt failed").contains("answered HTTP 503"));
    let waiting =
        until(async || Some(state().await).filter(|state| state.next_try_at_ms > Some(1_800_000_000_000)))
            .await;
    // The delay is two seconds plus jitter.
    let next_ms = waiting.next_try_at_ms.expect("another attempt is planned");
    assert!(waiting.waiting == 1 && (1_800_000_001_000..1_800_000_004_000).contains(&next_ms), "{next_ms}");
    let stored = host.store().webhooks().await.expect("read").remove(0);
    assert_eq!(
        stored.last_try.and_then(|last| last.status),
        Some(503),
        "the last attempt survives a restart"
    );
    until(async || {
        clock.advance(10_000);
        let last = state().await.webhook.last_try.expect("an attempt was made");
        (last.status == Some(204) && last.error.is_none()).then_some(())
    })
    .await;
    until(async || (state().await.waiting == 0).then_some(())).await;
    assert_eq!(state().await.webhook.id, added.id);
}

#[tokio::test]
async fn a_test_event_is_signed_sent_once_and_returns_the_response() {
    let receiver = Receiver::answering(["200", "500", "410"]).await;
    let (host, _clock) = start(&receiver).await;
    let (webhook, secret) = host.agents.add_webhook(to(receiver.url(), "order.*")).await.expect("added");
    let taken = host.agents.test_webhook(&webhook.id).await.expect("sent");
    assert_eq!((taken.status, &taken.error), (Some(200), &None));
    let payload = receiver.received(1).await.remove(0);
    payload.verify(&secret);
    assert_eq!(payload.header("webhook-id"), taken.event_id);
    let payload = payload.json();
    assert_eq!((&payload["type"], &payload["id"]), (&json!("skep.webhook.test"), &json!(taken.event_id)));
    assert_eq!(payload["data"], json!({"webhook": webhook.id}));
    for status in [500, 410] {
        let refused = host.agents.test_webhook(&webhook.id).await.expect("sent");
        assert_eq!(refused.status, Some(status));
        assert!(refused.error.expect("the receiver refused the event").contains(&format!("HTTP {status}")));
        assert_eq!(host.agents.webhooks()[0].last_try.as_ref().and_then(|last| last.status), Some(status));
    }
    assert_eq!(host.agents.webhooks()[0].disabled, None, "a test disables nothing");
    assert_eq!(receiver.count(), 3, "each test was sent once");
    assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
    assert_eq!(host.agents.test_webhook("wh_none").await.expect_err("none").code(), "webhook_not_found");
}
