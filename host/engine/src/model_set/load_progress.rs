//! The progress of a load, written by the loader and read by everyone who waits.

use std::sync::{Arc, Mutex, PoisonError};

/// The progress of one load. Clones share it.
#[derive(Clone, Default)]
pub struct LoadProgress {
    step: Arc<Mutex<Step>>,
}

#[derive(Default)]
struct Step {
    text: String,
    done: u64,
    total: Option<u64>,
}

impl LoadProgress {
    /// Begins a step, with its number of bytes or items if that is known.
    pub fn begin(&self, text: &str, total: Option<u64>) {
        *self.lock() = Step { text: text.to_owned(), done: 0, total };
    }

    /// Sets the number of bytes or items of the current step, if it was not known at the beginning.
    pub fn expect(&self, total: u64) {
        self.lock().total = Some(total);
    }

    /// Sets the number of bytes or items of the current step that are done.
    pub fn advance_to(&self, done: u64) {
        self.lock().done = done;
    }

    /// Returns the text of the current step.
    pub fn text(&self) -> String {
        self.lock().text.clone()
    }

    /// Returns the finished part of the current step in percent, if its size is known.
    pub fn percent(&self) -> Option<u8> {
        let step = self.lock();
        let total = step.total.filter(|total| *total > 0)?;
        Some((step.done.min(total) as f64 / total as f64 * 100.0) as u8)
    }

    /// Returns the progress for people, such as "downloading, 40 %".
    pub fn describe(&self) -> String {
        match (self.text(), self.percent()) {
            (text, _) if text.is_empty() => "starting".to_owned(),
            (text, Some(percent)) => format!("{text}, {percent} %"),
            (text, None) => text,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Step> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
