//! A client at `/mcp/AGENT` that agents can ask: forms, approvals, prompts, resources and subscriptions.

use crate::{
    config_host::Up,
    durability::{Process, tiny_model},
    harness::{Host, client as http_client, shared},
    mcp_conformance::{HOST, OFFER, deploy},
};
use rmcp::{
    ClientHandler, ErrorData, RoleClient, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ElicitRequestParams,
        ElicitResult, ElicitationAction, GetPromptRequestParams, Implementation, ReadResourceRequestParams,
        ResourceUpdatedNotificationParam, SubscribeRequestParams,
    },
    service::{NotificationContext, RequestContext, RunningService},
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// Time in which everything happens that a test waits for.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client whose person gives the same answer to every form.
#[derive(Clone)]
struct Person {
    answer: Option<(ElicitationAction, Value)>,
    /// The time that the person thinks before the answer.
    thinks: Duration,
    asked: Arc<Mutex<Vec<String>>>,
    updated: mpsc::UnboundedSender<String>,
}

impl ClientHandler for Person {
    fn get_info(&self) -> ClientConfig {
        let capabilities = match self.answer {
            Some(_) => ClientCapabilities::builder().enable_elicitation().build(),
            None => ClientCapabilities::default(),
        };
        ClientConfig::new(capabilities, Implementation::new("test", "1"))
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        let ElicitRequestParams::FormElicitationParams { message, .. } = request else {
            panic!("it is a form")
        };
        self.asked.lock().unwrap().push(message);
        tokio::time::sleep(self.thinks).await;
        let (action, content) = self.answer.clone().unwrap();
        Ok(ElicitResult::new(action).with_content(content))
    }

    async fn on_resource_updated(
        &self,
        updated: ResourceUpdatedNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let _ = self.updated.send(updated.uri);
    }
}

struct Connected {
    client: RunningService<RoleClient, Person>,
    asked: Arc<Mutex<Vec<String>>>,
    updated: mpsc::UnboundedReceiver<String>,
}

async fn connect(url: &str, answer: Option<(ElicitationAction, Value)>) -> Connected {
    connect_slow(url, answer, Duration::ZERO).await
}

async fn connect_slow(url: &str, answer: Option<(ElicitationAction, Value)>, thinks: Duration) -> Connected {
    let (send, updated) = mpsc::unbounded_channel();
    let person = Person { answer, thinks, asked: Arc::default(), updated: send };
    let asked = person.asked.clone();
    let config = StreamableHttpClientTransportConfig::with_uri(url.to_owned());
    let transport = StreamableHttpClientTransport::with_client(http_client(), config);
    Connected { client: person.serve(transport).await.expect("the host supports MCP"), asked, updated }
}

impl Connected {
    async fn call(&self, name: &str, arguments: Value) -> CallToolResult {
        let call = CallToolRequestParams::new(name.to_owned());
        let call = call.with_arguments(arguments.as_object().cloned().unwrap());
        self.client.call_tool(call).await.expect("the tool exists")
    }
}

fn text(result: &CallToolResult) -> &str {
    &result.content[0].as_text().expect("a text").text
}

/// Waits until this is true.
async fn until(what: impl AsyncFn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !what().await {
        assert!(Instant::now() < end, "it did not happen in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn approve() -> Option<(ElicitationAction, Value)> {
    Some((ElicitationAction::Accept, json!({"decision": "approve"})))
}

#[tokio::test]
async fn a_client_that_may_decide_is_asked_about_a_call_that_needs_approval() {
    let host = shared();
    deploy(host, "toolcall", "mcp-decides", "").await;
    let url = host.at("/mcp/mcp-decides");
    let allows = connect(&url, approve()).await;
    let paid = allows.call("pay", json!({"cents": 5})).await;
    assert_eq!((paid.is_error, paid.structured_content), (Some(false), Some(json!({"result": 5}))));
    let asked = allows.asked.lock().unwrap().clone();
    assert!(asked.len() == 1 && asked[0].contains("pay") && asked[0].contains("\"cents\":5"), "{asked:?}");

    let no = json!({"decision": "deny", "reason": "too much"});
    let denies = connect(&url, Some((ElicitationAction::Accept, no))).await;
    let refused = denies.call("pay", json!({"cents": 99})).await;
    assert_eq!(refused.is_error, Some(true), "{refused:?}");
    assert!(text(&refused).contains("too much"), "{refused:?}");
}

#[tokio::test]
async fn a_form_about_a_call_that_is_declined_or_closed_decides_nothing() {
    let host = shared();
    deploy(host, "toolcall", "mcp-undecided", "").await;
    let url = host.at("/mcp/mcp-undecided");
    let decisions = [
        (ElicitationAction::Decline, "approve"),
        (ElicitationAction::Cancel, "approve"),
        (ElicitationAction::Decline, "deny"),
    ];
    for (action, decision) in decisions {
        let person = connect(&url, Some((action, json!({"decision": "approve"})))).await;
        let asked = person.asked.clone();
        let call = tokio::spawn(async move { person.call("pay", json!({"cents": 7})).await });
        while asked.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        let waiting = async || {
            let (_, listed) = host.get("/v1/approvals").await;
            let all = listed["data"].as_array().unwrap().clone();
            all.into_iter().find(|one| one["agent"] == "mcp-undecided")
        };
        let id = loop {
            match waiting().await {
                Some(approval) => break approval["id"].as_str().unwrap().to_owned(),
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        // Another client decides, which it could not if the form had.
        let path = format!("/v1/approvals/{id}");
        let decided = json!({"decision": decision, "reason": "not today"});
        let (status, answer) = host.post(&path, decided).await;
        assert_eq!(status, 200, "{answer}");
        let paid = call.await.unwrap();
        match decision {
            "approve" => assert_eq!(
                (paid.is_error, paid.structured_content),
                (Some(false), Some(json!({"result": 7})))
            ),
            // The tool is not called, and the turn continues with the reason.
            _ => assert!(paid.is_error == Some(true) && text(&paid).contains("not today"), "{paid:?}"),
        }
        assert_eq!(asked.lock().unwrap().len(), 1, "people are asked once at the client");
        assert!(waiting().await.is_none());
    }
}

#[tokio::test]
async fn an_agent_asks_only_what_it_is_granted_and_only_clients_that_can_answer() {
    let up = Up::start(HOST);
    deploy(&up.host, "mcp_conformance", "asks", OFFER).await;
    deploy(&up.host, "mcp_conformance", "may-not-ask", "").await;
    let form = json!({"username": "ann", "email": "ann@example.com"});
    let answers = Some((ElicitationAction::Accept, form));
    let asks = connect(&up.host.at("/mcp/asks"), answers.clone()).await;
    let message = json!({"message": "Who are you?"});
    let result = asks.call("test_elicitation", message.clone()).await;
    assert_eq!(text(&result), "User response: ann at ann@example.com");

    let wrong = Some((ElicitationAction::Accept, json!({"username": 7})));
    let wrong =
        connect(&up.host.at("/mcp/asks"), wrong).await.call("test_elicitation", message.clone()).await;
    assert!(text(&wrong).contains("does not match the form"), "{wrong:?}");
    let declines = Some((ElicitationAction::Decline, json!({})));
    let declined = connect(&up.host.at("/mcp/asks"), declines).await;
    assert_eq!(text(&declined.call("test_elicitation", message.clone()).await), "User response: declined");

    let mute = connect(&up.host.at("/mcp/asks"), None).await.call("test_elicitation", message.clone()).await;
    assert!(mute.is_error == Some(true) && text(&mute).contains("does not fill in forms"), "{mute:?}");
    let denied =
        connect(&up.host.at("/mcp/may-not-ask"), answers).await.call("test_elicitation", message).await;
    assert!(
        text(&denied).contains("add \"client/elicit\" to `tools` under [grants] in agent.toml"),
        "{denied:?}"
    );
    let prompt = json!({"prompt": "bees"});
    let denied =
        connect(&up.host.at("/mcp/may-not-ask"), None).await.call("test_sampling", prompt.clone()).await;
    assert!(
        text(&denied).contains("add \"client/sample\" to `tools` under [grants] in agent.toml"),
        "{denied:?}"
    );
    let mute = connect(&up.host.at("/mcp/asks"), None).await.call("test_sampling", prompt).await;
    assert!(mute.is_error == Some(true) && text(&mute).contains("does not make completions"), "{mute:?}");
}

#[tokio::test]
async fn the_resource_of_a_session_has_its_messages() {
    let up = Up::start(HOST);
    deploy(&up.host, "generate", "talks", "").await;
    let body = json!({"text": "Count the bees.", "data": {"max_tokens": 4}});
    let (status, answer) = up.host.post("/v1/agents/talks/sessions/hive/messages", body).await;
    assert_eq!(status, 200, "{answer}");
    let talks = connect(&up.host.at("/mcp/talks"), None).await;
    let session = ReadResourceRequestParams::new("skep://agents/talks/sessions/hive");
    let read = talks.client.read_resource(session).await.unwrap();
    let read = serde_json::to_value(&read.contents[0]).unwrap();
    let shown: Value = serde_json::from_str(read["text"].as_str().unwrap()).unwrap();
    assert_eq!(shown["conversations"][0]["messages"], 2, "{shown}");
    let messages = shown["messages"].as_array().unwrap();
    assert_eq!((messages.len(), &messages[0]["role"]), (2, &json!("user")), "{shown}");
    assert!(messages[0].to_string().contains("Count the bees."), "{shown}");
    assert_eq!(messages[1]["role"], "assistant", "{shown}");
}

#[tokio::test]
async fn the_time_that_a_person_takes_is_not_the_turns_and_has_a_limit_of_its_own() {
    let up = Up::start(HOST);
    let answer = Some((ElicitationAction::Accept, json!({"username": "ann", "email": "ann@example.com"})));
    let message = json!({"message": "Who are you?"});
    for (name, limits, answers) in [
        ("patient", "[limits]\nturn_ms = 5000\n", true),
        ("hasty", "[limits]\nturn_ms = 5000\napproval_ms = 500\n", false),
    ] {
        deploy(&up.host, "mcp_conformance", name, &format!("{OFFER}{limits}")).await;
        let url = up.host.at(&format!("/mcp/{name}"));
        let person = connect_slow(&url, answer.clone(), Duration::from_secs(8)).await;
        let result = person.call("test_elicitation", message.clone()).await;
        match answers {
            true => assert_eq!(text(&result), "User response: ann at ann@example.com"),
            false => {
                assert_eq!(result.is_error, Some(true), "{result:?}");
                assert!(text(&result).contains("500 ms"), "{result:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_agent_is_a_server_with_its_own_tools_prompts_and_resources() {
    let up = Up::start(HOST);
    deploy(&up.host, "mcp_conformance", "own", OFFER).await;
    deploy(&up.host, "toolcall", "other", "").await;
    let mut own = connect(&up.host.at("/mcp/own"), None).await;
    let names: Vec<String> =
        own.client.list_all_tools().await.unwrap().iter().map(|tool| tool.name.to_string()).collect();
    assert!(names.contains(&"test_simple_text".to_owned()), "{names:?}");
    for absent in ["own", "simple_prompt", "read_text", "add", "other"] {
        assert!(!names.contains(&absent.to_owned()), "{absent} in {names:?}");
    }
    let unknown = CallToolRequestParams::new("other__add").with_arguments(Default::default());
    own.client.call_tool(unknown).await.expect_err("it is a tool of another agent");

    let prompts = serde_json::to_value(own.client.list_all_prompts().await.unwrap()).unwrap();
    let with_arguments =
        prompts.as_array().unwrap().iter().find(|p| p["name"] == "test_prompt_with_arguments");
    assert_eq!(
        with_arguments.unwrap()["arguments"],
        json!([
            {"name": "arg1", "description": "First test argument", "required": true},
            {"name": "arg2", "description": "Second test argument", "required": true},
        ])
    );
    let all = connect(&up.host.at("/mcp"), None).await;
    let missing = GetPromptRequestParams::new("own__test_prompt_with_arguments");
    let error = all.client.get_prompt(missing).await.unwrap_err().to_string();
    assert!(error.contains("\"arg1\" is a required property"), "{error}");

    let listed = async || serde_json::to_value(own.client.list_all_resources().await.unwrap()).unwrap();
    let uris = |listed: &Value| {
        let uris = listed.as_array().unwrap().iter().map(|one| one["uri"].as_str().unwrap().to_owned());
        uris.collect::<Vec<_>>()
    };
    let declared = ["test://static-binary", "test://static-text", "test://watched-resource"];
    assert_eq!(uris(&listed().await), declared);
    assert_eq!(uris(&serde_json::to_value(all.client.list_all_resources().await.unwrap()).unwrap()), [""; 0]);
    let (status, answer) = up.host.message("own", "talk", "hello").await;
    assert_eq!(status, 200, "{answer}");
    let session = "skep://agents/own/sessions/talk";
    assert_eq!(uris(&listed().await)[3..], [session]);
    for uri in [session, "test://watched-resource"] {
        // The revisions with sessions have no other subscriptions.
        #[expect(deprecated)]
        own.client.subscribe(SubscribeRequestParams::new(uri)).await.unwrap();
    }
    let read = own.client.read_resource(ReadResourceRequestParams::new(session)).await.unwrap();
    let read = serde_json::to_value(&read.contents[0]).unwrap();
    let shown: Value = serde_json::from_str(read["text"].as_str().unwrap()).unwrap();
    assert_eq!((&shown["id"], &shown["turns"]), (&json!("talk"), &json!(1)), "{shown}");

    // Reading is a turn, too, and changes nothing.
    own.client.read_resource(ReadResourceRequestParams::new("test://static-text")).await.unwrap();
    up.host.message("own", "talk", "again").await;
    let mut updated = Vec::new();
    for _ in 0..2 {
        let next = tokio::time::timeout(Duration::from_secs(20), own.updated.recv()).await;
        updated.push(next.expect("it is told").unwrap());
    }
    updated.sort();
    assert_eq!(updated, [session, "test://watched-resource"]);
    assert!(own.updated.try_recv().is_err());
    for uri in ["test://nothing", "skep://agents/other/sessions/talk", "skep://agents/own/sessions/none"] {
        own.client.read_resource(ReadResourceRequestParams::new(uri)).await.expect_err(uri);
    }
    let (status, answer) = up.host.post("/mcp/nobody", json!({})).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("agent_not_found")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_who_answered_is_not_asked_again_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let [model, data, config] = ["model", "data", "skep.toml"].map(|name| folder.path().join(name));
    std::fs::create_dir_all(&model).unwrap();
    tiny_model(&model);
    let grants = "[grants]\ntools = [\"client/elicit\"]\n";
    std::fs::write(&config, grants).unwrap();
    let start = || {
        let (config, model, data) = (config.clone(), model.clone(), data.clone());
        tokio::task::spawn_blocking(move || Process::configured(&config, &model, &data))
    };
    let process = start().await.unwrap();
    let host = Host::elsewhere(process.url.clone());
    deploy(&host, "mcp_conformance", "asks", grants).await;
    let form = json!({"username": "ann", "email": "ann@example.com"});
    let person = connect(&format!("{}/mcp/asks", process.url), Some((ElicitationAction::Accept, form))).await;
    let asked = person.asked.clone();
    let call = CallToolRequestParams::new("elicit_and_work");
    let mut call = call.with_arguments(json!({"message": "Who are you?"}).as_object().cloned().unwrap());
    call.meta = Some(serde_json::from_value(json!({"skep.dev/session": "s"})).unwrap());
    let session = "/v1/agents/asks/sessions/s";
    let called = tokio::spawn(async move { person.client.call_tool(call).await });
    // The tool has the answer and works on, for which it sleeps.
    until(async || {
        let (_, turns) = host.get(&format!("{session}/turns")).await;
        let turn = turns["data"][0]["turn_id"].as_str().unwrap_or_default();
        let (_, timeline) = host.get(&format!("{session}/turns/{turn}/timeline")).await;
        timeline["calls"].as_array().is_some_and(|calls| calls.iter().any(|call| call["name"] == "sleep"))
    })
    .await;
    // The host writes meanwhile what the tool got before.
    tokio::time::sleep(Duration::from_secs(1)).await;
    process.kill();
    let process = start().await.unwrap();
    let host = Host::elsewhere(process.url.clone());
    until(async || host.get(session).await.1["turns"] == 1).await;
    let (_, turn) = host.get(&format!("{session}/turns/1")).await;
    assert!(turn["data"].to_string().contains("User response: ann at ann@example.com"), "{turn}");
    assert_eq!(asked.lock().unwrap().len(), 1, "the answer is in the turn's journal");
    // The client keeps waiting for a connection that was closed.
    called.abort();
    process.kill();
}
