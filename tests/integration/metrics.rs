//! `/metrics` against `host/gateway/METRICS.md`: every documented metric exists, with the documented labels.

use crate::durability::tiny_model_of;
use crate::harness::{Host, MODEL, client, repository, shared};
use crate::mcp::{call, connect};
use crate::upstreams::{self, nowhere};
use serde_json::{Value, json};
use skep_cli::server_options::DataDir;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::num::NonZeroU32;

/// The names of metrics that only a host in a cluster has begin so.
const OF_CLUSTERS: &str = "skep_cluster_";
/// The names of metrics that only a host with a cluster cache has begin so.
const OF_CLUSTER_CACHES: &str = "skep_kv_cluster_";
/// The names of metrics that only a model with experts or several ranks has begin with one of these.
const OF_EXPERTS_AND_RANKS: [&str; 2] = ["skep_engine_expert_", "skep_engine_rank_"];
/// The names of metrics that only a machine with a GPU has begin so.
const OF_DEVICES: &str = "skep_device_";

/// A row of the document.
struct Documented {
    name: String,
    kind: String,
    labels: Vec<String>,
}

fn documented() -> Vec<Documented> {
    let text = std::fs::read_to_string(repository().join("host/gateway/METRICS.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Documented> = rows
        .map(|row| {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let labels = cells[2].split(", ").filter(|label| !label.is_empty()).map(str::to_owned).collect();
            Documented { name: cells[0].trim_matches('`').to_owned(), kind: cells[1].to_owned(), labels }
        })
        .collect();
    assert!(rows.len() > 10, "the table is found");
    rows
}

/// Starts a server that answers every chat with the same text, and returns its address.
pub fn talker() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut reader = BufReader::new(connection.unwrap());
            let (mut length, mut line) = (0, String::new());
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            let chunk =
                json!({"choices": [{"index": 0, "delta": {"content": "Hello."}, "finish_reason": "stop"}]});
            let usage = json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}});
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
            let answer = format!("{head}data: {chunk}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    address
}

#[tokio::test]
async fn every_documented_metric_exists_with_its_labels() {
    let data = tempfile::tempdir().unwrap();
    let (talker, gone) = (talker(), nowhere());
    let mut options = upstreams::options(&format!(
        "[requests]\nlog = \"metadata\"\n[[upstream]]\nname = \"talker\"\nkind = \"openai\"\nurl = \"{talker}\"\n[[upstream.models]]\nname = \"m\"\n\
         [[upstream]]\nname = \"gone\"\nkind = \"openai\"\nurl = \"{gone}\"\nattempts = 1\nbreaker_failures = 1\n[[upstream.models]]\nname = \"m\"\n\
         [[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"talker/m\"\n"
    ));
    options.data = DataDir::Path(data.path().to_owned());
    let host = Host::start_with(options);
    let hello = json!([{"role": "user", "content": "Hello"}]);
    host.ok("/v1/chat/completions", json!({"model": "smart", "messages": hello})).await;
    let form = json!({"type": "json_object"});
    let formless = json!({"model": "talker/m", "messages": hello, "response_format": form});
    let (status, formless) = host.post("/v1/chat/completions", formless).await;
    assert_eq!((status, &formless["error"]["code"]), (422, &json!("schema_unsatisfied")), "{formless}");
    let constrained =
        json!({"model": MODEL, "messages": hello, "guided_regex": "[a-z]{1,9}", "max_tokens": 16});
    host.ok("/v1/chat/completions", constrained).await;
    let schedule = "[[schedule]]\nname = \"x\"\nevery = \"1h\"\nsession = \"s\"";
    assert_eq!(host.deploy_guest("generate", "measured", schedule).await.0, 201);
    assert_eq!(host.post("/v1/events", json!({"topic": "x"})).await.0, 202);
    let schedules = host.get("/v1/schedules").await.1;
    let run = format!("/v1/agents/measured/schedules/{}/run", schedules["data"][0]["id"].as_str().unwrap());
    assert_eq!(host.post(&run, json!(null)).await.0, 202);
    while !host.get("/metrics").await.1.as_str().unwrap().contains("skep_deliveries_total{") {}
    let asks = "[grants]\nhosts = [\"*\"]";
    assert_eq!(host.deploy_guest("web", "fetches", asks).await.0, 201);
    assert_eq!(host.message("fetches", "s", "GET http://10.0.0.1/").await.0, 200);
    assert_eq!(host.deploy_guest("relay", "calls", "").await.0, 201);
    assert_eq!(host.message("calls", "s", "agent:nobody/tool {}").await.0, 200);
    let (mcp, _) = connect(&host).await;
    call(&mcp, "fetches", json!({"message": "GET nowhere"})).await;
    let (status, answer) = host.message("measured", "s", "Name a colour.").await;
    assert_eq!(status, 200, "{answer}");
    let request =
        json!({"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]});
    let raw = client().post(host.at("/v1/chat/completions")).header("x-session-affinity", "never-a-label");
    assert_eq!(raw.json(&request).send().await.unwrap().status(), 200);
    let batch = json!({"requests": [{"prompt": "Hello", "max_tokens": 4}]});
    let queued = host.ok("/ai/run/default?queueRequest=true", batch).await;
    let fetch = json!({"request_id": queued["result"]["request_id"]});
    while host.ok("/ai/run/default", fetch.clone()).await["result"].get("responses").is_none() {}
    let mut options = Host::options(None);
    options.rates.others.requests_per_minute = NonZeroU32::new(1);
    let limited = Host::start_with(options);
    assert_eq!((limited.get("/no/agent").await.0, limited.get("/no/agent").await.0), (404, 429));

    assert_eq!(host.post("/v1/config/reload", json!(null)).await.0, 409, "it was started without a file");

    let (_, metrics) = host.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    let is_special =
        |name: &str| [OF_CLUSTERS, OF_CLUSTER_CACHES, OF_DEVICES].iter().any(|start| name.starts_with(start));
    check(metrics, |name| !is_special(name) && !is_of_experts_or_ranks(name));
    assert!(!metrics.contains("never-a-label"), "a header became a label");
    check_alerts(metrics);
}

#[tokio::test]
async fn a_model_with_experts_and_ranks_has_metrics_of_their_work() {
    let model = tempfile::tempdir().unwrap();
    tiny_model_of("qwen3-moe", model.path());
    let mut options = Host::options(None);
    options.model = model.path().to_str().unwrap().to_owned();
    options.executor.tensor_parallel = 2;
    let host = Host::start_with(options);
    host.ok("/v1/completions", json!({"prompt": "The hives", "max_tokens": 4})).await;
    let (_, metrics) = host.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    check(metrics, is_of_experts_or_ranks);
    // The model has three layers with eight experts.
    for layer in 0..3 {
        let value = |name: &str| -> f64 {
            let is_of_layer = |line: &&str| line.contains(&format!("layer=\"{layer}\""));
            let mut lines = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
            lines.find(is_of_layer).expect(name).rsplit(' ').next().unwrap().parse().unwrap()
        };
        let share = value("skep_engine_expert_busiest_share");
        assert!((0.125..=1.0).contains(&share), "layer {layer}: {share}");
    }
}

/// Checks that the documented metrics of hosts in a cluster exist.
pub fn check_those_of_clusters(metrics: &str) {
    check(metrics, |name| name.starts_with(OF_CLUSTERS));
}

/// Checks that the documented metrics of a host with a cluster cache exist.
pub fn check_those_of_a_cluster_cache(metrics: &str) {
    check(metrics, |name| name.starts_with(OF_CLUSTER_CACHES));
}

fn is_of_experts_or_ranks(name: &str) -> bool {
    OF_EXPERTS_AND_RANKS.iter().any(|start| name.starts_with(start))
}

/// Checks that documented metrics exist, with their labels.
fn check(metrics: &str, is_wanted: impl Fn(&str) -> bool) {
    for Documented { name, kind, labels } in documented().into_iter().filter(|one| is_wanted(&one.name)) {
        assert!(metrics.contains(&format!("# TYPE {name} {kind}\n")), "{name} is not a {kind} in\n{metrics}");
        assert!(metrics.contains(&format!("# HELP {name} ")), "{name} has no help");
        let series = format!("{name}{}", if kind == "histogram" { "_bucket{" } else { "" });
        let line = metrics.lines().find(|line| line.starts_with(&series)).expect(&name);
        for label in &labels {
            assert!(line.contains(&format!("{label}=\"")), "no label {label}: {line}");
        }
    }
}

/// Checks that every metric that an alert uses exists.
fn check_alerts(metrics: &str) {
    let alerts = include_str!("../../host/gateway/alerts.yml").lines();
    for expression in alerts.filter_map(|line| line.trim().strip_prefix("expr: ")) {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("skep_") || word.starts_with("process_")) {
            let is_there = metrics
                .lines()
                .any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
            assert!(is_there, "an alert uses {name}, which does not exist");
        }
    }
}

/// Returns the words of an expression, with the quoted ones left out.
fn words(expression: &str) -> Vec<&str> {
    let unquoted = expression.split('"').step_by(2);
    unquoted.flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')).collect()
}

#[test]
fn the_grafana_dashboard_uses_documented_metrics_and_labels() {
    let documented = documented();
    let text = std::fs::read_to_string(repository().join("host/gateway/grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut expressions = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            expressions += 1;
            let words = words(expression);
            let metrics = words.iter().filter(|word| word.starts_with("skep_")).map(|word| {
                let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
                let histogram = documented
                    .iter()
                    .find(|metric| base == Some(metric.name.as_str()) && metric.kind == "histogram");
                histogram.or_else(|| {
                    documented.iter().find(|metric| metric.name == *word && metric.kind != "histogram")
                })
            });
            let metrics: Vec<&Documented> = metrics
                .map(|metric| metric.unwrap_or_else(|| panic!("not a metric in {expression}")))
                .collect();
            assert!(!metrics.is_empty(), "{expression}");
            for label in ["model", "agent", "kind", "outcome", "source", "upstream", "replica"] {
                let is_used = words.contains(&label);
                let is_known = metrics.iter().all(|metric| metric.labels.iter().any(|known| known == label));
                assert!(!is_used || is_known, "{label} is not a label of each metric in {expression}");
            }
        }
    }
    assert!(expressions > 15, "{expressions}");
}

#[tokio::test]
async fn tokens_are_counted_per_agent() {
    let agent = "counted";
    assert_eq!(shared().deploy_guest("generate", agent, "").await.0, 201);
    let (status, answer) = shared().message(agent, "s", "Name a colour.").await;
    assert_eq!(status, 200, "{answer}");
    let (_, metrics) = shared().get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    let value = |name: &str, label: &str| -> u64 {
        let mine = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        let mut mine =
            mine.filter(|line| line.contains(&format!("agent=\"{agent}\"")) && line.contains(label));
        mine.next().unwrap_or_else(|| panic!("{name} {label}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    let usage = &answer["usage"];
    assert_eq!(
        value("skep_engine_tokens_total", "kind=\"prompt\""),
        usage["prompt_tokens"].as_u64().unwrap()
    );
    let made =
        ["sampled", "forced"].map(|kind| value("skep_engine_tokens_total", &format!("kind=\"{kind}\"")));
    assert_eq!(made.iter().sum::<u64>(), usage["completion_tokens"].as_u64().unwrap());
    assert_eq!(value("skep_turns_total", "outcome=\"ok\""), 1);
    assert_eq!(value("skep_engine_queue_seconds_count", ""), 1);
    // A generation of n tokens has n - 1 gaps, not counting gaps before forced tokens.
    assert_eq!(value("skep_engine_inter_token_seconds_count", ""), made[0] - 1);
}

#[tokio::test]
async fn histogram_buckets_fit_their_values() {
    let request =
        json!({"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]});
    shared().ok("/v1/chat/completions", request).await;
    let (_, metrics) = shared().get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    let bounds = |name: &str| -> Vec<f64> {
        let mut lines = metrics.lines().filter(|line| line.starts_with(&format!("{name}_bucket{{")));
        let series = |line: &str| line.split(",le=").next().unwrap().to_owned();
        let first = series(lines.clone().next().expect(name));
        let mine = lines.by_ref().filter(|line| series(line) == first);
        let bound = |line: &str| line.split("le=\"").nth(1)?.split('"').next()?.parse().ok();
        mine.filter_map(bound).filter(|bound: &f64| bound.is_finite()).collect()
    };
    assert!(bounds("skep_engine_batch_tokens").iter().all(|bound| *bound >= 1.0));
    assert!(bounds("skep_engine_batch_tokens").last().unwrap() >= &2048.0);
    assert!(bounds("skep_engine_inter_token_seconds").first().unwrap() < &0.002);
    assert!(bounds("skep_engine_queue_seconds").last().is_some_and(|last| *last >= 60.0));
}
