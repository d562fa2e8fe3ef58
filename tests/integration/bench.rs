//! The benchmarks that drive a server: what they count, and that they fail when the server does.

use crate::harness::shared;
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
fn agents_work_is_counted_and_their_calls_are_checked() {
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
    // Of a second round's first requests all but the visitor's own words is in the cache, of its others more.
    let share = rounds[1]["cached_share"].as_f64().unwrap();
    assert!((0.9..1.0).contains(&share), "{share}");
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
fn a_server_that_is_not_there_is_an_error_of_its_own() {
    let (output, report) = bench(&["agents", "--url", "http://127.0.0.1:9/v1"]);
    assert_eq!((output.status.code(), report), (Some(3), Value::Null));
}

#[test]
fn every_kind_of_damage_is_stopped_by_its_own_limit() {
    let (output, report) = bench(&["neighbours", "--turns", "100", "--attackers", "1"]);
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
