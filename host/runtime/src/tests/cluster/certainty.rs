//! A host that may have been replaced has no effect outside.

use super::Cluster;
use crate::{
    ToolServer,
    tests::{
        fixture::{Setup, until},
        tools::{caller, granted, granting},
    },
};
use futures::future::BoxFuture;
use serde_json::{Value, json};
use skep_outbound::{ServedTool, ToolHints, ToolServerError};
use skep_store::{Fault, Moment, Store};
use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
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
        // The writer hangs, so that the lease is not renewed.
        let mut hangs = true;
        host.store().faults().choose(move |moment| {
            let now = moment == Moment::Begin && std::mem::replace(&mut hangs, false);
            now.then_some(Fault::Slow(Duration::from_secs(4)))
        });
        until(async || (!is_certain(host.store()).await).then_some(())).await;
        gate.opened.notify_one();
    };
    let (answer, ()) = tokio::join!(asking, hanging);
    assert_eq!(answer, r#"{"id":1}"#);
    assert_eq!(*gate.calls.lock().expect("no test panics here"), [true]);
}
