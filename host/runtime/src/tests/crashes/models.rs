//! Crash tests in which the next host has another model under the same name, and in which another server breaks off its
//! answer.

use super::{Crash, Life, copy_of, live};
use crate::{
    Invocation, RunEvent, RuntimeOptions, UsageBy, UsageCounts,
    tests::{
        durability::{QUESTION, talker},
        fixture::{Host, check_tokens, invocation, permuted_engine, tiny_engine},
        guest::Guest,
        inference::chatter,
        upstreams::{REMOTE, Scripted, Step, granting, models},
        usage::report,
    },
};
use skep_engine::{ModelSet, UpstreamFault};
use skep_store::Moment;

/// Returns a [`talker`] that replies with the error if its last generation fails. `first` are
/// instructions before that.
fn teller(first: &str) -> Guest {
    let talker = talker();
    let failed = "(if (i32.load8_u (i32.const 2048)) (then unreachable))";
    let (before, after) = talker.on_message.split_once(failed).expect("the guest checks for failure");
    let (before, generate) =
        before.split_once("(call $generate (i32.const 1024)").expect("the guest generates");
    let on_message = format!(
        r#"{before} {first} (call $generate (i32.const 1024) {generate}
        (if (i32.load8_u (i32.const 2048))
            (then
                (i32.store (i32.const 2056) (i32.load (i32.const 2060)))
                (i32.store (i32.const 2060) (i32.load (i32.const 2064)))))
        {after}"#
    );
    Guest { on_message: on_message.leak(), ..talker }
}

/// Interrupts a turn of the guest after each of its writes. Returns, for the host with the other
/// model, the turn's result, the number of its messages, and whether the conversation has tokens.
fn exchanged_at_every_write(guest: &Guest) -> Vec<(Result<String, String>, usize, bool)> {
    let keyed = || Invocation { idempotency_key: Some("k".into()), ..invocation("talk", "s", QUESTION) };
    let (model, other) = (ModelSet::new(tiny_engine("tiny")), ModelSet::new(permuted_engine("tiny")));
    let prepared = tempfile::tempdir().expect("a temporary folder");
    live(prepared.path(), &model, RuntimeOptions::default(), None, async |host| {
        host.deploy("talk", "", Guest { ..*guest }).await.expect("valid");
        host.agents.drain(std::time::Duration::ZERO).await;
        host.store().close().await;
    });
    let mut said = Vec::new();
    for number in 1.. {
        let crash = Crash { moment: Moment::Committed, number };
        let folder = copy_of(prepared.path());
        let life = live(folder.path(), &model, RuntimeOptions::default(), Some(crash), async |host| {
            host.agents.invoke(keyed()).await.expect("taken").outcome().await.expect("the turn succeeds");
        });
        let Life::Cut(left) = life else { break };
        let life = live(left.path(), &other, RuntimeOptions::default(), None, async |host: &Host| {
            let ended = host.agents.invoke(keyed()).await.expect("taken").outcome().await;
            let text = ended.map(|outcome| outcome.text).map_err(|error| error.code().to_owned());
            let (mut messages, mut has_tokens) = (0, false);
            if text.is_ok() {
                let exported = host.agents.export_session("talk", "s").await.expect("the session exists");
                let transcript = &exported.conversations[0].transcript;
                (messages, has_tokens) = (transcript.messages().len(), !transcript.tokens().is_empty());
            }
            // The session must stay usable in any case.
            host.answer("talk", "s", QUESTION).await;
            check_tokens(host, "talk").await;
            (text, messages, has_tokens)
        });
        let Life::Whole(ended) = life else { unreachable!("nothing cuts it off") };
        said.push(ended);
    }
    said
}

#[test]
fn a_generation_is_interrupted_when_its_model_was_replaced() {
    let said = exchanged_at_every_write(&teller(""));
    let interrupted = said.iter().filter(|(text, messages, _)| {
        text.as_ref().is_ok_and(|text| text.starts_with("interrupted: the model tiny was replaced"))
            && *messages == 1
    });
    assert!(interrupted.count() > 0, "{said:?}");
}

#[test]
fn an_answer_of_a_replaced_model_is_kept_as_text() {
    // Generates four tokens first.
    let first = r#"
        (i32.store offset=84 (i32.const 1024) (i32.const 4))
        (call $generate (i32.const 1024) (i32.const 2048))
        (if (i32.load8_u (i32.const 2048)) (then unreachable))
        (i32.store offset=84 (i32.const 1024) (i32.const 160))"#;
    let said = exchanged_at_every_write(&teller(first));
    let interrupted = said.iter().filter(|(text, messages, has_tokens)| {
        text.as_ref().is_ok_and(|text| text.starts_with("interrupted: "))
            && (*messages, *has_tokens) == (2, false)
    });
    assert!(interrupted.count() > 0, "{said:?}");
    for (text, ..) in &said {
        // The guest traps if its first generation was interrupted.
        assert!(text.as_ref().err().is_none_or(|code| code == "agent_trapped"), "{text:?}");
    }
}

/// Follows the turn of a client that repeats its message to the end. Returns its reply and the text that no restart of a
/// generation has made void.
async fn followed(host: &Host, message: Invocation) -> (String, String) {
    let mut handle = host.agents.invoke(message).await.expect("taken");
    let mut shown = String::new();
    loop {
        match handle.next().await.expect("the turn ends").expect("the turn succeeds") {
            RunEvent::Delta { text } => shown.push_str(&text),
            RunEvent::GenerationRestarted => shown.clear(),
            RunEvent::Done(outcome) => return (outcome.text, shown),
            _ => {}
        }
    }
}

#[test]
fn an_answer_that_breaks_off_is_requested_again_consistently_after_every_crash() {
    let keyed = || Invocation { idempotency_key: Some("k".into()), ..invocation("chat", "s", QUESTION) };
    let far = || granting(&["far/*"]);
    let prepared = tempfile::tempdir().expect("a temporary folder");
    live(prepared.path(), &models(&Scripted::new(None, Vec::new())), far(), None, async |host| {
        host.deploy("chat", REMOTE, chatter()).await.expect("valid");
        host.agents.drain(std::time::Duration::ZERO).await;
        host.store().close().await;
    });
    let mut crashes = 0;
    for moment in [Moment::Commit, Moment::Committed] {
        for number in 1.. {
            let broken = vec![Step::Say("One"), Step::Fail(UpstreamFault::CutOff)];
            let whole = || vec![Step::Say("Two."), Step::Finish];
            let remote = Scripted::new(None, vec![broken, whole(), whole()]);
            let models = models(&remote);
            let folder = copy_of(prepared.path());
            let life = live(folder.path(), &models, far(), Some(Crash { moment, number }), async |host| {
                host.agents.invoke(keyed()).await.expect("taken").outcome().await.expect("the turn succeeds");
            });
            let Life::Cut(left) = life else { break };
            crashes += 1;
            let life = live(left.path(), &models, far(), None, async |host: &Host| {
                let (reply, shown) = followed(host, keyed()).await;
                assert_eq!((reply.as_str(), shown.as_str()), ("Two.", "Two."), "{moment:?} {number}");
                let session = host.agents.session("chat", "s").await.expect("the session exists");
                let said: Vec<_> = session.messages.iter().map(|message| message.content.as_str()).collect();
                assert_eq!(said, [QUESTION, "Two."], "{moment:?} {number}");
                report(host, UsageBy::Model).await.lines
            });
            let Life::Whole(lines) = life else { unreachable!("nothing cuts it off") };
            let [line] = lines.as_slice() else { panic!("{moment:?} {number}: {lines:?}") };
            let UsageCounts { requests, estimated_requests, .. } = line.counts;
            let asked = remote.asked().len() as u64;
            assert_eq!(requests, estimated_requests + 1, "{moment:?} {number}: one answer is whole");
            assert!(requests <= asked, "{moment:?} {number}: {requests} of {asked} requests are counted");
        }
    }
    assert!(crashes > 5, "{crashes}");
}
