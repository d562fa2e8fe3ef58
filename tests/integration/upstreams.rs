//! A host whose models another host computes: the same answers, fallback, grants, and usage reports.

use crate::{
    harness::{Host, MODEL, client, content},
    scripted_upstream::{ScriptedUpstream, answered},
};
use serde_json::{Value, json};
use skep_cli::config::Config;
use skep_cli::server_options::ServerOptions;
use std::process::Command;

/// Returns the options of a host with these settings.
pub fn options(settings: &str) -> ServerOptions {
    let mut options = Host::options(None);
    Config::parse(settings).expect("valid settings").apply(&mut options).expect("sensible settings");
    options
}

/// Returns an address at which nobody listens.
pub fn nowhere() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}/v1", listener.local_addr().unwrap())
}

/// Starts a host with the upstream `near`, which is another host, the upstream `gone`, which nobody serves, and routes.
fn host_beside(near: &Host) -> Host {
    let (near, gone) = (near.at("/v1"), nowhere());
    Host::start_with(options(&format!(
        "[grants]\nmodels = [\"*\", \"near/*\"]\n\
         [[upstream]]\nname = \"near\"\nkind = \"openai\"\nurl = \"{near}\"\n\
         [[upstream.models]]\nname = \"{MODEL}\"\ncontext_length = 8192\n\
         [[upstream]]\nname = \"gone\"\nkind = \"openai\"\nurl = \"{gone}\"\nattempts = 1\n\
         [[upstream.models]]\nname = \"m\"\n\
         [[route]]\nname = \"smart\"\n\
         [[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"near/{MODEL}\"\n\
         [[route]]\nname = \"home\"\n\
         [[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"{MODEL}\"\n\
         [ai.models]\n\"@cf/vendor/near\" = \"near/{MODEL}\"\n\"@cf/vendor/smart\" = \"smart\"\n\
         [prices.\"near/{MODEL}\"]\ninput = 0.60\ncached_input = 0.10\noutput = 3.00\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n"
    )))
}

fn question(model: &str) -> Value {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    json!({"model": model, "messages": messages, "max_tokens": 24, "temperature": 0})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_another_host_answers_as_it_does_there() {
    let near = Host::start(None);
    let host = host_beside(&near);
    let models = host.get("/v1/models").await.1;
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    let remote = format!("near/{MODEL}");
    for name in [MODEL, remote.as_str(), "gone/m", "smart", "home"] {
        assert!(ids.contains(&name), "{name}: {ids:?}");
    }
    // Names with slashes are shown, with what the model can do here.
    let shown = host.get(&format!("/v1/models/{remote}")).await.1;
    assert_eq!((&shown["id"], &shown["skep"]["location"]), (&json!(remote), &json!("upstream")), "{shown}");
    let able = &shown["skep"]["capabilities"];
    assert_eq!(
        (&able["tools"], &able["images"], &able["tokens"]),
        (&json!(true), &json!(false), &json!(false))
    );
    let own = host.get(&format!("/v1/models/{MODEL}")).await.1;
    assert_eq!(
        (&own["skep"]["capabilities"]["tokens"], &own["skep"]["quantization"]),
        (&json!(true), &json!("Q4_1"))
    );
    for (path, body) in [("/tokenize", json!({"prompt": "a"})), ("/detokenize", json!({"tokens": [5]}))] {
        let mut body = body;
        body["model"] = json!("smart");
        let (status, refused) = host.post(path, body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("model")), "{refused}");
    }
    let there = near.ok("/v1/chat/completions", question(MODEL)).await;
    let here = host.ok("/v1/chat/completions", question(&remote)).await;
    assert_eq!(content(&here), content(&there));
    assert_eq!(here["model"], json!(remote));
    assert_eq!(here["usage"]["prompt_tokens"], there["usage"]["prompt_tokens"]);
    assert!(here["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{here}");

    // Structured output and calls have their form.
    let schema = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
        "additionalProperties": false});
    let form = json!({"type": "json_schema", "json_schema": {"name": "city", "schema": schema}});
    let mut structured = question(&remote);
    (structured["response_format"], structured["max_tokens"]) = (form, json!(60));
    let answer = host.ok("/v1/chat/completions", structured).await;
    let city: Value = serde_json::from_str(content(&answer)).expect("JSON");
    assert!(city["city"].is_string(), "{city}");
    let function = json!({"name": "look_up", "description": "Looks up a city.", "parameters": schema});
    let mut calling = question(&remote);
    calling["tools"] = json!([{"type": "function", "function": function}]);
    (calling["tool_choice"], calling["max_tokens"]) = (json!("required"), json!(60));
    let answer = host.ok("/v1/chat/completions", calling).await;
    let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).expect("JSON");
    assert!(call["name"] == "look_up" && arguments["city"].is_string(), "{answer}");

    // A stream joins to the whole answer.
    let mut streamed = question(&remote);
    streamed["stream"] = json!(true);
    let events = host.events("/v1/chat/completions", streamed).await;
    let deltas = events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
    let text: String = deltas
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, content(&there));

    // Clients of Workers AI reach the model and a route by the names that the file gives them.
    for name in ["@cf/vendor/near", "@cf/vendor/smart"] {
        let path = format!("/ai/run/{name}");
        let mut asked = question("");
        asked.as_object_mut().unwrap().remove("model");
        let native = host.ok(&path, asked).await;
        assert_eq!(native["result"]["response"], json!(content(&there)), "{name}");
        let mut asked = question("ignored");
        asked["max_completion_tokens"] = asked["max_tokens"].take();
        asked.as_object_mut().unwrap().remove("max_tokens");
        let shaped = host.ok(&path, asked).await;
        assert_eq!(content(&shaped["result"]), content(&there), "{name}");
        assert_eq!(shaped["result"]["model"], remote.as_str(), "{name}");
    }

    // A plain text is continued in the same way.
    let text = |model: &str| json!({"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "echo": true});
    let there = near.ok("/v1/completions", text(MODEL)).await;
    let here = host.ok("/v1/completions", text(&remote)).await;
    assert_eq!(here["choices"], there["choices"]);
    assert_eq!(here["usage"]["completion_tokens"], there["usage"]["completion_tokens"]);
    assert!(here["choices"][0]["text"].as_str().unwrap().starts_with("The capital of France is "), "{here}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_falls_back_and_reports_the_model_that_answered() {
    let near = Host::start(None);
    let host = host_beside(&near);
    for (route, expected) in [("smart", format!("near/{MODEL}")), ("home", MODEL.to_owned())] {
        let response =
            client().post(host.at("/v1/chat/completions")).json(&question(route)).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-skep-model"], expected.as_str());
        assert_eq!(response.headers()["x-skep-attempts"], "2");
        let answer: Value = response.json().await.unwrap();
        assert_eq!((&answer["model"], content(&answer).is_empty()), (&json!(expected), false), "{answer}");
    }
    let (status, refused) = host.post("/v1/chat/completions", question("gone/m")).await;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("upstream_unavailable")), "{refused}");
    // Usage is written in the background.
    let used = loop {
        let used = host.get("/v1/usage?by=model").await.1.to_string();
        if used.contains(&format!("near/{MODEL}")) && used.contains(&format!("\"{MODEL}\"")) {
            break used;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    assert!(!used.contains("smart") && used.contains("USD"), "{used}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_a_route_chooses_has_its_own_sampling_parameters() {
    let near = Host::start(None);
    let host = host_beside(&near);
    let mut question = question(MODEL);
    question.as_object_mut().unwrap().remove("temperature");
    (question["seed"], question["max_tokens"]) = (json!(7), json!(40));
    let direct = host.ok("/v1/chat/completions", question.clone()).await;
    question["model"] = json!("home");
    let routed = host.ok("/v1/chat/completions", question).await;
    assert_eq!((&routed["model"], content(&routed)), (&json!(MODEL), content(&direct)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_uses_a_model_of_another_host_if_it_is_granted() {
    let near = Host::start(None);
    let host = host_beside(&near);
    let (status, deployed) =
        host.deploy_guest("generate", "afar", &format!("model = \"near/{MODEL}\"")).await;
    assert_eq!(status, 201, "{deployed}");
    let (status, first) = host.message("afar", "s", "Name a colour.").await;
    assert_eq!(status, 200, "{first}");
    assert!(first["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{first}");
    let (status, second) = host.message("afar", "s", "Another one.").await;
    assert_eq!(status, 200, "{second}");
    assert!(
        second["usage"]["prompt_tokens"].as_u64() > first["usage"]["prompt_tokens"].as_u64(),
        "the conversation goes on: {second}"
    );
    let (status, deployed) = host.deploy_guest("generate", "denied", "model = \"gone/m\"").await;
    assert_eq!(status, 201, "{deployed}");
    let (status, denied) = host.message("denied", "s", "Name a colour.").await;
    assert!(status >= 400 && denied.to_string().contains("gone/m"), "{status} {denied}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_reads_the_reasoning_of_an_upstream_whether_it_streams_or_not() {
    let upstream = ScriptedUpstream::start(|asked| {
        let reasoning = [json!({"reasoning_content": "Let me "}), json!({"reasoning_content": "think."})];
        let text = [json!({"content": "Blue "}), json!({"content": "is one."})];
        // Every second answer has no reasoning.
        if asked.number % 2 == 0 { answered(&[reasoning, text].concat()) } else { answered(&text) }
    })
    .await;
    let host = Host::start_with(options(&format!(
        "[grants]\nmodels = [\"*\", \"far/*\"]\n[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\n\
         [[upstream.models]]\nname = \"m\"\n",
        upstream.url
    )));
    for guest in ["generate", "stream"] {
        let (status, deployed) = host.deploy_guest(guest, guest, "model = \"far/m\"").await;
        assert_eq!(status, 201, "{deployed}");
        for reasoning in [json!("Let me think."), Value::Null] {
            let (_, answer) = host.message(guest, "s", "Name a colour.").await;
            assert_eq!((&answer["text"], &answer["data"]["reasoning"]), (&json!("Blue is one."), &reasoning));
        }
        let messages = host.get(&format!("/v1/agents/{guest}/sessions/s/messages")).await.1;
        let reasoning = |at: usize| messages["data"][at].get("reasoning").cloned();
        assert_eq!((reasoning(0), reasoning(1), reasoning(3)), (None, Some(json!("Let me think.")), None));
        let show = ["session", "show", guest, "s", "--url", &host.url];
        let shown =
            Command::new(env!("CARGO_BIN_EXE_skep")).args(show).env("NO_COLOR", "1").output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("assistant: reasoning: Let me think.\n     Blue is one."), "{shown}");
    }
    assert_eq!(upstream.asked().len(), 4);

    assert_eq!(host.deploy_guest("generate", "here", "").await.0, 201);
    let (_, answer) = host.message("here", "s", "Name a colour.").await;
    assert_eq!(answer["data"]["reasoning"], Value::Null, "a local model gives no reasoning");
}

/// Starts a host whose upstream `far` is scripted, and deploys a guest with its model.
async fn host_with(upstream: &ScriptedUpstream, guest: &str) -> Host {
    let host = Host::start_with(options(&format!(
        "[grants]\nmodels = [\"far/*\"]\n[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\n\
         [[upstream.models]]\nname = \"m\"\n",
        upstream.url
    )));
    let (status, deployed) = host.deploy_guest(guest, guest, "model = \"far/m\"").await;
    assert_eq!(status, 201, "{deployed}");
    host
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_an_upstream_calls_runs_here_and_its_result_is_sent_with_the_next_request() {
    let upstream = ScriptedUpstream::start(|asked| {
        let part = |call: Value| json!({"tool_calls": [call]});
        match asked.number {
            // A call whose arguments arrive in two parts.
            0 => answered(&[
                part(json!({"index": 0, "id": "call_7", "type": "function",
                    "function": {"name": "add", "arguments": "{\"a\": 2, "}})),
                part(json!({"index": 0, "function": {"arguments": "\"b\": 3}"}})),
            ]),
            _ => answered(&[json!({"content": "It is "}), json!({"content": "5."})]),
        }
    })
    .await;
    let host = host_with(&upstream, "toolcall").await;
    let (status, answer) = host.message("toolcall", "s", "good Add 2 and 3.").await;
    assert_eq!((status, &answer["text"]), (200, &json!("It is 5.")), "{answer}");
    assert_eq!(answer["tool_calls"].as_array().map(Vec::len), Some(1), "{answer}");
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(18), &json!(6)), "{answer}");

    let asked = upstream.asked();
    assert_eq!(asked.len(), 2);
    let (first, second) = (&asked[0].body, &asked[1].body);
    let tools = first["tools"].as_array().unwrap();
    assert_eq!((tools.len(), &tools[0]["function"]["name"]), (1, &json!("add")), "{first}");
    assert_eq!(first["tool_choice"]["function"]["name"], "add", "{first}");
    let [.., call, result] = second["messages"].as_array().unwrap().as_slice() else { panic!("{second}") };
    let called = &call["tool_calls"][0];
    assert_eq!(
        (&call["role"], &called["function"]["name"]),
        (&json!("assistant"), &json!("add")),
        "{second}"
    );
    let arguments: Value = serde_json::from_str(called["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"a": 2, "b": 3}));
    assert_eq!((&result["role"], &result["tool_call_id"]), (&json!("tool"), &called["id"]), "{second}");
    let content: Value = serde_json::from_str(result["content"].as_str().unwrap()).unwrap();
    assert_eq!(content, json!({"sum": 5}));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_answer_that_breaks_its_schema_is_asked_for_again_and_never_accepted() {
    let upstream = ScriptedUpstream::start(|asked| {
        // Only the second answer has the form.
        let city = if asked.number == 1 { json!("Paris") } else { json!(5) };
        answered(&[json!({"content": json!({"city": city}).to_string()})])
    })
    .await;
    let host = host_with(&upstream, "generate").await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false});
    let say = async |session: &str| {
        let path = format!("/v1/agents/generate/sessions/{session}/messages");
        host.post(&path, json!({"text": "Name a city.", "data": {"schema": schema}})).await
    };
    let (status, answer) = say("good").await;
    assert_eq!((status, &answer["text"]), (200, &json!("{\"city\":\"Paris\"}")), "{answer}");
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(18), &json!(3)), "{answer}");
    let asked = upstream.asked();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[0].body["response_format"]["json_schema"]["schema"], schema);
    let [.., refused, complaint] = asked[1].body["messages"].as_array().unwrap().as_slice() else {
        panic!("{}", asked[1].body)
    };
    assert_eq!(refused["content"], "{\"city\":5}");
    assert!(complaint["content"].as_str().unwrap().contains("is not of type \"string\""), "{complaint}");

    let (status, failed) = say("bad").await;
    assert_eq!((status, &failed["error"]["code"]), (500, &json!("agent_failed")), "{failed}");
    let message = failed["error"]["message"].as_str().unwrap();
    assert!(message.contains("the answer does not satisfy its schema: at \"/city\""), "{message}");
    assert_eq!(upstream.asked().len(), 5, "it was asked twice more");
    // The refused answer and the complaint are not part of the conversation.
    let messages = host.get("/v1/agents/generate/sessions/good/messages").await.1;
    assert_eq!(messages["data"].as_array().map(Vec::len), Some(2), "{messages}");
}
