//! Lets the operating system read the files of a model ahead of the threads that pack its weights, from several places at once.
//!
//! Invariant: the parts of files are asked for in the order in which a load reads them, at most [`AHEAD_BYTES`] before it does, and
//! are those of the rank whose part is loaded. A load reads in the order of its plan.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::checkpoint::{Checkpoint, FilePart};

/// Number of bytes that are asked for before the load needs them.
const AHEAD_BYTES: u64 = 256 << 20;
/// Number of bytes that are asked for at once. Linux reads no more for one request than its own read-ahead, which is 128 KiB unless
/// someone has changed it.
const PIECE_BYTES: usize = 128 << 10;
/// Number of threads that ask. A request waits for memory, and for the queue of a busy drive.
const THREADS: usize = 2;

/// The reads of a load, in their order.
#[derive(Default)]
pub(crate) struct Reads {
    parts: Vec<FilePart>,
    /// Number of bytes before each read.
    starts: Vec<u64>,
    bytes: u64,
}

impl Reads {
    /// Adds a read of some parts of files.
    pub(crate) fn add(&mut self, parts: Vec<FilePart>) {
        self.starts.push(self.bytes);
        self.bytes += parts.iter().map(|part| part.bytes.len() as u64).sum::<u64>();
        self.parts.extend(parts);
    }
}

/// Reads ahead of one load.
pub(crate) struct ReadAhead<'a> {
    checkpoint: &'a Checkpoint,
    reads: Reads,
    ahead_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

/// The progress of the load and of the requests.
#[derive(Default)]
struct State {
    /// Number of reads that the load has begun.
    begun: usize,
    /// Number of bytes that the load has read.
    read: u64,
    /// Number of bytes that were asked for, or are not needed anymore.
    asked: u64,
    /// The place of the next request: a part, and an offset in it.
    part: usize,
    offset: usize,
    is_over: bool,
}

/// The next thing that a thread does which asks for parts of files.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Ask(FilePart),
    /// Enough was asked for.
    Wait,
    End,
}

impl<'a> ReadAhead<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, reads: Reads) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        ReadAhead { checkpoint, reads, ahead_bytes: AHEAD_BYTES, state, changed }
    }

    /// Runs a load, and reads ahead of it until it ends. The load calls [`ReadAhead::begin`] before each of its reads.
    pub(crate) fn beside<T>(&self, load: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            let _over = Over(self);
            for _ in 0..THREADS {
                let builder = std::thread::Builder::new().name("skep-read-ahead".to_owned());
                if let Err(error) = builder.spawn_scoped(scope, || self.ask()) {
                    tracing::debug!(%error, "a model is loaded without reading ahead");
                }
            }
            load()
        })
    }

    /// Notes that the load begins its next read.
    pub(crate) fn begin(&self) {
        let mut state = self.lock();
        state.read = self.reads.starts.get(state.begun).copied().unwrap_or(self.reads.bytes);
        state.begun += 1;
        drop(state);
        self.changed.notify_all();
    }

    fn ask(&self) {
        let mut state = self.lock();
        loop {
            match self.next(&mut state) {
                Next::Ask(part) => {
                    drop(state);
                    self.checkpoint.will_read(part);
                    state = self.lock();
                }
                Next::Wait => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Next::End => return,
            }
        }
    }

    fn next(&self, state: &mut State) -> Next {
        while let Some(part) = self.reads.parts.get(state.part)
            && !state.is_over
        {
            let left = part.bytes.len() - state.offset;
            if left == 0 {
                (state.part, state.offset) = (state.part + 1, 0);
                continue;
            }
            if state.asked >= state.read + self.ahead_bytes {
                return Next::Wait;
            }
            let length = left.min(PIECE_BYTES);
            let start = part.bytes.start + state.offset;
            state.offset += length;
            state.asked += length as u64;
            // The load reads by itself what it has reached already.
            if state.asked > state.read {
                return Next::Ask(FilePart { file: part.file, bytes: start..start + length });
            }
        }
        Next::End
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the requests when it is dropped, however the load ends.
struct Over<'a>(&'a ReadAhead<'a>);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::ops::Range;

    use super::*;
    use crate::checkpoint::fixtures::{fixture, tiny_models};
    use crate::models::transformer::Transformer;
    use crate::shard::Shard;
    use crate::weights::WeightLoader;
    use skep_kernels::WorkerPool;

    type Read = (String, Vec<Range<usize>>);

    fn part(file: usize, bytes: Range<usize>) -> FilePart {
        FilePart { file, bytes }
    }

    #[test]
    fn requests_follow_the_order_of_the_load_and_stay_near_it() {
        let checkpoint = Checkpoint::open(&fixture("llama-gqa")).unwrap();
        let mut reads = Reads::default();
        let piece = PIECE_BYTES;
        reads.add(vec![part(0, 10..10 + piece), part(1, 0..7)]);
        reads.add(vec![part(1, 7..7)]);
        reads.add(vec![part(0, 0..2 * piece)]);
        reads.add(vec![part(2, 5..6)]);
        let ahead = ReadAhead { ahead_bytes: 2 * piece as u64, ..ReadAhead::new(&checkpoint, reads) };
        let next = || ahead.next(&mut ahead.lock());
        assert_eq!(next(), Next::Ask(part(0, 10..10 + piece)));
        assert_eq!(next(), Next::Ask(part(1, 0..7)));
        assert_eq!(next(), Next::Ask(part(0, 0..piece)));
        assert_eq!(next(), Next::Wait);
        // The first two reads are behind the load once it begins the third.
        (0..3).for_each(|_| ahead.begin());
        assert_eq!(next(), Next::Ask(part(0, piece..2 * piece)));
        assert_eq!(next(), Next::Wait);
        ahead.begin();
        assert_eq!(next(), Next::Ask(part(2, 5..6)));
        assert_eq!(next(), Next::End);
    }

    #[test]
    fn nothing_is_asked_for_that_the_load_has_reached() {
        let checkpoint = Checkpoint::open(&fixture("llama-gqa")).unwrap();
        let mut reads = Reads::default();
        (0..3).for_each(|file| reads.add(vec![part(file, 0..9)]));
        let ahead = ReadAhead::new(&checkpoint, reads);
        (0..3).for_each(|_| ahead.begin());
        assert_eq!(ahead.next(&mut ahead.lock()), Next::Ask(part(2, 0..9)));
        drop(Over(&ahead));
        assert_eq!(ahead.next(&mut ahead.lock()), Next::End);
        // A load that ends early, or begins more reads than were planned, is followed to its end.
        let ahead = ReadAhead::new(&checkpoint, Reads::default());
        let loaded = ahead.beside(|| {
            (0..5).for_each(|_| ahead.begin());
            "all"
        });
        assert_eq!(loaded, "all");
    }

    /// Returns the reads of a rank, as they are planned or as they are made.
    fn reads_of(checkpoint: &Checkpoint, shard: Shard, pool: Option<&WorkerPool>) -> Vec<Read> {
        let all = RefCell::new(Vec::new());
        let note = |name: &str, ranges: &[Range<usize>]| {
            all.borrow_mut().push((name.to_owned(), ranges.to_vec()));
        };
        let loader = match pool {
            Some(pool) => WeightLoader::new(pool, checkpoint, shard),
            None => WeightLoader::for_plan(checkpoint, shard),
        };
        Transformer::load(checkpoint.config(), &mut loader.noting_reads(&note)).unwrap();
        all.into_inner()
    }

    #[test]
    fn a_load_reads_what_was_planned_in_the_same_order() {
        let pool = WorkerPool::new(2).unwrap();
        for name in tiny_models() {
            let checkpoint = Checkpoint::open(&fixture(&name)).unwrap();
            for shard in [Shard { rank: 0, ranks: 1 }, Shard { rank: 1, ranks: 2 }] {
                let planned = reads_of(&checkpoint, shard, None);
                assert_eq!(reads_of(&checkpoint, shard, Some(&pool)), planned, "{name}");
                for (tensor, ranges) in planned {
                    assert!(checkpoint.has(&tensor), "{name}: {tensor}");
                    assert!(!checkpoint.file_parts(&tensor, &ranges).is_empty(), "{name}: {tensor}");
                }
            }
        }
    }

    #[test]
    fn each_rank_reads_only_its_rows() {
        for name in ["qwen3-moe", "kimi-k2-int4", "deepseek-v3-fp8"] {
            let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
            let mut rows: BTreeMap<String, Vec<Range<usize>>> = BTreeMap::new();
            for rank in 0..2 {
                let mut of_rank = reads_of(&checkpoint, Shard { rank, ranks: 2 }, None);
                of_rank
                    .retain(|(tensor, _)| tensor.contains(".experts.") && tensor.ends_with("up_proj.weight"));
                of_rank
                    .into_iter()
                    .for_each(|(tensor, ranges)| rows.entry(tensor).or_default().extend(ranges));
            }
            assert!(rows.len() > 4, "{name}: {rows:?}");
            for (tensor, ranges) in rows {
                let height = checkpoint.tensor(&tensor).unwrap().shape[0];
                assert_eq!(ranges, [0..height / 2, height / 2..height], "{name}: {tensor}");
                let bytes = |ranges: &[Range<usize>]| {
                    let parts = checkpoint.file_parts(&tensor, ranges);
                    parts.last().map_or(0, |part| part.bytes.len())
                };
                assert_eq!(2 * bytes(&ranges[..1]), bytes(&[]), "{name}: {tensor}");
            }
        }
    }
}
