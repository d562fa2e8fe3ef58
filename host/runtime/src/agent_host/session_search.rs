//! Searches what was said in sessions: the messages of their conversations, from the session whose last turn is the newest to
//! older ones.
//!
//! A search reads the conversations themselves. There is no index, which would be a second copy of what was said, and so there is
//! none that a deletion has to find. One call reads a bounded number of sessions and bytes; the next one continues where it stopped.

use super::{AgentHost, MAX_PAGE};
use crate::{
    RuntimeError, Tenant,
    capability::is_quick_conversation,
    said::{SearchWords, said_in},
};
use skep_engine::Cancel;
use skep_store::{ConversationPlace, ConversationRow, ListedSession, SessionCursor, SessionSearch};
use std::{collections::BTreeMap, sync::Arc};

/// Maximum number of sessions that one call reads.
const MAX_SESSIONS: usize = 2_000;
/// Maximum number of bytes of conversations that one call reads; it reads at least one session.
const MAX_BYTES: usize = 64 << 20;
/// Number of sessions that are listed at once.
const LISTED: u32 = 100;
/// Conversations that are in memory at once have at most this many bytes together, unless a single one has more.
const READ_BYTES: usize = 1 << 20;

/// The sessions that a search has found, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundSessions {
    pub sessions: Vec<FoundSession>,
    /// The place of the last session that was searched, if there are more.
    pub searched_to: Option<SessionCursor>,
}

/// A session in whose messages the words were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSession {
    pub session: ListedSession,
    pub message: FoundMessage,
}

/// The first message of a session that has the words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundMessage {
    pub conversation: String,
    /// Number of the message in its conversation, from 1.
    pub number: u64,
    pub role: &'static str,
    /// The part of its text around the first word.
    pub excerpt: String,
}

/// The number of sessions and bytes that a call may still read.
struct Left {
    sessions: usize,
    bytes: usize,
}

impl AgentHost {
    /// Returns at most `limit` sessions of a tenant, or of all tenants, in whose messages the words were said. It may return
    /// fewer, or none, and say that there are more to search.
    pub async fn search_sessions(
        &self,
        tenant: Option<&Tenant>,
        search: SessionSearch,
        words: SearchWords,
        limit: u32,
    ) -> Result<FoundSessions, RuntimeError> {
        let (store, limit) = (&self.host().store, limit.clamp(1, MAX_PAGE) as usize);
        let mut search = SessionSearch { folder: tenant.map(Tenant::folder), ..search };
        let asker = tenant.cloned().unwrap_or_else(Tenant::local);
        let words = Arc::new(words);
        let mut found = FoundSessions::default();
        let mut left = Left { sessions: MAX_SESSIONS, bytes: MAX_BYTES };
        loop {
            let mut listed = store.recent_sessions(&search, LISTED).await?;
            let is_end = listed.len() < LISTED as usize;
            let keys: Vec<i64> = listed.iter().map(|session| session.cursor.key).collect();
            let mut places = store.conversation_places(&keys).await?;
            let fitting = left.take(&listed, &places);
            let is_cut = fitting < listed.len();
            listed.truncate(fitting);
            places.retain(|place| listed.iter().any(|session| session.cursor.key == place.session));
            let mut messages = self.find(&places, &words, asker.as_str()).await?;
            for session in listed {
                found.searched_to = Some(session.cursor);
                search.after = Some(session.cursor);
                let Some(message) = messages.remove(&session.cursor.key) else { continue };
                found.sessions.push(FoundSession { session, message });
                if found.sessions.len() == limit {
                    return Ok(found);
                }
            }
            if is_cut {
                return Ok(found);
            }
            if is_end {
                found.searched_to = None;
                return Ok(found);
            }
        }
    }

    /// Returns the first message that has the words, for each session with one.
    async fn find(
        &self,
        places: &[ConversationPlace],
        words: &Arc<SearchWords>,
        tenant: &str,
    ) -> Result<BTreeMap<i64, FoundMessage>, RuntimeError> {
        let mut found = BTreeMap::new();
        let mut rest = places;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(first_read(rest));
            rest = later;
            let read = self.host().store.conversation_bodies(now).await?;
            let bytes = read.iter().map(|(_, row)| row.body.len()).sum();
            let words = words.clone();
            let search = move |cancel: &Cancel| found_in(&read, &words, cancel);
            let messages = self.compute().run_unless(is_quick_conversation(bytes), tenant, search).await;
            for (session, message) in messages {
                found.entry(session).or_insert(message);
            }
        }
        Ok(found)
    }
}

impl Left {
    /// Takes as many of the listed sessions as the call may still read, and returns their number. A call reads at least one.
    fn take(&mut self, listed: &[ListedSession], places: &[ConversationPlace]) -> usize {
        let mut sizes: BTreeMap<i64, usize> = BTreeMap::new();
        for place in places {
            *sizes.entry(place.session).or_default() += place.bytes;
        }
        for (index, session) in listed.iter().enumerate() {
            let bytes = sizes.get(&session.cursor.key).copied().unwrap_or(0);
            let is_first = self.sessions == MAX_SESSIONS;
            if self.sessions == 0 || (bytes > self.bytes && !is_first) {
                return index;
            }
            self.sessions -= 1;
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        listed.len()
    }
}

/// Returns the number of the first conversations that are read together, at least one.
fn first_read(places: &[ConversationPlace]) -> usize {
    let mut bytes = 0;
    let fitting = places.iter().take_while(|place| {
        bytes += place.bytes;
        bytes <= READ_BYTES
    });
    fitting.count().max(1)
}

/// Returns the messages of conversations that have the words: the first one of each conversation, with the key of its session.
fn found_in(
    read: &[(i64, ConversationRow)],
    words: &SearchWords,
    cancel: &Cancel,
) -> Vec<(i64, FoundMessage)> {
    let mut found = Vec::new();
    for (session, row) in read {
        if cancel.is_cancelled() {
            break;
        }
        match said_in(&row.body, words) {
            Ok(Some(said)) => {
                let (conversation, role) = (row.name.clone(), said.role.as_str());
                let (number, excerpt) = (said.number, said.excerpt);
                found.push((*session, FoundMessage { conversation, number, role, excerpt }));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(conversation = row.name, "a search skips an unreadable conversation: {error}");
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(key: i64) -> ListedSession {
        ListedSession {
            agent: "a".into(),
            session: format!("s{key}"),
            turns: 1,
            created_at_ms: 1,
            cursor: SessionCursor { updated_at_ms: 1, key },
        }
    }

    fn place(session: i64, bytes: usize) -> ConversationPlace {
        ConversationPlace { session, name: "main".into(), bytes }
    }

    #[test]
    fn a_call_reads_a_bounded_number_of_sessions_and_bytes() {
        let sessions: Vec<_> = (1..=4).map(listed).collect();
        let mut left = Left { sessions: MAX_SESSIONS, bytes: MAX_BYTES };
        let places = [place(1, MAX_BYTES - 10), place(2, 5), place(2, 5), place(3, 1)];
        assert_eq!(left.take(&sessions, &places), 2, "the third one does not fit");
        assert_eq!(left.take(&sessions[3..], &places), 1, "a session without conversations does");
        let mut left = Left { sessions: MAX_SESSIONS, bytes: MAX_BYTES };
        assert_eq!(left.take(&sessions[..1], &[place(1, 2 * MAX_BYTES)]), 1, "one session is always read");
        assert_eq!(left.take(&sessions[1..], &[place(2, 1)]), 0);
        let mut left = Left { sessions: 3, bytes: MAX_BYTES };
        assert_eq!(left.take(&sessions, &[]), 3);
    }

    #[test]
    fn conversations_are_read_together_up_to_a_megabyte() {
        let places = [place(1, READ_BYTES / 2), place(2, READ_BYTES / 2), place(3, 1)];
        assert_eq!(first_read(&places), 2);
        assert_eq!(first_read(&[place(1, 2 * READ_BYTES), place(2, 1)]), 1);
    }
}
