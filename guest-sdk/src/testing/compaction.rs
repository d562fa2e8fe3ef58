//! What the host makes of a conversation that is compacted.

use crate::Entry;

/// The host's own question for a summary.
const REQUEST: &str = "Summarise our conversation so far.";

/// The first message that stays if at most `keep` do, where a call is not parted from its result and an answer is among what
/// goes. `None`: there is nothing to be summarised.
pub fn cut(entries: &[Entry], keep: usize) -> Option<usize> {
    let answered = entries.iter().position(|entry| matches!(entry, Entry::Assistant { .. }))?;
    let from = (answered + 1).max(entries.len().saturating_sub(keep));
    (from..=entries.len()).find(|at| !matches!(entries.get(*at), Some(Entry::Tool { .. })))
}

/// The conversation from `at` on, after its system message and a summary.
pub fn compacted(entries: &[Entry], at: usize, summary: &str) -> Vec<Entry> {
    let system = entries.first().filter(|entry| matches!(entry, Entry::System(_)));
    let mut compacted: Vec<Entry> = system.cloned().into_iter().collect();
    compacted.push(Entry::User(REQUEST.to_owned()));
    compacted.push(Entry::Assistant { text: summary.to_owned(), tool_calls: Vec::new() });
    if matches!(entries.get(at), Some(Entry::Assistant { .. })) {
        compacted.extend(entries[..at].iter().rfind(|entry| matches!(entry, Entry::User(_))).cloned());
    }
    compacted.extend_from_slice(&entries[at..]);
    compacted
}
