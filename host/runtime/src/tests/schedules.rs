//! Tests of schedules, from the turn that sets them to their alarms, with a clock that only the
//! test moves.

use super::{
    fixture::{Host, Setup, until},
    guest::{Guest, echo},
    store_faults::every_third_time,
    waker::waker,
};
use crate::{Clock, RuntimeOptions, ScheduleState, ScheduleSummary};
use skep_store::Moment;
use std::time::Duration;

const START_MS: u64 = 1_800_000_000_000;

fn setup(clock: &Clock) -> Setup {
    Setup::at(clock, RuntimeOptions::default())
}

async fn start() -> (Host, Clock) {
    let clock = Clock::at(START_MS);
    (Host::with(setup(&clock)).await, clock)
}

async fn schedules(host: &Host) -> Vec<ScheduleSummary> {
    host.agents.schedules(Some("w"), 100).await.expect("listed")
}

/// Returns the only schedule once it satisfies the condition.
async fn schedule(host: &Host, is_so: impl Fn(&ScheduleSummary) -> bool) -> ScheduleSummary {
    until(async || schedules(host).await.into_iter().find(|schedule| is_so(schedule))).await
}

async fn no_schedule(host: &Host) {
    until(async || schedules(host).await.is_empty().then_some(())).await;
}

/// Returns how many alarms the session has handled.
async fn alarms(host: &Host, session: &str) -> usize {
    host.answer("w", session, "n").await.len()
}

#[tokio::test]
async fn an_alarm_is_delivered_once_when_it_is_due() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    host.answer("w", "s", "a").await;
    let set = schedule(&host, |_| true).await;
    assert_eq!(
        (set.name.as_str(), set.due_at_ms, set.state),
        ("wake", START_MS + 1_000, ScheduleState::Waiting)
    );
    clock.advance(999);
    assert_eq!(alarms(&host, "s").await, 0);
    clock.advance(1);
    no_schedule(&host).await;
    assert_eq!(alarms(&host, "s").await, 1);
    clock.advance(3_600_000);
    let host = host.restart_with(setup(&clock)).await;
    assert_eq!(alarms(&host, "s").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_alarm_is_handled_once_despite_database_faults() {
    for at in [Moment::Begin, Moment::Write, Moment::Commit, Moment::Committed] {
        let (host, clock) = start().await;
        host.deploy("w", "", waker()).await.expect("deploys");
        for (session, kind) in [("a", "a"), ("b", "a"), ("c", "a"), ("often", "r")] {
            host.answer("w", session, kind).await;
        }
        host.store().faults().choose(every_third_time(at));
        until(async || {
            // Postponed alarms become due.
            clock.advance(1_000);
            tokio::time::sleep(Duration::from_millis(5)).await;
            schedules(&host).await.iter().all(|one| one.session == "often").then_some(())
        })
        .await;
        let seconds = (clock.now_ms() - START_MS) / 1_000;
        host.store().faults().end();
        for session in ["a", "b", "c"] {
            assert_eq!(alarms(&host, session).await, 1, "{at:?}: {session}");
        }
        let is_next =
            |one: &ScheduleSummary| one.state == ScheduleState::Waiting && one.due_at_ms > clock.now_ms();
        until(async || {
            for _ in 0..100 {
                if schedules(&host).await.iter().all(is_next) {
                    return Some(());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // The alarm was postponed beyond its next due time.
            clock.advance(1_000);
            None
        })
        .await;
        let taken = alarms(&host, "often").await as u64;
        assert!((1..=seconds + 60).contains(&taken), "{at:?}: {taken} in {seconds} seconds");
    }
}

#[tokio::test]
async fn a_failed_turn_sets_no_schedule_and_the_same_name_replaces_one() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    host.ask("w", "s", "t").await.expect_err("the guest traps after setting a schedule");
    assert!(schedules(&host).await.is_empty());
    host.answer("w", "s", "a").await;
    clock.advance(500);
    host.answer("w", "s", "a").await;
    assert_eq!(schedule(&host, |_| true).await.due_at_ms, START_MS + 1_500);
    assert_eq!(schedules(&host).await.len(), 1);
}

#[tokio::test]
async fn times_missed_while_the_host_was_down_are_one_alarm() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    host.answer("w", "s", "r").await;
    let host = {
        let down = host.stop().await;
        clock.advance(10_500);
        down.start(setup(&clock)).await
    };
    let next = schedule(&host, |schedule| schedule.due_at_ms > START_MS + 10_000).await;
    assert_eq!((next.due_at_ms, next.state), (START_MS + 11_000, ScheduleState::Waiting));
    assert_eq!(alarms(&host, "s").await, 1);
    assert_eq!(host.answer("w", "s", "m").await.len(), 9);
}

#[tokio::test]
async fn a_failing_alarm_is_retried_and_then_parked_with_its_error() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    host.answer("w", "s", "f").await;
    for attempt in 1..=5 {
        clock.advance(100_000);
        let waits = schedule(&host, |schedule| {
            schedule.attempt == attempt && schedule.state == ScheduleState::Waiting
        });
        assert!(waits.await.last_error.expect("the attempt failed").contains("trapped"));
    }
    clock.advance(100_000);
    let failed = schedule(&host, |schedule| schedule.state == ScheduleState::Failed).await;
    assert_eq!((failed.attempt, failed.tries), (6, 6));
    host.agents.run_schedule("w", &failed.id).await.expect("the schedule can be run");
    schedule(&host, |schedule| schedule.attempt == 1 && schedule.state == ScheduleState::Waiting).await;
    host.agents.cancel_schedule("w", &failed.id).await.expect("the schedule can be cancelled");
    let gone = host.agents.cancel_schedule("w", &failed.id).await.expect_err("the schedule is gone");
    assert_eq!(gone.code(), "schedule_not_found");
}

#[tokio::test]
async fn a_failing_manifest_schedule_continues_with_its_next_time() {
    let (host, clock) = start().await;
    let manifest = "[[schedule]]\nname = \"!bad\"\nevery = \"1m\"\nsession = \"s\"\ntries = 1";
    host.deploy("w", manifest, waker()).await.expect("deploys");
    clock.advance(60_000);
    let next = schedule(&host, |schedule| schedule.last_error.is_some()).await;
    assert_eq!((next.state, next.due_at_ms), (ScheduleState::Waiting, START_MS + 120_000));
    assert!(next.is_of_manifest);
}

#[tokio::test]
async fn manifest_schedules_follow_the_active_version() {
    let (host, clock) = start().await;
    let names = async || schedules(&host).await.into_iter().map(|one| one.name).collect::<Vec<_>>();
    let line = |name: &str| format!("[[schedule]]\nname = \"{name}\"\ncron = \"@hourly\"\nsession = \"s\"");
    host.deploy("w", &line("one"), waker()).await.expect("deploys");
    clock.advance(5_000);
    host.deploy("w", &line("two"), waker()).await.expect("deploys");
    assert_eq!(names().await, ["two"]);
    host.agents.rollback("w", None).await.expect("there is an earlier version");
    assert_eq!(names().await, ["one"]);
    clock.advance(3_600_000);
    until(async || (alarms(&host, "s").await == 1).then_some(())).await;
    host.agents.delete("w").await.expect("deletes");
    assert!(host.agents.schedules(None, 10).await.expect("listed").is_empty());
}

#[tokio::test]
async fn a_component_without_an_alarm_handler_cannot_have_schedules() {
    let (host, _clock) = start().await;
    let manifest = "[[schedule]]\nname = \"x\"\nevery = \"1m\"\nsession = \"s\"";
    let refused =
        host.deploy("w", manifest, echo()).await.expect_err("the component exports no handler").to_string();
    assert!(refused.contains("[[schedule]]") && refused.contains("alarm-handler"), "{refused}");
    let mute = Guest { world: "export skep:agent/event-handler@0.1.1;", ..waker() };
    host.deploy("w", "", mute).await.expect("deploys");
    host.ask("w", "s", "a").await.expect_err("the interface denies the call");
}

#[tokio::test]
async fn the_number_of_schedules_per_session_is_limited() {
    let (host, _clock) = start().await;
    host.deploy("w", "[limits]\nschedules = 1", waker()).await.expect("deploys");
    host.answer("w", "s", "a").await;
    host.ask("w", "s", "f").await.expect_err("a second one");
    host.answer("w", "other", "f").await;
    assert_eq!(schedules(&host).await.len(), 2);
}

#[tokio::test]
async fn an_alarm_interrupted_by_a_restart_is_handled_once() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    for session in ["a", "b", "c"] {
        host.answer("w", session, "a").await;
    }
    clock.advance(1_000);
    let host = host.restart_with(setup(&clock)).await;
    no_schedule(&host).await;
    for session in ["a", "b", "c"] {
        assert_eq!(alarms(&host, session).await, 1, "{session}");
    }
}

#[tokio::test]
async fn setting_the_clock_back_does_not_freeze_repeating_schedules() {
    const DAY_MS: u64 = 86_400_000;
    let (host, clock) = start().await;
    let manifest = "[[schedule]]\nname = \"cron\"\ncron = \"@hourly\"\nsession = \"c\"";
    host.deploy("w", manifest, waker()).await.expect("deploys");
    host.answer("w", "s", "r").await;
    clock.advance(1_000);
    until(async || (alarms(&host, "s").await == 1).then_some(())).await;
    clock.jump(-(DAY_MS as i64));
    let moved = async |name: &str| {
        let is_so = |one: &ScheduleSummary| one.name == name && one.due_at_ms < START_MS;
        schedule(&host, is_so).await.due_at_ms
    };
    assert_eq!(moved("wake").await, START_MS + 2_000 - DAY_MS);
    assert_eq!(moved("cron").await, START_MS + 3_600_000 - DAY_MS);
    for count in 2..=3 {
        clock.advance(1_000);
        until(async || (alarms(&host, "s").await == count).then_some(())).await;
    }
    // A host that starts after its clock was set back notices it too.
    clock.jump(-(DAY_MS as i64));
    let host = host.stop().await.start(setup(&clock)).await;
    schedule(&host, |one| one.name == "wake" && one.due_at_ms < START_MS - DAY_MS).await;
    clock.advance(1_000);
    until(async || (alarms(&host, "s").await == 4).then_some(())).await;
}

#[tokio::test]
async fn times_skipped_by_setting_the_clock_forward_are_one_alarm() {
    let (host, clock) = start().await;
    host.deploy("w", "", waker()).await.expect("deploys");
    host.answer("w", "s", "r").await;
    clock.jump(10 * 366 * 86_400_000);
    until(async || (alarms(&host, "s").await == 1).then_some(())).await;
    clock.advance(1_000);
    until(async || (alarms(&host, "s").await == 2).then_some(())).await;
}
