//! Tests of what a client's API adds to batches: the time for which they are kept, several choices, responses that are
//! stored, and sessions. Also tests the bounds of chains of responses.

use super::{
    fixture::{Host, Setup, until},
    upstreams::{Scripted, Step, models},
};
use crate::{
    BatchItem, BatchOptions, BatchOutcome, BatchPhase, BatchPrompt, BatchRequest, BatchResults, BatchTerms,
    Clock, NewBatch, NewResponse, ResponseEnd, ResponseOptions, ResponsePhase, RuntimeError, RuntimeOptions,
    response_id,
};
use skep_engine::{
    Affinity, Sampling,
    chat::{ChatMessage, ChatOptions},
};
use skep_store::ResponseRoom;
use std::time::Duration;

const PRINCIPAL: &str = "local";
const HOUR_MS: u64 = 3_600_000;

fn options() -> ChatOptions {
    let sampling = Sampling { temperature: 0.9, ..Sampling::default() };
    ChatOptions { max_tokens: Some(6), ignore_eos: true, sampling, seed: Some(7), ..ChatOptions::default() }
}

fn chat(options: ChatOptions, choices: u32) -> BatchItem {
    let request =
        BatchRequest::Chat { messages: vec![ChatMessage::user("hi")], options: Box::new(options), choices };
    BatchItem { request, form: "plain".into(), reference: None, keep: None }
}

async fn queue(
    host: &Host,
    model: &str,
    items: Vec<BatchItem>,
    keep: Option<Duration>,
) -> Result<String, RuntimeError> {
    let terms = BatchTerms { details: Some("{}".into()), window: None, keep };
    let batch = NewBatch { principal: PRINCIPAL.into(), key: None, model: model.into(), items, terms };
    host.agents.queue_batch(batch).await.map(|status| status.id)
}

async fn results(host: &Host, id: &str) -> BatchResults {
    until(async || host.agents.batch_results(PRINCIPAL, id).await.expect("the batch is known").1).await
}

fn answers(results: &BatchResults) -> Vec<&crate::BatchAnswer> {
    let found = results.items.iter().map(|item| match &item.outcome {
        BatchOutcome::Done(answer) => &**answer,
        other => panic!("{other:?}"),
    });
    found.collect()
}

#[tokio::test]
async fn a_batch_is_kept_for_its_own_time_bounded_by_the_hosts() {
    let clock = Clock::at(20_000 * 86_400_000);
    let batch = BatchOptions {
        retention: Duration::from_millis(HOUR_MS),
        file_retention: Duration::from_millis(5 * HOUR_MS),
        ..BatchOptions::default()
    };
    let host = Host::with(Setup::at(&clock, RuntimeOptions { batch, ..RuntimeOptions::default() })).await;
    let hours = |hours: u64| Some(Duration::from_millis(hours * HOUR_MS));
    let mut ids = Vec::new();
    for keep in [None, hours(3), hours(9)] {
        let id = queue(&host, "tiny", vec![chat(options(), 1)], keep).await.expect("room");
        results(&host, &id).await;
        ids.push(id);
    }
    let status = host.agents.batch(PRINCIPAL, &ids[2]).await.expect("known");
    let BatchPhase::Ended { at_ms, .. } = status.phase else { panic!("{status:?}") };
    assert_eq!(status.kept_until_ms, Some(at_ms + 5 * HOUR_MS), "the host bounds it");
    for (hour, left) in [(0, 3), (2, 2), (4, 1), (6, 0)] {
        clock.advance(20_000 * 86_400_000 + hour * HOUR_MS + 1_000 - clock.now_ms());
        let mut known = 0;
        for id in &ids {
            known += usize::from(host.agents.batch(PRINCIPAL, id).await.is_ok());
        }
        assert_eq!(known, left, "after {hour} hours");
        // The rows go, too.
        let _ = queue(&host, "tiny", Vec::new(), hours(1)).await.expect("room");
        let mut rows = 0;
        for id in &ids {
            rows += usize::from(host.store().batch(id).await.expect("read").is_some());
        }
        assert_eq!(rows, left, "after {hour} hours");
    }
}

#[tokio::test]
async fn an_emptied_batch_frees_its_storage_and_keeps_its_counts() {
    let batch = BatchOptions { max_stored_bytes: 4_000, ..BatchOptions::default() };
    let host = Host::with(RuntimeOptions { batch, ..RuntimeOptions::default() }).await;
    let long = || {
        let messages = vec![ChatMessage::user("word ".repeat(50).repeat(10))];
        let request = BatchRequest::Chat { messages, options: Box::new(options()), choices: 1 };
        BatchItem { request, form: "plain".into(), reference: None, keep: None }
    };
    let keep = Some(Duration::from_secs(3600));
    let first = queue(&host, "tiny", vec![long()], keep).await.expect("room");
    results(&host, &first).await;
    assert_eq!(queue(&host, "tiny", vec![long()], keep).await.expect_err("full").code(), "queue_full");
    host.agents.empty_batch(PRINCIPAL, &first).await.expect("emptied");
    assert_eq!(host.agents.batch(PRINCIPAL, &first).await.expect("known").items.total(), 1);
    let emptied = results(&host, &first).await;
    assert!(matches!(emptied.items[0].outcome, BatchOutcome::Cancelled), "{emptied:?}");
    queue(&host, "tiny", vec![long()], keep).await.expect("the room was given back");
}

#[tokio::test]
async fn choices_differ_by_their_seeds_and_have_their_scores() {
    let host = Host::start().await;
    let scored = |seed: u64| ChatOptions { seed: Some(seed), top_logprobs: Some(2), ..options() };
    let items = vec![chat(scored(7), 3), chat(scored(8), 1)];
    let id = queue(&host, "tiny", items, None).await.expect("room");
    let results = results(&host, &id).await;
    let found = answers(&results);
    let texts: Vec<&str> = found[0].choices().map(|choice| choice.text.as_str()).collect();
    assert_eq!(texts.len(), 3);
    assert_eq!(texts[1], found[1].text, "the second choice has the next seed");
    assert_eq!(found[0].total_usage().completion_tokens, 18);
    for choice in found[0].choices() {
        let scores = choice.scores.as_ref().expect("scores");
        let text: Vec<u8> = scores.iter().flat_map(|token| token.bytes.clone()).collect();
        assert_eq!(String::from_utf8_lossy(&text), choice.text);
        assert!(scores.iter().all(|token| token.top.len() == 2 && token.logprob <= Some(0.0)), "{scores:?}");
    }
    let texts = BatchRequest::Texts {
        prompts: vec![BatchPrompt::Text("a b".into()), BatchPrompt::Ids(vec![65, 66])],
        options: Box::new(scored(7)),
        choices: 2,
        echo: true,
    };
    let item = BatchItem { request: texts, form: String::new(), reference: None, keep: None };
    let id = queue(&host, "tiny", vec![item], None).await.expect("room");
    let results = self::results(&host, &id).await;
    let choices: Vec<_> = answers(&results)[0].choices().collect();
    assert_eq!(choices.len(), 4);
    assert!(choices[1].text.starts_with("a b"), "{choices:?}");
    let scores = choices[0].scores.as_ref().expect("scores");
    assert_eq!(scores[0].logprob, None, "nothing precedes the prompt's first token");
    assert!(scores.len() > 6, "the prompt is scored, too");
}

#[tokio::test]
async fn a_request_of_a_batch_keeps_its_session_and_leaves_a_response() {
    let script = || vec![Step::Say("One."), Step::Finish];
    let remote = Scripted::new(None, vec![script(), script()]);
    let host = Host::with_models(models(&remote), RuntimeOptions::default()).await;
    let session = |session: &str| Affinity { session: Some(session.to_owned()), ..Affinity::default() };
    let new = |id: &str| NewResponse {
        id: id.to_owned(),
        principal: PRINCIPAL.to_owned(),
        previous: None,
        thread: id.to_owned(),
        turn: None,
        request: b"{}".to_vec(),
    };
    let id = response_id();
    let kept =
        BatchItem { keep: Some(new(&id)), ..chat(ChatOptions { affinity: session("ann"), ..options() }, 1) };
    let batch = queue(&host, "far/model", vec![kept], None).await.expect("room");
    results(&host, &batch).await;
    let response = host.agents.response(PRINCIPAL, &id).await.expect("it is stored");
    let ResponsePhase::Ended { end: ResponseEnd::Done(answer), .. } = response.phase else {
        panic!("{response:?}")
    };
    assert_eq!(answer.text, "One.");
    // The response of an item whose end was not written is not produced again.
    let again = BatchItem { keep: Some(new(&id)), ..chat(options(), 1) };
    let batch = queue(&host, "far/model", vec![again], None).await.expect("room");
    assert_eq!(answers(&results(&host, &batch).await)[0].text, "One.");
    // A response in the background keeps its session, too.
    let id = response_id();
    let item = chat(ChatOptions { affinity: session("bob"), ..options() }, 1);
    let batch = NewBatch {
        principal: PRINCIPAL.into(),
        key: None,
        model: "far/model".into(),
        items: vec![item],
        terms: BatchTerms::default(),
    };
    host.agents.queue_response(new(&id), batch).await.expect("room");
    let ended = async || {
        let response = host.agents.response(PRINCIPAL, &id).await.expect("known");
        matches!(response.phase, ResponsePhase::Ended { .. }).then_some(())
    };
    until(ended).await;
    assert_eq!(remote.sessions(), [Some("ann".to_owned()), Some("bob".to_owned())]);
}

#[tokio::test]
async fn an_answer_without_room_for_its_response_is_not_produced_again() {
    let script = || vec![Step::Say("One."), Step::Finish];
    let remote = Scripted::new(None, vec![script(), script(), script()]);
    let batch =
        BatchOptions { max_attempts: 3, backoff: Duration::from_millis(1), ..BatchOptions::default() };
    let responses = ResponseOptions { max_stored_bytes: 10, ..ResponseOptions::default() };
    let options = RuntimeOptions { batch, responses, ..RuntimeOptions::default() };
    let host = Host::with_models(models(&remote), options).await;
    let response = NewResponse {
        id: response_id(),
        principal: PRINCIPAL.to_owned(),
        previous: None,
        thread: "t".to_owned(),
        turn: None,
        request: b"{}".to_vec(),
    };
    let item = BatchItem { keep: Some(response), ..chat(self::options(), 1) };
    let batch = queue(&host, "far/model", vec![item], None).await.expect("room");
    let results = results(&host, &batch).await;
    assert!(matches!(results.items[0].outcome, BatchOutcome::Failed { .. }), "{results:?}");
    assert_eq!(remote.asked().len(), 1);
}

#[tokio::test]
async fn a_chain_is_bounded_in_responses_and_in_bytes() {
    let host = Host::start().await;
    let put = async |id: String, previous: Option<String>, bytes: usize| {
        let response = skep_store::NewResponse {
            id,
            principal: PRINCIPAL.to_owned(),
            previous,
            thread: "one".to_owned(),
            turn: None,
            at_ms: host.agents.now_ms(),
            request: vec![b' '; bytes],
            answer: None,
        };
        let room = ResponseRoom { bytes: 1 << 30, share: None };
        assert!(host.store().put_response(response, room).await.expect("written"));
    };
    let name = |index: usize| format!("resp_{index}");
    for index in 0..=1000 {
        put(name(index), index.checked_sub(1).map(name), 1).await;
    }
    let chain = async |id: &str| host.agents.response_chain(PRINCIPAL, id).await.map(|chain| chain.len());
    assert_eq!(chain(&name(999)).await.expect("the longest chain"), 1000);
    assert_eq!(chain(&name(1000)).await.expect_err("one too many").code(), "response_chain_too_long");
    put("half".into(), None, 32 << 20).await;
    put("whole".into(), Some("half".into()), 32 << 20).await;
    put("more".into(), Some("whole".into()), 1).await;
    assert_eq!(chain("whole").await.expect("64 MiB"), 2);
    let error = chain("more").await.expect_err("a byte too many");
    assert_eq!(error.code(), "response_chain_too_long");
    assert!(error.to_string().contains("64"), "{error}");
}

#[tokio::test]
async fn text_completion_by_an_unsuitable_upstream_fails_immediately() {
    let remote = Scripted::new(None, vec![vec![Step::Say("One."), Step::Finish]]);
    let host = Host::with_models(models(&remote), RuntimeOptions::default()).await;
    let texts = |prompt: BatchPrompt, options: ChatOptions| BatchItem {
        request: BatchRequest::Texts {
            prompts: vec![prompt],
            options: Box::new(options),
            choices: 1,
            echo: true,
        },
        form: String::new(),
        reference: None,
        keep: None,
    };
    let scored = ChatOptions { top_logprobs: Some(1), ..options() };
    let items = vec![
        texts(BatchPrompt::Ids(vec![1]), options()),
        texts(BatchPrompt::Text("a".into()), scored),
        texts(BatchPrompt::Text("Count: ".into()), options()),
    ];
    let id = queue(&host, "far/model", items, None).await.expect("room");
    let results = results(&host, &id).await;
    for item in &results.items[..2] {
        let BatchOutcome::Failed { code: "invalid_request", message } = &item.outcome else {
            panic!("{item:?}")
        };
        assert!(message.contains("may be an upstream model"), "{message}");
    }
    let BatchOutcome::Done(answer) = &results.items[2].outcome else { panic!("{results:?}") };
    assert_eq!(answer.text, "Count: One.");
}
