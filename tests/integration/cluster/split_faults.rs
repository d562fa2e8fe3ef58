//! Faults of hosts that compute prompts for others, with processes: whatever happens to them, and whenever, the answers are those of
//! a single host, no request is lost, and nobody waits for long.

use super::{
    nodes::{Node, PATIENCE, Site, until},
    pages::kv,
    split::{chat, knows, prompt_tokens, site, used},
};
use futures::future::join_all;
use reqwest::Method;
use serde_json::Value;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// Number of prompts that are on their way at the same time.
const TOGETHER: usize = 6;
/// Number of times that something is tried which may happen too late.
const ATTEMPTS: usize = 3;
/// Time within which all of these prompts are answered, whatever happens. A silent host counts as gone after a few seconds, and hosts of
/// tests, which always fetch, wait a minute for an order at most.
const DEADLINE: Duration = Duration::from_secs(90);
/// Number of answers of a load that are compared with those of a single host.
const COMPARED: usize = 8;

/// The answers to questions, by their numbers.
type Answers = Vec<(usize, String)>;

async fn fetched_pages(node: &Node) -> u64 {
    kv(node).await["peers"]["fetched_pages"].as_u64().unwrap()
}

async fn prefill_host(site: &Site, decode: &Node) -> Node {
    // It gives pages without a disk.
    let prefill = site.node_as("prefill", None, &["--kv-disk-gb", "0"]).await;
    knows(decode, &prefill, "prefill").await;
    prefill
}

/// Asks questions from this number on at the same time, and sends a signal to the prefill host once pages of them have arrived. Returns
/// the answers, and whether pages were missing then.
async fn interrupted(decode: &Node, prefill: &Node, first: usize, signal: &str) -> (Answers, bool) {
    let before = fetched_pages(decode).await;
    let asking = join_all((first..first + TOGETHER).map(|number| chat(decode, number)));
    let signalling = async {
        let until = Instant::now() + PATIENCE;
        while fetched_pages(decode).await == before {
            assert!(Instant::now() < until, "no page arrives");
            sleep(Duration::from_millis(1)).await;
        }
        prefill.signal(signal);
    };
    let (answers, ()) = tokio::join!(timeout(DEADLINE, asking), signalling);
    let answers = answers.expect("no request waits for a host that is gone");
    let mut computed_here = 0;
    for (_, usage) in &answers {
        let (prompt, prefilled, cached) = prompt_tokens(usage);
        computed_here += prompt - prefilled - cached;
    }
    // The last page of a prompt, or a part of it, is computed in any case.
    let pages_were_missing = computed_here > 16 * TOGETHER as u64;
    ((first..).zip(answers.into_iter().map(|(text, _)| text)).collect(), pages_were_missing)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_at_a_host_that_is_killed_or_stopped_in_the_middle_get_the_answers_of_a_single_host() {
    let Some(site) = site().await else { return };
    let decode = site.node_as("decode", None, &[]).await;
    let mut all = Answers::new();
    for signal in ["-KILL", "-STOP"] {
        let mut was_in_the_middle = false;
        for _ in 0..ATTEMPTS {
            let prefill = prefill_host(&site, &decode).await;
            let (answers, pages_were_missing) = interrupted(&decode, &prefill, all.len(), signal).await;
            if signal == "-STOP" {
                // It continues with orders that nobody waits for, and gives them up, or ends because it has lost its lease.
                prefill.signal("-CONT");
                let tokens = "skep_cluster_prefill_tokens_in_flight";
                until(async || prefill.metric_while_it_lives(tokens).await == 0).await;
            }
            prefill.kill();
            // The pages that came before are those that are used now, and have not changed.
            for (number, text) in &answers {
                let (again, usage) = chat(&decode, *number).await;
                assert_eq!((&again, prompt_tokens(&usage).1), (text, 0), "question {number} after {signal}");
            }
            all.extend(answers);
            was_in_the_middle = pages_were_missing;
            if was_in_the_middle {
                break;
            }
        }
        assert!(was_in_the_middle, "all pages had come before {signal}");
    }
    decode.ok(Method::DELETE, "/v1/kv", Value::Null).await;
    for (number, text) in all {
        let (expected, usage) = chat(&decode, number).await;
        assert_eq!(prompt_tokens(&usage).1, 0, "it computes all of the prompt: {usage}");
        assert_eq!(text, expected, "question {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_of_both_stages_join_leave_and_restart_under_load_without_a_lost_request() {
    let Some(site) = site().await else { return };
    let first = site.node_as("decode", None, &[]).await;
    let balancer = site.node_as("balancer", None, &[]).await;
    knows(&balancer, &first, "decode").await;
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let client = async || {
        let mut answers = Answers::new();
        while !is_over.load(SeqCst) {
            let number = next.fetch_add(1, SeqCst);
            // Every request is answered.
            answers.push((number, chat(&balancer, number).await.0));
        }
        answers
    };
    let hosts = async {
        let prefill = prefill_host(&site, &first).await;
        until(async || used(&first).await > 0).await;
        prefill.kill();
        let restarted = prefill_host(&site, &first).await;
        let before = used(&first).await;
        until(async || used(&first).await > before).await;
        // Another decode host joins, and the first one leaves.
        let second = site.node_as("decode", None, &[]).await;
        knows(&balancer, &second, "decode").await;
        knows(&second, &restarted, "prefill").await;
        second.ok(Method::POST, &format!("/v1/cluster/hosts/{}/drain", first.number), Value::Null).await;
        let (status, log) = first.exited().await;
        assert_eq!(status, Some(0), "{log}");
        until(async || used(&second).await > 0).await;
        is_over.store(true, SeqCst);
        restarted.kill();
        second
    };
    let (second, one, two, three) = tokio::join!(hosts, client(), client(), client());
    let answers: Answers = [one, two, three].concat();
    assert!(answers.len() >= COMPARED, "{}", answers.len());
    second.ok(Method::DELETE, "/v1/kv", Value::Null).await;
    for (number, text) in answers.iter().step_by(answers.len() / COMPARED) {
        assert_eq!(*text, chat(&second, *number).await.0, "question {number}");
    }
}
