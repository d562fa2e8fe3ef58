//! Tests of reading the pages of a conversation before a request needs them.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::disk_pages::{
    bare, cached, engine, engine_of, first_tokens, first_turn, open, prompt, second_turn, written,
};
use super::fixture::{executor_options, generate, greedy};
use crate::{Affinity, EraseScope, GenerateRequest, Warmed};

fn of_session(mut request: GenerateRequest, session: &str) -> GenerateRequest {
    request.affinity =
        Affinity { agent: Some("agent".into()), session: Some(session.into()), ..Affinity::default() };
    request
}

#[tokio::test]
async fn a_warmed_conversation_is_in_memory_before_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let expected = generate(&bare(), second_turn(&first)).await.unwrap();
    let tier = open(folder.path());
    let engine = engine(&tier);
    let next = second_turn(&first);
    let pages = first_tokens(&first) / 16;
    let tokens = next.prompt[..pages * 16].to_vec();
    let mut other = next.affinity.clone();
    other.tenant = "somebody else".to_owned();
    let nothing = Warmed { pages, ..Warmed::default() };
    assert_eq!(engine.warm(&other, tokens.clone()).await, nothing, "pages are never shared by tenants");
    let warmed = engine.warm(&next.affinity, tokens.clone()).await;
    assert_eq!(warmed, Warmed { pages, in_memory: 0, on_disk: pages, read: pages });
    assert_eq!(warmed.missing(), 0);
    let owned: usize = engine.page_owners().await.iter().flatten().map(|owner| owner.pages).sum();
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.pages_free), (0, stats.pages_total), "nothing was computed, or is held");
    assert_eq!(owned, pages);
    let read = tier.status().read_pages;
    let second = generate(&engine, next.clone()).await.unwrap();
    assert_eq!((second.ids, tier.status().read_pages), (expected.ids, read));
    assert_eq!(second.finished.usage.cached_tokens as usize, pages * 16);
    let again = engine.warm(&next.affinity, tokens).await;
    assert_eq!(again, Warmed { pages, in_memory: pages, on_disk: 0, read: 0 });
}

#[tokio::test]
async fn only_the_room_that_requests_leave_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let tier = open(folder.path());
    // Sixteen pages, of which an eighth is left to requests.
    let engine = engine_of(Some(&tier), executor_options(256), "weights");
    let next = second_turn(&first);
    let warmed = engine.warm(&next.affinity, next.prompt).await;
    assert_eq!(warmed, Warmed { pages: 16, in_memory: 0, on_disk: 16, read: 14 });
    assert_eq!(warmed.missing(), 2);
}

#[tokio::test]
async fn a_request_does_not_wait_for_a_slow_read_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let expected = generate(&bare(), second_turn(&first)).await.unwrap();
    let tier = open(folder.path());
    tier.faults().read_delay_ms.store(6_000, SeqCst);
    let engine = engine(&tier);
    let next = second_turn(&first);
    let (affinity, tokens) = (next.affinity.clone(), next.prompt.clone());
    let begun = Instant::now();
    let (warmed, second) = tokio::join!(engine.warm(&affinity, tokens), generate(&engine, next));
    // All pages would take longer than this, and a single one would count as read.
    assert!(begun.elapsed() < Duration::from_secs(20), "the request waited for the disk");
    assert_eq!((second.unwrap().ids, warmed.read), (expected.ids, 0));
    tier.faults().read_delay_ms.store(0, SeqCst);
}

#[tokio::test]
async fn a_caller_that_gives_up_ends_the_read() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_turn(folder.path()).await;
    let tier = open(folder.path());
    tier.faults().read_delay_ms.store(100, SeqCst);
    let engine = engine(&tier);
    let next = second_turn(&first);
    let warming = engine.warm(&next.affinity, next.prompt.clone());
    assert!(tokio::time::timeout(Duration::from_millis(10), warming).await.is_err());
    tier.faults().read_delay_ms.store(0, SeqCst);
    engine.drain(Duration::from_secs(60)).await;
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages_total);
    let pages = (first_tokens(&first) / 16) as u64;
    assert!(tier.status().read_pages < pages, "{:?}", tier.status());
    let drained = engine.warm(&next.affinity, next.prompt).await;
    assert_eq!((drained.in_memory, drained.on_disk, drained.read), (0, 0, 0));
}

#[tokio::test]
async fn a_session_that_is_forgotten_while_it_is_read_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open(folder.path());
    let before = engine(&tier);
    let request = of_session(greedy(&prompt("a"), 8), "one");
    generate(&before, request.clone()).await.unwrap();
    written(&before, &tier, ((prompt("a").len() + 7) / 16) as u64).await;
    drop(before);
    let after = engine(&tier);
    tier.faults().read_delay_ms.store(30, SeqCst);
    let session = EraseScope::Session { agent: "agent".into(), session: "one".into() };
    let forget = async {
        while tier.status().read_pages < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        after.forget_pages(&session).await;
    };
    let (warmed, ()) = tokio::join!(after.warm(&request.affinity, request.prompt.clone()), forget);
    assert!(warmed.read < warmed.pages, "{warmed:?}");
    tier.faults().read_delay_ms.store(0, SeqCst);
    assert!(session.erase_from(&tier).unwrap() > 0);
    assert_eq!(cached(&generate(&after, request).await.unwrap()), 0);
}

#[tokio::test]
async fn without_a_disk_only_memory_is_searched() {
    let engine = bare();
    let request = greedy(&prompt("a"), 8);
    generate(&engine, request.clone()).await.unwrap();
    let pages = request.prompt.len() / 16;
    let warmed = engine.warm(&request.affinity, request.prompt).await;
    assert_eq!(warmed, Warmed { pages, in_memory: pages, on_disk: 0, read: 0 });
}
