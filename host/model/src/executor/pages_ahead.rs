//! A thread that puts memory behind KV pages before a step writes to them.
//!
//! A pool takes memory only as its pages are used. The first write to a huge page waits until the system has found and
//! cleared it, in every layer in the same step. The thread does that while steps write to pages before it.
//!
//! Invariant: beside the pages that steps have used, at most a chunk and an eighth of one have memory. A chunk is a huge page in the
//! pool of the layer with the largest pages.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use skep_kernels::buffer::{Backing, HUGE_PAGE};

use crate::batch::{Batch, PAGE_TOKENS, PageId};
use crate::layers::cache::LayerCache;

/// The fraction of a chunk, as a divisor, that is left when memory is put behind the next one.
const MARGIN: usize = 8;

/// The pools of a rank's layers, each with the number of bytes that it has of a page.
type Pools = Vec<(Backing, usize)>;

pub(super) struct PagesAhead {
    /// Gets the number of pages from the first that are to have memory. Without a thread, nobody does.
    asked: Option<Sender<usize>>,
    thread: Option<JoinHandle<()>>,
    /// Number of pages that were asked for.
    ahead: usize,
    chunk: usize,
    page_count: usize,
}

impl PagesAhead {
    /// Starts the thread, which begins with the first chunk. It may run on the CPUs of the calling thread.
    pub(super) fn start(caches: &[LayerCache], page_count: usize) -> Self {
        let pools: Pools = caches.iter().flat_map(LayerCache::backings).collect();
        let largest = pools.iter().map(|(_, page_bytes)| *page_bytes).max().unwrap_or(0);
        let chunk = (HUGE_PAGE / largest.max(1)).max(1);
        let (asked, wanted) = channel();
        let work = move || populate(&pools, &wanted);
        // Without the thread, steps take memory themselves.
        let thread = std::thread::Builder::new().name("skep-kv-ahead".to_owned()).spawn(work).ok();
        let asked = thread.is_some().then_some(asked);
        let mut pages = PagesAhead { asked, thread, ahead: 0, chunk, page_count };
        pages.ask(chunk);
        pages
    }

    /// Records the pages that a step writes to.
    pub(super) fn record(&mut self, batch: &Batch) {
        for sequence in &batch.sequences {
            self.record_pages(sequence.pages.get(sequence.start / PAGE_TOKENS..).unwrap_or_default());
        }
    }

    /// Records pages that are written to.
    pub(super) fn record_pages(&mut self, pages: &[PageId]) {
        let used = pages.iter().map(|page| page.0 as usize + 1).max().unwrap_or(0);
        let needed = used + self.chunk / MARGIN;
        if needed > self.ahead {
            self.ask(needed.next_multiple_of(self.chunk));
        }
    }

    fn ask(&mut self, pages: usize) {
        let pages = pages.min(self.page_count);
        if let Some(asked) = self.asked.as_ref().filter(|_| pages > self.ahead) {
            self.ahead = pages;
            // The thread has ended if the system refused.
            let _ = asked.send(pages);
        }
    }
}

impl Drop for PagesAhead {
    fn drop(&mut self) {
        self.asked = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Puts memory behind as many pages as are asked for, until nobody can ask anymore.
fn populate(pools: &Pools, wanted: &Receiver<usize>) {
    let mut done = 0;
    while let Ok(pages) = wanted.recv() {
        for (pool, page_bytes) in pools {
            let (mut at, end) = (done * page_bytes, pages * page_bytes);
            while at < end {
                let next = end.min((at / HUGE_PAGE + 1) * HUGE_PAGE);
                if let Err(error) = pool.populate(at..next) {
                    tracing::debug!(%error, "KV pages get their memory as steps write to them");
                    return;
                }
                at = next;
            }
        }
        done = pages;
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::{Duration, Instant};

    use skep_kernels::Isa;
    use skep_kernels::kv::KvFormat;

    use super::*;
    use crate::batch::{BatchSequence, LogitsWanted};
    use crate::layers::cache::CacheShape;

    const PAGE_BYTES: usize = 4 * 64 * PAGE_TOKENS * 4;
    const CHUNK: usize = HUGE_PAGE / PAGE_BYTES;

    /// Returns the number of pages that have memory in the pool which has the least.
    fn populated(pools: &Pools, page_count: usize) -> usize {
        let pages = |(pool, bytes): &(Backing, usize)| pool.populated(0..page_count * bytes).unwrap() / bytes;
        pools.iter().map(pages).min().unwrap()
    }

    fn until(pools: &Pools, page_count: usize, wanted: usize) {
        let start = Instant::now();
        while populated(pools, page_count) < wanted {
            assert!(start.elapsed() < Duration::from_secs(60), "{} pages", populated(pools, page_count));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn batch(start: usize, pages: &[u32]) -> Batch {
        let pages = pages.iter().map(|page| PageId(*page)).collect();
        Batch { sequences: vec![BatchSequence { tokens: vec![1], start, pages, logits: LogitsWanted::None }] }
    }

    #[test]
    fn memory_stays_ahead_of_the_pages_that_steps_use() {
        let page_count = 8 * CHUNK;
        let shape = CacheShape::Grouped { kv_heads: 4, head_size: 64 };
        let caches: Vec<LayerCache> =
            (0..2).map(|_| shape.pages(KvFormat::F32, Isa::Portable, page_count).unwrap()).collect();
        let pools: Pools =
            caches.iter().flat_map(LayerCache::backings).filter(|(_, bytes)| *bytes > 0).collect();
        let mut ahead = PagesAhead::start(&caches, page_count);
        until(&pools, page_count, CHUNK);
        ahead.record(&batch(0, &[0]));
        assert_eq!(ahead.ahead, CHUNK, "most of the chunk is left");
        let last = (CHUNK - CHUNK / MARGIN) as u32;
        // A page that is only read says nothing.
        ahead.record(&batch(PAGE_TOKENS, &[7 * CHUNK as u32, last - 1]));
        assert_eq!(ahead.ahead, CHUNK);
        ahead.record(&batch(PAGE_TOKENS, &[0, last]));
        assert_eq!(ahead.ahead, 2 * CHUNK);
        until(&pools, page_count, 2 * CHUNK);
        ahead.record_pages(&[PageId(5 * CHUNK as u32)]);
        assert_eq!(ahead.ahead, 6 * CHUNK);
        ahead.record_pages(&[PageId(8 * CHUNK as u32 - 1)]);
        assert_eq!(ahead.ahead, page_count, "there are no more");
        until(&pools, page_count, page_count);
        drop(ahead);
    }
}
