//! The log of requests to models, on real hosts: what it stores, who may read it, and what it removes.

use crate::{
    logged_host::{Logged, answer, question, refuser},
    metrics::talker,
    upstreams::nowhere,
};
use serde_json::{Value, json};
use skep_store::{Durability, RequestBody, RequestRow, Store};
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const SECRET: &str = "tangerine-8491-lamp";

/// Returns whether a file of the data folder contains a text.
fn is_on_disk(data: &Path, text: &str) -> bool {
    std::fs::read_dir(data).unwrap().any(|file| {
        let bytes = std::fs::read(file.unwrap().path()).unwrap_or_default();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

async fn store(data: &Path) -> Store {
    Store::open(&data.join("skep.db"), Durability::Process).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn by_default_nothing_is_stored() {
    let host = Logged::start("");
    host.chat("is this written down?").await;
    let (status, page) = host.get("/v1/requests").await;
    assert_eq!((status, &page["data"], &page["next"]), (200, &json!([]), &Value::Null));
    let folder = host.stop();
    let store = store(&folder.path().join("data")).await;
    assert_eq!(store.newest_request().await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_says_everything_but_the_texts() {
    let model = "tiny";
    let prices = format!(
        "[requests]\nlog = \"metadata\"\n[prices.\"{model}\"]\ninput = 1\ncached_input = 1\noutput = 2\ncurrency = \"USD\"\n\
         from = \"2020-01-01\"\n"
    );
    let host = Logged::start(&prices);
    let said = host.chat("a needle in the haystack").await;
    let [record] = &host.records("", 1).await[..] else { panic!("one") };
    let usage = &said["usage"];
    let (input, output) =
        (usage["prompt_tokens"].as_u64().unwrap(), usage["completion_tokens"].as_u64().unwrap());
    assert_eq!(record["usage"]["prompt_tokens"], input, "{record}");
    assert_eq!(record["usage"]["completion_tokens"], output, "{record}");
    assert_eq!(record["usage"]["estimated"], false);
    assert_eq!(
        (&record["tenant"], &record["key"], &record["agent"]),
        (&json!("local"), &Value::Null, &Value::Null)
    );
    assert_eq!(
        (&record["surface"], &record["model"]["answered"]),
        (&json!("chat"), &json!(model)),
        "{record}"
    );
    let expected = json!({"status": "ok", "error": null, "finish_reason": said["choices"][0]["finish_reason"],
        "streamed": false});
    assert_eq!(record["result"], expected);
    assert_eq!(record["cost"]["currency"], "USD");
    let millionths = record["cost"]["amount"].as_str().unwrap().parse::<f64>().unwrap() * 1e6;
    assert!((millionths - (input + 2 * output) as f64).abs() < 1e-6, "{record}");
    let timing = &record["timing"];
    assert!(
        timing["queue_ms"].is_u64() && timing["first_token_ms"].as_u64() <= timing["total_ms"].as_u64(),
        "{timing}"
    );
    assert_eq!(
        (&record["attempts"], &record["has_body"], record.get("body")),
        (&json!([]), &json!(false), None)
    );
    let (status, one) = host.get(&format!("/v1/requests/{}", record["id"].as_str().unwrap())).await;
    assert_eq!((status, &one), (200, record));
    assert_eq!(host.records("&q=needle", 0).await.len(), 0);
    assert_eq!(host.get("/v1/requests/req_0").await.0, 404);
    let folder = host.stop();
    assert!(!is_on_disk(&folder.path().join("data"), "needle in the"), "a text was stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_stored_without_secrets_and_can_be_searched() {
    let host = Logged::start("[requests]\nlog = \"full\"\nbody_kb = 1\n");
    host.skep(&["secret", "set", "PAY_KEY", "--to", "https://api.example.com"], SECRET);
    host.chat(&format!("Pay with {SECRET}. Authorization: Bearer abc123def456, said the Heron.")).await;
    host.chat(&"long ".repeat(1_000)).await;
    let [record] = &host.records("&q=heron&bodies=true", 1).await[..] else { panic!("one") };
    let said = "Pay with [secret PAY_KEY]. Authorization: Bearer [redacted], said the Heron.";
    assert_eq!(record["body"]["messages"], json!([{"role": "user", "text": said}]), "{record}");
    assert_eq!(record["body"]["answer"]["role"], "assistant");
    assert_eq!(record["body"]["request_truncated"], false);
    // Words of the encoding are not texts.
    for nothing in ["request_truncated", "omitted_messages", "tangerine", "abc123def456"] {
        assert!(host.records(&format!("&q={nothing}"), 0).await.is_empty(), "{nothing}");
    }
    let [long] = &host.records("&q=long%20long&bodies=true", 1).await[..] else { panic!("one") };
    let text = long["body"]["messages"][0]["text"].as_str().unwrap();
    assert_eq!((text.len(), &long["body"]["request_truncated"]), (1_024, &json!(true)), "{long}");
    let shown =
        String::from_utf8(host.skep(&["requests", record["id"].as_str().unwrap()], "").stdout).unwrap();
    assert!(shown.contains(said) && !shown.contains(SECRET), "{shown}");
    let folder = host.stop();
    let data = folder.path().join("data");
    assert!(
        is_on_disk(&data, "said the Heron")
            && !is_on_disk(&data, SECRET)
            && !is_on_disk(&data, "abc123def456")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_see_their_own_requests_and_texts_need_a_key_for_them() {
    let mut host = Logged::start(
        "[auth]\nrequired = true\n[requests]\nlog = \"metadata\"\n[tenants.acme]\nrequests = \"full\"\n[tenants.quiet]\nrequests = \"off\"\n",
    );
    let key = |arguments: &[&str]| host.create_key(arguments);
    let (admin, operator) = (key(&["--role", "admin"]), key(&["--role", "admin", "--bodies"]));
    let (acme, auditor) = (
        key(&["--tenant", "acme", "--role", "invoke"]),
        key(&["--tenant", "acme", "--role", "read", "--bodies"]),
    );
    let globex = key(&["--tenant", "globex", "--role", "invoke", "--bodies"]);
    let quiet = key(&["--tenant", "quiet", "--role", "invoke"]);
    for (key, text) in [(&acme, "the plans of acme"), (&globex, "the plans of globex"), (&quiet, "nothing")] {
        host.with_key(key).chat(text).await;
    }
    let all = host.with_key(&admin).records("", 2).await;
    let tenants: BTreeSet<&str> = all.iter().map(|record| record["tenant"].as_str().unwrap()).collect();
    assert_eq!(tenants, BTreeSet::from(["acme", "globex"]), "`quiet` is not logged");
    let of = |tenant: &str| all.iter().find(|record| record["tenant"] == tenant).unwrap().clone();
    let (of_acme, of_globex) = (of("acme"), of("globex"));
    assert!(of_acme["key"].as_str().unwrap().starts_with("key-"), "{of_acme}");
    assert_eq!((&of_acme["has_body"], &of_globex["has_body"]), (&json!(true), &json!(false)));
    let path = |record: &Value| format!("/v1/requests/{}", record["id"].as_str().unwrap());
    // An admin does not see prompts and answers without a key for them.
    assert_eq!(host.get(&path(&of_acme)).await, (200, of_acme.clone()));
    for refused in ["/v1/requests?bodies=true", "/v1/requests?q=plans"] {
        let (status, error) = host.get(refused).await;
        assert_eq!((status, &error["error"]["code"]), (403, &json!("role_missing")), "{error}");
    }
    let more = json!({"tenant": "local", "role": "admin", "bodies": true});
    assert_eq!(host.post("/v1/keys", more.clone()).await.0, 403, "nor can it give itself such a key");
    host.with_key(&operator);
    let (_, one) = host.get(&path(&of_acme)).await;
    assert_eq!(one["body"]["messages"][0]["text"], "the plans of acme", "{one}");
    assert_eq!(host.records("&q=PLANS", 1).await[0]["id"], of_acme["id"]);
    let (status, created) = host.post("/v1/keys", more).await;
    assert_eq!((status, &created["bodies"]), (201, &json!(true)), "{created}");
    // A tenant's key sees its own.
    for (key, reads) in [(&acme, false), (&auditor, true)] {
        host.with_key(key);
        assert_eq!(host.records("", 1).await[0]["id"], of_acme["id"]);
        assert_eq!(host.records("&tenant=acme", 1).await.len(), 1);
        let (status, one) = host.get(&path(&of_acme)).await;
        assert_eq!((status, one.get("body").is_some()), (200, reads), "{one}");
        assert_eq!(host.get(&path(&of_globex)).await.0, 404);
        assert_eq!(host.get("/v1/requests?tenant=globex").await.0, 403);
    }
    let (_, listed) = host.with_key(&admin).get("/v1/keys").await;
    let with_bodies = listed["data"].as_array().unwrap().iter().filter(|key| key["bodies"] == true);
    assert_eq!(with_bodies.count(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_to_a_model_is_logged_and_deleted_with_its_session() {
    let host = Logged::start("[requests]\nlog = \"full\"\n");
    host.deploy("desk", "generate").await;
    host.chat("hello").await;
    let completion = json!({"prompt": "Once upon", "max_tokens": 3, "n": 2, "stream": true});
    assert_eq!(host.post("/v1/completions", completion).await.0, 200);
    assert_eq!(host.post("/ai/run/default", json!({"prompt": "hi", "max_tokens": 3})).await.0, 200);
    let batch = json!({"requests": [{"prompt": "later", "max_tokens": 3}]});
    assert_eq!(host.post("/ai/run/default?queueRequest=true", batch).await.0, 200);
    host.message("desk", "ada", json!({"text": "Name a bird.", "data": {"max_tokens": 4}})).await;
    host.message("desk", "bob", json!({"text": "Go on", "data": {"max_tokens": 4, "complete": true}})).await;
    let with_agent =
        json!({"model": "agent:desk", "user": "eve", "messages": [{"role": "user", "content": "Hi"}]});
    let (status, said) = host.post("/v1/chat/completions", with_agent).await;
    assert_eq!(status, 200, "{said}");
    let all = host.records("&bodies=true", 8).await;
    let mut surfaces: Vec<&str> = all.iter().map(|record| record["surface"].as_str().unwrap()).collect();
    surfaces.sort_unstable();
    assert_eq!(
        surfaces,
        ["agent", "agent", "agent-chat", "ai-run", "batch", "chat", "completions", "completions"]
    );
    let [of_ada] = &host.records("&agent=desk&session=ada&bodies=true", 1).await[..] else { panic!("one") };
    assert_eq!(of_ada["agent"]["session"], "ada");
    let turn = of_ada["agent"]["turn"].as_str().unwrap();
    assert_eq!(host.get(&format!("/v1/agents/desk/sessions/ada/turns/{turn}")).await.0, 200);
    assert_eq!(of_ada["body"]["messages"], json!([{"role": "user", "text": "Name a bird."}]), "{of_ada}");
    let completion = all.iter().find(|record| record["surface"] == "completions").unwrap();
    assert_eq!(
        completion["body"]["messages"],
        json!([{"role": "prompt", "text": "Once upon"}]),
        "{completion}"
    );
    assert_eq!(completion["result"]["streamed"], true);

    assert_eq!(answer(host.request(reqwest::Method::DELETE, "/v1/agents/desk/sessions/ada")).await.0, 204);
    assert_eq!(host.get(&format!("/v1/requests/{}", of_ada["id"].as_str().unwrap())).await.0, 404);
    assert_eq!(host.records("&agent=desk", 2).await.len(), 2, "other sessions keep theirs");
    assert_eq!(answer(host.request(reqwest::Method::DELETE, "/v1/agents/desk")).await.0, 204);
    assert_eq!(host.records("&agent=desk", 0).await.len(), 0);
    assert_eq!(host.records("", 5).await.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_too_old_or_too_much_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    std::fs::create_dir_all(&data).unwrap();
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let (old, recent) = (now_ms - 3 * 86_400_000, now_ms - 3_600_000);
    let before = [("req_old", old), ("req_recent", recent)].map(|(id, at_ms)| RequestRow {
        id: id.into(),
        at_ms,
        tenant: "local".into(),
        asked: "m".into(),
        model: "m".into(),
        status: "ok".into(),
        details: "{}".into(),
        body: RequestBody::Text("{}".into()),
        ..RequestRow::default()
    });
    let made = store(&data).await;
    made.append_requests(before.to_vec()).await.unwrap();
    made.close().await;
    let settings = "[requests]\nlog = \"full\"\nretention_days = 2\nmax_mb = 1\nbody_kb = 64\n";
    let host = Logged::start_in(folder, settings);
    let [kept] = &host.records("", 1).await[..] else { panic!("one") };
    assert_eq!(kept["id"], "req_recent", "the older one was removed at the start");
    // Each of them is refused, and its 64 KiB are logged nevertheless.
    let long = "word ".repeat(20_000);
    for number in 0..40 {
        let (status, refused) =
            host.post("/v1/chat/completions", question("default", &format!("{number} {long}"))).await;
        assert_eq!(
            (status, &refused["error"]["code"]),
            (400, &json!("context_length_exceeded")),
            "{refused}"
        );
    }
    let newest = async || host.get("/v1/requests?limit=1&q=39%20word&bodies=true").await.1["data"][0].clone();
    let mut last = newest().await;
    while last.is_null() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        last = newest().await;
    }
    assert_eq!(
        last["result"],
        json!({"status": "failed", "error": "context_overflow", "finish_reason": null,
        "streamed": false})
    );
    assert!(last["body"]["error"].as_str().unwrap().contains("do not fit the context"), "{last}");
    assert_eq!(
        (last["body"]["messages"][0]["text"].as_str().unwrap().len(), &last["body"]["request_truncated"]),
        (64 << 10, &json!(true))
    );
    let (_, metrics) = host.get("/metrics").await;
    assert!(metrics.as_str().unwrap().contains("skep_requests_log_dropped_total{reason=\"full\"} 0"));
    let folder = host.stop();
    let store = store(&folder.path().join("data")).await;
    let bytes: u64 = store.request_bytes().await.unwrap().iter().map(|(_, bytes)| bytes).sum();
    assert!((512 << 10..=1 << 20).contains(&bytes), "{bytes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_sees_requests_live_and_an_export_is_json_lines() {
    let host = Logged::start("[requests]\nlog = \"full\"\n");
    host.chat("before").await;
    host.records("", 1).await;
    let mut follower =
        host.request(reqwest::Method::GET, "/v1/requests?follow=true&model=tiny").send().await.unwrap();
    assert_eq!(follower.headers()["content-type"], "text/event-stream");
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["requests", "--follow"]).env("SKEP_URL", &host.process.url).env("NO_COLOR", "1");
    let mut following = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    // The command has begun to follow once it shows one of these.
    let seen = tokio::task::spawn_blocking(move || lines.next().unwrap().unwrap());
    let mut text = String::new();
    host.chat("live").await;
    while !text.contains("\n\n") || !text.contains("data:") {
        let chunk = tokio::time::timeout(Duration::from_secs(60), follower.chunk()).await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&chunk.unwrap()).unwrap());
    }
    let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let live: Value = serde_json::from_str(data).unwrap();
    assert!(text.contains("event: request") && text.contains("id: 2"), "{text}");
    assert_eq!(host.records("", 2).await[0]["id"], live["id"], "only the new one is shown");
    while !seen.is_finished() {
        host.chat("again").await;
    }
    let seen = seen.await.unwrap();
    following.kill().unwrap();
    following.wait().unwrap();
    assert!(seen.contains("req_") && seen.contains("tiny"), "{seen}");

    let settled = host.stop();
    let host = Logged::start_in(settled, "[requests]\nlog = \"full\"\n");
    let exported = String::from_utf8(host.skep(&["requests", "--jsonl", "--bodies"], "").stdout).unwrap();
    let records: Vec<Value> =
        exported.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(records.len() >= 2, "{exported}");
    assert_eq!(records[0]["body"]["messages"][0]["text"], "before");
    assert_eq!(records[1]["id"], live["id"], "the oldest first");
    let two = String::from_utf8(host.skep(&["requests", "--jsonl", "--limit", "2"], "").stdout).unwrap();
    assert_eq!(two.lines().count(), 2);
    assert!(!two.contains("before"), "texts are exported only if they are asked for");
    let table = String::from_utf8(host.skep(&["requests", "--since", "1h", "-n", "1"], "").stdout).unwrap();
    assert!(table.starts_with("TIME") && table.lines().count() == 2, "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fail_over_shows_its_attempts() {
    let upstream = |name: &str, url: &str| {
        format!(
            "[[upstream]]\nname = \"{name}\"\nkind = \"openai\"\nurl = \"{url}\"\nattempts = 1\n[[upstream.models]]\nname = \"m\"\n"
        )
    };
    let route = |name: &str, models: &[&str]| {
        let models = models.iter().map(|model| format!("[[route.models]]\nmodel = \"{model}\"\n"));
        format!("[[route]]\nname = \"{name}\"\n{}", models.collect::<String>())
    };
    let settings = [
        "[requests]\nlog = \"full\"\n".to_owned(),
        upstream("broken", &refuser("503 Service Unavailable")),
        upstream("gone", &nowhere()),
        upstream("talker", &talker()),
        route("smart", &["broken/m", "gone/m", "talker/m"]),
        route("home", &["broken/m", "tiny"]),
        route("none", &["broken/m", "gone/m"]),
    ];
    let host = Logged::start(&settings.concat());
    for (model, expected) in [("smart", 200), ("home", 200), ("none", 503)] {
        assert_eq!(host.post("/v1/chat/completions", question(model, "hi")).await.0, expected, "{model}");
    }
    let attempts = |record: &Value| -> Vec<(Value, Value, Value, Value)> {
        let attempts = record["attempts"].as_array().unwrap().iter();
        let part = |attempt: &Value, name: &str| attempt[name].clone();
        attempts
            .inspect(|attempt| assert!(attempt["ms"].is_u64(), "{attempt}"))
            .map(|attempt| {
                (
                    part(attempt, "upstream"),
                    part(attempt, "model"),
                    part(attempt, "outcome"),
                    part(attempt, "status"),
                )
            })
            .collect()
    };
    let broken = (json!("broken"), json!("broken/m"), json!("unavailable"), json!(503));
    let gone = (json!("gone"), json!("gone/m"), json!("unavailable"), Value::Null);
    let talker = (json!("talker"), json!("talker/m"), json!("ok"), json!(200));
    let local = (Value::Null, json!("tiny"), json!("ok"), Value::Null);
    let [smart] = &host.records("&model=smart&bodies=true", 1).await[..] else { panic!("one") };
    assert_eq!(attempts(smart), [broken.clone(), gone.clone(), talker], "{smart}");
    assert_eq!(smart["model"], json!({"asked": "smart", "answered": "talker/m"}));
    assert_eq!((&smart["body"]["answer"]["text"], &smart["cost"]), (&json!("Hello."), &Value::Null));
    assert_eq!(
        (&smart["usage"]["prompt_tokens"], &smart["usage"]["completion_tokens"]),
        (&json!(3), &json!(2))
    );
    let [home] = &host.records("&model=home", 1).await[..] else { panic!("one") };
    assert_eq!(attempts(home), [broken.clone(), local], "{home}");
    let [none] = &host.records("&status=failed&error=upstream_unavailable", 1).await[..] else {
        panic!("one")
    };
    assert_eq!(attempts(none), [broken, gone], "{none}");
    assert_eq!(none["result"]["status"], "failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_the_client_cut_is_cancelled_and_its_tokens_are_an_estimate() {
    let host = Logged::start("[requests]\nlog = \"full\"\n");
    let endless = json!({"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3_000, "ignore_eos": true,
        "stream": true});
    let mut stream =
        host.request(reqwest::Method::POST, "/v1/chat/completions").json(&endless).send().await.unwrap();
    let mut text = String::new();
    while text.matches("data:").count() < 5 {
        text.push_str(&String::from_utf8_lossy(&stream.chunk().await.unwrap().unwrap()));
    }
    drop(stream);
    let [record] = &host.records("&status=cancelled&bodies=true", 1).await[..] else { panic!("one") };
    assert_eq!(
        record["result"],
        json!({"status": "cancelled", "error": null, "finish_reason": null, "streamed": true})
    );
    let usage = &record["usage"];
    assert_eq!(usage["estimated"], true, "{record}");
    assert!((1..3_000).contains(&usage["completion_tokens"].as_u64().unwrap()), "{usage}");
    assert!(record["timing"]["first_token_ms"].is_u64(), "{record}");
    assert!(!record["body"]["answer"]["text"].as_str().unwrap().is_empty(), "what was told is kept");
}
