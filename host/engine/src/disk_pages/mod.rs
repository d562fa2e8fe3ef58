//! Moves KV pages to the disk tier and back, and gets pages from other hosts.
//!
//! When a sequence gives back its pages, which may be evicted from then on, they are copied out of the executor between steps and
//! queued for the disk: for half a millisecond, or as many as keep ahead of what steps evict. When a request
//! arrives whose prefix is on disk and not in memory, and reading is expected to take less time than computing, the request
//! waits while its pages are read into the prefix tree, where admission finds them, or computes the first of them while the others
//! are read (`head_start`). A caller may have the pages of a
//! conversation read before a request needs them. What is neither in memory nor on disk may be on another host of a cluster,
//! and is fetched on the same terms, or is computed by another host for this one (`asking`).
//!
//! Invariant: whatever fails, a page is computed instead. Nothing here makes a step wait for the disk or another host.

mod asking;
mod erase_scope;
mod head_start;
mod misses;
mod other_read;
mod promotion;
mod speed;
mod spill;
mod split;
mod warming;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skep_cache::{Digest, DiskTier, LayoutId, Owner, PageNamer, TenantTag};
use skep_model::{Executor, PAGE_TOKENS};

use crate::kv::{PrefixOwner, SequencePages};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::{Affinity, PagePeers, Priority, PublicPart};

pub use erase_scope::EraseScope;
use misses::RecentMisses;
use other_read::HeldRequest;
use promotion::{Progress, Promotion, Reader, Reading, Source};
use speed::Speed;
use spill::{Copied, Spill};
pub use warming::Warmed;
pub(crate) use warming::Warming;

/// Maximum number of ended sequences whose pages wait to be copied.
const MAX_SPILLS: usize = 1024;
/// Time that copying may take between two steps.
pub(crate) const COPY_TIME: Duration = Duration::from_micros(500);
/// Number of pages that are copied for each one that steps compute or may evict, so that copies that are behind catch up.
const AHEAD: usize = 2;
/// Prefixes of fewer pages are computed instead of read.
const MIN_READ_PAGES: usize = 2;
/// Time that a read may take if prefixes are read in any case.
const LONG_PATIENCE: Duration = Duration::from_secs(60);
/// Time that a read ahead of a request may take.
const WARM_PATIENCE: Duration = Duration::from_secs(30);

/// The tier on disk, and the layout of this replica's pages in it.
struct Disk {
    tier: Arc<DiskTier>,
    layout: LayoutId,
}

/// The connection of one replica to the disk tier and to the other hosts.
pub(crate) struct DiskPages {
    /// The name of the model.
    model: String,
    keys: PageNamer,
    /// `None` if no pages are kept on disk.
    disk: Option<Disk>,
    /// The other hosts, if they are asked for pages.
    peers: Option<Arc<dyn PagePeers>>,
    /// Pages that they did not have.
    misses: RecentMisses,
    /// The name of the layout, which other hosts with the same weights and format have too.
    layout_name: Digest,
    page_bytes: usize,
    spills: VecDeque<Spill>,
    /// Number of pages that the last step has computed.
    step_pages: usize,
    promotions: Vec<Promotion>,
    /// Requests whose prefix another request is reading in part; they look it up again afterwards.
    waiting_for_other_read: Vec<HeldRequest>,
    /// Requests for whose prefix there was too little room, with the pages that it takes; they look again when there is.
    short: Vec<(SequenceId, usize)>,
    /// Conversations whose pages another read has in part; they are looked up again afterwards.
    later_warmings: Vec<Warming>,
    speed: Speed,
    /// Number of pages that were taken from reads since the last step.
    taken_pages: usize,
}

impl DiskPages {
    /// Returns the ways of the pages of an executor, or `None` if it cannot copy them out, or they have nowhere to go.
    pub fn of(
        (tier, peers): (Option<&Arc<DiskTier>>, Option<&Arc<dyn PagePeers>>),
        weights: &str,
        executor: &dyn Executor,
        model: &str,
    ) -> Option<Self> {
        let keys = match tier {
            Some(tier) => tier.keys().clone(),
            None => peers?.names()?.clone(),
        };
        let Some(form) = executor.page_form() else {
            tracing::info!(
                model,
                "KV pages of this model are not written to disk: its layers with a window keep fewer pages than the others"
            );
            return None;
        };
        let layout_name = keys.layout(weights, &form.description);
        let disk = match tier.map(|tier| (tier, tier.layout(layout_name, form.bytes))) {
            Some((tier, Ok(layout))) => Some(Disk { tier: tier.clone(), layout }),
            Some((_, Err(error))) => {
                tracing::warn!(model, %error, "KV pages of this model are not written to disk");
                return None;
            }
            None => None,
        };
        Some(DiskPages {
            model: model.to_owned(),
            keys,
            disk,
            peers: peers.cloned(),
            misses: RecentMisses::default(),
            layout_name,
            page_bytes: form.bytes,
            spills: VecDeque::new(),
            step_pages: 0,
            promotions: Vec::new(),
            waiting_for_other_read: Vec::new(),
            short: Vec::new(),
            later_warmings: Vec::new(),
            speed: Speed::default(),
            taken_pages: 0,
        })
    }

    /// Returns whether the pages of ended sequences are kept on disk.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Returns how many of these pages are on disk, from the first one on.
    fn on_disk(&self, names: &[Digest]) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.tier.leading(disk.layout, names))
    }

    /// Returns the time that a read of pages is expected to take.
    fn read_time(&self, pages: usize) -> Duration {
        let bytes = (pages * self.page_bytes) as u64;
        self.disk.as_ref().map_or(Duration::ZERO, |disk| disk.tier.read_time(bytes))
    }

    /// Returns whether prefixes are read in any case.
    fn reads_always(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.tier.reads_always())
    }

    /// Records how fast a step was.
    pub fn record_step(&mut self, tokens: usize, took: Duration) {
        self.speed.record_step(tokens, took);
        self.step_pages = tokens.div_ceil(PAGE_TOKENS);
    }

    /// Queues the pages of prefixes that may be evicted from now on.
    pub fn take_ended(&mut self, scheduler: &mut Scheduler) {
        let Some(disk) = &self.disk else { return };
        for ended in scheduler.take_ended() {
            if ended.tokens.len() < PAGE_TOKENS {
                continue;
            }
            if self.spills.len() == MAX_SPILLS {
                let dropped = self.spills.pop_front().map_or(0, |spill| spill.pages_left());
                disk.tier.record_dropped(dropped);
            }
            self.spills.push_back(Spill::new(ended, &self.keys));
        }
    }

    /// Returns whether ended sequences have pages that are not yet copied out of the executor.
    pub fn has_spills(&self) -> bool {
        !self.spills.is_empty()
    }

    /// Copies pages to the queue of the disk for `time`, and longer only until it is ahead of what steps compute and evict: a page
    /// that is evicted before it was copied is lost. Returns false if the queue is full.
    pub fn copy_some(
        &mut self,
        scheduler: &mut Scheduler,
        executor: &mut dyn Executor,
        time: Duration,
    ) -> bool {
        let Some(Disk { tier, layout }) = self.disk.as_ref().filter(|_| !self.spills.is_empty()) else {
            return true;
        };
        let due = AHEAD * std::mem::take(&mut self.step_pages).max(scheduler.evictable_by_next_step());
        let (started, mut copied) = (Instant::now(), 0);
        while let Some(spill) = self.spills.front_mut() {
            match spill.copy_next((tier, *layout, self.page_bytes), scheduler, executor) {
                Copied::Page => copied += 1,
                Copied::Done => {
                    let done = self.spills.pop_front();
                    if let Some((peers, spill)) = self.peers.as_ref().zip(done) {
                        peers.keep(self.layout_name, self.page_bytes, spill.names());
                    }
                }
                Copied::Later => return false,
            }
            if copied >= due && started.elapsed() >= time {
                break;
            }
        }
        true
    }

    /// Forgets pages that wait to be copied, and those that are read ahead.
    pub fn forget(&mut self, pages: &EraseScope, scheduler: &mut Scheduler) {
        self.spills.retain(|spill| !spill.belongs_to(pages));
        let belongs = |affinity: &Affinity| pages.includes(&PrefixOwner::of(affinity));
        self.later_warmings.retain(|warming| !belongs(&warming.affinity));
        let is_gone = |promotion: &Promotion| promotion.warmed_client().is_some_and(belongs);
        let gone = self.take_promotions(is_gone);
        let has_ended = !gone.is_empty();
        gone.into_iter().for_each(|promotion| promotion.end_forgotten(scheduler));
        if has_ended {
            self.look_again(scheduler);
        }
    }

    /// Ends the reads that no request waits for.
    pub fn end_warmings(&mut self, scheduler: &mut Scheduler) {
        self.later_warmings.clear();
        let ended = self.take_promotions(|promotion| promotion.warmed_client().is_some());
        let has_ended = !ended.is_empty();
        ended.into_iter().for_each(|promotion| promotion.end(scheduler));
        if has_ended {
            self.look_again(scheduler);
        }
    }

    /// Ends all reads, because the executor that has their pages is lost. Their pages are unlocked, so that the scheduler can drop
    /// them. Nobody looks up a prefix again here, which would lock pages that are about to be dropped.
    pub fn lose_pages(&mut self, scheduler: &mut Scheduler) {
        self.later_warmings.clear();
        for read in std::mem::take(&mut self.promotions) {
            read.end(scheduler);
        }
        for held in std::mem::take(&mut self.waiting_for_other_read) {
            scheduler.release_hold(held.id);
        }
    }

    /// Returns the number of pages that further reads may take, beside those that reads under way will still take.
    fn room(&self, scheduler: &Scheduler) -> usize {
        let taken: usize = self.promotions.iter().map(Promotion::pages_left).sum();
        scheduler.spare_pages().saturating_sub(taken)
    }

    fn take_promotions(&mut self, is_taken: impl Fn(&Promotion) -> bool) -> Vec<Promotion> {
        let (taken, left) = std::mem::take(&mut self.promotions).into_iter().partition(is_taken);
        self.promotions = left;
        taken
    }

    /// Reads the pages of a conversation that are on disk and not in memory, as far as there is room for them. If there are none,
    /// those of another host are fetched.
    pub fn warm(&mut self, warming: Warming, scheduler: &mut Scheduler) {
        if warming.is_given_up() {
            return;
        }
        let (tenant, whole) = (warming.affinity.tenant.as_str(), warming.whole_pages());
        let in_memory = scheduler.cached_prefix(tenant, whole).len();
        let names = self.names(&warming.affinity, whole);
        let brings = |other: &Promotion| other.brings_up_to((tenant, &names), in_memory).is_some();
        if self.promotions.iter().any(brings) {
            self.later_warmings.push(warming);
            return;
        }
        let on_disk = self.on_disk(&names).saturating_sub(in_memory);
        let found = Warmed { pages: names.len(), in_memory, on_disk, read: 0 };
        let (room, deadline) = (self.room(scheduler), Instant::now() + WARM_PATIENCE);
        let missing = &names[in_memory..];
        let reading = match on_disk.min(room) {
            0 => self.fetch(&missing[..missing.len().min(room)]),
            wanted => self.read(&missing[..wanted]),
        };
        let Some(reading) = reading else {
            // A caller that no longer waits does not need the answer.
            let _ = warming.done.send(found);
            return;
        };
        let tokens = &whole[..(in_memory + reading.names.len()) * PAGE_TOKENS];
        let held = scheduler.borrow_pages(tenant, tokens, in_memory);
        let tokens = tokens.to_vec();
        let Warming { affinity, done, .. } = warming;
        let (reader, prefix) = (Reader::Warming { found, done }, (&affinity, tokens.as_slice()));
        self.promotions.push(Promotion::new(reader, prefix, reading, held, deadline));
    }

    /// Looks up the prefix of a request on the disk and at the other hosts, and makes the request wait while it is read.
    pub fn look_up(&mut self, sequence: &Sequence, scheduler: &mut Scheduler) {
        let request = &sequence.request;
        let prefix = (&request.affinity, request.priority, sequence.reusable_tokens());
        // Another host gets the pages of its request in order.
        let may_start = !sequence.is_for_other_host();
        self.look_up_tokens(sequence.id, prefix, (Source::Disk, may_start, None), scheduler);
    }

    /// Looks up a prefix, from this source on. A request that may start can compute some of it while the rest is read. One that
    /// has waited for another read waits until `latest` at most.
    fn look_up_tokens(
        &mut self,
        id: SequenceId,
        (affinity, priority, tokens): (&Affinity, Priority, &[u32]),
        (from, may_start, latest): (Source, bool, Option<Instant>),
        scheduler: &mut Scheduler,
    ) {
        let tenant = affinity.tenant.as_str();
        let pages = tokens.len().saturating_sub(1) / PAGE_TOKENS;
        if pages < MIN_READ_PAGES {
            return;
        }
        let in_memory = scheduler.cached_prefix(tenant, tokens).len().min(pages);
        if pages < in_memory + MIN_READ_PAGES {
            return;
        }
        let names = self.names(affinity, &tokens[..pages * PAGE_TOKENS]);
        let waits = self.wait_for_other_read((id, latest), (tenant, &names), in_memory, scheduler);
        if waits.is_some() {
            return;
        }
        let on_disk = match from {
            Source::Disk => self.on_disk(&names),
            Source::Peers => 0,
        };
        let (room, wanted) = (self.room(scheduler), on_disk.saturating_sub(in_memory));
        let missing = wanted.min(room);
        if missing < MIN_READ_PAGES {
            match wanted >= MIN_READ_PAGES {
                true => self.short.push((id, wanted)),
                false => self.ask_peers(id, (affinity, priority, tokens), (&names, in_memory), scheduler),
            }
            return;
        }
        let compute = self.speed.compute_time(missing * PAGE_TOKENS);
        let mut read_time = self.read_time(missing);
        if scheduler.is_running() {
            // Pages are taken between the steps of those that run.
            read_time = read_time.max(self.speed.take_time(missing));
        }
        if read_time >= compute && !self.reads_always() {
            return;
        }
        let missing_names = &names[in_memory..in_memory + missing];
        if may_start {
            let (prefix, times) = ((affinity, tokens), (read_time, compute));
            let begun = self.begin_head_start(id, prefix, (missing_names, in_memory), times, scheduler);
            if begun.is_some() {
                return;
            }
        }
        let Some(reading) = self.read(missing_names) else { return };
        let tokens = &tokens[..(in_memory + missing) * PAGE_TOKENS];
        let held = scheduler.borrow_pages(tenant, tokens, in_memory);
        scheduler.hold(id);
        let deadline = Instant::now() + self.patience(read_time, compute);
        let deadline = latest.map_or(deadline, |latest| latest.min(deadline));
        let reader = Reader::Request(id);
        self.promotions.push(Promotion::new(reader, (affinity, tokens), reading, held, deadline));
    }

    /// Names the whole pages of a client's tokens. If it is not known how many of them are public, those are that the disk has
    /// as public ones.
    fn names(&self, affinity: &Affinity, tokens: &[u32]) -> Vec<Digest> {
        if affinity.public != PublicPart::SystemMessage {
            return affinity.page_names(&self.keys, tokens, PAGE_TOKENS);
        }
        let public = |tokens| Affinity { public: PublicPart::Tokens(tokens), ..affinity.clone() };
        let all = public(tokens.len()).page_names(&self.keys, tokens, PAGE_TOKENS);
        public(self.on_disk(&all) * PAGE_TOKENS).page_names(&self.keys, tokens, PAGE_TOKENS)
    }

    /// Starts to read pages from the disk.
    fn read(&self, names: &[Digest]) -> Option<Reading> {
        let names = names.to_vec();
        let disk = self.disk.as_ref()?;
        let pages = disk.tier.read(disk.layout, names.clone())?;
        Some(Reading { source: Source::Disk, names, pages, report: None })
    }

    /// Returns how long a request waits for a read that is expected to take `read`, in place of computing for `compute`.
    fn patience(&self, read: Duration, compute: Duration) -> Duration {
        match self.reads_always() {
            true => LONG_PATIENCE,
            false => self.speed.patience(read, compute),
        }
    }

    /// Returns whether pages are being read from the disk.
    pub fn is_reading(&self) -> bool {
        !self.promotions.is_empty()
    }

    /// Waits briefly for the next page, when there is nothing else to do.
    pub fn wait(&mut self) {
        if let Some(promotion) = self.promotions.first_mut() {
            promotion.wait();
        }
    }

    /// Returns the number of pages that were taken from reads since the last call.
    pub fn take_page_count(&mut self) -> usize {
        std::mem::take(&mut self.taken_pages)
    }

    /// Moves the pages that have been read into the prefix tree, and resumes requests whose pages are complete.
    pub fn promote(&mut self, scheduler: &mut Scheduler, executor: &mut dyn Executor) {
        self.look_for_room(scheduler);
        if self.promotions.is_empty() {
            return;
        }
        let gives_up = scheduler.is_short_of_pages();
        let (mut at, mut has_ended) = (0, false);
        while let Some(promotion) = self.promotions.get_mut(at) {
            let left = promotion.pages_left();
            let progress = match gives_up {
                true => Progress::Ended,
                false => promotion.advance(scheduler, executor),
            };
            self.taken_pages += left.saturating_sub(promotion.pages_left());
            match progress {
                Progress::Waits => at += 1,
                Progress::Ended => {
                    has_ended = true;
                    let ended = self.promotions.swap_remove(at);
                    self.end(ended, scheduler);
                }
            }
        }
        match has_ended {
            true => self.look_again(scheduler),
            false => self.resume_waiting(scheduler),
        }
    }

    /// Ends a read, and asks the other hosts for what the disk does not have.
    fn end(&mut self, ended: Promotion, scheduler: &mut Scheduler) {
        let request = ended.request_of_disk().filter(|_| self.peers.is_some());
        if let Some(missed) = ended.missed() {
            self.misses.note(missed, Instant::now());
        }
        ended.end(scheduler);
        if let Some(id) = request
            && let Some((affinity, priority, tokens)) = scheduler.waiting_prefix(id)
        {
            self.look_up_tokens(id, (&affinity, priority, &tokens), (Source::Peers, false, None), scheduler);
        }
    }

    /// Lets waiting requests look up their prefix again for which there is room now.
    fn look_for_room(&mut self, scheduler: &mut Scheduler) {
        if self.short.is_empty() {
            return;
        }
        let room = self.room(scheduler);
        let (ready, short) =
            std::mem::take(&mut self.short).into_iter().partition(|(_, pages)| *pages <= room);
        self.short = short;
        self.short.retain(|(id, _)| scheduler.is_waiting(*id));
        let ready: Vec<(SequenceId, usize)> = ready;
        for (id, _) in ready {
            if let Some((affinity, priority, tokens)) = scheduler.waiting_prefix(id) {
                let from = (Source::Disk, false, None);
                self.look_up_tokens(id, (&affinity, priority, &tokens), from, scheduler);
            }
        }
    }

    /// Makes requests and callers look up their prefix again after another read of it has ended.
    fn look_again(&mut self, scheduler: &mut Scheduler) {
        self.resume_waiting(scheduler);
        for warming in std::mem::take(&mut self.later_warmings) {
            self.warm(warming, scheduler);
        }
    }

    /// Returns the pages that reads hold.
    pub fn held_pages(&self) -> impl Iterator<Item = &SequencePages> {
        self.promotions.iter().map(Promotion::held)
    }
}

/// Returns the tag of a tenant and the owner of a sequence's pages.
fn owner_of(keys: &PageNamer, affinity: &Affinity) -> (TenantTag, Owner) {
    // Sessions of agents are deleted by the name of their agent; those of other clients end with their tenant.
    let session = affinity.agent.as_ref().and(affinity.session.as_deref());
    (keys.tenant(&affinity.tenant), keys.owner(affinity.agent.as_deref(), session))
}
