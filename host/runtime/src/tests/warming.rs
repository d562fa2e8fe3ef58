//! Tests of reading a session's KV pages from the disk before its turn, by request and before its alarm.

use super::{
    fixture::{Host, Setup, engine_with_disk, until},
    guest::Guest,
    inference::chatter,
};
use crate::{Clock, ModelSet, RuntimeOptions, WarmedConversation};
use skep_engine::{DiskTier, EraseScope, Pin, PinStatus, TierOptions};
use skep_store::Store;
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

const START_MS: u64 = 1_800_000_000_000;
pub(super) const QUESTION: &str =
    "a message that fills more than a page of the cache, so that there is something to keep";

pub(super) fn tier(folder: &Path) -> Arc<DiskTier> {
    let options = TierOptions { reads_always: true, ..TierOptions::for_tests(folder) };
    Arc::new(DiskTier::open(options).expect("the folder is writable"))
}

fn setup(tier: &Arc<DiskTier>, clock: &Clock, warm_ahead: Duration) -> Setup {
    let options = RuntimeOptions { warm_ahead, ..RuntimeOptions::default() };
    Setup { disk: Some(tier.clone()), ..Setup::at(clock, options) }
}

fn models(tier: &Arc<DiskTier>) -> ModelSet {
    ModelSet::new(engine_with_disk("tiny", tier))
}

/// Answers each message with the model, and does nothing at an alarm.
fn alarmed_chatter() -> Guest {
    let handler = r#"
        (func (export "skep:agent/alarm-handler@0.1.1#on-alarm")
            (param i32 i32 i32 i32 i32 i32 i32 i32 i32) (param i64 i64 i64) (param i32 i32) (result i32)
            (i32.store8 (i32.const 200) (i32.const 0))
            (i32.const 200))"#;
    let module: &'static str = Box::leak(format!("{}{handler}", chatter().module).into_boxed_str());
    Guest { world: "export skep:agent/alarm-handler@0.1.1;", module, ..chatter() }
}

/// Makes a turn of the session `s`, and starts another host whose memory is empty once the turn's pages are on disk.
async fn restarted(tier: &Arc<DiskTier>, clock: &Clock, manifest: &str, warm_ahead: Duration) -> Host {
    let store = Store::for_tests().await.expect("a database in memory");
    let host = Host::on(store.clone(), models(tier), setup(tier, clock, warm_ahead)).await;
    host.deploy("chat", manifest, alarmed_chatter()).await.expect("valid");
    host.ask("chat", "s", QUESTION).await.expect("the turn succeeds");
    let session = host.agents.export_session("chat", "s").await.expect("the session exists");
    let tokens = session.conversations[0].transcript.tokens().len();
    assert!(tokens > 33, "the conversation has two pages");
    // The last token was drawn and not computed.
    let pages = (tokens as u64 - 1) / 16;
    until(async || (tier.status().pages >= pages).then_some(())).await;
    tier.flush();
    drop(host.stop().await);
    Host::on(store, models(tier), setup(tier, clock, warm_ahead)).await
}

async fn warm(host: &Host, session: &str) -> WarmedConversation {
    let mut all = host.agents.warm_session("chat", session).await.expect("the session exists");
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

/// Returns the number of pages in memory that the session has.
async fn in_memory(host: &Host, session: &str) -> usize {
    let engine = host.agents.models().engines().next().expect("the tiny model");
    let owners = engine.page_owners().await.into_iter().flatten();
    owners.filter(|owner| owner.session.as_deref() == Some(session)).map(|owner| owner.pages).sum()
}

#[tokio::test]
async fn a_session_is_read_into_memory_before_its_turn_and_nothing_is_computed() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = tier(folder.path());
    let host = restarted(&tier, &Clock::at(START_MS), "", Duration::ZERO).await;
    assert_eq!(in_memory(&host, "s").await, 0);
    let warmed = warm(&host, "s").await;
    assert_eq!((warmed.name.as_str(), warmed.model.as_str(), warmed.skipped), ("main", "tiny", None));
    assert!(warmed.read_tokens > 0 && warmed.read_tokens == warmed.on_disk_tokens, "{warmed:?}");
    assert_eq!(warmed.in_memory_tokens, 0);
    assert_eq!(warmed.missing_tokens, warmed.tokens - warmed.read_tokens);
    assert!(warmed.missing_tokens <= 16, "{warmed:?}");
    assert_eq!(in_memory(&host, "s").await as u64 * 16, warmed.read_tokens);
    let stats = host.agents.models().engines().next().expect("the tiny model").stats();
    assert_eq!((stats.steps, stats.prompt_tokens), (0, 0));
    let again = warm(&host, "s").await;
    assert_eq!((again.in_memory_tokens, again.read_tokens), (warmed.read_tokens, 0));
    for (agent, session, code) in [
        ("chat", "nobody", "session_not_found"),
        ("none", "s", "agent_not_found"),
        ("chat", "acme/s", "session_not_found"),
    ] {
        let error = host.agents.warm_session(agent, session).await.expect_err(session);
        assert_eq!(error.code(), code);
    }
    // A deletion leaves nothing of what was read ahead.
    host.agents.delete_session("chat", "s").await.expect("the session exists");
    until(async || (in_memory(&host, "s").await == 0 && tier.status().pages == 0).then_some(())).await;
}

#[tokio::test]
async fn a_conversation_of_another_model_is_skipped_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = tier(folder.path());
    let store = Store::for_tests().await.expect("a database in memory");
    let clock = Clock::at(START_MS);
    let host = Host::on(store.clone(), models(&tier), setup(&tier, &clock, Duration::ZERO)).await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    host.ask("chat", "s", QUESTION).await.expect("the turn succeeds");
    drop(host.stop().await);
    let other = ModelSet::new(engine_with_disk("other", &tier));
    let host = Host::on(store, other, setup(&tier, &clock, Duration::ZERO)).await;
    let warmed = warm(&host, "s").await;
    assert_eq!((warmed.skipped, warmed.read_tokens), (Some("its model is not served"), 0));
    assert_eq!(warmed.missing_tokens, warmed.tokens);
}

#[tokio::test]
async fn the_pages_of_a_session_are_read_shortly_before_its_alarm() {
    let manifest = "[[schedule]]\nname = \"hourly\"\nsession = \"s\"\nevery = \"1h\"";
    for (ahead, expected) in [(Duration::from_secs(2), true), (Duration::ZERO, false)] {
        let folder = tempfile::tempdir().expect("a folder");
        let tier = tier(folder.path());
        let clock = Clock::at(START_MS);
        let host = restarted(&tier, &clock, manifest, ahead).await;
        clock.advance(3_600_000 - 2_001);
        // The courier has looked, and found nothing to do yet.
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(tier.status().read_pages, 0);
        clock.advance(1_001);
        match expected {
            true => until(async || (in_memory(&host, "s").await > 0).then_some(())).await,
            false => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                assert_eq!(in_memory(&host, "s").await, 0);
            }
        }
        let session = host.agents.session("chat", "s").await.expect("the session exists");
        assert_eq!(session.summary.turns, 1, "the alarm is not due yet");
    }
}

#[tokio::test]
async fn a_purge_that_the_disk_does_not_take_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = tier(folder.path());
    let host = restarted(&tier, &Clock::at(START_MS), "", Duration::ZERO).await;
    let pages = tier.status().pages;
    tier.faults().erasures_fail.store(true, SeqCst);
    let error = host.agents.purge_kv_disk(EraseScope::Everyone).await.expect_err("the disk fails");
    assert_eq!(error.code(), "internal");
    tier.faults().erasures_fail.store(false, SeqCst);
    assert_eq!(host.agents.purge_kv_disk(EraseScope::Everyone).await.expect("the disk works"), pages);
}

#[tokio::test]
async fn a_pin_needs_a_session_and_a_disk_and_ends_with_the_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = tier(folder.path());
    let host = restarted(&tier, &Clock::at(START_MS), "", Duration::ZERO).await;
    let missing = host.agents.pin_session("chat", "nobody").await.expect_err("there is no such session");
    assert_eq!(missing.code(), "session_not_found");
    assert!(host.agents.pin_session("chat", "s").await.expect("pinned"));
    assert!(!host.agents.pin_session("chat", "s").await.expect("pinned already"));
    let pin = Pin { tenant: "local".into(), agent: "chat".into(), session: "s".into() };
    let bytes = tier.status().used_bytes;
    assert_eq!(host.agents.pinned_sessions(), [PinStatus { pin, bytes, is_protected: true }]);
    host.agents.delete_session("chat", "s").await.expect("the session exists");
    assert!(host.agents.pinned_sessions().is_empty());
    let bare = Host::start().await;
    bare.deploy("chat", "", chatter()).await.expect("valid");
    bare.ask("chat", "s", QUESTION).await.expect("the turn succeeds");
    assert_eq!(bare.agents.pin_session("chat", "s").await.expect_err("no disk").code(), "kv_disk_off");
    assert!(bare.agents.pinned_sessions().is_empty());
}

#[tokio::test]
async fn a_session_that_is_deleted_while_it_is_pinned_leaves_no_pin() {
    let folder = tempfile::tempdir().expect("a folder");
    let tier = tier(folder.path());
    let host = restarted(&tier, &Clock::at(START_MS), "", Duration::ZERO).await;
    for round in 0..20 {
        let session = format!("short-{round}");
        host.ask("chat", &session, QUESTION).await.expect("the turn succeeds");
        let (pinned, deleted) = tokio::join!(
            host.agents.pin_session("chat", &session),
            host.agents.delete_session("chat", &session)
        );
        deleted.expect("the session exists");
        if let Err(error) = pinned {
            assert_eq!(error.code(), "session_not_found");
        }
        assert!(host.agents.pinned_sessions().is_empty(), "round {round}");
    }
}

#[tokio::test]
async fn a_session_that_expires_while_it_is_pinned_leaves_no_pin() {
    const THREE_HOURS_MS: u64 = 3 * 3_600_000;
    let folder = tempfile::tempdir().expect("a folder");
    let (tier, clock) = (tier(folder.path()), Clock::at(START_MS));
    let host = restarted(&tier, &clock, "[sessions]\nttl_h = 2", Duration::ZERO).await;
    for round in 0..20 {
        let session = format!("short-{round}");
        host.ask("chat", &session, QUESTION).await.expect("the turn succeeds");
        clock.advance(THREE_HOURS_MS);
        // It is pinned again and again until it is gone.
        let pinning = async {
            loop {
                if let Err(error) = host.agents.pin_session("chat", &session).await {
                    return error;
                }
            }
        };
        let (error, expired) = tokio::join!(pinning, host.agents.expire_sessions(clock.now_ms()));
        assert!(expired.expect("the call succeeds") > 0, "round {round}");
        assert_eq!(error.code(), "session_not_found");
        assert!(host.agents.pinned_sessions().is_empty(), "round {round}");
    }
}
