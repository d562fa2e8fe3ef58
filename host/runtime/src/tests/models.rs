//! Tests of model grants: the models that `agent.toml` requests, as far as `skep.toml` allows them,
//! for every interface to a model.

use super::{
    durability::detached,
    fixture::{Host, Setup, tiny_engine, until},
    guest::Guest,
    inference::chatter,
    settings::{Slow, servers},
    tools,
    upstreams::{REMOTE, Scripted, Step, granting, models},
};
use crate::{ModelGrant, RuntimeOptions};
use skep_engine::{LoadProgress, LocalModel, ModelSet, ModelState};
use std::{
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

/// Opens a conversation with the model that the message names, and appends a message to it. Replies
/// with `ok`, or with the text of the error, which must be `denied`.
fn opener(import: &'static str) -> Guest {
    let module = format!(
        r#"(import "skep:agent/{import}@0.1.1" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/{import}@0.1.1" "[method]conversation.append-user"
                (func $append (param i32 i32 i32 i32)))
            (data (i32.const 512) "mainok")"#
    );
    Guest {
        world: "import skep:agent/inference-sync@0.1.1;",
        module: module.leak(),
        on_message: r#"
            (call $open (i32.const 512) (i32.const 4)
                (i32.const 1) (local.get $text) (local.get $length) (i32.const 600))
            (if (i32.load8_u (i32.const 600))
                (then
                    (if (i32.ne (i32.load8_u offset=4 (i32.const 600)) (i32.const 5)) (then unreachable))
                    (local.set $text (i32.load offset=8 (i32.const 600)))
                    (local.set $length (i32.load offset=12 (i32.const 600))))
                (else
                    (call $append (i32.load offset=4 (i32.const 600)) (local.get $text) (local.get $length)
                        (i32.const 640))
                    (local.set $text (i32.const 516))
                    (local.set $length (i32.const 2))))"#,
        ..Guest::default()
    }
}

/// Does the same as [`opener`], but with a completion of eight tokens.
///
/// At 1024: the parameters of `complete` (the model, at 12 the prompt, at 24 the options:
/// `max-tokens` at 72).
fn completer() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/inference@0.1.1" "complete" (func $complete (param i32 i32)))
            (data (i32.const 512) "mainok")"#,
        on_message: r#"
            (i32.store8 (i32.const 1024) (i32.const 1))
            (i32.store offset=4 (i32.const 1024) (local.get $text))
            (i32.store offset=8 (i32.const 1024) (local.get $length))
            (i32.store offset=12 (i32.const 1024) (i32.const 512))
            (i32.store offset=16 (i32.const 1024) (i32.const 4))
            (i32.store8 offset=96 (i32.const 1024) (i32.const 1))
            (i32.store offset=100 (i32.const 1024) (i32.const 8))
            (call $complete (i32.const 1024) (i32.const 2048))
            (local.set $text (i32.const 516))
            (local.set $length (i32.const 2))
            (if (i32.load8_u (i32.const 2048))
                (then
                    (if (i32.ne (i32.load8_u offset=8 (i32.const 2048)) (i32.const 5)) (then unreachable))
                    (local.set $text (i32.load offset=12 (i32.const 2048)))
                    (local.set $length (i32.load offset=16 (i32.const 2048)))))"#,
        ..Guest::default()
    }
}

/// Returns options of an operator who allows these models. `None` leaves the setting out.
fn allowing(models: Option<&[&str]>) -> RuntimeOptions {
    let grant = |name: &&str| ModelGrant::try_from((*name).to_owned()).expect("a name");
    let granted_models = models.map(|models| models.iter().map(grant).collect());
    RuntimeOptions { granted_models, ..RuntimeOptions::default() }
}

async fn two_models(options: RuntimeOptions) -> Host {
    let models = ModelSet::new(tiny_engine("tiny")).with(tiny_engine("other"));
    Host::with_models(models, options).await
}

async fn deploy_all(host: &Host, more: &str) {
    for (name, guest) in
        [("opens", opener("inference")), ("opens-sync", opener("inference-sync")), ("completes", completer())]
    {
        host.deploy(name, more, guest).await.expect("valid");
    }
}

const WAYS: [&str; 3] = ["opens", "opens-sync", "completes"];

#[tokio::test]
async fn an_agent_without_a_model_grant_has_only_the_default_model() {
    let host = two_models(allowing(Some(&["*"]))).await;
    deploy_all(&host, "").await;
    for agent in WAYS {
        assert_eq!(host.answer(agent, "s", "tiny").await, "ok", "{agent}");
        let denied = host.answer(agent, "other", "other").await;
        let line = "may not use the model other; add \"other\" to `models` under [grants] in agent.toml";
        assert!(denied.contains(line), "{agent}: {denied}");
    }
}

#[tokio::test]
async fn a_model_that_the_operator_does_not_grant_is_denied_with_the_setting() {
    let host = two_models(allowing(None)).await;
    let asking = "[grants]\nmodels = [\"other\"]";
    deploy_all(&host, asking).await;
    host.deploy("own", "model = \"other\"", opener("inference")).await.expect("valid");
    for agent in WAYS.into_iter().chain(["own"]) {
        let denied = host.answer(agent, "s", "other").await;
        let line = "add \"other\" to `models` under [grants] in skep.toml";
        assert!(denied.contains(line), "{agent}: {denied}");
    }
    let host = host.restart_with(allowing(Some(&["other"]))).await;
    for agent in WAYS.into_iter().chain(["own"]) {
        assert_eq!(host.answer(agent, "s", "other").await, "ok", "{agent}");
    }
    let denied = host.answer("opens", "default", "tiny").await;
    assert!(denied.contains("add \"tiny\" to `models` under [grants] in skep.toml"), "{denied}");
}

#[tokio::test]
async fn a_text_is_completed_by_a_model_of_another_server() {
    let remote = Scripted::new(None, vec![vec![Step::Say(" upon"), Step::Finish]]);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("completes", "[grants]\nmodels = [\"far/*\"]", completer()).await.expect("valid");
    assert_eq!(host.answer("completes", "s", "far/model").await, "ok");
    assert_eq!(remote.asked(), [Vec::new()], "a text has no messages");
}

#[tokio::test]
async fn a_conversation_is_not_reopened_when_its_model_is_no_longer_granted() {
    let host = two_models(allowing(Some(&["*"]))).await;
    host.deploy("opens", "[grants]\nmodels = [\"*\"]", opener("inference")).await.expect("valid");
    assert_eq!(host.answer("opens", "s", "other").await, "ok");
    let host = host.restart_with(allowing(None)).await;
    // The conversation exists, so its own model is checked.
    let denied = host.answer("opens", "s", "tiny").await;
    assert!(denied.contains("may not use the model other"), "{denied}");
}

#[tokio::test]
async fn an_alias_of_an_upstream_model_does_not_leave_the_host_without_a_grant_of_it() {
    let remote = Scripted::new(None, Vec::new());
    let models = models(&remote);
    models.set_alias("fast", "far/model").expect("valid");
    let host = Host::with_models(models, granting(&["*"])).await;
    deploy_all(&host, "[grants]\nmodels = [\"*\", \"far/*\"]").await;
    host.deploy("own", "model = \"fast\"", opener("inference")).await.expect("valid");
    for agent in WAYS.into_iter().chain(["own"]) {
        let denied = host.answer(agent, "s", "fast").await;
        let line = "add \"far/model\" to `models` under [grants] in skep.toml";
        assert!(denied.contains(line), "{agent}: {denied}");
    }
    assert!(remote.asked().is_empty());
}

fn on_demand(name: &'static str) -> LocalModel {
    LocalModel::new(name, "cpu", move |_: &LoadProgress| Ok(tiny_engine(name)))
}

fn state(host: &Host, name: &str) -> ModelState {
    host.agents.models().find(Some(name)).expect("declared").state()
}

#[tokio::test]
async fn an_agent_is_deployed_without_its_model_and_its_turns_load_it() {
    let models = ModelSet::new(tiny_engine("tiny")).with(on_demand("other"));
    let host = Host::with_models(models, allowing(Some(&["*"]))).await;
    for (agent, guest) in
        [("opens", opener("inference")), ("opens-sync", opener("inference-sync")), ("completes", completer())]
    {
        host.deploy(agent, "model = \"other\"", guest).await.expect("valid");
        assert_eq!(state(&host, "other"), ModelState::Unloaded, "{agent} is deployed without its model");
        assert_eq!(host.answer(agent, "s", "other").await, "ok", "{agent}");
        assert_eq!(state(&host, "other"), ModelState::Loaded);
        host.agents.models().unload("other", std::time::Duration::from_secs(60)).expect("it has begun");
        assert_eq!(host.agents.models().settled("other").await.expect("known"), ModelState::Unloaded);
    }
}

#[tokio::test]
async fn an_alias_is_pointed_at_another_model_without_a_deployment() {
    let models = ModelSet::new(tiny_engine("tiny")).with(on_demand("first")).with(on_demand("second"));
    models.set_alias("fast", "first").expect("valid");
    let host = Host::with_models(models, allowing(Some(&["*"]))).await;
    host.deploy("opens", "model = \"fast\"", opener("inference")).await.expect("valid");
    assert_eq!(host.answer("opens", "s", "fast").await, "ok");
    assert_eq!((state(&host, "first"), state(&host, "second")), (ModelState::Loaded, ModelState::Unloaded));
    host.agents.models().set_alias("fast", "second").expect("valid");
    assert_eq!(
        host.answer("opens", "s", "fast").await,
        "ok",
        "the conversation continues with the new model"
    );
    assert_eq!(state(&host, "second"), ModelState::Loaded);
    let denied = host.answer("opens", "other", "tiny").await;
    assert!(denied.contains("may not use the model tiny"), "{denied}");
}

#[tokio::test]
async fn a_turn_that_runs_again_sees_again_that_a_model_was_being_loaded() {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let slow = LocalModel::new("other", "cpu", move |_: &LoadProgress| {
        held.lock().expect("not poisoned").recv().expect("the test releases it");
        Ok(tiny_engine("other"))
    });
    let slow = LocalModel { load_wait: Duration::from_millis(20), ..slow };
    let remote =
        Scripted::new(None, vec![vec![Step::Say("One"), Step::Hang], vec![Step::Say("Two."), Step::Finish]]);
    let options = || granting(&["*", "far/*"]);
    let host = Host::with_models(models(&remote).with(slow), options()).await;
    // The guest continues only if it does not get the model.
    let chatter = chatter();
    let on_message = format!(
        r#"(call $open (i32.const 516) (i32.const 5) (i32.const 1) (i32.const 516) (i32.const 5) (i32.const 660))
            (if (i32.eqz (i32.load8_u (i32.const 660))) (then unreachable))
            {}"#,
        chatter.on_message
    );
    let module = chatter.module.replace("\"main\")", "\"mainother\")");
    let guest = Guest { module: module.leak(), on_message: on_message.leak(), ..chatter };
    let settings = format!("{REMOTE}\n[grants]\nmodels = [\"*\"]");
    host.deploy("chat", &settings, guest).await.expect("valid");
    let id = host.agents.invoke(detached("chat", "count")).await.expect("taken").turn_id().to_owned();
    until(async || host.journals().await.contains("One").then_some(())).await;
    release.send(()).expect("the load waits");
    until(async || (state(&host, "other") == ModelState::Loaded).then_some(())).await;
    let host = host.crash().await.start(options()).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the guest sees what it saw").text, "Two.");
}

/// Generates, calls the tool `look` of the server `bank`, and generates again.
fn looker() -> Guest {
    let chatter = chatter();
    let module = format!(
        r#"(import "skep:agent/tools@0.1.1" "call" (func $call (param i32 i32 i32 i32 i32 i32 i32)))
            {}
            (data (i32.const 560) "mcp:bank/look") (data (i32.const 576) "{{\"id\":1}}")"#,
        chatter.module
    );
    let generate = "(call $generate (i32.const 1024) (i32.const 2048))";
    let twice = format!(
        r#"{generate}
            (if (i32.load8_u (i32.const 2048)) (then unreachable))
            (call $call (i32.const 560) (i32.const 13) (i32.const 576) (i32.const 8)
                (i32.const 0) (i32.const 0) (i32.const 600))
            (if (i32.load8_u (i32.const 600)) (then unreachable))
            {generate}"#
    );
    let on_message = chatter.on_message.replacen(generate, &twice, 1);
    Guest { module: module.leak(), on_message: on_message.leak(), ..chatter }
}

#[tokio::test]
async fn a_turn_in_flight_ends_with_its_model_before_the_model_is_unloaded() {
    let bank = Arc::new(Slow::default());
    let granted_tools = tools::granting(&["mcp:*/*"]).granted_tools;
    let options = RuntimeOptions { granted_tools, ..allowing(Some(&["*"])) };
    let setup = Setup { tool_servers: servers(&bank), ..Setup::from(options) };
    let models = ModelSet::new(tiny_engine("tiny")).with(on_demand("other"));
    let host = Host::with_models(models, setup).await;
    let settings = format!("model = \"other\"\n{}", tools::granted("\"mcp:bank/look\""));
    host.deploy("chat", &settings, looker()).await.expect("valid");
    let running = host.invoke("chat", "s", "hi").await.expect("taken");
    bank.called.notified().await;
    // The turn has generated once and holds its conversation.
    host.agents.models().unload("other", Duration::from_secs(600)).expect("it has begun");
    assert_eq!(state(&host, "other"), ModelState::Unloading);
    host.agents.models().get(Some("other")).expect_err("new requests do not get it");
    bank.release.notify_one();
    running.outcome().await.expect("the turn generates again and commits");
    let session = host.agents.session("chat", "s").await.expect("the session exists");
    assert_eq!(session.messages.len(), 3, "a question and two answers: {:?}", session.messages);
    assert_eq!(host.agents.models().settled("other").await.expect("known"), ModelState::Unloaded);
}
