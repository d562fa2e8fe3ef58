//! Long sessions in the harness: paging of state and messages, and compaction.

use skep_sdk::serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{
    AgentError, CompactOptions, CompactionPolicy, Context, Entry, Message, Reply, StateError, agent,
};

/// Keeps numbers and a conversation.
#[agent]
async fn keeper(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let state = cx.state();
    match message.text.as_str() {
        "list" => {
            (0..5).try_for_each(|number| state.set(&format!("n/{number}"), &number))?;
            state.set("other", "text")?;
            let first = state.list::<u32>("n/", None, 2)?;
            let rest = state.list::<u32>("n/", Some("n/1"), 10)?;
            let wrong = matches!(state.list::<u32>("", None, 10), Err(StateError::Json { key, .. }) if key == "other");
            Reply::json("", &(first, rest, wrong))
        }
        "large" => {
            state.set("full", &"x".repeat((256 << 10) - 2))?;
            let over = state.set("over", &"x".repeat((256 << 10) - 1));
            Reply::json("", &matches!(over, Err(StateError::QuotaExceeded(_))))
        }
        "page" => {
            let page = cx.conversation().messages_page(1, 2)?;
            Reply::json("", &(page.len(), page[0] == Entry::User("hello".into())))
        }
        "compact" | "in my words" => {
            let options = CompactOptions::new().with_keep_recent(2);
            let options = match message.text.as_str() {
                "compact" => options.with_max_tokens(100),
                _ => options.with_summary("We greeted."),
            };
            let compaction = cx.conversation().compact(options).await?;
            Reply::json(compaction.summary, &compaction.dropped)
        }
        text => {
            cx.conversation().system("Be kind.").with_compaction(CompactionPolicy::Off).user(text).run().await
        }
    }
}

fn talked(model: ScriptedModel) -> Harness {
    let mut harness = Harness::new(keeper).model(model);
    for text in ["hello", "how are you?", "and now?"] {
        harness.send(text).unwrap();
    }
    harness
}

#[test]
fn state_is_listed_page_by_page_with_its_types() {
    let reply = Harness::new(keeper).send("list").unwrap().reply;
    let expected = json!([[["n/0", 0], ["n/1", 1]], [["n/2", 2], ["n/3", 3], ["n/4", 4]], true]);
    assert_eq!(reply.data, Some(expected));
}

#[test]
fn rejects_oversized_values_like_the_host() {
    assert_eq!(Harness::new(keeper).send("large").unwrap().reply.data, Some(json!(true)));
}

#[test]
fn messages_are_read_page_by_page() {
    let mut harness = talked(ScriptedModel::new().text("Hi.").text("Fine.").text("Now."));
    assert_eq!(harness.send("page").unwrap().reply.data, Some(json!([2, true])));
}

#[test]
fn a_compacted_conversation_has_its_system_message_a_summary_and_the_last_messages() {
    for (text, steps, summary) in [("compact", 1, "They greeted."), ("in my words", 0, "We greeted.")] {
        let mut model = ScriptedModel::new().text("Hi.").text("Fine.").text("Now.");
        if steps == 1 {
            model = model.text("They greeted.");
        }
        let mut harness = talked(model);
        let outcome = harness.send(text).unwrap();
        assert_eq!((outcome.reply.text.as_str(), outcome.generations), (summary, steps));
        assert_eq!(outcome.reply.data, Some(json!(4)));
        let after = harness.conversation("main");
        assert_eq!(after.len(), 5);
        assert_eq!(after[0], Entry::System("Be kind.".into()));
        assert_eq!(after[2], Entry::Assistant { text: summary.into(), tool_calls: vec![] });
        assert_eq!(after[3], Entry::User("and now?".into()));
    }
}

#[test]
fn a_conversation_without_answers_has_nothing_to_compact() {
    let outcome = Harness::new(keeper).send("compact").unwrap();
    assert_eq!((outcome.generations, outcome.reply.data), (0, Some(json!(0))));
}
