//! Lets a request wait for pages that the read of another one brings, so that nothing is read twice.
//!
//! Invariant: a request waits for no page that it does not need, and no longer than for a read of its own. The read of another
//! tenant brings it nothing, because prefix trees are per tenant.

use std::time::Instant;

use skep_cache::Digest;
use skep_model::PAGE_TOKENS;

use super::DiskPages;
use super::promotion::{Promotion, Source};
use crate::scheduler::Scheduler;
use crate::sequence_id::SequenceId;

/// A request that is held until another read has brought pages of its prefix.
pub(super) struct HeldRequest {
    pub id: SequenceId,
    tenant: String,
    /// Number of pages of its prefix up to the last one that the read brings.
    pages: usize,
    /// The name of that page.
    last: Digest,
    /// The time from which on the request computes what the read has not brought.
    deadline: Instant,
    /// The time from which on the request waits for no read.
    latest: Instant,
}

impl DiskPages {
    /// Holds a request if another read brings the page after the first `in_memory` ones of its prefix. Returns `None` if none
    /// does. A request that has waited before waits until `latest` at most.
    pub(super) fn wait_for_other_read(
        &mut self,
        (id, latest): (SequenceId, Option<Instant>),
        (tenant, names): (&str, &[Digest]),
        in_memory: usize,
        scheduler: &mut Scheduler,
    ) -> Option<()> {
        let brings = |other: &Promotion| other.brings_up_to((tenant, names), in_memory);
        let (pages, prefilled_by) =
            self.promotions.iter().find_map(|other| Some((brings(other)?, other.prefill_deadline())))?;
        let now = Instant::now();
        let patience = |pages: usize| {
            let compute = self.speed.compute_time(pages * PAGE_TOKENS);
            now + self.patience(self.read_time(pages), compute)
        };
        let deadline = prefilled_by.unwrap_or_else(|| patience(pages - in_memory));
        let deadline = latest.map_or(deadline, |latest| deadline.min(latest));
        let latest = latest.unwrap_or_else(|| patience(names.len() - in_memory));
        let (tenant, last) = (tenant.to_owned(), names[pages - 1]);
        scheduler.hold(id);
        self.waiting_for_other_read.push(HeldRequest { id, tenant, pages, last, deadline, latest });
        Some(())
    }

    /// Lets requests look up their prefix again once another read has brought what it has of it, or has ended. A request whose
    /// deadline has passed computes its pages.
    pub(super) fn resume_waiting(&mut self, scheduler: &mut Scheduler) {
        let now = Instant::now();
        for held in std::mem::take(&mut self.waiting_for_other_read) {
            let last = (held.pages, &held.last);
            match self.promotions.iter_mut().find(|other| other.still_brings(&held.tenant, last)) {
                Some(_) if now < held.deadline => self.waiting_for_other_read.push(held),
                Some(late) => {
                    late.end_if_ahead();
                    scheduler.release_hold(held.id);
                }
                None => {
                    scheduler.release_hold(held.id);
                    if let Some((affinity, priority, tokens)) = scheduler.waiting_prefix(held.id) {
                        let prefix = (&affinity, priority, tokens.as_slice());
                        let from = (Source::Disk, false, Some(held.latest));
                        self.look_up_tokens(held.id, prefix, from, scheduler);
                    }
                }
            }
        }
    }
}
