//! A host that may have been replaced has no effect outside.

use super::Cluster;
use crate::{
    ToolServer,
    tests::{
        fetch_tool::{GRANTS, everything, fetch_twice},
        fixture::{Host, Setup, until},
        inference::chatter,
        tools::{caller, granted, granting},
        upstreams::{self, REMOTE},
        web::Server,
    },
};
use futures::{StreamExt, future::BoxFuture};
use serde_json::{Value, json};
use skep_engine::{
    EngineError, Model, ModelDigest, RemoteInfo, RemoteModel, UpstreamFault, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, Input, RemoteStream},
};
use skep_outbound::{ServedTool, ToolHints, ToolServerError};
use skep_store::{Fault, Moment, Store};
use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// A server that lists its tool when it is let, and notes whether its caller was certain of its lease.
#[derive(Debug, Default)]
struct Gate {
    store: OnceLock<Store>,
    asked: AtomicBool,
    opened: Notify,
    calls: Mutex<Vec<bool>>,
}

async fn is_certain(store: &Store) -> bool {
    tokio::time::timeout(Duration::from_millis(20), store.until_certain()).await.is_ok()
}

/// Makes the writer of a host hang for a few seconds, so that the lease is not renewed, and waits until the host is not certain of it.
async fn hang(host: &Host) {
    let mut hangs = true;
    host.store().faults().choose(move |moment| {
        let now = moment == Moment::Begin && std::mem::replace(&mut hangs, false);
        now.then_some(Fault::Slow(Duration::from_secs(4)))
    });
    until(async || (!is_certain(host.store()).await).then_some(())).await;
}

impl ToolServer for Gate {
    fn tools(&self) -> BoxFuture<'_, Result<Arc<[ServedTool]>, ToolServerError>> {
        Box::pin(async move {
            self.asked.store(true, Ordering::Release);
            self.opened.notified().await;
            let tool = ServedTool {
                name: "look".into(),
                description: String::new(),
                input_schema: json!({"type": "object"}),
                output_schema: None,
                hints: ToolHints { read_only: true, ..ToolHints::default() },
            };
            Ok([tool].into())
        })
    }

    fn call<'a>(&'a self, _tool: &'a str, arguments: Value) -> BoxFuture<'a, Result<Value, ToolServerError>> {
        Box::pin(async move {
            let certain = is_certain(self.store.get().expect("the host has started")).await;
            self.calls.lock().expect("no test panics here").push(certain);
            Ok(arguments)
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_is_called_only_while_the_lease_is_certain() {
    let Some(cluster) = Cluster::new().await else { return };
    let gate = Arc::new(Gate::default());
    let servers = [("gate".to_owned(), gate.clone() as Arc<dyn ToolServer>)].into();
    let host = cluster.host(Setup { tool_servers: servers, ..Setup::from(granting(&["mcp:gate/*"])) }).await;
    gate.store.set(host.store().clone()).expect("it is set once");
    host.deploy("desk", &granted("\"mcp:gate/look\""), caller()).await.expect("valid");
    let asking = host.answer("desk", "s", "mcp:gate/look");
    let hanging = async {
        until(async || gate.asked.load(Ordering::Acquire).then_some(())).await;
        hang(&host).await;
        gate.opened.notify_one();
    };
    let (answer, ()) = tokio::join!(asking, hanging);
    assert_eq!(answer, r#"{"id":1}"#);
    assert_eq!(*gate.calls.lock().expect("no test panics here"), [true]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_sent_only_while_the_lease_is_certain() {
    let Some(cluster) = Cluster::new().await else { return };
    let host = cluster.host(everything()).await;
    host.deploy("web", GRANTS, fetch_twice()).await.expect("valid");
    let mut server = Server::start().await;
    let arguments = json!({"url": format!("http://{}/", server.address)}).to_string();
    let asking = host.answer("web", "s", &arguments);
    let answering = async {
        let first = server.next().await;
        hang(&host).await;
        first.answer("one").await;
        let second = server.next().await;
        let certain = is_certain(host.store()).await;
        second.answer("two").await;
        certain
    };
    let (answer, certain) = tokio::join!(asking, answering);
    assert!(answer.contains("two"), "{answer}");
    assert!(certain, "the request was sent while another host may have had the session");
}

/// A model on another server, which breaks its first answer off when it is let. The second request notes whether the host was
/// certain of its lease.
struct Breaking {
    info: RemoteInfo,
    asked: AtomicUsize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    store: OnceLock<Store>,
    breaks: Notify,
    was_certain: OnceLock<bool>,
}

impl Shared {
    /// Returns an event of the answer to the request with this number, counted from 0.
    async fn event(&self, request: usize, number: usize) -> Result<ChatEvent, EngineError> {
        let usage = Usage { prompt_tokens: 9, completion_tokens: 3, ..Usage::default() };
        match (request, number) {
            (_, 0) => {
                if request > 0 {
                    let store = self.store.get().expect("the host has started");
                    self.was_certain.set(is_certain(store).await).expect("it is asked twice");
                }
                Ok(ChatEvent::Started { prompt_tokens: 9, cached_tokens: 0, cache_write_tokens: 0 })
            }
            (_, 1) => Ok(ChatEvent::Text { delta: "One.".to_owned(), logprobs: Vec::new() }),
            (0, _) => {
                self.breaks.notified().await;
                Err(EngineError::Upstream {
                    upstream: "far".to_owned(),
                    fault: UpstreamFault::CutOff,
                    message: "as the test says".to_owned(),
                })
            }
            _ => Ok(ChatEvent::Finished(ChatOutcome {
                usage,
                ..ChatOutcome::remote("One.".to_owned(), ChatFinish::Stop)
            })),
        }
    }
}

impl RemoteModel for Breaking {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        let (request, shared) = (self.asked.fetch_add(1, Ordering::AcqRel), self.shared.clone());
        let events = futures::stream::iter(0..3);
        Box::pin(events.then(move |number| {
            let shared = shared.clone();
            async move { shared.event(request, number).await }
        }))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_server_is_asked_for_an_answer_only_while_the_lease_is_certain() {
    let Some(mut cluster) = Cluster::new().await else { return };
    let info = RemoteInfo {
        name: "far/model".to_owned(),
        digest: ModelDigest::remote("http://far", "model"),
        context_length: None,
        created_unix_s: 0,
    };
    let far = Arc::new(Breaking { info, asked: AtomicUsize::new(0), shared: Arc::default() });
    cluster.models = cluster.models.clone().with(Model::Remote(far.clone()));
    let host = cluster.host(upstreams::granting(&["far/*"])).await;
    far.shared.store.set(host.store().clone()).expect("it is set once");
    host.deploy("chat", REMOTE, chatter()).await.expect("valid");
    let asking = host.answer("chat", "s", "count");
    let hanging = async {
        until(async || (far.asked.load(Ordering::Acquire) == 1).then_some(())).await;
        hang(&host).await;
        far.shared.breaks.notify_one();
    };
    let (answer, ()) = tokio::join!(asking, hanging);
    assert_eq!(answer, "One.");
    assert_eq!(far.shared.was_certain.get(), Some(&true));
}
