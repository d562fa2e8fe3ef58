//! The benchmarks that use a server: their counts, and their failure when the server fails.

use crate::{durability::tiny_model, harness::shared};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Output, Stdio},
};

fn bench(arguments: &[&str]) -> (Output, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    let output = command.arg("bench").args(arguments).arg("--json").stdin(Stdio::null()).output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output, report)
}

#[test]
fn the_agents_benchmark_counts_work_and_checks_calls() {
    let url = format!("{}/v1", shared().url);
    let small = ["--sessions", "2", "--turns", "1", "--concurrency", "2", "--answer-tokens", "4"];
    let (output, report) = bench(&[&["agents", "--url", &url, "--rounds", "2"], small.as_slice()].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rounds = report["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 2);
    for round in rounds {
        assert_eq!((&round["requests"], &round["schema_failures"]), (&Value::from(4), &Value::from(0)));
        assert!(round["output_tokens"].as_u64().unwrap() >= 2 * 4, "{round}");
        assert!(round["first_token_ms"]["p50"].as_f64().unwrap() > 0.0, "{round}");
    }
    // In the first requests of the second round, everything except the visitor's own words is cached. In
    // later requests even more is cached.
    let share = rounds[1]["cached_share"].as_f64().unwrap();
    assert!((0.9..1.0).contains(&share), "{share}");
}

#[test]
fn a_timeline_has_every_step_and_every_request_of_a_mixed_workload() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let small =
        ["--sessions", "3", "--turns", "1", "--concurrency", "3", "--answer-tokens", "4", "--rounds", "1"];
    let flags = ["agents", "--mix", "--timeline", trace.to_str().unwrap()];
    let (output, report) = bench(&[flags.as_slice(), small.as_slice()].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let round = &report["rounds"][0];
    assert!(report["mix"] == true && round["requests"] == 6, "{report}");
    // Each session has a system prompt of its own, and only its second request finds it in the cache.
    assert!(round["cached_share"].as_f64().unwrap() < 0.6, "{round}");
    let phases = ["wait", "plan", "forward", "masks", "sample", "commit"];
    let shares: f64 = phases.iter().map(|phase| round["engine"][phase].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{round}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count =
        |name: &str| events.iter().filter(|event| event["name"] == name && event["ph"] == "X").count();
    assert_eq!((count("call"), count("answer"), count("first token")), (3, 3, 6));
    assert!(count("forward") >= 2 * 4 && phases.iter().all(|phase| count(phase) == count("forward")));
}

#[test]
fn a_server_whose_calls_break_their_schema_fails_the_benchmark() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = BufReader::new(connection.unwrap());
            read_request(&mut connection);
            let body = "data: {\"choices\":[{\"delta\":{\"content\":\"I cannot\"}}]}\n\n\
                        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\n\
                        data: [DONE]\n\n";
            write!(connection.get_mut(), "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{body}").unwrap();
        }
    });
    let (output, report) =
        bench(&["agents", "--url", &url, "--sessions", "1", "--turns", "2", "--rounds", "1"]);
    assert_eq!(output.status.code(), Some(1));
    let round = &report["rounds"][0];
    assert_eq!((&round["requests"], &round["schema_failures"]), (&Value::from(4), &Value::from(2)));
    assert_eq!((&round["output_tokens"], &round["forced_tokens"]), (&Value::from(8), &Value::Null));
}

#[test]
fn a_fleet_that_knows_what_is_cached_hits_more_and_only_dead_hosts_lose_sessions() {
    let small = ["fleet", "--hosts", "20", "--sessions", "2000", "--turns", "6000", "--agents", "20"];
    let (output, report) = bench(&small);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let policies = report["policies"].as_array().unwrap();
    let of = |name: &str| policies.iter().find(|of| of["policy"] == name).unwrap();
    let hit_rate = |name: &str| of(name)["hit_rate"].as_f64().unwrap();
    for knowing in ["affinity", "placement"] {
        assert!(hit_rate(knowing) > hit_rate("round-robin") + 0.05, "{report:#}");
    }
    let placement = of("placement");
    assert_eq!((&report["deaths"], &placement["moved_from_living_hosts"]), (&2.into(), &0.into()));
    let count = |field: &str| placement[field].as_u64().unwrap();
    let moved = count("moved_from_dead_hosts");
    assert!(moved > 0 && moved <= count("sessions_of_dead_hosts"), "{placement:#}");
    assert!(count("report_bytes") > 0 && placement["first_token_ms"]["p50"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_fleet_takes_its_turns_from_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("turns.jsonl");
    let path = trace.to_str().unwrap();
    let sizes = ["fleet", "--hosts", "4", "--sessions", "100", "--turns", "500", "--write-trace", path];
    assert!(bench(&sizes).0.status.success());
    let lines = std::fs::read_to_string(&trace).unwrap();
    assert_eq!(lines.lines().count(), 500);
    let (output, report) = bench(&["fleet", "--hosts", "4", "--policy", "placement", "--trace", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((&report["turns"], &report["policies"][0]["policy"]), (&500.into(), &"placement".into()));
    std::fs::write(&trace, format!("{lines}{}", lines.lines().next().unwrap())).unwrap();
    let (output, _) = bench(&["fleet", "--hosts", "4", "--trace", path]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("line 501"), "{error}");
}

#[test]
fn an_unreachable_server_has_its_own_exit_code() {
    let (output, report) = bench(&["agents", "--url", "http://127.0.0.1:9/v1"]);
    assert_eq!((output.status.code(), report), (Some(3), Value::Null));
}

#[test]
fn a_host_killed_under_mixed_load_loses_and_duplicates_nothing() {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let small = ["crash", "--kills", "6", "--minutes", "5", "--workers", "4", "--seed", "2026", "--model"];
    let (output, report) = bench(&[small.as_slice(), &[model.path().to_str().unwrap()]].concat());
    assert!(output.status.success(), "{report:#}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((&report["kills"], &report["lost"], &report["doubled"]), (&6.into(), &0.into(), &0.into()));
    assert!(report["effects"].as_u64().unwrap() > 0 && report["ready_ms"]["p50"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_kind_of_attack_is_stopped_by_its_own_limit() {
    let (output, report) = bench(&["neighbors", "--turns", "100", "--attackers", "1"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stopped_by = [
        ("endless loops", "limit cpu_ms"),
        ("allocation bombs", "limit memory_mb"),
        ("deep recursion", "agent_trapped"),
        ("handle leaks", "limit resources"),
    ];
    for (damage, by) in stopped_by {
        let beside = report["beside"].as_array().unwrap().iter().find(|beside| beside["damage"] == damage);
        let ended = beside.unwrap()["ended"].as_object().unwrap();
        assert_eq!(ended.keys().collect::<Vec<_>>(), [by], "{damage}");
    }
    assert!(report["alone"]["p99_us"].as_f64().unwrap() > 0.0);
}

#[test]
fn an_interactive_model_is_measured_beside_a_busy_one_with_and_without_turns() {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let path = model.path().to_str().unwrap();
    let arguments = ["--device", "cpu", "--threads", "1", "--decodes", "1"];
    let (output, report) =
        bench(&[["interference", "--model", path, "--beside", path].as_slice(), &arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Three rounds of 1,000 tokens in each setting.
    for setting in ["alone", "with_turns", "without_turns"] {
        assert!(report[setting]["count"].as_u64() >= Some(2_000), "{setting}: {report}");
        assert!(report[setting]["p50_ms"].as_f64() > Some(0.0), "{setting}: {report}");
    }
    for rate in ["busy_alone", "busy_with_turns", "busy_without_turns"] {
        assert!(report[format!("{rate}_tok_per_s")].as_f64() > Some(0.0), "{rate}: {report}");
    }
}

/// Runs `skep bench tools` on the CPU.
fn bench_tools(arguments: &[&str]) -> (Output, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["bench", "tools", "--device", "cpu", "--json", "-"]).args(arguments).stdin(Stdio::null());
    let output = command.output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output, report)
}

/// Runs a tenth of the cases in every spelling; `skep bench tools --spelling every --check` runs all 600.
#[test]
fn a_constraint_that_accepts_an_answer_does_not_change_it() {
    let (output, report) = bench_tools(&["--spelling", "every", "--limit", "12", "--concurrency", "8"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 60);
    let of = |change: &str| -> Vec<String> {
        let cases = cases.iter().filter(|case| case["change"] == change);
        cases.map(|case| format!("{} {}: {case}", case["id"], case["spelling"])).collect()
    };
    let count = |name: &str| report["changes"][name].as_u64().unwrap();
    let valid = cases.len() as u64 - count("free_is_invalid");
    assert!(valid >= 30, "only {valid} free answers are valid, which is too few");
    assert_eq!(of("text"), Vec::<String>::new(), "accepted free answers that the constraint changed");
    assert_eq!(of("tokens"), Vec::<String>::new(), "the same text with different tokens");
    let outside = count("escape") + count("white_space") + count("markup");
    assert!(
        100 * outside <= 2 * valid,
        "{outside} of {valid} are outside the accepted set: {}",
        report["changes"]
    );
    let lost = cases
        .iter()
        .filter(|case| case["free"]["is_right"] == true && case["constrained"]["is_right"] == false);
    for case in lost {
        assert!(
            ["key_order", "escape", "white_space", "markup"].map(Value::from).contains(&case["change"]),
            "{case}"
        );
    }
    // The mask is useful: it makes more answers right.
    assert!(!report["won"].as_array().unwrap().is_empty(), "{}", report["total"]);
}

#[test]
fn a_peer_with_the_same_engine_gives_the_constrained_answers() {
    let url = &shared().url;
    let (output, report) = bench_tools(&["--limit", "2", "--against", url]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(report["peer"], format!("{url}/v1"));
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let written = |column: &str| {
            let calls = case[column]["calls"].as_array().unwrap().iter();
            let calls: Vec<_> = calls.map(|call| (&call["name"], &call["arguments"])).collect();
            (case[column]["text"].as_str().unwrap(), calls)
        };
        assert_eq!(written("peer"), written("constrained"), "{}", case["id"]);
        assert!(case["peer"]["ms"].as_f64().unwrap() > 0.0, "{case}");
    }
    assert_eq!(report["total"]["peer"], report["total"]["constrained"]);
}

#[test]
fn any_server_with_the_routes_can_be_the_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = BufReader::new(connection.unwrap());
            read_request(&mut connection);
            let body = "{\"choices\":[{\"message\":{\"content\":\"I have no tool for that.\"},\
                        \"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":7}}";
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            write!(connection.get_mut(), "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    });
    let (_, report) =
        bench_tools(&["--limit", "2", "--cases", "choice", "--cases", "refusals", "--against", &url]);
    let peer: Vec<_> =
        report["groups"].as_array().unwrap().iter().map(|group| group["peer"].clone()).collect();
    assert_eq!(peer, [0, 2], "the peer never calls a tool");
    assert_eq!(report["peer_cost"]["tokens"], 4 * 7);
    let (output, _) = bench_tools(&["--against", "http://127.0.0.1:9"]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn declared_tools_are_measured_in_plain_chat() {
    let (output, report) = bench_tools(&["--chat", "--limit", "2"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for side in ["without", "with"] {
        assert_eq!(report[side]["answers"], 2);
        assert!(report[side]["mean_logprob"].as_f64().unwrap() < 0.0, "{report}");
        assert!(report[side]["mean_tokens"].as_f64().unwrap() > 1.0, "{report}");
    }
    assert_eq!(
        (report["without"]["leaks"].as_u64(), report["answers"].as_array().unwrap().len()),
        (Some(0), 2)
    );
    assert_eq!(report["tools"].as_array().unwrap().len(), 5);
}

/// Reads a request with its body.
fn read_request(connection: &mut BufReader<TcpStream>) {
    let mut body_bytes = 0;
    loop {
        let mut line = String::new();
        connection.read_line(&mut line).unwrap();
        match line.trim().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                body_bytes = value.trim().parse().unwrap();
            }
            Some(_) => {}
            None if line.trim().is_empty() => break,
            None => {}
        }
    }
    connection.read_exact(&mut vec![0; body_bytes]).unwrap();
}
