//! Tests of schedules: which are due, the changes that a turn makes to them, and recovery after a crash.

use crate::*;

const AGENT: &str = "a";

async fn with_agent() -> Store {
    let store = Store::for_tests().await.unwrap();
    store.put_agent(&agent(), b"component", &[]).await.unwrap();
    store
}

fn agent() -> AgentRow {
    AgentRow {
        name: AGENT.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    }
}

fn schedule(name: &str, target: &str, due_ms: u64) -> NewSchedule {
    NewSchedule {
        id: format!("{target}-{name}-{due_ms}"),
        name: name.into(),
        target: target.into(),
        principal: "p".into(),
        timing: "once".into(),
        repeats: false,
        data: Some(b"{}".to_vec()),
        tries: 3,
        due_ms,
    }
}

fn turn(session: &str, turn: u64, schedules: Vec<ScheduleChange>) -> TurnCommit {
    TurnCommit { agent: AGENT.into(), session: session.into(), turn, schedules, ..Default::default() }
}

async fn due(store: &Store, now_ms: u64) -> Vec<String> {
    let rows = store.due_schedules(now_ms, 10).await.unwrap();
    rows.into_iter().map(|row| row.schedule.id).collect()
}

#[tokio::test]
async fn one_schedule_of_a_session_is_due_at_a_time_and_the_earliest_comes_first() {
    let store = with_agent().await;
    let set = |name, target, due_ms| ScheduleChange::Set(schedule(name, target, due_ms));
    let changes = vec![set("later", "s", 20), set("early", "s", 10), set("never", "s", 99)];
    store.commit_turn(turn("s", 1, changes)).await.unwrap();
    store.commit_turn(turn("t", 1, vec![set("other", "t", 15)])).await.unwrap();
    assert!(due(&store, 9).await.is_empty());
    assert_eq!(store.next_schedule_ms(9).await.unwrap(), Some(10));
    let upcoming = async |now_ms, limit| -> Vec<String> {
        let rows = store.upcoming_schedules(now_ms, limit).await.unwrap();
        rows.into_iter().map(|row| row.schedule.id).collect()
    };
    assert_eq!(upcoming(9, 10).await, ["s-early-10", "t-other-15", "s-later-20", "s-never-99"]);
    assert_eq!(upcoming(10, 2).await, ["t-other-15", "s-later-20"], "one that is due is not upcoming");
    assert_eq!(due(&store, 30).await, ["s-early-10", "t-other-15"]);
    assert!(store.begin_schedule("s-early-10", 10, 0, 1, 10).await.unwrap());
    assert!(!store.begin_schedule("s-early-10", 10, 0, 1, 10).await.unwrap(), "it starts once");
    assert_eq!(due(&store, 30).await, ["t-other-15"], "the session is busy");
    assert_eq!(store.begun_schedules().await.unwrap()[0].attempt, 1);
    store.retry_schedule("s-early-10", 1, 50, "no luck").await.unwrap();
    assert_eq!(due(&store, 30).await, ["t-other-15", "s-later-20"]);
    for (attempt, wake_ms) in [(1, 10), (2, 10), (1, 50)] {
        let begun = store.begin_schedule("s-early-10", 10, 0, attempt, wake_ms).await.unwrap();
        assert!(!begun, "it was read before the attempt that failed");
    }
    assert!(store.begin_schedule("s-early-10", 10, 0, 2, 50).await.unwrap());
}

#[tokio::test]
async fn a_commit_settles_its_schedule_and_may_set_it_again() {
    let store = with_agent().await;
    let repeating = NewSchedule { repeats: true, ..schedule("r", "s", 10) };
    let changes = vec![ScheduleChange::Set(schedule("once", "s", 10)), ScheduleChange::Set(repeating)];
    store.commit_turn(turn("s", 1, changes)).await.unwrap();
    for id in ["s-once-10", "s-r-10"] {
        store.begin_schedule(id, 10, 0, 1, 10).await.unwrap();
    }
    let alarm = |id: &str| Some(TurnTrigger::Alarm { schedule: id.into(), due_ms: 10 });
    let again = vec![ScheduleChange::Set(schedule("once", "s", 70))];
    store.commit_turn(TurnCommit { trigger: alarm("s-once-10"), ..turn("s", 2, again) }).await.unwrap();
    store.commit_turn(TurnCommit { trigger: alarm("s-r-10"), ..turn("s", 3, vec![]) }).await.unwrap();
    let rows = store.schedules_of(AGENT, "s").await.unwrap();
    let seen: Vec<_> = rows.iter().map(|row| (row.schedule.id.as_str(), row.state)).collect();
    assert_eq!(seen, [("s-once-70", ScheduleState::Waiting), ("s-r-10", ScheduleState::Settled)]);
    store.advance_schedule("s-r-10", 40, 2, None).await.unwrap();
    let rows = store.schedules_of(AGENT, "s").await.unwrap();
    assert_eq!((rows[1].schedule.due_ms, rows[1].missed, rows[1].state), (40, 2, ScheduleState::Waiting));
}

#[tokio::test]
async fn manifest_schedules_follow_the_version_and_keep_their_due_time_if_unchanged() {
    let store = with_agent().await;
    let named = |name: &str, timing: &str, due_ms| NewSchedule {
        timing: timing.into(),
        repeats: true,
        ..schedule(name, "s", due_ms)
    };
    let first = [named("kept", "hourly", 10), named("changed", "daily", 10), named("gone", "daily", 10)];
    store.put_agent(&agent(), b"component", &first).await.unwrap();
    let second = [named("kept", "hourly", 99), named("changed", "weekly", 99), named("new", "daily", 99)];
    store.put_agent(&agent(), b"component", &second).await.unwrap();
    let listed = async || {
        let mut rows = store.schedules(Some(AGENT), 10).await.unwrap();
        rows.sort_by_key(|row| row.schedule.name.clone());
        rows.into_iter().map(|row| (row.schedule.name, row.schedule.due_ms, row.owner)).collect::<Vec<_>>()
    };
    let own = |name: &str, due_ms| (name.to_owned(), due_ms, None);
    assert_eq!(listed().await, [own("changed", 99), own("kept", 10), own("new", 99)]);
    assert!(store.activate_version(AGENT, 2, &first).await.unwrap());
    assert_eq!(listed().await, [own("changed", 10), own("gone", 10), own("kept", 10)]);
    assert!(!store.activate_version(AGENT, 9, &[]).await.unwrap());
    assert_eq!(listed().await.len(), 3, "a version that is not activated changes nothing");
    store.delete_agent(AGENT).await.unwrap();
    assert!(store.schedules(None, 10).await.unwrap().is_empty());
}

#[tokio::test]
async fn deleting_a_session_removes_its_schedules_but_not_those_of_the_manifest() {
    let store = with_agent().await;
    store.put_agent(&agent(), b"component", &[schedule("digest", "s", 10)]).await.unwrap();
    let set = vec![ScheduleChange::Set(schedule("own", "s", 20))];
    store.commit_turn(turn("s", 1, set)).await.unwrap();
    assert_eq!(store.schedules(None, 10).await.unwrap().len(), 2);
    store.delete_session(AGENT, "s").await.unwrap();
    let left = store.schedules(None, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].schedule.name.as_str(), left[0].owner.as_deref()), ("digest", None));
}

#[tokio::test]
async fn a_failed_schedule_is_not_due_until_it_is_run() {
    let store = with_agent().await;
    let set = vec![ScheduleChange::Set(schedule("x", "s", 10))];
    store.commit_turn(turn("s", 1, set)).await.unwrap();
    store.begin_schedule("s-x-10", 10, 0, 1, 10).await.unwrap();
    assert!(!store.run_schedule(AGENT, "s-x-10", 60).await.unwrap(), "it has started");
    store.fail_schedule("s-x-10", "it never worked").await.unwrap();
    let failed = &store.schedules(None, 10).await.unwrap()[0];
    assert_eq!((failed.state, failed.error.as_deref()), (ScheduleState::Failed, Some("it never worked")));
    assert!(due(&store, 1_000).await.is_empty());
    assert!(store.run_schedule(AGENT, "s-x-10", 60).await.unwrap());
    assert_eq!(due(&store, 60).await, ["s-x-10"]);
    assert!(store.cancel_schedule(AGENT, "s-x-10").await.unwrap());
    assert!(!store.cancel_schedule(AGENT, "s-x-10").await.unwrap());
}
