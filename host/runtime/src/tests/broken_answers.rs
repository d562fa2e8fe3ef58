//! Tests of answers that their server breaks off while the host runs. By the agent's manifest they are requested again or
//! interrupted, as after a crash.

use super::{
    compute::completer,
    durability::detached,
    fixture::Host,
    guest::Guest,
    inference::{chatter, former, relayer},
    lost_answers::{CUT, FINISHED, asked, sum, used},
    upstreams::{REMOTE, Scripted, Step, crashed_after, followed, granting, models},
};
use crate::{RunEvent, UsageCounts};
use skep_engine::UpstreamFault;
use std::sync::Arc;

/// The use of a [`broken`] answer, which has one token. It is an estimate.
const BROKEN: UsageCounts = UsageCounts { output_tokens: 1, estimated_output_tokens: 1, ..CUT };

/// Returns an answer that breaks off after three letters.
fn broken(text: &'static str) -> Vec<Step> {
    vec![Step::Say(text), Step::Fail(UpstreamFault::CutOff)]
}

fn whole(text: &'static str) -> Vec<Step> {
    vec![Step::Say(text), Step::Finish]
}

async fn host_with(remote: &Arc<Scripted>, settings: &str, guest: Guest) -> Host {
    let host = Host::with_models(models(remote), granting(&["far/*"])).await;
    host.deploy("chat", &format!("{REMOTE}\n{settings}"), guest).await.expect("valid");
    host
}

/// Returns the use of the model, which is the only one that was used.
async fn used_of_model(host: &Host) -> UsageCounts {
    let used = used(host).await;
    assert_eq!(used.keys().collect::<Vec<_>>(), ["far/model"]);
    used["far/model"]
}

/// Returns the parts of answers among the events of a turn, and where one is void.
fn answers(events: Vec<RunEvent>) -> Vec<RunEvent> {
    let is_part = |event: &RunEvent| {
        matches!(event, RunEvent::Delta { .. } | RunEvent::Thinking { .. } | RunEvent::GenerationRestarted)
    };
    events.into_iter().filter(is_part).collect()
}

fn delta(text: &str) -> RunEvent {
    RunEvent::Delta { text: text.to_owned() }
}

#[tokio::test]
async fn an_answer_that_its_server_breaks_off_is_requested_again_and_leaves_no_trace() {
    let remote = Scripted::new(None, vec![broken("One"), whole("Two.")]);
    let host = host_with(&remote, "", chatter()).await;
    let (events, outcome) = followed(&host).await;
    assert_eq!(answers(events), [delta("One"), RunEvent::GenerationRestarted, delta("Two.")]);
    assert_eq!(outcome.expect("the turn succeeds").text, "Two.");
    let asked = remote.asked();
    assert_eq!((asked.len(), &asked[1]), (2, &asked[0]), "the same messages are sent");
    let session = host.agents.session("chat", "s").await.expect("the session exists");
    let said: Vec<_> = session.messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!(said, ["count", "Two."]);
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, FINISHED]), "both are billed");
}

#[tokio::test]
async fn a_server_that_keeps_breaking_off_is_asked_three_times_and_the_generation_is_interrupted() {
    let remote = Scripted::new(None, vec![broken("One"), broken("Two"), broken("Six")]);
    let host = host_with(&remote, "", relayer()).await;
    let (events, outcome) = followed(&host).await;
    let again = RunEvent::GenerationRestarted;
    assert_eq!(answers(events), [delta("One"), again.clone(), delta("Two"), again, delta("Six")]);
    let error = outcome.expect_err("each answer breaks off").to_string();
    assert!(error.contains("interrupted: the upstream far broke off its answer: as the script"), "{error}");
    assert!(error.contains("this was attempt 3 of at most 3"), "{error}");
    assert_eq!(remote.asked().len(), 3);
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, BROKEN, BROKEN]));
}

#[tokio::test]
async fn an_agent_can_have_broken_answers_interrupted() {
    // A second request would find no entry in the script.
    let remote = Scripted::new(None, vec![broken("One")]);
    let host = host_with(&remote, "[inference]\ncut_off = \"fail\"", relayer()).await;
    let (events, outcome) = followed(&host).await;
    assert_eq!(answers(events), [delta("One")]);
    let error = outcome.expect_err("the answer breaks off").to_string();
    assert!(error.contains("interrupted: the upstream far broke off its answer: as the script"), "{error}");
    assert!(error.contains("`cut_off` under [inference] in agent.toml is \"fail\""), "{error}");
    assert_eq!(remote.asked().len(), 1);
    assert_eq!(used_of_model(&host).await, BROKEN);
}

#[tokio::test]
async fn an_agent_generates_again_after_an_interruption_without_a_trace_of_the_first_answer() {
    let remote = Scripted::new(None, vec![broken("One"), whole("Two.")]);
    let chatter = chatter();
    let generate = "(call $generate (i32.const 1024) (i32.const 2048))";
    let twice = format!("{generate} (if (i32.load8_u (i32.const 2048)) (then {generate}))");
    let on_message = chatter.on_message.replacen(generate, &twice, 1);
    let guest = Guest { on_message: on_message.leak(), ..chatter };
    let host = host_with(&remote, "[inference]\ncut_off = \"fail\"", guest).await;
    assert_eq!(host.answer("chat", "s", "count").await, "Two.");
    let asked = remote.asked();
    assert_eq!((asked.len(), &asked[1]), (2, &asked[0]), "the same messages are sent");
    let session = host.agents.session("chat", "s").await.expect("the session exists");
    let said: Vec<_> = session.messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!(said, ["count", "Two."]);
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, FINISHED]), "both are billed");
}

#[tokio::test]
async fn structured_output_begins_again_after_reasoning_that_was_shown() {
    let thought: &str = "hm ".repeat(100).leak();
    let thinks = vec![Step::Think(thought), Step::Fail(UpstreamFault::CutOff)];
    let remote = Scripted::new(None, vec![thinks, whole("\"ab\"")]);
    let host = host_with(&remote, "", former(r#"{"const": "ab"}"#, None)).await;
    let (events, outcome) = followed(&host).await;
    let thinking = RunEvent::Thinking { text: thought.to_owned() };
    assert_eq!(answers(events), [thinking, RunEvent::GenerationRestarted, delta("\"ab\"")]);
    assert_eq!(outcome.expect("the turn succeeds").text, "O");
}

#[tokio::test]
async fn a_completion_that_breaks_off_is_requested_again() {
    let remote = Scripted::new(None, vec![broken("One"), whole("Two."), broken("Six")]);
    let host = host_with(&remote, "", completer()).await;
    let (events, outcome) = followed(&host).await;
    assert_eq!(outcome.expect("the turn succeeds").text, "o");
    assert_eq!(answers(events), [], "nothing of a hidden answer is void for the caller");
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, FINISHED]));
    host.deploy("chat", &format!("{REMOTE}\n[inference]\ncut_off = \"fail\""), completer())
        .await
        .expect("valid");
    assert_eq!(host.answer("chat", "s", "count").await, "e", "the completion is interrupted");
    assert_eq!(remote.asked().len(), 3);
}

#[tokio::test]
async fn a_summary_that_breaks_off_is_requested_again() {
    let remote = Scripted::new(
        Some(2_000),
        vec![whole("First."), whole("Second."), broken("The"), whole("They counted."), whole("Third.")],
    );
    let host = host_with(&remote, "", chatter()).await;
    let long = "word ".repeat(600);
    for expected in ["First.", "Second.", "Third."] {
        assert_eq!(host.answer("chat", "s", &long).await, expected);
    }
    let asked = remote.asked();
    assert_eq!((asked.len(), &asked[3]), (5, &asked[2]), "the same summary is requested");
    assert!(asked[4].iter().any(|message| message.content.contains("They counted.")), "{:?}", asked[4]);
}

#[tokio::test]
async fn a_budget_that_does_not_cover_another_attempt_ends_the_generation() {
    let remote = Scripted::new(None, vec![broken("One")]);
    let host = host_with(&remote, "[limits]\ntokens_per_day = 1", relayer()).await;
    let (events, outcome) = followed(&host).await;
    assert_eq!(answers(events), [delta("One")], "nothing begins again");
    let error = outcome.expect_err("the day's token is used up").to_string();
    assert!(error.contains("has used its 1 tokens for today"), "{error}");
    assert_eq!(used_of_model(&host).await, BROKEN);
}

#[tokio::test]
async fn a_crash_while_an_answer_is_requested_again_is_one_more_attempt() {
    let hangs = || vec![Step::Say("Two"), Step::Hang];
    let refused = vec![Step::Fail(UpstreamFault::Refused)];
    let remote = Scripted::new(None, vec![broken("One"), hangs(), whole("Three."), refused]);
    let host = crashed_after(&remote, "", "Two").await;
    let (events, outcome) = followed(&host).await;
    let again = || RunEvent::GenerationRestarted;
    assert_eq!(answers(events), [delta("One"), again(), delta("Two"), again(), delta("Three.")]);
    outcome.expect_err("the agent generates until it is refused");
    let asked = remote.asked();
    assert_eq!((asked.len(), &asked[1], &asked[2]), (4, &asked[0], &asked[0]), "the same messages are sent");
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, CUT, FINISHED]), "a refused request uses nothing");

    let remote = Scripted::new(None, vec![broken("One"), hangs(), broken("Six")]);
    let host = crashed_after(&remote, "", "Two").await;
    let (events, outcome) = followed(&host).await;
    assert_eq!(answers(events), [delta("One"), again(), delta("Two"), again(), delta("Six")]);
    let error = outcome.expect_err("the third attempt is the last one").to_string();
    assert!(error.contains("this was attempt 3 of at most 3"), "{error}");
    assert_eq!(used_of_model(&host).await, sum(&[BROKEN, CUT, BROKEN]));
}

#[tokio::test]
async fn attempts_of_a_recorded_generation_are_billed_once() {
    let broken = [vec![Step::Route("far/one", 1)], broken("One")].into_iter().flatten().collect();
    let whole = [vec![Step::Route("far/two", 1)], whole("Two.")].into_iter().flatten().collect();
    let refused = vec![Step::Fail(UpstreamFault::Refused)];
    let remote = Scripted::new(None, vec![broken, whole, vec![Step::Hang], refused]);
    let host = host_with(&remote, "", relayer()).await;
    let id = host.agents.invoke(detached("chat", "count")).await.expect("taken").turn_id().to_owned();
    asked(&host, &remote, 3, "\"attempt\":0,").await;
    let host = host.crash().await.start(granting(&["far/*"])).await;
    let outcome = host.agents.follow("chat", "s", &id).await.expect("kept").outcome().await;
    outcome.expect_err("the agent generates until it is refused");
    let used = used(&host).await;
    assert_eq!((used["far/one"], used["far/two"]), (BROKEN, FINISHED));
}
