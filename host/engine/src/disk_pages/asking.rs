//! Asks other hosts for pages: for those that they have, and for those that one of them computes for this host.

use std::time::{Duration, Instant};

use skep_cache::{Digest, MAX_ASKED_PAGES, PageQuestion};
use skep_model::PAGE_TOKENS;

use super::promotion::{Promotion, Reader, Reading, Source};
use super::split::{self, TokenTimes};
use super::{DiskPages, LONG_PATIENCE};
use crate::scheduler::Scheduler;
use crate::sequence_id::SequenceId;
use crate::{Affinity, PrefillOrder, Priority};

/// Prefixes of fewer missing pages are computed, and no other host is asked for them.
const MIN_FETCH_PAGES: usize = 8;
/// A request waits for this multiple of the time that another host is expected to take for its prompt, and this time in addition.
const PREFILL_PATIENCE: u32 = 2;
const PREFILL_GRACE: Duration = Duration::from_secs(2);

impl DiskPages {
    /// Asks the other hosts for the pages of a request that this one lacks, and makes the request wait for them, if getting all
    /// of them is expected to be better than computing. `names` are those of all pages, of which the first `in_memory` are here.
    pub(super) fn ask_peers(
        &mut self,
        id: SequenceId,
        (affinity, priority, tokens): (&Affinity, Priority, &[u32]),
        (names, in_memory): (&[Digest], usize),
        scheduler: &mut Scheduler,
    ) {
        let wanted = (names.len() - in_memory).min(self.room(scheduler));
        if wanted < MIN_FETCH_PAGES {
            return;
        }
        let (names, tokens) = (&names[..in_memory + wanted], &tokens[..(in_memory + wanted) * PAGE_TOKENS]);
        let asked = match self.have_computed((affinity, priority, tokens), (names, in_memory), scheduler) {
            Some(asked) => Some(asked),
            None => self.fetch_if_quicker(&names[in_memory..], scheduler),
        };
        let Some((reading, patience)) = asked else { return };
        let deadline = Instant::now() + patience;
        let held = scheduler.borrow_pages(&affinity.tenant, tokens, in_memory);
        scheduler.hold(id);
        let prefix = (affinity, tokens);
        self.promotions.push(Promotion::new(Reader::Request(id), prefix, reading, held, deadline));
    }

    /// Has another host compute the pages after the first `first` ones, if there is one and the prompt is long enough. Returns
    /// the pages, and how long to wait for them.
    fn have_computed(
        &self,
        (affinity, priority, tokens): (&Affinity, Priority, &[u32]),
        (names, first): (&[Digest], usize),
        scheduler: &Scheduler,
    ) -> Option<(Reading, Duration)> {
        let peers = self.peers.as_ref()?;
        let view = peers.prefill_view(&self.model)?;
        // The pages after those that one order may have are computed here.
        let pages = names.len().min(MAX_ASKED_PAGES);
        let (names, tokens) = (&names[..pages], &tokens[..pages * PAGE_TOKENS]);
        let missing = pages.checked_sub(first).filter(|missing| *missing > 0)?;
        let latency_s = peers.fetch_time(0).as_secs_f64();
        let all_s = peers.fetch_time((missing * self.page_bytes) as u64).as_secs_f64();
        let taken_s = if scheduler.is_running() { self.speed.take_time(missing).as_secs_f64() } else { 0.0 };
        let missing_tokens = missing * PAGE_TOKENS;
        let times = TokenTimes {
            compute_s: self.speed.compute_time(missing_tokens).as_secs_f64() / missing_tokens as f64,
            fetch_s: (all_s - latency_s).max(taken_s) / missing_tokens as f64,
            latency_s,
        };
        let within = match split::expected(missing_tokens, times, view) {
            _ if self.reads_always() && missing_tokens >= view.min_tokens => LONG_PATIENCE,
            Some(expected) => PREFILL_PATIENCE * expected + PREFILL_GRACE,
            None => return None,
        };
        let question = self.question(&names[first..]);
        let (names, asked) = (names.to_vec(), question.names.clone());
        let (model, affinity, tokens) = (self.model.clone(), affinity.clone(), tokens.to_vec());
        let order = PrefillOrder { model, affinity, priority, tokens, names, first, question, within };
        let prefilled = peers.prefill(order)?;
        let (pages, report) = (prefilled.pages, Some(prefilled.report));
        Some((Reading { source: Source::Peers, names: asked, pages, report }, within))
    }

    /// Fetches pages that another host has, if that is expected to be quicker than computing them. Returns how long to wait for
    /// them, too.
    fn fetch_if_quicker(&mut self, missing: &[Digest], scheduler: &Scheduler) -> Option<(Reading, Duration)> {
        let compute = self.speed.compute_time(missing.len() * PAGE_TOKENS);
        let mut fetch_time = self.peers.as_ref()?.fetch_time((missing.len() * self.page_bytes) as u64);
        if scheduler.is_running() {
            fetch_time = fetch_time.max(self.speed.take_time(missing.len()));
        }
        if fetch_time >= compute && !self.reads_always() {
            return None;
        }
        let patience = self.patience(fetch_time, compute);
        Some((self.fetch(missing)?, patience))
    }

    /// Starts to fetch pages from another host, unless nobody had them a moment ago.
    pub(super) fn fetch(&mut self, names: &[Digest]) -> Option<Reading> {
        let first = *names.first().filter(|_| names.len() >= MIN_FETCH_PAGES)?;
        let peers = self.peers.as_ref().filter(|peers| peers.are_there())?;
        if self.misses.has(first, Instant::now()) {
            return None;
        }
        let question = self.question(names);
        let names = question.names.clone();
        let pages = peers.fetch(question)?;
        Some(Reading { source: Source::Peers, names, pages, report: None })
    }

    /// Returns the question for these pages of this model.
    fn question(&self, names: &[Digest]) -> PageQuestion {
        PageQuestion { layout: self.layout_name, payload_bytes: self.page_bytes, names: names.to_vec() }
    }
}
