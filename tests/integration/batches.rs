//! Batches from outside: a host is killed with a full queue and restarted, and `skep ai` fills and reads a
//! queue.
//!
//! Answers are sampled without a seed, so an answer that was generated twice would differ.

use crate::{
    durability::{Process, deploy_ledger, tiny_model},
    harness::{MODEL, client, shared},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, process::Command};

const KILLS: u64 = 4;
const BATCHES: usize = 16;
const ITEMS: usize = 10;
const TOKENS: u64 = 100;

async fn post(url: &str, body: &Value) -> Value {
    let response = client().post(url).json(body).send().await.unwrap();
    let envelope: Value = response.json().await.unwrap();
    assert_eq!(envelope["success"], true, "{envelope}");
    envelope["result"].clone()
}

/// Everything that is needed to request the results of a batch.
struct Batch {
    id: String,
    model: &'static str,
    name: usize,
}

async fn queue(url: &str, name: usize) -> Batch {
    // Every fourth batch is for an agent.
    let model = if name % 4 == 3 { "agent:ledger" } else { "default" };
    let request = |item: usize| {
        let mut request =
            json!({"prompt": format!("{name}-{item}"), "external_reference": format!("{name}-{item}")});
        if model == "default" {
            request["max_tokens"] = json!(TOKENS);
            request["ignore_eos"] = json!(true);
        }
        request
    };
    let requests: Vec<Value> = (0..ITEMS).map(request).collect();
    let path = format!("{url}/ai/run/{model}?queueRequest=true");
    let queued = post(&path, &json!({ "requests": requests })).await;
    Batch { id: queued["request_id"].as_str().unwrap().to_owned(), model, name }
}

/// Returns the responses of the batches that have finished.
async fn ended(url: &str, batches: &[Batch]) -> BTreeMap<String, Value> {
    let mut ended = BTreeMap::new();
    for batch in batches {
        let answer = post(&format!("{url}/ai/run/{}", batch.model), &json!({"request_id": batch.id})).await;
        if let Some(responses) = answer.get("responses") {
            ended.insert(batch.id.clone(), responses.clone());
        }
    }
    ended
}

#[tokio::test]
async fn a_host_killed_with_a_full_queue_answers_each_item_once() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let start = || {
        let (model, data) = (model.path().to_owned(), data.path().to_owned());
        tokio::task::spawn_blocking(move || Process::start(&model, &data))
    };
    let mut process = start().await.unwrap();
    deploy_ledger(&process.url).await;
    let mut batches = Vec::new();
    for name in 0..BATCHES {
        batches.push(queue(&process.url, name).await);
    }
    // Responses seen before a kill must be the same after it.
    let mut told: BTreeMap<String, Value> = BTreeMap::new();
    for kill in 0..=KILLS {
        let enough = BATCHES * kill as usize / KILLS as usize;
        loop {
            let now = ended(&process.url, &batches).await;
            for (id, responses) in &told {
                assert_eq!(now.get(id), Some(responses), "{id} was answered differently before kill {kill}");
            }
            told = now;
            if told.len() >= enough {
                break;
            }
        }
        if kill < KILLS {
            process.kill();
            process = start().await.unwrap();
        }
    }
    for batch in &batches {
        let responses = told[&batch.id].as_array().unwrap();
        assert_eq!(responses.len(), ITEMS);
        for (index, response) in responses.iter().enumerate() {
            assert_eq!((&response["id"], &response["success"]), (&json!(index), &json!(true)), "{response}");
            assert_eq!(response["external_reference"], format!("{}-{index}", batch.name));
            let result = &response["result"];
            match batch.model {
                "default" => assert_eq!(result["usage"]["completion_tokens"], TOKENS),
                // The session has seen this message and no other, regardless of the number of kills.
                _ => assert_eq!(result["data"], json!([format!("{}-{index}", batch.name)])),
            }
        }
    }
    let path = format!("{}/v1/agents/ledger/sessions", process.url);
    let sessions: Value = client().get(path).send().await.unwrap().json().await.unwrap();
    let sessions = sessions["data"].as_array().unwrap();
    assert_eq!(sessions.len(), BATCHES / 4 * ITEMS);
    assert!(sessions.iter().all(|session| session["turns"] == 1), "{sessions:?}");
    process.kill();
}

/// Sends a form with a file of requests, as OpenAI's clients do.
async fn upload(url: &str, file: &str) -> String {
    let body = format!(
        "--cut\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--cut\r\ncontent-disposition: form-data; \
         name=\"file\"; filename=\"requests.jsonl\"\r\n\r\n{file}\r\n--cut--\r\n"
    );
    let request =
        client().post(format!("{url}/v1/files")).header("content-type", "multipart/form-data; boundary=cut");
    let file: Value = request.body(body).send().await.unwrap().json().await.unwrap();
    file["id"].as_str().unwrap_or_else(|| panic!("{file}")).to_owned()
}

#[tokio::test]
async fn a_batch_of_a_file_survives_kills_and_keeps_its_files() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let start = || {
        let (model, data) = (model.path().to_owned(), data.path().to_owned());
        tokio::task::spawn_blocking(move || Process::start(&model, &data))
    };
    let line = |n: usize| {
        let body = json!({"messages": [{"role": "user", "content": n.to_string()}], "max_tokens": TOKENS, "ignore_eos": true});
        json!({"custom_id": n.to_string(), "method": "POST", "url": "/v1/chat/completions", "body": body})
            .to_string()
            + "\n"
    };
    let file: String = (0..40).map(line).collect();
    let mut process = start().await.unwrap();
    let input = upload(&process.url, &file).await;
    let create =
        json!({"input_file_id": input, "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    let created = client().post(format!("{}/v1/batches", process.url)).json(&create).send().await.unwrap();
    let created: Value = created.json().await.unwrap();
    let id = created["id"].as_str().unwrap_or_else(|| panic!("{created}")).to_owned();
    let get = async |url: &str, path: String| client().get(format!("{url}{path}")).send().await.unwrap();
    for enough in [5, 20, 40] {
        let batch = loop {
            let batch: Value = get(&process.url, format!("/v1/batches/{id}")).await.json().await.unwrap();
            if batch["request_counts"]["completed"].as_u64().unwrap() >= enough
                && (enough < 40 || batch["status"] == "completed")
            {
                break batch;
            }
            assert_eq!(batch["status"], "in_progress", "{batch}");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        process.kill();
        process = start().await.unwrap();
        let content = get(&process.url, format!("/v1/files/{input}/content")).await.text().await.unwrap();
        assert_eq!(content, file);
        if let Some(output) = batch["output_file_id"].as_str() {
            let output = get(&process.url, format!("/v1/files/{output}/content")).await.text().await.unwrap();
            let lines: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let names: Vec<String> =
                lines.iter().map(|line| line["custom_id"].as_str().unwrap().to_owned()).collect();
            assert_eq!(names, (0..40).map(|n| n.to_string()).collect::<Vec<_>>(), "each once, in order");
            assert!(
                lines.iter().all(|line| line["response"]["body"]["usage"]["completion_tokens"] == TOKENS)
            );
        }
    }
    process.kill();
}

#[tokio::test]
async fn a_file_of_requests_becomes_a_file_of_answers() {
    let folder = tempfile::tempdir().unwrap();
    let (questions, answers) = (folder.path().join("questions.jsonl"), folder.path().join("answers.jsonl"));
    let lines =
        "\"What is gravity?\"\n{\"prompt\": \"Hi\", \"max_tokens\": 3, \"external_reference\": \"mine\"}\n";
    std::fs::write(&questions, lines).unwrap();
    let skep = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.arg("ai").args(arguments).args(["--url", &shared().url]).output().unwrap()
    };
    let (input, output) = (questions.to_str().unwrap(), answers.to_str().unwrap());
    let waited = skep(&["batch", input, "--model", MODEL, "--wait", "--output", output]);
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
    let text = std::fs::read_to_string(&answers).unwrap();
    let read: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(read.len(), 2);
    assert!(read[0]["result"]["response"].as_str().is_some_and(|text| !text.is_empty()), "{text}");
    assert_eq!(
        (&read[1]["external_reference"], &read[1]["result"]["usage"]["completion_tokens"]),
        (&json!("mine"), &json!(3))
    );

    let queued = skep(&["batch", input]);
    let id = String::from_utf8(queued.stdout).unwrap().trim().to_owned();
    assert!(skep(&["cancel", &id]).status.success());
    let status: Value = serde_json::from_slice(&skep(&["status", &id, "--json"]).stdout).unwrap();
    assert_eq!((&status["request_id"], &status["items"]["waiting"]), (&json!(id), &json!(0)));
    assert_eq!(skep(&["status", "none"]).status.code(), Some(4));

    let answer = skep(&["run", MODEL, "What is gravity?", "--max-tokens", "8", "--temperature", "0"]);
    let streamed =
        skep(&["run", MODEL, "What is gravity?", "--max-tokens", "8", "--temperature", "0", "--stream"]);
    assert!(answer.status.success() && !answer.stdout.is_empty());
    assert_eq!(
        String::from_utf8_lossy(&answer.stdout).trim(),
        String::from_utf8_lossy(&streamed.stdout).trim()
    );
    let schema = folder.path().join("schema.json");
    let form = json!({"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
                      "required": ["age"], "additionalProperties": false});
    std::fs::write(&schema, form.to_string()).unwrap();
    let answer = skep(&["run", MODEL, "Ada is 36.", "--schema", schema.to_str().unwrap()]);
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    // JSON Schema counts 36.0 as an integer.
    let age = answer["age"].as_f64().expect("a number");
    assert!(age.fract() == 0.0 && (0.0..=99.0).contains(&age), "{answer}");
}
