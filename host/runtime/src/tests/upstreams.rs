//! Tests of agents whose model another server computes: grants, conversations that move between models, compaction, and
//! answers that a crash cuts off. The server is a script; `skep-providers` tests real ones.

use super::{
    fixture::{Host, tiny_engine, until},
    inference::{chatter, relayer},
};
use crate::{ModelGrant, Outcome, RunEvent, RunHandle, RuntimeError, RuntimeOptions};
use futures::StreamExt;
use skep_engine::{
    EngineError, ModelDigest, ModelSet, RemoteInfo, RemoteModel, UpstreamFault, Usage,
    chat::{ChatEvent, ChatFinish, ChatMessage, ChatOptions, ChatOutcome, Input, RemoteStream, Role, Routed},
};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

/// The server's reaction to one request, step by step.
pub(super) enum Step {
    Say(&'static str),
    Think(&'static str),
    Route(&'static str, u32),
    /// Uses so many tokens of prompt and output for an answer that is refused before anything of it is sent.
    Refuse(u32, u32),
    /// Ends the answer with what was said.
    Finish,
    /// Says nothing more.
    Hang,
    Fail(UpstreamFault),
}

/// A server that follows a script, one entry for each request.
pub(super) struct Scripted {
    info: RemoteInfo,
    script: Mutex<VecDeque<Vec<Step>>>,
    asked: Mutex<Vec<Vec<ChatMessage>>>,
    sessions: Mutex<Vec<Option<String>>>,
}

impl Scripted {
    pub(super) fn new(context_length: Option<usize>, script: Vec<Vec<Step>>) -> Arc<Self> {
        let info = RemoteInfo {
            name: "far/model".to_owned(),
            digest: ModelDigest::remote("http://far", "model"),
            context_length,
            created_unix_s: 0,
        };
        Scripted::of(info, script)
    }

    fn of(info: RemoteInfo, script: Vec<Vec<Step>>) -> Arc<Self> {
        Arc::new(Scripted {
            info,
            script: Mutex::new(script.into()),
            asked: Mutex::default(),
            sessions: Mutex::default(),
        })
    }

    pub(super) fn asked(&self) -> Vec<Vec<ChatMessage>> {
        self.asked.lock().expect("not poisoned").clone()
    }

    /// Returns the session that each request named for its affinity.
    pub(super) fn sessions(&self) -> Vec<Option<String>> {
        self.sessions.lock().expect("not poisoned").clone()
    }
}

impl RemoteModel for Scripted {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream {
        self.sessions.lock().expect("not poisoned").push(options.affinity.session);
        self.asked.lock().expect("not poisoned").push(input.messages().to_vec());
        let mut steps =
            self.script.lock().expect("not poisoned").pop_front().expect("the script has an entry");
        for step in &steps {
            if let Step::Refuse(prompt_tokens, completion_tokens) = *step {
                let usage = Usage { prompt_tokens, completion_tokens, ..Usage::default() };
                options.unreported.begin("far/hidden").count(usage);
            }
        }
        steps.retain(|step| !matches!(step, Step::Refuse(..)));
        let (mut said, mut thought) = (String::new(), String::new());
        let mut begun = false;
        let started = move |step: &Step| {
            let begins = !begun && matches!(step, Step::Say(_) | Step::Think(_));
            begun |= begins;
            begins.then_some(Some(Ok(ChatEvent::Started {
                prompt_tokens: 9,
                cached_tokens: 4,
                cache_write_tokens: 0,
            })))
        };
        let event = move |step| match step {
            Step::Say(text) => {
                said.push_str(text);
                Some(Ok(ChatEvent::Text { delta: text.to_owned(), logprobs: Vec::new() }))
            }
            Step::Think(text) => {
                thought.push_str(text);
                Some(Ok(ChatEvent::Reasoning { delta: text.to_owned() }))
            }
            Step::Route(model, attempts) => {
                Some(Ok(ChatEvent::Routed(Routed { model: model.to_owned(), attempts })))
            }
            Step::Finish => {
                let usage =
                    Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens: 3, ..Usage::default() };
                let outcome = ChatOutcome::remote(std::mem::take(&mut said), ChatFinish::Stop);
                let reasoning = std::mem::take(&mut thought);
                Some(Ok(ChatEvent::Finished(ChatOutcome { usage, reasoning, ..outcome })))
            }
            Step::Fail(fault) => Some(Err(EngineError::Upstream {
                upstream: "far".to_owned(),
                fault,
                message: "as the script says".to_owned(),
            })),
            Step::Hang | Step::Refuse(..) => None,
        };
        let (mut started, mut event) = (started, event);
        let events = steps.into_iter().flat_map(move |step| started(&step).into_iter().chain([event(step)]));
        Box::pin(futures::stream::iter(events).then(|event| async {
            match event {
                Some(event) => event,
                None => std::future::pending().await,
            }
        }))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

pub(super) fn models(remote: &Arc<Scripted>) -> ModelSet {
    ModelSet::new(tiny_engine("tiny")).with(skep_engine::Model::Remote(remote.clone()))
}

pub(super) fn granting(models: &[&str]) -> RuntimeOptions {
    let grants = models.iter().map(|name| ModelGrant::try_from((*name).to_owned()).expect("a grant"));
    RuntimeOptions { granted_models: Some(grants.collect()), ..RuntimeOptions::default() }
}

pub(super) const REMOTE: &str = "model = \"far/model\"";

/// Returns all events of a turn before its end, and its outcome.
async fn events(mut handle: RunHandle) -> (Vec<RunEvent>, Outcome) {
    let mut events = Vec::new();
    loop {
        match handle.next().await.expect("the turn ends").expect("the turn succeeds") {
            RunEvent::Done(outcome) => return (events, outcome),
            event => events.push(event),
        }
    }
}

#[tokio::test]
async fn an_agent_talks_to_a_model_on_another_server() {
    let remote = Scripted::new(
        None,
        vec![
            vec![
                Step::Route("far/big", 2),
                Step::Think("hm"),
                Step::Say("One"),
                Step::Say(" two."),
                Step::Finish,
            ],
            vec![Step::Say("Three."), Step::Finish],
        ],
    );
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, chatter()).await.expect("valid");
    let (events, outcome) = events(host.invoke("chat", "s", "count").await.expect("taken")).await;
    assert_eq!(outcome.text, "One two.");
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.cached_tokens), (9, 4));
    let chosen = RunEvent::ModelChosen { model: "far/big".to_owned(), attempts: 2 };
    assert!(events.contains(&chosen), "{events:?}");
    assert!(events.contains(&RunEvent::Thinking { text: "hm".to_owned() }), "{events:?}");
    let host = host.restart_with(granting(&["far/*"])).await;
    assert_eq!(host.answer("chat", "s", "go on").await, "Three.");
    let asked = remote.asked();
    let said: Vec<_> = asked[1].iter().map(|message| message.content.as_str()).collect();
    assert_eq!(said, ["count", "One two.", "go on"], "the stored conversation is sent");
    assert_eq!(asked[1][1].reasoning.as_deref(), Some("hm"));
}

#[tokio::test]
async fn a_grant_for_all_models_does_not_leave_the_host() {
    let remote = Scripted::new(None, Vec::new());
    let host = Host::with_models(models(&remote), granting(&["*"])).await;
    host.deploy("chat", REMOTE, relayer()).await.expect("valid");
    let error = host.ask("chat", "s", "hi").await.expect_err("the operator granted local models");
    assert!(error.to_string().contains("trapped") || error.to_string().contains("far/model"), "{error}");
    assert!(remote.asked().is_empty());
}

#[tokio::test]
async fn a_local_tenant_uses_only_local_models_even_if_its_agent_may_use_upstreams() {
    let remote = Scripted::new(None, Vec::new());
    let local = ModelGrant::try_from("*".to_owned()).expect("a grant");
    let options = RuntimeOptions {
        tenant_models: [("local".to_owned(), vec![local])].into(),
        ..granting(&["far/*", "tiny"])
    };
    let host = Host::with_models(models(&remote), options).await;
    host.deploy("chat", REMOTE, chatter()).await.expect("valid");
    host.ask("chat", "s", "hi").await.expect_err("the tenant may use local models only");
    assert!(remote.asked().is_empty());
}

#[tokio::test]
async fn a_conversation_follows_the_model_that_its_agent_names() {
    let remote = Scripted::new(None, vec![vec![Step::Say("From afar."), Step::Finish]]);
    let options = || granting(&["far/*", "tiny"]);
    let host = Host::with_models(models(&remote), options()).await;
    let follow = "[inference]\nfollow_model = true";
    host.deploy("chat", &format!("model = \"tiny\"\n{follow}"), chatter()).await.expect("valid");
    let first = host.answer("chat", "s", "here").await;
    host.deploy("chat", &format!("{REMOTE}\n{follow}"), chatter()).await.expect("valid");
    assert_eq!(host.answer("chat", "s", "there").await, "From afar.");
    let asked = remote.asked();
    let said: Vec<_> = asked[0].iter().map(|message| message.content.as_str()).collect();
    assert_eq!(said, ["here", first.as_str(), "there"]);
    host.deploy("chat", &format!("model = \"tiny\"\n{follow}"), chatter()).await.expect("valid");
    let (events, outcome) = events(host.invoke("chat", "s", "back").await.expect("taken")).await;
    let changed = RunEvent::ModelChanged {
        conversation: "main".to_owned(),
        from: "far/model".to_owned(),
        to: "tiny".to_owned(),
    };
    assert!(events.contains(&changed), "{events:?}");
    assert!(outcome.usage.completion_tokens > 0);
    let session = host.agents.session("chat", "s").await.expect("the session exists");
    assert_eq!(session.messages.len(), 6, "no message is lost on the way");
}

#[tokio::test]
async fn a_long_conversation_is_compacted_by_the_remote_model_itself() {
    let remote = Scripted::new(
        Some(2_000),
        vec![
            vec![Step::Say("First."), Step::Finish],
            vec![Step::Say("Second."), Step::Finish],
            vec![Step::Say("They counted."), Step::Finish],
            vec![Step::Say("Third."), Step::Finish],
        ],
    );
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, chatter()).await.expect("valid");
    let long = "word ".repeat(600);
    for expected in ["First.", "Second.", "Third."] {
        assert_eq!(host.answer("chat", "s", &long).await, expected);
    }
    let asked = remote.asked();
    let last = asked.last().expect("four requests");
    assert!(last.iter().any(|message| message.content.contains("They counted.")), "{last:?}");
    let bytes: usize = last.iter().map(ChatMessage::text_bytes).sum();
    assert!(bytes < 4 * 2_000, "{bytes} bytes do not fit into the context");
    assert!(last.iter().all(|message| message.role != Role::Assistant || !message.content.is_empty()));
}

/// Runs a turn whose answer hangs, and crashes the host once the caller has been shown some of it.
pub(super) async fn crashed(remote: &Arc<Scripted>, settings: &str) -> Host {
    crashed_after(remote, settings, "One").await
}

/// Runs a turn, and crashes the host once the caller has been shown this text.
pub(super) async fn crashed_after(remote: &Arc<Scripted>, settings: &str, shown: &str) -> Host {
    let host = Host::with_models(models(remote), granting(&["far/*"])).await;
    host.deploy("chat", &format!("{REMOTE}\n{settings}"), relayer()).await.expect("valid");
    let mut invocation = super::fixture::invocation("chat", "s", "count");
    invocation.idempotency_key = Some("k".to_owned());
    let mut handle = host.agents.invoke(invocation).await.expect("taken");
    loop {
        let event = handle.next().await.expect("the turn runs").expect("it does not fail");
        if matches!(event, RunEvent::Delta { text } if text == shown) {
            break;
        }
    }
    until(async || host.journals().await.contains(shown).then_some(())).await;
    let stopped = host.crash().await;
    stopped.start(granting(&["far/*"])).await
}

/// Runs a turn, or follows that of [`crashed`] again, from its first event.
pub(super) async fn followed(host: &Host) -> (Vec<RunEvent>, Result<Outcome, RuntimeError>) {
    let mut invocation = super::fixture::invocation("chat", "s", "count");
    invocation.idempotency_key = Some("k".to_owned());
    let mut handle = host.agents.invoke(invocation).await.expect("the key is known");
    let mut events = Vec::new();
    loop {
        match handle.next().await.expect("the turn ends") {
            Ok(RunEvent::Done(outcome)) => return (events, Ok(outcome)),
            Ok(event) => events.push(event),
            Err(error) => return (events, Err(error)),
        }
    }
}

#[tokio::test]
async fn an_answer_that_another_host_began_is_regenerated_where_its_session_is_now() {
    let engine = tiny_engine("tiny");
    let (name, digest) = ("tiny".to_owned(), engine.info().digest.clone());
    let info = RemoteInfo { name, digest, context_length: None, created_unix_s: 0 };
    let elsewhere = Scripted::of(info, vec![vec![Step::Say("One"), Step::Hang]]);
    let models = ModelSet::new(skep_engine::Model::Remote(elsewhere));
    let host = Host::with_models(models, RuntimeOptions::default()).await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let mut invocation = super::fixture::invocation("chat", "s", "count");
    invocation.idempotency_key = Some("k".to_owned());
    let mut run = host.agents.invoke(invocation).await.expect("taken");
    while !matches!(run.next().await.expect("it runs").expect("well"), RunEvent::Delta { .. }) {}
    until(async || host.journals().await.contains("One").then_some(())).await;
    drop(run);
    let host = host.crash().await.start_with(ModelSet::new(engine), RuntimeOptions::default()).await;
    let (events, outcome) = followed(&host).await;
    let texts: Vec<&str> = events
        .iter()
        .filter_map(|event| match event {
            RunEvent::Delta { text } => Some(text.as_str()),
            RunEvent::GenerationRestarted => Some("again: "),
            _ => None,
        })
        .collect();
    let text = outcome.expect("this host has the same model").text;
    assert_eq!(texts.concat(), format!("Oneagain: {text}"), "the answer has all of its text: {events:?}");
}

#[tokio::test]
async fn an_interrupted_upstream_answer_is_regenerated_and_the_caller_is_notified() {
    let refused = || vec![Step::Fail(UpstreamFault::Refused)];
    let remote = Scripted::new(
        None,
        vec![vec![Step::Say("One"), Step::Hang], vec![Step::Say("Another answer."), Step::Finish], refused()],
    );
    let host = crashed(&remote, "").await;
    let (events, outcome) = followed(&host).await;
    let published: Vec<_> = events
        .iter()
        .filter(|event| matches!(event, RunEvent::Delta { .. } | RunEvent::GenerationRestarted))
        .cloned()
        .collect();
    let delta = |text: &str| RunEvent::Delta { text: text.to_owned() };
    assert_eq!(published, [delta("One"), RunEvent::GenerationRestarted, delta("Another answer.")]);
    let error = outcome.expect_err("the agent generates until it is refused").to_string();
    assert!(error.contains("as the script says"), "{error}");
    assert_eq!(remote.asked().len(), 3);
}

#[tokio::test]
async fn an_agent_can_fail_instead_of_repeating_a_request() {
    let remote = Scripted::new(None, vec![vec![Step::Say("One"), Step::Hang]]);
    let host = crashed(&remote, "[inference]\ncut_off = \"fail\"").await;
    let (_, outcome) = followed(&host).await;
    let error = outcome.expect_err("the answer was cut off").to_string();
    assert!(error.contains("interrupted: the host crashed while another server answered"), "{error}");
    assert_eq!(remote.asked().len(), 1, "the request was not made again");
}
