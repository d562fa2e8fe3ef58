//! Tests of what is counted of answers that a crash of the host cut off while another server computed them.

use super::{
    durability::detached,
    fixture::{Host, until},
    guest::Guest,
    inference::relayer,
    upstreams::{REMOTE, Scripted, Step, crashed, followed, granting, models},
    usage::report,
};
use crate::{TurnPhase, UsageBy, UsageCounts};
use skep_engine::UpstreamFault;
use std::{collections::BTreeMap, sync::Arc};

/// The use of a finished answer of the script.
pub(super) const FINISHED: UsageCounts = UsageCounts {
    requests: 1,
    input_tokens: 9,
    cached_tokens: 4,
    output_tokens: 3,
    estimated_requests: 0,
    estimated_input_tokens: 0,
    estimated_output_tokens: 0,
    cache_write_tokens: 0,
};
/// The known use of an answer that broke off after "One": the journal learns of its tokens only now and then.
pub(super) const CUT: UsageCounts = UsageCounts {
    requests: 1,
    input_tokens: 9,
    cached_tokens: 4,
    output_tokens: 0,
    estimated_requests: 1,
    estimated_input_tokens: 9,
    estimated_output_tokens: 0,
    cache_write_tokens: 0,
};

pub(super) async fn used(host: &Host) -> BTreeMap<String, UsageCounts> {
    let lines = report(host, UsageBy::Model).await.lines.into_iter();
    lines.map(|line| (line.name.expect("a model"), line.counts)).collect()
}

pub(super) fn sum(counts: &[UsageCounts]) -> UsageCounts {
    let mut sum = UsageCounts::default();
    counts.iter().for_each(|counts| sum.add(counts));
    sum
}

/// Waits until the server has `asked` requests and the journal has this text behind its last result.
pub(super) async fn asked(host: &Host, remote: &Arc<Scripted>, asked: usize, text: &str) {
    until(async || {
        let journal = host.journals().await;
        let after = journal.rfind("{\"result\"").unwrap_or(0);
        (remote.asked().len() == asked && journal[after..].contains(text)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_turn_that_never_runs_again_is_counted_with_what_a_server_may_bill() {
    let on_message =
        relayer().on_message.replace("(i32.store8 offset=128 (i32.const 1024) (i32.const 1))", "");
    lost_after_three_crashes(Guest { on_message: on_message.leak(), ..relayer() }).await;
}

#[tokio::test]
async fn text_that_is_regenerated_after_each_crash_is_not_progress() {
    lost_after_three_crashes(relayer()).await;
}

async fn lost_after_three_crashes(guest: Guest) {
    let finished = vec![Step::Route("far/big", 1), Step::Say("One."), Step::Finish];
    let long: &str = "word".repeat(100).leak();
    let cut = || vec![Step::Say("One "), Step::Say(long), Step::Hang];
    let remote = Scripted::new(None, vec![finished, cut(), cut(), cut()]);
    let mut host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, guest).await.expect("valid");
    let id = host.agents.invoke(detached("chat", "count")).await.expect("taken").turn_id().to_owned();
    for attempt in 0..3 {
        let usage = "{\"prompt_tokens\":9,\"cached_tokens\":4,\"completion_tokens\":101,";
        let used = format!("\"attempt\":{attempt},\"model\":\"far/model\",\"usage\":{usage}");
        asked(&host, &remote, 2 + attempt, &used).await;
        host = host.crash().await.start(granting(&["far/*"])).await;
    }
    let phase = until(async || match host.agents.turn("chat", "s", &id).await.expect("kept").phase {
        TurnPhase::Failed { code, .. } => Some(code),
        _ => None,
    });
    assert_eq!(phase.await, "turn_lost");
    let used = used(&host).await;
    assert_eq!(used["far/big"], FINISHED);
    let cut = UsageCounts { output_tokens: 101, estimated_output_tokens: 101, ..CUT };
    assert_eq!((used["far/model"], used.len()), (sum(&[cut, cut, cut]), 2));
    assert_eq!(remote.asked().len(), 4, "a turn that is lost asks no more");
}

#[tokio::test]
async fn a_repeated_answer_is_counted_with_the_one_that_was_cut_off() {
    let refused = vec![Step::Fail(UpstreamFault::Refused)];
    let finished = vec![Step::Route("far/big", 1), Step::Say("Another answer."), Step::Finish];
    let remote = Scripted::new(None, vec![vec![Step::Say("One"), Step::Hang], finished, refused]);
    let host = crashed(&remote, "").await;
    followed(&host).await.1.expect_err("the agent generates until it is refused");
    let expected = [("far/big".to_owned(), FINISHED), ("far/model".to_owned(), CUT)];
    assert_eq!(used(&host).await, BTreeMap::from(expected), "a refused request uses nothing");
}

#[tokio::test]
async fn a_recorded_answer_is_billed_to_the_model_that_a_route_chose() {
    let chosen = vec![Step::Route("far/big", 2), Step::Say("One."), Step::Finish];
    let refused = vec![Step::Fail(UpstreamFault::Refused)];
    let remote = Scripted::new(None, vec![chosen, vec![Step::Hang], refused]);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, relayer()).await.expect("valid");
    let id = host.agents.invoke(detached("chat", "count")).await.expect("taken").turn_id().to_owned();
    asked(&host, &remote, 2, "\"attempt\":0,").await;
    let host = host.crash().await.start(granting(&["far/*"])).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    outcome.expect_err("the agent generates until it is refused");
    assert_eq!(used(&host).await["far/big"], FINISHED);
}

/// The use of two answers that were refused before anything of them was sent.
const REFUSED: UsageCounts = UsageCounts { requests: 2, input_tokens: 20, output_tokens: 8, ..NOTHING };
const NOTHING: UsageCounts = UsageCounts {
    requests: 0,
    input_tokens: 0,
    cached_tokens: 0,
    output_tokens: 0,
    estimated_requests: 0,
    estimated_input_tokens: 0,
    estimated_output_tokens: 0,
    cache_write_tokens: 0,
};

#[tokio::test]
async fn answers_that_were_refused_before_they_were_sent_are_counted_and_once_after_a_crash() {
    let refused = || vec![Step::Refuse(10, 5), Step::Refuse(10, 3), Step::Fail(UpstreamFault::Malformed)];
    let remote = Scripted::new(None, vec![refused()]);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, relayer()).await.expect("valid");
    host.ask("chat", "s", "count").await.expect_err("the answer is refused");
    assert_eq!(used(&host).await, BTreeMap::from([("far/hidden".to_owned(), REFUSED)]));

    // The turn runs again after its first generation, which is repeated from the journal.
    let answered = vec![Step::Refuse(10, 5), Step::Refuse(10, 3), Step::Say("One."), Step::Finish];
    let failed = vec![Step::Fail(UpstreamFault::Refused)];
    let remote = Scripted::new(None, vec![answered, vec![Step::Hang], failed]);
    let host = Host::with_models(models(&remote), granting(&["far/*"])).await;
    host.deploy("chat", REMOTE, relayer()).await.expect("valid");
    let id = host.agents.invoke(detached("chat", "count")).await.expect("taken").turn_id().to_owned();
    asked(&host, &remote, 2, "\"attempt\":0,").await;
    let host = host.crash().await.start(granting(&["far/*"])).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    outcome.expect_err("the agent generates until it is refused");
    assert_eq!(used(&host).await["far/hidden"], REFUSED);
}

#[tokio::test]
async fn an_answer_that_is_not_repeated_is_counted() {
    let remote = Scripted::new(None, vec![vec![Step::Say("One"), Step::Hang]]);
    let host = crashed(&remote, "[inference]\ncut_off = \"fail\"").await;
    followed(&host).await.1.expect_err("the answer was cut off");
    assert_eq!(used(&host).await, BTreeMap::from([("far/model".to_owned(), CUT)]));
}
