//! Tests of searches in what was said: their order, their bounds, and sessions that are deleted.

use super::{fixture::Host, guest::echo};
use crate::{FoundSessions, SearchWords, Tenant, capability::StoredConversation};
use skep_engine::chat::{ChatMessage, Transcript};
use skep_store::{ConversationRow, SessionCursor, SessionSearch, TurnCommit};

async fn host() -> Host {
    let host = Host::start().await;
    host.deploy("a", "", echo()).await.expect("valid");
    host
}

fn conversation(name: &str, text: &str) -> ConversationRow {
    let mut transcript = Transcript::new();
    transcript.push(ChatMessage::user(text));
    let stored = StoredConversation { model: "tiny".into(), digest: None, transcript };
    stored.row(name).expect("written")
}

/// Stores a session with these conversations.
async fn said(host: &Host, session: &str, at_ms: u64, conversations: Vec<ConversationRow>) {
    let (agent, session) = ("a".to_owned(), session.to_owned());
    let commit = TurnCommit { agent, session, turn: 1, at_ms, conversations, ..TurnCommit::default() };
    host.store().commit_turn(commit).await.expect("stored");
}

async fn search(host: &Host, tenant: Option<&str>, after: Option<SessionCursor>) -> FoundSessions {
    let tenant = tenant.map(|name| Tenant::new(name).expect("a name"));
    let search = SessionSearch { after, ..SessionSearch::default() };
    let words = SearchWords::new("hive NORTH").expect("words");
    host.agents.search_sessions(tenant.as_ref(), search, words, 10).await.expect("searched")
}

fn ids(found: &FoundSessions) -> Vec<&str> {
    found.sessions.iter().map(|found| found.session.session.as_str()).collect()
}

#[tokio::test]
async fn sessions_are_found_in_their_tenant_the_newest_first_until_they_are_deleted() {
    let host = host().await;
    said(&host, "one", 10, vec![conversation("main", "the north hive")]).await;
    let two = vec![conversation("main", "the north"), conversation("side", "North, said the hive")];
    said(&host, "two", 20, two).await;
    said(&host, "acme/x", 30, vec![conversation("main", "a hive in the north")]).await;
    let unreadable = ConversationRow { name: "main".into(), body: b"?".to_vec(), ..Default::default() };
    said(&host, "broken", 40, vec![unreadable]).await;
    for (tenant, expected) in [
        (None, &["acme/x", "two", "one"][..]),
        (Some("local"), &["two", "one"][..]),
        (Some("acme"), &["acme/x"][..]),
        (Some("acm"), &[][..]),
    ] {
        let found = search(&host, tenant, None).await;
        assert_eq!((ids(&found), found.searched_to), (expected.to_vec(), None), "{tenant:?}");
    }
    let message = search(&host, Some("local"), None).await.sessions.remove(0).message;
    assert_eq!((message.conversation.as_str(), message.number, message.role), ("side", 1, "user"));
    assert_eq!(message.excerpt, "North, said the hive");
    host.agents.delete_session("a", "two").await.expect("deleted");
    assert_eq!(ids(&search(&host, Some("local"), None).await), ["one"]);
}

#[tokio::test]
async fn a_search_through_thousands_of_sessions_stops_and_continues() {
    let host = host().await;
    said(&host, "old", 1, vec![conversation("main", "the north hive")]).await;
    for number in 0..2_100 {
        said(&host, &format!("s{number}"), 100 + number, Vec::new()).await;
    }
    let first = search(&host, None, None).await;
    assert!(first.sessions.is_empty() && first.searched_to.is_some(), "{first:?}");
    let second = search(&host, None, first.searched_to).await;
    assert_eq!((ids(&second), second.searched_to), (vec!["old"], None));
}
