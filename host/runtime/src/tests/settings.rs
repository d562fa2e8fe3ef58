//! Tests of settings that are replaced while turns run.

use super::{
    fixture::{Host, Setup, permuted_engine, tiny_engine},
    inference::chatter,
    limits::fifty_calls,
    tools::{caller, granted, granting},
};
use crate::{
    Limits, ModelGrant, RequestLogMode, RequestLogOptions, RequestOrigin, RuntimeOptions, ServedTool,
    Surface, ToolHints, ToolServer, ToolServerError,
};
use serde_json::{Value, json};
use skep_engine::ModelSet;
use std::{collections::BTreeMap, pin::Pin, sync::Arc};
use tokio::sync::Notify;

type ToolFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ToolServerError>> + Send + 'a>>;

/// A server whose calls wait until the test releases them.
#[derive(Debug, Default)]
pub(super) struct Slow {
    pub(super) called: Notify,
    pub(super) release: Notify,
}

impl ToolServer for Slow {
    fn tools(&self) -> ToolFuture<'_, Arc<[ServedTool]>> {
        let look = ServedTool {
            name: "look".into(),
            description: String::new(),
            input_schema: json!({"type": "object"}),
            output_schema: None,
            hints: ToolHints::default(),
        };
        Box::pin(std::future::ready(Ok([look].into())))
    }

    fn call<'a>(&'a self, _tool: &'a str, arguments: Value) -> ToolFuture<'a, Value> {
        Box::pin(async move {
            self.called.notify_one();
            self.release.notified().await;
            Ok(arguments)
        })
    }
}

/// Returns the server as `bank`, whose tool is `look`.
pub(super) fn servers(server: &Arc<Slow>) -> BTreeMap<String, Arc<dyn ToolServer>> {
    let server: Arc<dyn ToolServer> = server.clone();
    [("bank".to_owned(), server)].into()
}

#[tokio::test]
async fn replaced_grants_and_servers_reach_the_next_turn_and_not_the_running_one() {
    let (old, new) = (Arc::new(Slow::default()), Arc::new(Slow::default()));
    let setup = Setup { tool_servers: servers(&old), ..Setup::from(granting(&["mcp:*/*"])) };
    let host = Host::with(setup).await;
    host.deploy("desk", &granted("\"mcp:bank/*\""), caller()).await.expect("valid");
    let running = host.invoke("desk", "a", "mcp:bank/look").await.expect("taken");
    old.called.notified().await;

    host.agents.set_rules(&RuntimeOptions::default()).await;
    host.agents.set_tool_servers(BTreeMap::new());
    assert!(Arc::strong_count(&old) > 1, "the running turn keeps its server");
    let denied = host.answer("desk", "b", "mcp:bank/look").await;
    assert!(denied.contains("to `tools` under [grants] in skep.toml"), "{denied}");
    host.agents.set_rules(&granting(&["mcp:*/*"])).await;
    let absent = host.answer("desk", "b", "mcp:bank/look").await;
    assert!(absent.contains("skep.toml does not list an MCP server \"bank\""), "{absent}");

    host.agents.set_tool_servers(servers(&new));
    old.release.notify_one();
    assert_eq!(running.outcome().await.expect("the turn succeeds").text, r#"{"id":1}"#);
    new.release.notify_one();
    assert_eq!(host.answer("desk", "b", "mcp:bank/look").await, r#"{"id":1}"#);
    super::fixture::until(async || (Arc::strong_count(&old) == 1).then_some(())).await;
}

#[tokio::test]
async fn a_replaced_log_of_requests_observes_the_next_ones() {
    let host = Host::start().await;
    let observer =
        || host.agents.requests().observer(RequestOrigin::of_client("acme", None, Surface::ChatCompletions));
    assert!(observer().is_none(), "it is off");
    let requests = RequestLogOptions { mode: RequestLogMode::Metadata, ..RequestLogOptions::default() };
    host.agents.set_rules(&RuntimeOptions { requests, ..RuntimeOptions::default() }).await;
    assert!(observer().is_some());
}

#[tokio::test]
async fn replaced_ceilings_limit_deployed_agents_except_for_the_pools() {
    let host = Host::start().await;
    let asks = "[limits]\nhost_calls = 60\nmemory_mb = 8";
    host.deploy("asking", asks, fifty_calls()).await.expect("valid");
    assert_eq!(host.answer("asking", "s", "go").await, "go");
    let ceilings = Limits { host_calls: 10, memory_mb: 1, ..Limits::default() };
    host.agents.set_rules(&RuntimeOptions { ceilings, ..RuntimeOptions::default() }).await;
    let limits = host.agents.agent("asking").expect("deployed").limits;
    assert_eq!((limits.host_calls, limits.memory_mb), (10, 8));
    let error = host.ask("asking", "s", "go").await.expect_err("too many calls");
    assert_eq!(error.code(), "limit_exceeded");
    host.agents.set_rules(&RuntimeOptions::default()).await;
    assert_eq!(host.answer("asking", "s", "go").await, "go");
    assert_eq!(host.agents.agent("asking").expect("deployed").summary.version, 1);
}

#[tokio::test]
async fn an_agent_starts_when_its_missing_model_is_added() {
    let host = Host::start().await;
    host.deploy("pinned", "model = \"tiny\"", chatter()).await.expect("valid");
    let models = ModelSet::new(permuted_engine("new"));
    let all = ModelGrant::try_from("*".to_owned()).expect("a grant");
    let options = RuntimeOptions { granted_models: Some(vec![all]), ..RuntimeOptions::default() };
    let host = host.stop().await.start_with(models, options).await;
    assert_eq!(host.ask("pinned", "s", "hi").await.expect_err("no model").code(), "model_gone");
    host.agents.restart_waiting_agents().await.expect("readable");
    assert_eq!(host.agents.failed_agents().len(), 1, "the model is still not there");
    let _ = host.agents.models().clone().with(tiny_engine("tiny"));
    host.agents.restart_waiting_agents().await.expect("readable");
    assert!(host.agents.failed_agents().is_empty());
    host.answer("pinned", "s", "hi").await;
}
