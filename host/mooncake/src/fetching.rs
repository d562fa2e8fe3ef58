//! The threads that get pages for the engine.
//!
//! A fetch first finds how many of its pages the cache has, and then gets them in batches that fit into the thread's lane. It
//! ends when the engine no longer waits for its pages.

use std::ffi::CString;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use skep_cache::{ErasedPages, FetchEnding, PageQuestion};

use crate::arena::Lane;
use crate::objects::{Failure, Objects};
use crate::state::{NAMES_AT_ONCE, Shared, batch_len};

/// Fewer pages are not worth a transfer.
const MIN_PAGES: usize = 2;
/// Time that a fetch may wait for a thread. Its request has begun to compute by then.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Pages that the engine waits for.
pub(crate) struct FetchJob {
    pub question: PageQuestion,
    pub pages: SyncSender<Vec<u8>>,
    pub asked: Instant,
}

/// Gets pages until the senders of jobs are gone.
pub(crate) fn run(shared: &Shared, jobs: &Mutex<Receiver<FetchJob>>, mut lane: Lane) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(FetchJob { question, pages, asked }) = job else { return };
        let ending = match asked.elapsed() < MAX_WAIT {
            true => fetch(shared, &question, &pages, &mut lane),
            false => FetchEnding::Late,
        };
        shared.figures.record_end(ending, asked.elapsed());
        // The engine sees the end of its pages after it was counted.
        drop(pages);
    }
}

fn fetch(
    shared: &Shared,
    question: &PageQuestion,
    pages: &SyncSender<Vec<u8>>,
    lane: &mut Lane,
) -> FetchEnding {
    let Some(objects) = shared.connection.objects() else { return FetchEnding::Broken };
    let image_bytes = question.image_bytes();
    let at_once = batch_len(lane, image_bytes);
    if at_once == 0 {
        return FetchEnding::Absent;
    }
    let names = match shared.timed(|| leading(&*objects, shared, question)) {
        Ok(names) if names.len() >= MIN_PAGES => names,
        Ok(_) => return FetchEnding::Absent,
        Err(ending) => return ending,
    };
    let (mut transfer, mut bytes) = (Duration::ZERO, 0);
    let wanted = question.names[..names.len()].chunks(at_once).zip(names.chunks(at_once));
    for (pages_of_batch, names_of_batch) in wanted {
        let began = Instant::now();
        let images = match shared.timed(|| objects.get(lane, names_of_batch, image_bytes)) {
            Ok(images) => images,
            Err(ending) => return ending,
        };
        transfer += began.elapsed();
        for (name, image) in pages_of_batch.iter().zip(images) {
            let Some(image) = image else { return FetchEnding::Cut };
            let began = Instant::now();
            let page = match shared.seal.open(question.layout, *name, question.payload_bytes, image) {
                Ok(page) => page,
                Err(error) => {
                    tracing::warn!(%error, "a KV page of the cluster cache is not used");
                    // Nobody puts a page that is there, so this one would be a miss for all hosts until it is evicted.
                    shared.work.remove(ErasedPages::Pages(vec![(question.layout, *name)]));
                    return FetchEnding::Rejected;
                }
            };
            transfer += began.elapsed();
            if pages.send(page).is_err() {
                return FetchEnding::Unwanted;
            }
            bytes += image_bytes as u64;
            shared.figures.record_fetched(image_bytes as u64);
        }
        shared.rate.record(bytes, transfer, Instant::now());
    }
    FetchEnding::Fetched
}

/// Returns the names of the pages that the cache has, from the first on.
fn leading(objects: &dyn Objects, shared: &Shared, question: &PageQuestion) -> Result<Vec<CString>, Failure> {
    let mut found = Vec::new();
    for chunk in question.names.chunks(NAMES_AT_ONCE) {
        let mut names = shared.names.all(question.layout, chunk);
        let here = objects.exist(&names)?.into_iter().take_while(|exists| *exists).count();
        let is_last = here < names.len();
        names.truncate(here);
        found.append(&mut names);
        if is_last {
            break;
        }
    }
    Ok(found)
}
