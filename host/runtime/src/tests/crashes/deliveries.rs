//! Crash tests of work that the host starts itself: alarms, events, webhooks and batch items.

use super::{
    super::{
        doer::{MANIFEST, did, doer, keyed},
        fixture::Host,
        outside::Outside,
    },
    Scenario, cut_off_during_effects, eventually,
};
use crate::{
    BatchItem, BatchOutcome, BatchRequest, BatchTerms, Clock, Event, NewBatch, NewWebhook, ScheduleState,
    TopicPattern,
};
use serde_json::json;
use skep_engine::chat::{ChatMessage, ChatOptions};

const PRINCIPAL: &str = "local";

/// An alarm that a turn sets, once or repeating every second.
struct Alarm {
    outside: Outside,
    repeats: bool,
}

impl Scenario for Alarm {
    /// Whether the alarm is due.
    type Observed = bool;

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("doer", MANIFEST, doer(&self.outside)).await.expect("valid");
    }

    async fn act(&self, host: &Host, clock: &Clock, is_due: &mut bool) {
        if !*is_due {
            let set = keyed("doer", "s", if self.repeats { "repeat" } else { "alarm" });
            host.agents.invoke(set).await.expect("taken").outcome().await.expect("the turn succeeds");
            clock.advance(1_000);
            *is_due = true;
        }
        eventually(async || {
            let schedules = host.agents.schedules(None, 10).await.expect("listed");
            match &schedules[..] {
                [] => !self.repeats,
                [one] => {
                    let is_next = one.due_at_ms > clock.now_ms();
                    self.repeats && one.state == ScheduleState::Waiting && is_next
                }
                more => panic!("{more:?}"),
            }
        })
        .await;
    }

    async fn check(&self, host: &Host, _is_due: &bool) -> usize {
        let session = host.agents.session("doer", "s").await.expect("the session exists");
        assert_eq!(session.summary.turns, 2, "one turn set the alarm and one handled it");
        did(host, &self.outside, "s", "/alarm", 1).await
    }
}

#[test]
fn an_alarm_survives_every_crash() {
    cut_off_during_effects(&Alarm { outside: Outside::start(), repeats: false }, 15);
}

#[test]
fn a_repeating_alarm_survives_every_crash() {
    cut_off_during_effects(&Alarm { outside: Outside::start(), repeats: true }, 15);
}

fn event() -> Event {
    Event {
        id: Some("1".into()),
        source: "shop".into(),
        topic: "order.paid".into(),
        data: Some(json!({"to": "s"}).into()),
        at_ms: Some(1),
        principal: PRINCIPAL.into(),
    }
}

/// An event for a session, published by a client or emitted by another session.
struct SessionEvent {
    outside: Outside,
    by_a_client: bool,
}

impl Scenario for SessionEvent {
    type Observed = ();

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("doer", MANIFEST, doer(&self.outside)).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, (): &mut ()) {
        if self.by_a_client {
            host.agents.publish(event()).await.expect("taken");
        } else {
            let emits = host.agents.invoke(keyed("doer", "teller", "emit")).await.expect("taken");
            emits.outcome().await.expect("the turn succeeds");
        }
    }

    async fn check(&self, host: &Host, (): &()) -> usize {
        assert_eq!(host.agents.events(None, 10).await.expect("listed").len(), 1);
        assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
        did(host, &self.outside, "s", "/event", 1).await
    }
}

#[test]
fn an_event_of_a_client_survives_every_crash() {
    cut_off_during_effects(&SessionEvent { outside: Outside::start(), by_a_client: true }, 9);
}

#[test]
fn an_event_of_an_agent_survives_every_crash() {
    cut_off_during_effects(&SessionEvent { outside: Outside::start(), by_a_client: false }, 15);
}

/// A webhook that receives an event and the end of a turn.
struct Webhook(Outside);

impl Scenario for Webhook {
    type Observed = ();

    fn outside(&self) -> &Outside {
        &self.0
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("doer", "[grants]\nhosts = [\"*\"]", doer(&self.0)).await.expect("valid");
        let topics = ["order.*", "skep.turn.*"].map(|topic| TopicPattern::new(topic).expect("a pattern"));
        let webhook = NewWebhook { url: self.0.url("/hook"), topics: topics.into(), secret: None };
        host.agents.add_webhook(webhook).await.expect("added");
    }

    async fn act(&self, host: &Host, _clock: &Clock, (): &mut ()) {
        host.agents.publish(event()).await.expect("taken");
        let turn = host.agents.invoke(keyed("doer", "s", "post")).await.expect("taken");
        turn.outcome().await.expect("the turn succeeds");
    }

    async fn check(&self, host: &Host, (): &()) -> usize {
        assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
        let observed: Vec<String> = self.0.webhooks("/hook").into_iter().map(|(_, topic)| topic).collect();
        let mut sorted = observed.clone();
        sorted.sort();
        assert_eq!(sorted, ["order.paid", "skep.turn.done"], "each event has one id");
        did(host, &self.0, "s", "/message", 1).await
    }
}

#[test]
fn webhooks_survive_every_crash() {
    cut_off_during_effects(&Webhook(Outside::start()), 15);
}

/// Two batches: turns of an agent, and requests to a model.
struct Batches(Outside);

#[derive(Default)]
struct Queued {
    /// Whether queueing was tried, and the id if the client received it.
    turns: Option<Option<String>>,
    chats: Option<Option<String>>,
}

const ITEMS: usize = 2;

impl Batches {
    async fn queue(host: &Host, model: &str, item: BatchItem, queued: &mut Option<Option<String>>) {
        // A client that received no response does not know whether to send the batch again; this
        // one does not.
        if queued.is_none() {
            *queued = Some(None);
            let (principal, model, items) = (PRINCIPAL.into(), model.into(), vec![item; ITEMS]);
            let batch = NewBatch { principal, key: None, model, items, terms: BatchTerms::default() };
            let status = host.agents.queue_batch(batch).await.expect("taken");
            *queued = Some(Some(status.id));
        }
    }
}

impl Scenario for Batches {
    type Observed = Queued;

    fn outside(&self) -> &Outside {
        &self.0
    }

    async fn prepare(&self, host: &Host) {
        let manifest =
            format!("{MANIFEST}\n[[trigger.event]]\ntopic = \"cf.workersAi.model.batch.*\"\nsession = \"b\"");
        host.deploy("doer", &manifest, doer(&self.0)).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Queued) {
        let item = |request| BatchItem { request, form: String::new(), reference: None, keep: None };
        let turn = item(BatchRequest::Turn { text: "post".into(), data: None });
        Batches::queue(host, "agent:doer", turn, &mut observed.turns).await;
        let options = ChatOptions { max_tokens: Some(2), ignore_eos: true, ..ChatOptions::default() };
        let (messages, options) = (vec![ChatMessage::user("hi")], Box::new(options));
        let chat = item(BatchRequest::Chat { messages, options, choices: 1 });
        Batches::queue(host, "tiny", chat, &mut observed.chats).await;
    }

    async fn check(&self, host: &Host, observed: &Queued) -> usize {
        let (mut batches, mut interrupted, mut told_ends) = (0, 0, 0);
        for id in [&observed.turns, &observed.chats].into_iter().flatten().flatten() {
            let (_, results) =
                host.agents.batch_results(PRINCIPAL, id).await.expect("a reported batch is kept");
            let items = results.expect("the batch has ended").items;
            assert_eq!(items.len(), ITEMS);
            let is_done = |outcome: &BatchOutcome| matches!(outcome, BatchOutcome::Done(_));
            assert!(items.iter().all(|item| is_done(&item.outcome)), "{items:?}");
            batches += 1;
        }
        let sessions = host.agents.sessions(&crate::Tenant::local(), "doer", None, 10).await.expect("listed");
        let of_items: Vec<_> = sessions.iter().filter(|session| session.id.starts_with("batch-")).collect();
        // All items of a batch exist or none; a batch that was never reported may exist or not.
        let is_known = matches!(observed.turns, Some(Some(_)));
        assert!(of_items.len() == ITEMS || of_items.is_empty() && !is_known, "{sessions:?}");
        for session in &of_items {
            assert_eq!(session.turns, 1);
            let exported = host.agents.export_session("doer", &session.id).await.expect("the session exists");
            assert_eq!(exported.state["n"].len(), 1);
            interrupted += usize::from(exported.state.contains_key("i"));
        }
        let came = self.0.count("/message");
        assert!((of_items.len() - interrupted..=of_items.len()).contains(&came), "{came} of {of_items:?}");
        for event in host.agents.events(None, 100).await.expect("listed") {
            assert_eq!((event.pending, event.dead), (0, 0), "{event:?}");
            told_ends += usize::from(event.topic.ends_with(".succeeded"));
        }
        assert!(told_ends >= batches, "{told_ends} ends of {batches} batches were published");
        let kept = host.store().count("SELECT COUNT(*) FROM batches").await.expect("counted");
        assert_eq!(kept, told_ends as i64, "each end is published once");
        // The published events caused actions as well.
        let in_session = host.agents.export_session("doer", "b").await;
        interrupted + in_session.map_or(0, |one| one.state.get("i").map_or(0, Vec::len))
    }
}

#[test]
fn batches_survive_every_crash() {
    cut_off_during_effects(&Batches(Outside::start()), 30);
}
