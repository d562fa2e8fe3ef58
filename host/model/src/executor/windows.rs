//! The pages of layers with a window where they have fewer than the other layers.
//!
//! Invariant: a page of the cache keeps what these layers need until it is released, and gets one of their pages when a step first
//! writes to it. A step that would see a page that was released is refused, so nothing is read that belongs to other tokens.

use super::{ExecutorLimits, ExecutorOptions, option};
use crate::batch::{Batch, BatchSequence, PAGE_TOKENS, PageId, WindowChange, WindowLimits};
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Pages beyond those of a window and a step: both begin and end within a page, and the last token may be computed again.
const PARTIAL_PAGES: usize = 3;

/// For each page of the cache, the page that layers with a window have in its place.
pub(super) struct WindowPages {
    window: usize,
    places: Vec<Option<u32>>,
    free: Vec<u32>,
}

/// Returns the limits that the options set, or `None` if layers with a window have as many pages as the others.
pub(super) fn window_limits(
    config: &ModelConfig,
    options: &ExecutorOptions,
    limits: &ExecutorLimits,
) -> Result<Option<WindowLimits>, ModelError> {
    let Some((tokens, window)) = options.window_tokens.zip(config.windows.iter().flatten().copied().max())
    else {
        return Ok(None);
    };
    let pages = window_page_count(options, limits);
    let least = (window + limits.max_batch_tokens).div_ceil(PAGE_TOKENS) + PARTIAL_PAGES;
    if tokens.div_ceil(PAGE_TOKENS) < least {
        let problem = format!(
            "{tokens} tokens do not hold a window of {window} tokens and a step of {}; set at least {}",
            limits.max_batch_tokens,
            least * PAGE_TOKENS
        );
        return Err(option("window_tokens", problem));
    }
    Ok((pages < limits.page_count).then_some(WindowLimits { window, pages }))
}

/// Returns the number of pages of a layer with a window.
pub(super) fn window_page_count(options: &ExecutorOptions, limits: &ExecutorLimits) -> usize {
    let wanted = options.window_tokens.map(|tokens| tokens.div_ceil(PAGE_TOKENS));
    wanted.map_or(limits.page_count, |wanted| wanted.min(limits.page_count))
}

impl WindowPages {
    /// Returns the pages of a cache of `page_count` pages, none of which keeps anything.
    pub(super) fn new(limits: WindowLimits, page_count: usize) -> Self {
        let free = (0..limits.pages as u32).rev().collect();
        WindowPages { window: limits.window, places: vec![None; page_count], free }
    }

    /// Releases pages, and moves what pages keep.
    pub(super) fn apply(&mut self, changes: &[WindowChange]) {
        for change in changes {
            match *change {
                WindowChange::Release(page) => {
                    let place = self.places[page.0 as usize].take();
                    self.free.extend(place);
                }
                WindowChange::Move { from, to } => {
                    if let Some(place) = self.places[from.0 as usize].take() {
                        let former = self.places[to.0 as usize].replace(place);
                        self.free.extend(former);
                    }
                }
            }
        }
    }

    /// Returns the pages of each sequence in layers with a window. Those before a window have any number.
    pub(super) fn of_batch(&mut self, batch: &Batch) -> Result<Vec<Vec<u32>>, ModelError> {
        batch.sequences.iter().map(|sequence| self.of_sequence(sequence)).collect()
    }

    fn of_sequence(&mut self, sequence: &BatchSequence) -> Result<Vec<u32>, ModelError> {
        let end = (sequence.start + sequence.tokens.len()).div_ceil(PAGE_TOKENS);
        let first = (sequence.start + 1).saturating_sub(self.window) / PAGE_TOKENS;
        let mut pages = vec![0; sequence.pages.len()];
        let seen = pages.iter_mut().zip(&sequence.pages).enumerate().take(end).skip(first);
        for (at, (own, page)) in seen {
            *own = self.place(*page, at * PAGE_TOKENS >= sequence.start)?;
        }
        Ok(pages)
    }

    /// Returns what is in place of a page. Only a page without computed tokens gets one here.
    fn place(&mut self, page: PageId, is_new: bool) -> Result<u32, ModelError> {
        let place = &mut self.places[page.0 as usize];
        if place.is_none() && is_new {
            *place = self.free.pop();
        }
        place.ok_or_else(|| {
            let problem = match is_new {
                true => format!("layers with a window have no page left for page {}", page.0),
                false => format!("page {} was released, but a window still covers it", page.0),
            };
            ModelError::Batch { problem }
        })
    }
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
