//! The text of answers that are being produced, for clients that follow a response in the background.

use skep_engine::chat::ChatEvent;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};
use tokio::sync::Notify;

/// The answers that are being produced or followed, by the ids of their batches.
#[derive(Default)]
pub(crate) struct LiveAnswers(Mutex<HashMap<String, Weak<LiveAnswer>>>);

/// An answer that is being produced. If it is produced again, it starts from the beginning.
#[derive(Default)]
pub struct LiveAnswer {
    text_so_far: Mutex<PartialAnswer>,
    changed: Notify,
}

/// Everything that a model has generated so far, except for calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartialAnswer {
    pub reasoning: String,
    pub text: String,
}

impl LiveAnswers {
    /// Returns the answer of a batch, which those who produce it and those who follow it share.
    pub(crate) fn of(&self, batch: &str) -> Arc<LiveAnswer> {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = answers.get(batch).and_then(Weak::upgrade) {
            return answer;
        }
        answers.retain(|_, answer| answer.strong_count() > 0);
        let answer = Arc::default();
        answers.insert(batch.to_owned(), Arc::downgrade(&answer));
        answer
    }

    /// Wakes the followers of the answer of a batch that has ended.
    pub(super) fn ended(&self, batch: &str) {
        let answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = answers.get(batch).and_then(Weak::upgrade) {
            answer.changed.notify_waiters();
        }
    }
}

impl LiveAnswer {
    pub(super) fn begin(&self) {
        *self.text_so_far.lock().unwrap_or_else(PoisonError::into_inner) = PartialAnswer::default();
    }

    pub(super) fn note(&self, event: &ChatEvent) {
        let mut said = self.text_so_far.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            ChatEvent::Reasoning { delta } => said.reasoning.push_str(delta),
            ChatEvent::Text { delta, .. } => said.text.push_str(delta),
            _ => return,
        }
        drop(said);
        self.changed.notify_waiters();
    }

    /// Returns what was generated beyond these numbers of bytes of the reasoning and the text, or waits until there
    /// may be more or the answer may have ended.
    pub async fn beyond(&self, reasoning: usize, text: usize) -> Option<PartialAnswer> {
        let changed = self.changed.notified();
        let more = |said: &str, from: usize| said.get(from..).unwrap_or_default().to_owned();
        let said = {
            let said = self.text_so_far.lock().unwrap_or_else(PoisonError::into_inner);
            PartialAnswer { reasoning: more(&said.reasoning, reasoning), text: more(&said.text, text) }
        };
        if said != PartialAnswer::default() {
            return Some(said);
        }
        changed.await;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_follower_gets_what_it_has_not_seen() {
        let answers = LiveAnswers::default();
        let answer = answers.of("a");
        let text = |delta: &str| ChatEvent::Text { delta: delta.into(), logprobs: Vec::new() };
        answer.note(&ChatEvent::Reasoning { delta: "hm".into() });
        answer.note(&text("one"));
        let follower = answers.of("a");
        let said = follower.beyond(1, 0).await;
        assert_eq!(said, Some(PartialAnswer { reasoning: "m".into(), text: "one".into() }));
        let waits = tokio::spawn(async move { follower.beyond(2, 3).await });
        tokio::task::yield_now().await;
        answers.ended("a");
        assert_eq!(waits.await.expect("it ends"), None);
        answer.begin();
        answer.note(&text("on"));
        assert_eq!(
            answer.beyond(0, 1).await,
            Some(PartialAnswer { reasoning: String::new(), text: "n".into() })
        );
        drop(answer);
        answers.of("b");
        assert!(!answers.0.lock().expect("unpoisoned").contains_key("a"), "nobody follows it");
    }
}
