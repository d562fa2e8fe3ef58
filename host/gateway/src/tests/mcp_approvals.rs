//! Tests of the forms in which the person at an MCP client decides about calls.

use super::mcp::Running;
use crate::{GatewayOptions, McpOptions};
use rmcp::{
    ClientHandler, ErrorData, RoleClient, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ElicitRequestParams,
        ElicitResult, ElicitationAction, GetPromptRequestParams, Implementation,
    },
    service::{RequestContext, RunningService},
};
use serde_json::{Value, json};
use skep_runtime::Manifest;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// Returns an agent whose tool `pay` needs approval and returns its arguments.
fn payer() -> Vec<u8> {
    let strings = [
        (16, "Pays."),
        (32, "pay"),
        (48, r#"{"type":"object","properties":{"cents":{"type":"integer"}},"required":["cents"]}"#),
    ];
    let part = |index: usize| [strings[index].0, strings[index].1.len() as u32];
    // The description of the agent and the list of its tools; then the tool, whose last word says that it needs approval.
    let described = [part(0), [1_024, 1]].concat();
    let tool = [&part(1)[..], &part(0), &part(2), &[0; 7], &[1]].concat();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("\\{byte:02x}")).collect::<String>();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let mut data = vec![(512, words(&described)), (1_024, words(&tool))];
    data.extend(strings.map(|(at, text)| (at, text.as_bytes().to_vec())));
    let data: String =
        data.iter().map(|(at, bytes)| format!("(data (i32.const {at}) \"{}\")", hex(bytes))).collect();
    let module = format!(
        r#"(module
            (memory (export "memory") 1)
            {data}
            (global $free (mut i32) (i32.const 8192))
            (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
                (local $at i32)
                (local.set $at (i32.and (i32.add (global.get $free) (i32.const 7)) (i32.const -8)))
                (global.set $free (i32.add (local.get $at) (local.get 3)))
                (local.get $at))
            (func (export "skep:agent/handler@0.1.1#describe") (result i32) (i32.const 512))
            (func (export "skep:agent/handler@0.1.1#on-message") (param i32) (result i32) unreachable)
            (func (export "skep:agent/tool-handler@0.1.1#call-tool")
                (param $name i32) (param $n i32) (param $arguments i32) (param $length i32) (param i32 i32 i64 i64)
                (result i32)
                (i32.store (i32.const 2052) (local.get $arguments))
                (i32.store (i32.const 2056) (local.get $length))
                (i32.const 2048)))"#
    );
    let mut module = wat::parse_str(module).unwrap();
    let mut resolve = Resolve::default();
    resolve.push_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit/skep-agent")).unwrap();
    let world = "include skep:agent/agent@0.1.1; export skep:agent/tool-handler@0.1.1;";
    let world = format!("package skep:test; world test {{ {world} }}");
    let package = resolve.push_str("test.wit", &world).unwrap();
    let world = resolve.select_world(&[package], Some("test")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).unwrap();
    ComponentEncoder::default().module(&module).unwrap().encode().unwrap()
}

/// A form that a client shows. The answer's receiver is dropped when the server withdraws the form.
struct Form {
    message: String,
    answer: oneshot::Sender<Value>,
}

/// A client whose person is the test.
struct Person(mpsc::UnboundedSender<Form>);

impl ClientHandler for Person {
    fn get_info(&self) -> ClientConfig {
        let capabilities = ClientCapabilities::builder().enable_elicitation().build();
        ClientConfig::new(capabilities, Implementation::new("test", "1"))
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        let ElicitRequestParams::FormElicitationParams { message, .. } = request else {
            panic!("it is a form")
        };
        let (answer, answered) = oneshot::channel();
        let _ = self.0.send(Form { message, answer });
        tokio::select! {
            () = context.ct.cancelled() => Ok(ElicitResult::new(ElicitationAction::Cancel)),
            content = answered => match content {
                Ok(content) => Ok(ElicitResult::new(ElicitationAction::Accept).with_content(content)),
                Err(_dropped) => Ok(ElicitResult::new(ElicitationAction::Decline)),
            },
        }
    }
}

/// A host with the agent `bank`, and a client of it.
struct Bank {
    running: Running,
    client: RunningService<RoleClient, Person>,
    forms: mpsc::UnboundedReceiver<Form>,
}

impl Bank {
    /// Opens a bank whose calls wait this long for a decision. `more` is a part of the agent's manifest.
    async fn open(approval_wait: Duration, more: &str) -> Bank {
        let mcp = McpOptions { approval_wait, ..McpOptions::default() };
        let running = Running::start(GatewayOptions { mcp, ..GatewayOptions::default() }).await;
        let manifest = Manifest::from_toml(&format!("name = \"bank\"\n{more}")).unwrap();
        running.server.host.deploy(manifest, payer(), "tester").await.unwrap();
        let (sender, forms) = mpsc::unbounded_channel();
        let client = Person(sender).serve(running.transport()).await.unwrap();
        Bank { running, client, forms }
    }
}

fn pay(arguments: Value) -> CallToolRequestParams {
    CallToolRequestParams::new("bank__pay").with_arguments(arguments.as_object().cloned().unwrap())
}

fn meta<'a>(result: &'a CallToolResult, key: &str) -> &'a str {
    result.meta.as_ref().and_then(|meta| meta.0.get(key)?.as_str()).unwrap_or_default()
}

/// A time in which a form is shown. The calls of these tests wait for it in full.
const SHORT: Duration = Duration::from_secs(1);
/// A time that only a failing test needs.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_decision_in_a_form_counts_after_the_client_has_stopped_waiting() {
    let Bank { running, client, mut forms } = Bank::open(SHORT, "").await;
    let result = client.call_tool(pay(json!({"cents": 7}))).await.unwrap();
    assert_eq!(meta(&result, "skep.dev/code"), "approval_required", "{result:?}");
    let form = forms.recv().await.unwrap();
    assert_eq!(form.message, r#"May pay be called with {"cents":7}?"#);
    form.answer.send(json!({"decision": "approve"})).unwrap();
    let (session, turn) = (meta(&result, "skep.dev/session"), meta(&result, "skep.dev/turn_id"));
    let turn = running.server.host.follow("bank", session, turn).await.unwrap();
    let paid = tokio::time::timeout(LONG, turn.outcome()).await.expect("the decision counts").unwrap();
    assert_eq!(paid.data.unwrap().value(), json!({"cents": 7}));
}

#[tokio::test]
async fn a_call_that_is_repeated_opens_no_second_form() {
    let Bank { running, client, mut forms } = Bank::open(SHORT, "").await;
    let call = pay(json!({"cents": 7}));
    let result = client.call_tool(call.clone()).await.unwrap();
    let form = forms.recv().await.unwrap();
    let mut repeated = call;
    let keys = ["skep.dev/idempotency_key", "skep.dev/session"].map(|key| (key, meta(&result, key)));
    repeated.meta = Some(serde_json::from_value(json!(std::collections::BTreeMap::from(keys))).unwrap());
    let again = client.call_tool(repeated.clone()).await.unwrap();
    assert_eq!(meta(&again, "skep.dev/turn_id"), meta(&result, "skep.dev/turn_id"), "{again:?}");
    assert!(forms.try_recv().is_err() && !form.answer.is_closed(), "the first form is open");
    let waiting = running.server.host.approvals(None, 10).await.unwrap();
    form.answer.send(json!({"decision": "approve"})).unwrap();
    let paid = client.call_tool(repeated).await.unwrap();
    assert_eq!(paid.structured_content, Some(json!({"result": {"cents": 7}})));
    assert_eq!(waiting.len(), 1);
}

#[tokio::test]
async fn a_form_is_withdrawn_when_its_call_has_ended() {
    let Bank { running, client, mut forms } = Bank::open(LONG, "").await;
    let host = &running.server.host;
    let deciding = async {
        let form = forms.recv().await.unwrap();
        let waiting = host.approvals(None, 10).await.unwrap();
        host.decide(&waiting[0].id, true, None, "somebody else").await.unwrap();
        form
    };
    let (result, mut form) = tokio::join!(client.call_tool(pay(json!({"cents": 7}))), deciding);
    assert_eq!(result.unwrap().structured_content, Some(json!({"result": {"cents": 7}})));
    tokio::time::timeout(LONG, form.answer.closed()).await.expect("the form is withdrawn");
}

#[tokio::test]
async fn the_form_of_a_prompt_is_withdrawn_with_the_prompt() {
    let Bank { client, mut forms, running: _running } =
        Bank::open(SHORT, "[mcp.prompts.receipt]\ntool = \"pay\"").await;
    let arguments = json!({"cents": "7"}).as_object().cloned().unwrap();
    let prompt = GetPromptRequestParams::new("bank__receipt").with_arguments(arguments);
    let error = client.get_prompt(prompt).await.unwrap_err().to_string();
    assert!(error.contains("a person must approve first"), "{error}");
    let mut form = forms.recv().await.unwrap();
    tokio::time::timeout(LONG, form.answer.closed()).await.expect("the form is withdrawn");
}

#[tokio::test]
async fn a_call_whose_arguments_do_not_fit_into_a_form_waits_for_people() {
    let Bank { running, client, mut forms } = Bank::open(SHORT, "").await;
    let arguments = json!({"cents": 7, "note": "x".repeat(2_000)});
    let result = client.call_tool(pay(arguments)).await.unwrap();
    assert_eq!(meta(&result, "skep.dev/code"), "approval_required", "{result:?}");
    assert!(forms.try_recv().is_err(), "the form would hide a part of the note");
    assert_eq!(running.server.host.approvals(None, 10).await.unwrap().len(), 1);
}
