//! The thread that puts pages into the cache, removes those that this host erases, and connects to the store.
//!
//! Pages are put from the disk, where they are within seconds after the end of a turn: nothing of it runs between the steps of
//! the engine, and a page that was erased is not put.
//!
//! Invariant: a page that is erased while it is put is removed afterwards, because one thread does both, in this order.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use skep_cache::{Digest, LayoutId, PageQuestion, PageRead, metric};

use crate::arena::Lane;
use crate::objects::Objects;
use crate::state::{NAMES_AT_ONCE, Shared, batch_len};
use crate::work::{KeptPages, Task};

/// Interval at which the thread looks whether it has to connect.
const LOOK_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 200 });
/// Time within which pages that wait for the disk are written.
const WRITE_TIME: Duration = Duration::from_secs(10);
const WRITE_INTERVAL: Duration = Duration::from_millis(10);
/// Time that the disk may take for a page.
const READ_TIME: Duration = Duration::from_secs(5);
/// Time for which nothing is put after the store has refused a batch, for example because it is full.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Time that waiting removals have when the cache is closed, which is less than its threads have.
const REST_TIME: Duration = Duration::from_millis(if cfg!(test) { 1_500 } else { 4_000 });
/// Time after which no further page of a batch is removed. A batch counts as one call, which must not be taken for a slow one.
const REMOVE_TIME: Duration = Duration::from_millis(500);
/// Maximum rate at which pages are put.
const PUT_BYTES_PER_S: f64 = 500e6;

/// Puts and removes pages until the cache is closed, and then makes the removals that wait.
pub(crate) fn run(shared: &Shared, mut lane: Lane) {
    let mut refused: Option<Instant> = None;
    while !shared.is_closing.load(Relaxed) {
        shared.connection.connect_if_due();
        shared.show();
        let Some(task) = shared.work.next(LOOK_INTERVAL) else { continue };
        let Some(objects) = shared.connection.objects() else {
            match task {
                Task::Put(pages) => shared.figures.record_dropped(pages.names.len() as u64),
                // A removal is made once the cache is back, which it may not have left.
                removal => {
                    shared.work.remove_later(removal);
                    std::thread::sleep(LOOK_INTERVAL);
                }
            }
            continue;
        };
        match task {
            Task::Put(pages) => {
                let rests = refused.is_some_and(|at| at.elapsed() < REFUSED_FOR);
                if !put(shared, &*objects, &pages, (&mut lane, rests)) {
                    refused = Some(Instant::now());
                }
            }
            removal => remove(shared, &*objects, removal),
        }
    }
    remove_rest(shared);
    metrics::gauge!(metric::CLUSTER_UP).set(0.0);
}

/// Makes the removals that wait when the cache is closed, as long as the store answers and there is time.
fn remove_rest(shared: &Shared) {
    let until = Instant::now() + REST_TIME;
    while shared.work.has_removals() && Instant::now() < until {
        let Some(objects) = shared.connection.objects() else { return };
        match shared.work.next(LOOK_INTERVAL) {
            // Pages that wait are not put.
            Some(Task::Put(_)) | None => {}
            Some(removal) => remove(shared, &*objects, removal),
        }
    }
}

/// Puts the pages that the cache lacks, as far as they are on the disk, and counts those that it does not get. Nothing is put while
/// it rests. Returns false if it has refused some.
fn put(shared: &Shared, objects: &dyn Objects, pages: &KeptPages, (lane, rests): (&mut Lane, bool)) -> bool {
    let Some(layout) = shared.tier.find_layout(pages.layout, pages.payload_bytes) else { return true };
    let missing = match missing(shared, objects, pages, layout) {
        Ok(missing) => missing,
        Err(unknown) => {
            shared.figures.record_dropped(unknown as u64);
            return true;
        }
    };
    if missing.is_empty() {
        return true;
    }
    let (put, is_refused) = match rests {
        true => (0, false),
        false => put_missing(shared, objects, (pages, layout), &missing, lane),
    };
    shared.figures.record_dropped((missing.len() - put) as u64);
    !is_refused
}

/// Returns the pages that are on the disk and not in the cache. If the cache does not answer, returns the number of pages that it
/// may lack.
fn missing(
    shared: &Shared,
    objects: &dyn Objects,
    pages: &KeptPages,
    layout: LayoutId,
) -> Result<Vec<Digest>, usize> {
    let names = on_disk(shared, layout, &pages.names, pages.asked);
    let (mut missing, mut asked) = (Vec::new(), 0);
    for chunk in names.chunks(NAMES_AT_ONCE) {
        let answer = shared.timed(|| objects.exist(&shared.names.all(pages.layout, chunk)));
        let exist = answer.map_err(|_| missing.len() + names.len() - asked)?;
        missing.extend(chunk.iter().zip(exist).filter(|(_, exists)| !exists).map(|(name, _)| *name));
        asked += chunk.len();
    }
    Ok(missing)
}

/// Puts pages from the disk in batches. Returns how many the cache has taken, and whether it has refused some.
fn put_missing(
    shared: &Shared,
    objects: &dyn Objects,
    (pages, layout): (&KeptPages, LayoutId),
    missing: &[Digest],
    lane: &mut Lane,
) -> (usize, bool) {
    let at_once = batch_len(lane, PageQuestion::image_bytes_of(pages.payload_bytes));
    if at_once == 0 {
        tracing::warn!(
            payload_bytes = pages.payload_bytes,
            "KV pages are larger than buffer_mb under [kv.cluster] allows; they are not put"
        );
        return (0, true);
    }
    let Some(mut reading) = shared.tier.read(layout, missing.to_vec()) else { return (0, false) };
    let mut put = 0;
    for batch in missing.chunks(at_once) {
        let (began, mut images) = (Instant::now(), Vec::with_capacity(batch.len()));
        for name in batch {
            let PageRead::Page(page) = reading.next_within(READ_TIME) else { break };
            let Ok(image) = shared.seal.seal(pages.layout, *name, &page) else { break };
            images.push(image);
        }
        if images.is_empty() || shared.is_closing.load(Relaxed) {
            break;
        }
        let bytes: u64 = images.iter().map(|image| image.len() as u64).sum();
        let object_names = shared.names.all(pages.layout, &batch[..images.len()]);
        let stored = objects.put(lane, &object_names, &images).unwrap_or_else(|error| {
            tracing::debug!(%error, "the cluster cache takes no pages");
            0
        });
        shared.figures.record_put(stored as u64, bytes / images.len() as u64 * stored as u64);
        put += stored;
        if stored < images.len() {
            return (put, true);
        }
        if images.len() < batch.len() {
            break;
        }
        let least = Duration::from_secs_f64(bytes as f64 / PUT_BYTES_PER_S);
        std::thread::sleep(least.saturating_sub(began.elapsed()));
    }
    (put, false)
}

/// Waits until pages that are queued for the disk are written. Returns those that are there, from the first on.
fn on_disk<'n>(shared: &Shared, layout: LayoutId, names: &'n [Digest], asked: Instant) -> &'n [Digest] {
    loop {
        let found = shared.tier.leading(layout, names);
        let comes = names.get(found).is_some_and(|next| shared.tier.has(layout, *next));
        if !comes || asked.elapsed() >= WRITE_TIME || shared.is_closing.load(Relaxed) {
            return &names[..found];
        }
        std::thread::sleep(WRITE_INTERVAL);
    }
}

/// Removes pages. Those that a failure or too little time has left are put back, and so are those that somebody uses at this moment.
fn remove(shared: &Shared, objects: &dyn Objects, removal: Task) {
    let (mut reached, mut removed, mut in_use) = (0, 0, Vec::new());
    let began = Instant::now();
    // A call that took too long is a failure for others, but has removed its pages. To repeat it would take as long.
    let _ = shared.timed(|| {
        match &removal {
            Task::RemoveAll => {
                removed = objects.remove_beginning(shared.names.prefix())?;
                reached = 1;
            }
            Task::Remove(pages) => {
                for page in pages {
                    if began.elapsed() >= REMOVE_TIME {
                        break;
                    }
                    let (layout, name) = page;
                    match objects.remove(&shared.names.of(*layout, *name))? {
                        true => removed += 1,
                        false => in_use.push(*page),
                    }
                    reached += 1;
                }
            }
            Task::Put(_) => {}
        }
        Ok(())
    });
    shared.figures.record_removed(removed);
    shared.work.remove_after_use(in_use);
    match removal {
        Task::RemoveAll if reached == 0 => shared.work.remove_later(Task::RemoveAll),
        Task::Remove(pages) if reached < pages.len() => {
            shared.work.remove_later(Task::Remove(pages[reached..].to_vec()));
        }
        _ => {}
    }
}
