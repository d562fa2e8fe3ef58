//! llama-server of llama.cpp as an upstream. The tests run if `SKEP_LLAMA_SERVER` names the binary; it serves the default
//! model with the template of `skep bench tools --peer-template`, because its own does not support tools; or the GGUF
//! file that `SKEP_LLAMA_MODEL` names, as it is.

use crate::{
    harness::{Host, client, content, model_path, skipped_without},
    ports::unused_port,
    upstreams::options,
};
use serde_json::{Value, json};
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Time within which the server has to load its model.
const LOADS: Duration = Duration::from_secs(120);
/// Length of the context of each of its slots.
const CONTEXT: u32 = 2048;
const MODEL: &str = "llama/m";

/// A server that ends with its test.
struct LlamaServer {
    child: Child,
    url: String,
    /// Holds the template.
    _folder: TempDir,
}

impl LlamaServer {
    /// Starts the server that the environment names, and waits until it has loaded its model.
    async fn start() -> Option<LlamaServer> {
        let binary = std::env::var_os("SKEP_LLAMA_SERVER")?;
        let folder = TempDir::new().unwrap();
        let (model, template) = match std::env::var_os("SKEP_LLAMA_MODEL") {
            Some(model) => (PathBuf::from(model), None),
            None => (model_path().to_owned(), Some(template(folder.path()))),
        };
        let template =
            template.iter().flat_map(|file| [OsStr::new("--chat-template-file"), file.as_os_str()]);
        let port = unused_port();
        let arguments = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let (port, context) = (port.to_string(), (2 * CONTEXT).to_string());
        let child = Command::new(binary)
            .arg("--model")
            .arg(model)
            .args(arguments(&["--host", "127.0.0.1", "--port", &port, "--jinja"]))
            .args(template)
            .args(arguments(&["--ctx-size", &context, "--parallel", "2", "--threads", "2"]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("SKEP_LLAMA_SERVER names a program");
        let mut server = LlamaServer { child, url: format!("http://127.0.0.1:{port}"), _folder: folder };
        let started = Instant::now();
        let health = format!("{}/health", server.url);
        while !client().get(&health).send().await.is_ok_and(|response| response.status() == 200) {
            assert_eq!(server.child.try_wait().unwrap(), None, "llama-server ended");
            assert!(started.elapsed() < LOADS, "llama-server does not get ready");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(server)
    }

    /// Starts a host with the server as its upstream.
    fn host(&self) -> Host {
        Host::start_with(options(&format!(
            "[grants]\nmodels = [\"*\", \"llama/*\"]\n\
             [[upstream]]\nname = \"llama\"\nkind = \"openai\"\nurl = \"{}/v1\"\n\
             [[upstream.models]]\nname = \"m\"\ncontext_length = {CONTEXT}\n",
            self.url
        )))
    }
}

impl Drop for LlamaServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the template that shows tools as Skep does.
fn template(folder: &Path) -> PathBuf {
    let printed =
        Command::new(env!("CARGO_BIN_EXE_skep")).args(["bench", "tools", "--peer-template"]).output();
    let file = folder.join("tools.jinja");
    std::fs::write(&file, printed.unwrap().stdout).unwrap();
    file
}

/// Returns a conversation in which the assistant has called `look_up`, and a question to call it again. The server
/// lets a model write text before a call that it requires, so a small model needs the examples.
fn look_up() -> Value {
    let cities = [("Rome", 3_000_000), ("Oslo", 700_000), ("Bern", 130_000)];
    let asked = |city: &str, people: i64| json!({"role": "user", "content": format!("Look up {city}, where {people} people live.")});
    let mut messages = vec![json!({"role": "system", "content": "Serve the user with the tools."})];
    for (index, (city, people)) in cities.into_iter().enumerate() {
        let arguments = format!("{{\"city\": \"{city}\", \"people\": {people}}}");
        let function = json!({"name": "look_up", "arguments": arguments});
        let call = json!({"id": format!("call_{index}"), "type": "function", "function": function});
        messages.extend([
            asked(city, people),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        ]);
    }
    messages.push(asked("Paris", 2_000_000));
    let function = json!({"name": "look_up", "description": "Looks up a city.", "parameters": schema()});
    let tools = json!([{"type": "function", "function": function}]);
    json!({"model": MODEL, "messages": messages, "tools": tools, "tool_choice": "required", "max_tokens": 80,
        "temperature": 0})
}

fn question(text: &str) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0})
}

fn schema() -> Value {
    let properties = json!({"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}});
    json!({"type": "object", "properties": properties, "required": ["city", "people"], "additionalProperties": false})
}

fn is_a_city(text: &str) -> bool {
    serde_json::from_str::<Value>(text)
        .is_ok_and(|value| value["city"].is_string() && value["people"].is_i64())
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_chat_stream_get_forms_and_calls_from_llama_server() {
    let Some(server) = LlamaServer::start().await else { return skipped_without("llama-server") };
    let host = server.host();
    let whole = host.ok("/v1/chat/completions", question("What is the capital of France?")).await;
    assert!(!content(&whole).is_empty() && whole["model"] == MODEL, "{whole}");
    let counted = |field: &str| whole["usage"][field].as_u64().unwrap();
    assert!(counted("prompt_tokens") > 8 && (1..=24).contains(&counted("completion_tokens")), "{whole}");

    let mut streamed = question("What is the capital of France?");
    (streamed["stream"], streamed["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let events = host.events("/v1/chat/completions", streamed).await;
    assert_eq!(events.last().map(|(_, data)| data.as_str()), Some("[DONE]"));
    let chunks: Vec<Value> = events.iter().filter_map(|(_, data)| serde_json::from_str(data).ok()).collect();
    let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert!(deltas.clone().count() > 2 && !deltas.collect::<String>().is_empty(), "{events:?}");
    assert_eq!(chunks.last().unwrap()["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);

    let mut formed = question("Name a city and how many people live there.");
    formed["max_tokens"] = json!(80);
    formed["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "city", "schema": schema()}});
    let formed = host.ok("/v1/chat/completions", formed).await;
    assert!(is_a_city(content(&formed)), "{formed}");

    let mut calling = look_up();
    for stream in [false, true] {
        calling["stream"] = json!(stream);
        let call = if stream {
            let events = host.events("/v1/chat/completions", calling.clone()).await;
            let chunks = events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
            let parts = chunks.filter_map(|chunk| {
                let function = chunk["choices"][0]["delta"]["tool_calls"][0]["function"].clone();
                function.is_object().then_some(function)
            });
            let text = |part: &Value, field: &str| part[field].as_str().unwrap_or_default().to_owned();
            parts.fold((String::new(), String::new()), |(name, arguments), part| {
                (name + &text(&part, "name"), arguments + &text(&part, "arguments"))
            })
        } else {
            let answer = host.ok("/v1/chat/completions", calling.clone()).await;
            let function = answer["choices"][0]["message"]["tool_calls"][0]["function"].clone();
            let text = |field: &str| function[field].as_str().unwrap_or_default().to_owned();
            (text("name"), text("arguments"))
        };
        assert!(call.0 == "look_up" && is_a_city(&call.1), "stream {stream}: {call:?}");
    }

    let text =
        json!({"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    let continued = host.ok("/v1/completions", text).await;
    assert!(!continued["choices"][0]["text"].as_str().unwrap().is_empty(), "{continued}");
    assert_eq!(
        (&continued["usage"]["completion_tokens"], &continued["choices"][0]["finish_reason"]),
        (&json!(8), &json!("length"))
    );

    let (status, refused) =
        host.post("/v1/chat/completions", question(&"word ".repeat(4 * CONTEXT as usize))).await;
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("context_length_exceeded")), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_converse_fill_forms_and_call_tools_with_llama_server() {
    let Some(server) = LlamaServer::start().await else { return skipped_without("llama-server") };
    let host = server.host();
    for guest in ["generate", "stream", "toolcall"] {
        let (status, deployed) = host.deploy_guest(guest, guest, &format!("model = \"{MODEL}\"")).await;
        assert_eq!(status, 201, "{deployed}");
    }
    let say = async |agent: &str, text: &str, data: Value| {
        let path = format!("/v1/agents/{agent}/sessions/s/messages");
        host.ok(&path, json!({"text": text, "data": data})).await
    };
    let first = say("generate", "Name a colour.", json!({"max_tokens": 16, "temperature": 0})).await;
    let second = say("generate", "And another one.", json!({"max_tokens": 16, "temperature": 0})).await;
    let prompt = |turn: &Value| turn["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(&second) > prompt(&first) && !second["text"].as_str().unwrap().is_empty(), "{second}");
    let formed =
        say("generate", "Name a city.", json!({"max_tokens": 80, "schema": schema(), "clear": true})).await;
    assert!(is_a_city(formed["text"].as_str().unwrap()), "{formed}");
    let streamed = host.message("stream", "s", "Name a colour.").await.1;
    assert_eq!(streamed["data"]["same"], true, "{streamed}");
    // The server does not make a model call a tool before its tokens are used up. Text that is not a call is an error then, and
    // never taken for one.
    let (status, called) = host.message("toolcall", "s", "good Add 2 and 3.").await;
    let refused = called["error"]["message"].as_str().unwrap_or_default();
    match status {
        200 => assert!(called["text"].is_string(), "{called}"),
        _ => assert!(
            refused.contains("has to call a tool") || refused.contains("cut off"),
            "{status} {called}"
        ),
    }
}
