//! The use of remote models that no event of an answer reports, although their servers bill it.
//!
//! Parts of it are attempts that were cut off before anything of them was sent to the caller, and answers that were refused
//! because they did not match their schema. It survives the errors of a request, and callers that leave.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Usage;

/// The unreported use of one request, if anybody counts it. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Unreported(Option<Arc<Mutex<Vec<UnreportedUse>>>>);

/// The unreported use of one request to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreportedUse {
    pub model: String,
    /// The part of the request's use that the events of the answer do not report. If they report its prompt, it has no
    /// prompt tokens.
    pub usage: Usage,
    /// Whether the server did not count the tokens.
    pub is_estimate: bool,
}

/// The entry of one request to a server, whose use grows while the server answers.
#[derive(Debug)]
pub struct UnreportedEntry {
    of: Unreported,
    index: usize,
}

impl Unreported {
    /// Returns a record in which use is kept.
    pub fn kept() -> Self {
        Unreported(Some(Arc::default()))
    }

    /// Returns the same record if it keeps use, or a new one that does.
    pub(crate) fn or_kept(self) -> Self {
        if self.0.is_some() { self } else { Self::kept() }
    }

    /// Adds an entry without use for a request to a model.
    pub fn begin(&self, model: &str) -> UnreportedEntry {
        let mut index = 0;
        if let Some(mut uses) = self.lock() {
            index = uses.len();
            uses.push(UnreportedUse { model: model.to_owned(), usage: Usage::default(), is_estimate: true });
        }
        UnreportedEntry { of: self.clone(), index }
    }

    /// Returns the use so far, by request.
    pub fn uses(&self) -> Vec<UnreportedUse> {
        let Some(uses) = self.lock() else { return Vec::new() };
        uses.iter().filter(|used| used.usage != Usage::default()).cloned().collect()
    }

    /// Returns the number of output tokens so far.
    pub fn output_tokens(&self) -> usize {
        self.lock().map_or(0, |uses| uses.iter().map(|used| used.usage.produced_tokens()).sum())
    }

    fn lock(&self) -> Option<MutexGuard<'_, Vec<UnreportedUse>>> {
        let uses = self.0.as_ref()?;
        Some(uses.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl UnreportedEntry {
    /// Replaces the entry's use with an estimate.
    pub fn estimate(&self, usage: Usage) {
        self.set(usage, true);
    }

    /// Replaces the entry's use with what the server counted.
    pub fn count(&self, usage: Usage) {
        self.set(usage, false);
    }

    /// Removes the use, because the answer reports it.
    pub fn clear(&self) {
        self.set(Usage::default(), true);
    }

    fn set(&self, usage: Usage, is_estimate: bool) {
        if let Some(mut uses) = self.of.lock() {
            let entry = &mut uses[self.index];
            (entry.usage, entry.is_estimate) = (usage, is_estimate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(prompt_tokens: u32, completion_tokens: u32) -> Usage {
        Usage { prompt_tokens, completion_tokens, ..Usage::default() }
    }

    #[test]
    fn use_is_kept_until_the_answer_reports_it() {
        let unreported = Unreported::kept();
        let (first, second) = (unreported.begin("a/m"), unreported.begin("b/m"));
        assert!(unreported.uses().is_empty(), "nothing was used yet");
        first.estimate(usage(9, 1));
        first.estimate(usage(9, 4));
        second.count(usage(9, 3));
        drop((first, unreported.begin("c/m")));
        assert_eq!(unreported.output_tokens(), 7);
        second.clear();
        let left = UnreportedUse { model: "a/m".to_owned(), usage: usage(9, 4), is_estimate: true };
        assert_eq!(unreported.uses(), [left]);
    }

    #[test]
    fn a_record_that_keeps_nothing_stays_empty() {
        let unreported = Unreported::default();
        unreported.begin("a/m").count(usage(9, 4));
        assert_eq!((unreported.uses(), unreported.output_tokens()), (Vec::new(), 0));
        let kept = unreported.or_kept();
        kept.clone().or_kept().begin("a/m").count(usage(9, 4));
        assert_eq!(kept.uses().len(), 1, "a record that keeps use is passed on");
    }
}
