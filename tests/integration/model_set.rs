//! Several models in one host: one is there from the start, and one is loaded by its first request and unloaded again.

use crate::{
    durability::tiny_model,
    harness::{MODEL, client, content, metric, model_path, repository},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Bytes of a token in the KV cache of the default model: 30 layers, 3 heads of 64 keys and values in 16 bits.
const BYTES_OF_A_TOKEN: u64 = 30 * 3 * 64 * 2 * 2;

struct Up {
    child: Child,
    url: String,
}

impl Up {
    /// Starts a host with this `skep.toml`.
    fn start(folder: &std::path::Path, settings: &str) -> Up {
        let file = folder.join("skep.toml");
        fs::write(&file, settings).unwrap();
        Up::with(&["--config", file.to_str().unwrap()])
    }

    /// Starts a host with these flags.
    fn with(arguments: &[&str]) -> Up {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--ephemeral", "--listen", "127.0.0.1:0", "--log-level", "warn"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let url = lines
            .find_map(|line| line.split_once("http://").map(|(_, url)| format!("http://{}", url.trim())));
        std::thread::spawn(move || lines.for_each(drop));
        Up { child, url: url.expect("`skep up` prints its URL") }
    }

    /// Runs a command of `skep` against the host and returns what it prints.
    fn skep(&self, arguments: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(arguments)
            .args(["--url", &self.url])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    }

    async fn chat(&self, model: &str) -> Value {
        self.chat_in("x", model).await
    }

    /// Asks a model in a session, by which its cached prefix is found.
    async fn chat_in(&self, session: &str, model: &str) -> Value {
        let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
        let body = json!({"model": model, "messages": messages, "max_tokens": 12, "temperature": 0});
        let request = client().post(format!("{}/v1/chat/completions", self.url)).json(&body);
        let response = request.header("x-session-affinity", session).send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.json().await.unwrap()
    }

    /// Returns the state of a model.
    async fn state(&self, model: &str) -> String {
        let shown = client().get(format!("{}/v1/models/{model}", self.url)).send().await.unwrap();
        let shown: Value = shown.json().await.unwrap();
        shown["skep"]["state"].as_str().unwrap().to_owned()
    }

    /// Returns the resident memory that is not of files, in MiB.
    fn memory_mib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux says it");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    /// Returns the number of engine loops.
    fn engines(&self) -> usize {
        self.threads("engine-").len()
    }

    /// Returns the names of the threads that begin with this, in order. Linux cuts them off after 15 bytes.
    fn threads(&self, beginning: &str) -> Vec<String> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let names =
            threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        let names = names.map(|name| name.trim().to_owned());
        let mut names: Vec<String> = names.filter(|name| name.starts_with(beginning)).collect();
        names.sort();
        names
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn two_models_are_served_and_one_is_loaded_and_unloaded_while_the_host_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = model_path().display().to_string();
    let settings = format!(
        "[[model]]\nname = \"small\"\nsource = {path:?}\n\
         [[model]]\nname = \"big\"\nsource = {path:?}\naliases = [\"smart\"]\nload = \"demand\"\ncontext = 2048\n\
         [engine]\nload_wait_s = 300\n"
    );
    let up = Up::start(folder.path(), &settings);
    let status = up.skep(&["model", "status"]);
    assert!(
        status.contains("small  loaded, default") && status.contains("big  unloaded, aliases smart"),
        "{status}"
    );
    let small = up.chat("default").await;
    assert_eq!((up.engines(), small["model"].as_str()), (1, Some("small")));
    let alone = up.memory_mib();
    let big = up.chat("smart").await;
    assert_eq!((up.engines(), big["model"].as_str()), (2, Some("big")));
    assert_eq!(content(&big), content(&small), "the same weights answer the same");
    let status = up.skep(&["model", "status"]);
    assert!(status.contains("big  loaded, aliases smart, context 2048"), "{status}");
    let both = up.memory_mib();
    up.skep(&["model", "alias", "smart", "small"]);
    assert_eq!(up.chat("smart").await["model"], "small");
    let metrics =
        async || client().get(format!("{}/metrics", up.url)).send().await.unwrap().text().await.unwrap();
    let pages =
        async |name: &str, model: &str| metric(&metrics().await, name, &[&format!("model=\"{model}\"")]);
    assert!(pages("skep_engine_kv_pages_total", "big").await > 0.0);
    let unloaded = up.skep(&["model", "unload", "big"]);
    assert!(unloaded.contains("big  unloaded"), "{unloaded}");
    for name in ["total", "used", "cached"] {
        let left = pages(&format!("skep_engine_kv_pages_{name}"), "big").await;
        assert_eq!(left, 0.0, "{name}: a model that is not loaded has no pages");
    }
    assert!(pages("skep_engine_kv_pages_total", "small").await > 0.0);
    let after = up.memory_mib();
    println!("memory without files: one model {alone} MiB, two {both} MiB, after the unload {after} MiB");
    assert_eq!(up.engines(), 1);
    assert!(both > alone + 50 && after + 50 < both, "{alone} {both} {after}");
    assert!(up.skep(&["model", "load", "big"]).contains("big  loaded"));
    assert_eq!(content(&up.chat("big").await), content(&small));
}

/// Returns the number of tokens of an answer's prompt that were cached.
fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

#[tokio::test]
async fn two_flags_serve_two_models_with_separate_caches_and_figures() {
    let folder = tempfile::tempdir().unwrap();
    let model = |name: &str| {
        let of_model = folder.path().join(name);
        fs::create_dir(&of_model).unwrap();
        tiny_model(&of_model);
        format!("{name}={}", of_model.display())
    };
    let up = Up::with(&["--model", &model("first"), "--model", &model("second")]);
    let status = up.skep(&["model", "status"]);
    assert!(status.contains("first  loaded, default") && status.contains("second  loaded"), "{status}");
    assert_eq!(up.threads("engine-"), ["engine-0-first", "engine-0-second"]);
    let first = up.chat_in("s", "default").await;
    assert_eq!((&first["model"], cached(&first)), (&json!("first"), 0));
    let again = up.chat_in("s", "default").await;
    assert!(cached(&again) > 0, "{again}");
    assert_eq!(content(&again), content(&first));
    // The same prompt in the same session, and even the same weights, but another model.
    let second = up.chat_in("s", "second").await;
    assert_eq!((&second["model"], cached(&second)), (&json!("second"), 0));
    let third = up.chat_in("s", "second").await;
    assert_eq!(cached(&third), cached(&again));

    up.chat_in("s", "second").await;
    // The figures of a request are counted when it has ended, which may be after its answer.
    let all = "skep_engine_requests_total";
    let metrics = loop {
        let shown = client().get(format!("{}/metrics", up.url)).send().await.unwrap();
        let metrics = shown.text().await.unwrap();
        if metric(&metrics, all, &[]) >= 5.0 {
            break metrics;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let of = |name: &str, labels: &[&str]| metric(&metrics, name, labels);
    for (model, requests) in [("model=\"first\"", 2.0), ("model=\"second\"", 3.0)] {
        assert_eq!(of(all, &[model]), requests, "{metrics}");
        let (prompt, tokens) =
            (first["usage"]["prompt_tokens"].as_f64().unwrap(), "skep_engine_tokens_total");
        assert_eq!(of(tokens, &[model, "kind=\"prompt\""]), requests * prompt, "{metrics}");
        let cached = (requests - 1.0) * cached(&again) as f64;
        assert_eq!(of(tokens, &[model, "kind=\"cached\""]), cached, "{metrics}");
    }
}

#[tokio::test]
async fn each_model_has_its_own_replicas_ranks_and_time_without_requests() {
    let folder = tempfile::tempdir().unwrap();
    tiny_model(folder.path());
    let path = folder.path().display().to_string();
    let settings = format!(
        "[[model]]\nname = \"one\"\nsource = {path:?}\nreplicas = 2\n\
         [[model]]\nname = \"two\"\nsource = {path:?}\ntp = 2\ndefault = true\n\
         [[model]]\nname = \"idle\"\nsource = {path:?}\nload = \"demand\"\nidle_unload_s = 1\n"
    );
    let up = Up::start(folder.path(), &settings);
    assert_eq!(up.threads("engine-"), ["engine-0-one", "engine-0-two", "engine-1-one"]);
    assert_eq!(up.threads("skep-rank-").len(), 1, "the engine's thread is the other rank");
    let status = up.skep(&["model", "status"]);
    assert!(status.contains("one  loaded") && status.contains("two  loaded, default"), "{status}");
    assert_eq!(
        (up.chat("default").await["model"].as_str(), up.state("idle").await.as_str()),
        (Some("two"), "unloaded")
    );
    assert_eq!(up.chat("one").await["model"], "one");
    // It is unloaded without requests, as often as they come back. The others stay.
    for _ in 0..2 {
        assert_eq!(up.chat("idle").await["model"], "idle");
        while up.state("idle").await != "unloaded" || up.engines() > 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(up.threads("engine-"), ["engine-0-one", "engine-0-two", "engine-1-one"]);
    }
}

#[tokio::test]
async fn sampling_parameters_of_models_that_are_not_loaded_are_those_of_the_catalog() {
    let folder = tempfile::tempdir().unwrap();
    // A file with the name of a model of the catalog is not that model.
    let tiny = repository().join("tests/fixtures/tiny/llama-gqa/model.safetensors");
    let other = folder.path().join("qwen3-8b.safetensors");
    fs::copy(tiny, &other).unwrap();
    let settings = format!(
        "[[model]]\nname = \"small\"\nsource = {:?}\n\
         [[model]]\nname = \"big\"\nsource = \"qwen3:14b\"\nload = \"demand\"\n\
         [[model]]\nname = \"other\"\nsource = {:?}\nload = \"demand\"\n",
        MODEL,
        other.display().to_string()
    );
    let up = Up::start(folder.path(), &settings);
    let models: Value =
        client().get(format!("{}/v1/models", up.url)).send().await.unwrap().json().await.unwrap();
    let sampling = |name: &str| {
        let model = models["data"].as_array().unwrap().iter().find(|model| model["id"] == name).unwrap();
        let numbers = ["temperature", "top_p", "top_k"].map(|key| model["skep"]["sampling"][key].as_f64());
        numbers.map(|number| number.map(|number| (number * 1000.0).round() / 1000.0))
    };
    assert_eq!(sampling("small"), [Some(0.2), Some(0.9), Some(0.0)]);
    assert_eq!(sampling("big"), [Some(0.6), Some(0.95), Some(20.0)], "nobody has pulled it");
    assert_eq!(sampling("other"), [None; 3]);
}

#[tokio::test]
async fn a_model_that_does_not_fit_beside_the_others_is_refused_with_the_numbers_and_they_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = model_path().display().to_string();
    // Six tenths of the memory fit alone, and not twice. What the first one was promised is hardly used yet.
    let kv_tokens = available_bytes() / 10 * 6 / BYTES_OF_A_TOKEN;
    let settings = format!(
        "[[model]]\nname = \"small\"\nsource = {path:?}\nkv_tokens = {kv_tokens}\n\
         [[model]]\nname = \"large\"\nsource = {path:?}\nload = \"demand\"\nkv_tokens = {kv_tokens}\n"
    );
    let up = Up::start(folder.path(), &settings);
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"model": "large", "messages": messages});
    let refused = client().post(format!("{}/v1/chat/completions", up.url)).json(&body).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    let refused: Value = refused.json().await.unwrap();
    let why = refused["error"]["message"].as_str().unwrap();
    assert!(why.contains("large needs ") && why.contains(" are available beside small"), "{why}");
    assert!(why.contains("KV cache ") && why.contains("hint: give it a smaller KV cache"), "{why}");
    assert!(!content(&up.chat("small").await).is_empty());
    // It does fit once the other one is gone.
    up.skep(&["model", "unload", "small"]);
    assert!(up.skep(&["model", "load", "large"]).contains("large  loaded"));
    assert!(!content(&up.chat("large").await).is_empty());
}

/// Returns the memory that the system calls available.
fn available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn mistakes_in_several_models_are_refused_before_anything_is_loaded() {
    let up = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--ephemeral", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let twice = up(&["--model", "smollm2-135m", "--model", "smollm2-135m"]);
    assert!(twice.contains("two models are called \"smollm2-135m\"") && twice.contains("hint: "), "{twice}");
    // 2 × 4 billion tokens take more memory than any machine has.
    let folder = tempfile::tempdir().unwrap();
    let path = model_path().display().to_string();
    let model =
        |name: &str| format!("[[model]]\nname = {name:?}\nsource = {path:?}\nkv_tokens = 4000000000\n");
    let file = folder.path().join("skep.toml");
    fs::write(&file, model("one") + &model("other")).unwrap();
    let large = up(&["--config", &file.display().to_string()]);
    assert!(large.contains("the models need 16") && large.contains("TiB of memory, and "), "{large}");
    assert!(large.contains("\n  one: weights ") && large.contains("\n  other: weights "), "{large}");
    assert!(large.contains("hint: give models smaller KV caches"), "{large}");
    let missing = up(&["--model", "a=/nonexistent/model.gguf"]);
    assert!(missing.contains("no model \"/nonexistent/model.gguf\""), "{missing}");
}
