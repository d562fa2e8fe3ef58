//! Compaction of a conversation, in the same way as the host does it.

use crate::Entry;

/// The question that the host puts in front of a summary.
const REQUEST: &str = "Summarise our conversation so far.";

/// Returns the index of the first message that stays if at most `keep` messages do. A call is not separated
/// from its result, and at least one answer is among the removed messages. Returns `None` if there is nothing
/// to summarize.
pub fn cut(entries: &[Entry], keep: usize) -> Option<usize> {
    let answered = entries.iter().position(|entry| matches!(entry, Entry::Assistant { .. }))?;
    let from = (answered + 1).max(entries.len().saturating_sub(keep));
    (from..=entries.len()).find(|at| !matches!(entries.get(*at), Some(Entry::Tool { .. })))
}

/// Returns the system message, the summary, and the messages from `at` on.
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
