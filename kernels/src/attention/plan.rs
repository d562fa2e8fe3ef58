//! The division of a call's work into tasks. It affects only speed, never the result.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use super::{AttentionBatch, AttentionSequence, PAGE_TOKENS, Strides};
use crate::cpu::attention::{BLOCK, EXACT_ROWS, MAX_ROWS, QueryRow};
use crate::cpu::softmax_state::State;
use crate::shared_prefix::SharedRange;

/// Number of tasks per thread into which long ranges are divided to balance the load.
pub(super) const TASKS_PER_THREAD: usize = 6;
/// Maximum number of blocks of a task that is one of several that read the same keys. A thread's cache holds the latents of so
/// many positions, so those after the first find them there or in the cache that threads share.
pub(super) const REREAD_BLOCKS: usize = 8;
/// Maximum number of values of states. It is a gibibyte. No further part is divided, and no ranges are shared, if there would
/// be more.
pub(super) const MAX_STATES: usize = 1 << 28;

/// Everything that a plan depends on beside the sequences of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PlanShape {
    pub(super) threads: usize,
    pub(super) strides: Strides,
    pub(super) window: Option<usize>,
}

pub(super) struct Plan {
    pub(super) groups: Vec<Group>,
    pub(super) parts: Vec<Part>,
    pub(super) tasks: Vec<Task>,
    /// Number of floats in all states that are kept.
    pub(super) state_len: usize,
}

/// Up to `MAX_ROWS` query rows of one sequence and one KV head, whose results are finished together.
pub(super) struct Group {
    pub(super) rows: Vec<QueryRow>,
    /// The parts that cover the positions of the rows, in order, and the position of the rows among those of the part.
    pub(super) parts: Vec<(usize, usize)>,
    /// Number of tasks of the parts.
    tasks: usize,
    /// Number of these tasks that the current call has not finished.
    pub(super) unfinished: AtomicUsize,
}

/// Query rows of one KV head, and a range of positions that they read together.
pub(super) struct Part {
    pub(super) rows: Vec<QueryRow>,
    pub(super) kv_head: usize,
    /// The sequence whose pages are read.
    pub(super) sequence: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) groups: Vec<usize>,
    /// Offset of the states of the part's blocks. Without it, the part is one task and all of its only group.
    pub(super) states: Option<usize>,
}

/// A range of a part's positions, cut at block boundaries.
pub(super) struct Task {
    pub(super) part: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Part {
    pub(super) fn blocks(&self) -> Range<usize> {
        self.from / BLOCK..self.to.div_ceil(BLOCK)
    }

    fn work(&self) -> usize {
        // Reading a position costs about as much as computing three rows of it.
        (self.to - self.from) * (self.rows.len() + 3)
    }
}

impl Plan {
    pub(super) fn new(shape: &PlanShape, batch: &AttentionBatch) -> Self {
        let PlanShape { threads, strides, window } = shape;
        let mut plan = Plan { groups: Vec::new(), parts: Vec::new(), tasks: Vec::new(), state_len: 0 };
        plan.form_groups(strides, *window, batch);
        // The rows of one token take several groups, which read the same keys.
        let rereads = strides.heads / strides.kv_heads > MAX_ROWS;
        plan.cut(*threads, strides.value_stride, rereads);
        if rereads {
            let parts = &plan.parts;
            plan.tasks.sort_by_key(|task| (parts[task.part].sequence, task.from));
        }
        plan
    }

    /// Prepares the plan for a call.
    pub(super) fn begin(&mut self) {
        for group in &mut self.groups {
            *group.unfinished.get_mut() = group.tasks;
        }
    }

    /// Returns the bytes of all lists.
    #[cfg(test)]
    pub(super) fn list_bytes(&self) -> usize {
        let groups = self.groups.capacity() * size_of::<Group>()
            + self.parts.capacity() * size_of::<Part>()
            + self.tasks.capacity() * size_of::<Task>();
        let rows = |rows: &Vec<QueryRow>| rows.capacity() * size_of::<QueryRow>();
        let of_group =
            |group: &Group| rows(&group.rows) + group.parts.capacity() * size_of::<(usize, usize)>();
        let of_part = |part: &Part| rows(&part.rows) + part.groups.capacity() * size_of::<usize>();
        groups
            + self.groups.iter().map(of_group).sum::<usize>()
            + self.parts.iter().map(of_part).sum::<usize>()
    }

    fn form_groups(&mut self, strides: &Strides, window: Option<usize>, batch: &AttentionBatch) {
        let share = strides.heads / strides.kv_heads;
        let (sequences, ranges) = (batch.sequences(), batch.ranges(share, window));
        let states = shared_states(strides, window, sequences, &ranges);
        let ranges = if states <= MAX_STATES { &*ranges } else { &[] };
        for kv_head in 0..strides.kv_heads {
            let mut first_groups = Vec::with_capacity(sequences.len());
            for sequence in sequences {
                first_groups.push(self.groups.len());
                let count = sequence.tokens * share;
                for first in (0..count).step_by(MAX_ROWS) {
                    let describe = |row| query_row(strides, window, sequence, [kv_head, row]);
                    let rows = (first..count.min(first + MAX_ROWS)).map(describe).collect();
                    let (parts, unfinished) = (Vec::new(), AtomicUsize::new(0));
                    self.groups.push(Group { rows, parts, tasks: 0, unfinished });
                }
            }
            first_groups.push(self.groups.len());
            let groups_of = |sequence: usize| first_groups[sequence]..first_groups[sequence + 1];
            let mut covered = vec![0; sequences.len()];
            for range in ranges {
                for member in &range.members {
                    for group in groups_of(*member) {
                        self.add_own(kv_head, *member, covered[*member]..range.from, group);
                    }
                    covered[*member] = range.to;
                }
                let groups: Vec<usize> = range.members.iter().flat_map(|member| groups_of(*member)).collect();
                self.add(kv_head, range.members[0], range.from..range.to, groups);
            }
            for (index, covered) in covered.into_iter().enumerate() {
                for group in groups_of(index) {
                    let to = self.groups[group].rows.iter().map(|row| row.end).max().unwrap_or(0);
                    self.add_own(kv_head, index, covered..to, group);
                }
            }
        }
    }

    /// Adds the part of a range that a group of a sequence sees and reads alone, if there is one.
    fn add_own(&mut self, kv_head: usize, sequence: usize, range: Range<usize>, group: usize) {
        let rows = &self.groups[group].rows;
        let low = rows.iter().map(|row| row.first).min().unwrap_or(0) / PAGE_TOKENS * PAGE_TOKENS;
        if low.max(range.start) < range.end {
            self.add(kv_head, sequence, low.max(range.start)..range.end, vec![group]);
        }
    }

    /// Adds a part that the rows of `groups` read.
    fn add(&mut self, kv_head: usize, sequence: usize, range: Range<usize>, groups: Vec<usize>) {
        let mut rows: Vec<QueryRow> = Vec::with_capacity(MAX_ROWS);
        for group in &groups {
            let group = &mut self.groups[*group];
            group.parts.push((self.parts.len(), rows.len()));
            rows.extend(&group.rows);
        }
        if rows.len() > EXACT_ROWS {
            // The kernel computes this many rows; the copies are not used.
            rows.resize(MAX_ROWS, rows[0]);
        }
        let Range { start: from, end: to } = range;
        self.parts.push(Part { rows, kv_head, sequence, from, to, groups, states: None });
    }

    /// Cuts the parts into tasks. Prefill and large decode batches have enough parts; those of a single decode are divided, as
    /// long as the states of their blocks are not too large.
    fn cut(&mut self, threads: usize, value_stride: usize, rereads: bool) {
        let work: usize = self.parts.iter().map(Part::work).sum();
        let share = match threads {
            0 | 1 => usize::MAX,
            _ => work.div_ceil(threads * TASKS_PER_THREAD),
        };
        let state_len = |part: &Part| part.blocks().len() * State::len(part.rows.len(), value_stride);
        let is_shared = |part: &Part, groups: &[Group]| {
            part.groups.len() > 1 || part.groups.iter().any(|group| groups[*group].parts.len() > 1)
        };
        // The states of shared parts are kept in any case, and their number was bounded.
        let shared = self.parts.iter().filter(|part| is_shared(part, &self.groups)).map(state_len);
        let mut kept: usize = shared.sum();
        for (index, part) in self.parts.iter_mut().enumerate() {
            let blocks = part.blocks();
            let (states, is_shared) = (state_len(part), is_shared(part, &self.groups));
            let tasks = match is_shared || kept.saturating_add(states) <= MAX_STATES {
                true => part.work().div_ceil(share.max(1)).clamp(1, blocks.len()),
                false => 1,
            };
            let tasks = match tasks > 1 && rereads {
                true => tasks.max(blocks.len().div_ceil(REREAD_BLOCKS)),
                false => tasks,
            };
            let step = blocks.len().div_ceil(tasks);
            let before = self.tasks.len();
            self.tasks.extend(blocks.clone().step_by(step).map(|block| Task {
                part: index,
                from: part.from.max(block * BLOCK),
                to: part.to.min((block + step) * BLOCK),
            }));
            let tasks = self.tasks.len() - before;
            if tasks > 1 || is_shared {
                part.states = Some(self.state_len);
                self.state_len += states;
                kept += if is_shared { 0 } else { states };
            }
            for group in &part.groups {
                self.groups[*group].tasks += tasks;
            }
        }
    }
}

/// Returns a bound on the number of values of the states of sequences that share ranges, which are kept for all of their blocks.
fn shared_states(
    strides: &Strides,
    window: Option<usize>,
    sequences: &[AttentionSequence],
    ranges: &[SharedRange],
) -> usize {
    let mut shared = vec![0; sequences.len()];
    let mut blocks = 0;
    for range in ranges {
        let count = (range.to - range.from).div_ceil(BLOCK);
        range.members.iter().for_each(|member| shared[*member] += count);
        blocks += count;
    }
    let own = |(sequence, shared): (&AttentionSequence, usize)| match shared {
        0 => 0,
        shared => {
            let first = first_seen(window, sequence.start + 1) / BLOCK;
            (sequence.start + sequence.tokens).div_ceil(BLOCK) - first - shared
        }
    };
    blocks += sequences.iter().zip(shared).map(own).sum::<usize>();
    blocks.saturating_mul(strides.kv_heads).saturating_mul(State::len(MAX_ROWS, strides.value_stride))
}

/// Returns the first position that the query before position `end` sees.
fn first_seen(window: Option<usize>, end: usize) -> usize {
    window.map_or(0, |window| end.saturating_sub(window))
}

fn query_row(
    strides: &Strides,
    window: Option<usize>,
    sequence: &AttentionSequence,
    [kv_head, row]: [usize; 2],
) -> QueryRow {
    let share = strides.heads / strides.kv_heads;
    let (token, head) = (row / share, kv_head * share + row % share);
    let end = sequence.start + token + 1;
    let at = |[row, column]: [usize; 2]| (sequence.row + token) * row + head * column;
    QueryRow {
        offset: at(strides.query),
        output: at(strides.output),
        first: first_seen(window, end),
        end,
        head,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSITIONS: usize = 262_144;

    fn strides(heads: usize, kv_heads: usize, value_stride: usize) -> Strides {
        Strides {
            heads,
            kv_heads,
            query: [heads * value_stride, value_stride],
            output: [heads * value_stride, value_stride],
            value_stride,
            value_size: value_stride,
        }
    }

    fn plan(threads: usize, strides: Strides, batch: &AttentionBatch) -> Plan {
        Plan::new(&PlanShape { threads, strides, window: None }, batch)
    }

    /// Returns a sequence whose pages all have the same number.
    fn sequence(row: usize, page: u32) -> AttentionSequence {
        AttentionSequence { row, tokens: 1, start: POSITIONS - 1, pages: vec![page; POSITIONS / PAGE_TOKENS] }
    }

    #[test]
    fn the_states_of_long_sequences_are_bounded() {
        // The heads of latent attention read one KV head together.
        let heads = 128;
        let strides = strides(heads, 1, 512);
        for (count, all_divided) in [(1, true), (8, false)] {
            let sequences = (0..count).map(|row| sequence(row, row as u32)).collect();
            let batch = AttentionBatch::new(sequences, heads);
            let plan = plan(64, strides, &batch);
            assert!((1..=MAX_STATES).contains(&plan.state_len), "{count}: {}", plan.state_len);
            let divided = plan.parts.iter().filter(|part| part.states.is_some()).count();
            assert!(divided > 0 && (divided == plan.parts.len()) == all_divided, "{count}: {divided}");
            for (index, part) in plan.parts.iter().enumerate() {
                let tasks: Vec<&Task> = plan.tasks.iter().filter(|task| task.part == index).collect();
                assert!(tasks.len() == 1 || part.states.is_some());
                assert_eq!((tasks[0].from, tasks[tasks.len() - 1].to), (0, POSITIONS));
                assert!(tasks.windows(2).all(|pair| pair[0].to == pair[1].from));
            }
        }
    }

    #[test]
    fn long_ranges_are_shared_only_while_their_states_are_bounded() {
        for (kv_heads, are_shared) in [(8, true), (128, false)] {
            let batch = AttentionBatch::new((0..12).map(|row| sequence(row, 7)).collect(), 1);
            let plan = plan(2, strides(kv_heads, kv_heads, 128), &batch);
            assert!(plan.state_len <= MAX_STATES, "{kv_heads}: {}", plan.state_len);
            assert_eq!(plan.parts.iter().any(|part| part.groups.len() > 1), are_shared, "{kv_heads}");
            let positions = |group: &Group| {
                let parts = group.parts.iter().map(|(part, _)| &plan.parts[*part]);
                parts.map(|part| part.to - part.from).sum::<usize>()
            };
            assert!(plan.groups.iter().all(|group| positions(group) == POSITIONS), "{kv_heads}");
        }
    }

    /// Sequences with a common beginning of 10 blocks, whose own parts have these lengths.
    fn tails(lengths: &[usize]) -> AttentionBatch {
        let sequence = |(row, tail): (usize, &usize)| {
            let count = 80 + tail.div_ceil(PAGE_TOKENS) as u32;
            let pages = (0..count).map(|page| if page < 80 { page } else { row as u32 * 1000 + page });
            AttentionSequence { row, tokens: 1, start: 10 * BLOCK + tail - 1, pages: pages.collect() }
        };
        AttentionBatch::new(lengths.iter().enumerate().map(sequence).collect(), 2)
    }

    #[test]
    fn windows_that_begin_in_a_common_prefix_read_the_rest_of_it_once() {
        let lengths = [40, 200, 230, 700, 5000];
        let batch = tails(&lengths);
        for window in [300, 700, 1024, 2000, 10_000] {
            let shape = PlanShape { threads: 2, strides: strides(4, 2, 64), window: Some(window) };
            let plan = Plan::new(&shape, &batch);
            let mut read = 0;
            for group in &plan.groups {
                let parts: Vec<&Part> = group.parts.iter().map(|(part, _)| &plan.parts[*part]).collect();
                // The parts are what the window covers, in order.
                assert_eq!(parts[0].from, group.rows[0].first / PAGE_TOKENS * PAGE_TOKENS, "{window}");
                assert_eq!(parts[parts.len() - 1].to, group.rows[0].end, "{window}");
                assert!(parts.windows(2).all(|pair| pair[0].to == pair[1].from), "{window}");
                let shared = parts.iter().filter(|part| part.groups.len() > 1);
                assert!(shared.clone().all(|part| part.from >= group.rows[0].first), "{window}");
                read += group.rows[0].end - parts[0].from;
            }
            let once: usize = plan.parts.iter().map(|part| part.to - part.from).sum();
            let saved = (read - once) / BLOCK / 2;
            // Only the largest window of the last sequence covers the common beginning.
            let expected = match window {
                300 => 0,
                // 700 - 40 positions of the prefix are 5 blocks, those of the next two are 3 each.
                700 => 2 * 3,
                1024 => 2 * 6 + 2,
                2000 => 3 * 10,
                _ => 4 * 10,
            };
            assert_eq!(saved, expected, "{window}");
        }
    }

    #[test]
    fn tasks_that_read_the_same_latents_follow_each_other() {
        let heads = 48;
        let batch = AttentionBatch::new(vec![sequence(0, 1), sequence(1, 2)], heads);
        let plan = plan(2, strides(heads, 1, 512), &batch);
        let ranges: Vec<_> =
            plan.tasks.iter().map(|task| (plan.parts[task.part].sequence, task.from)).collect();
        // They are four groups.
        for same in ranges.chunks(4) {
            assert_eq!(same, [same[0]; 4]);
        }
        assert_eq!(plan.tasks.len(), 2 * 4 * POSITIONS / BLOCK / REREAD_BLOCKS);
        assert!(plan.tasks.iter().all(|task| task.to - task.from <= REREAD_BLOCKS * BLOCK));
    }
}
