//! The memory that calls of attention take beside their operands, bounded by the limits of a step.
//!
//! Invariant: no call within the limits takes more. The bounds follow from shapes and limits alone, so memory can be
//! planned before anything is computed.

use super::plan::{Group, MAX_STATES, Part, REREAD_BLOCKS, TASKS_PER_THREAD, Task};
use super::sharing::KEPT_PLANS;
use crate::cpu::attention::{BLOCK, EXACT_ROWS, MAX_ROWS, QueryRow};
use crate::cpu::kv::MAX_HEAD;
use crate::cpu::softmax_state::State;
use crate::cpu::{latent_bf16, latent_bytes};
use crate::kv::PAGE_TOKENS;
use crate::pool::WorkerPool;

/// The limits of a step, and the shape of the attention that it computes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionLimits {
    /// Number of threads of the pool.
    pub threads: usize,
    pub heads: usize,
    /// 1 for attention with latents.
    pub kv_heads: usize,
    /// Number of values of a head, or of a latent.
    pub value_size: usize,
    /// Maximum number of tokens in a step.
    pub tokens: usize,
    /// Maximum number of sequences in a step.
    pub sequences: usize,
    /// Maximum number of positions of a sequence.
    pub positions: usize,
    /// Number of plans that a step needs: one for each kind of layer, by its heads and its window, and at least two if layers with a
    /// window have pages of their own.
    pub plans: usize,
}

impl AttentionLimits {
    /// Returns a bound of the bytes that the states of blocks, the plans of a step and the buffers of all threads take.
    pub fn workspace_bytes(&self) -> usize {
        let states = WorkerPool::scratch_bytes_of(self.state_len());
        let lists = self.list_bytes().saturating_add(self.page_list_bytes());
        let lists = lists.saturating_mul(self.plans.clamp(1, 2 * KEPT_PLANS));
        states.saturating_add(lists).saturating_add(self.threads.saturating_mul(THREAD_BYTES))
    }

    /// Returns a bound of the number of values in the states that a call keeps.
    pub(super) fn state_len(&self) -> usize {
        let share = self.queries_per_token();
        let blocks = self.positions.div_ceil(BLOCK);
        let divided = self.divided();
        // More rows than the kernels are compiled for are filled up.
        let rows = self.tokens.saturating_mul(share);
        let rows = if rows > EXACT_ROWS { MAX_ROWS } else { rows };
        let part = |rows| blocks.saturating_mul(State::len(rows, self.value_size.next_multiple_of(16)));
        let divided = divided.saturating_mul(part(rows));
        divided.saturating_add(self.shared_len(blocks)).min(MAX_STATES)
    }

    /// Returns a bound of the number of values in the states of sequences that share ranges. At each position, each of them has
    /// its rows in one part, alone or with others; up to a third of the rows of a part are filled up.
    fn shared_len(&self, blocks: usize) -> usize {
        let (share, members, most) = (self.queries_per_token(), self.members(), MAX_ROWS / 2);
        if members < 2 || share > most {
            return 0;
        }
        let rows = members.saturating_mul(most).min(self.tokens.saturating_mul(share));
        let values = rows.saturating_mul(self.value_size.next_multiple_of(16));
        let each = values
            .saturating_add(values.div_ceil(3))
            .saturating_add(members.saturating_mul(State::len(0, 0)));
        each.saturating_mul(blocks).saturating_mul(self.kv_heads)
    }

    /// Returns a bound of the bytes of the lists of a plan.
    pub(super) fn list_bytes(&self) -> usize {
        let groups = self.groups();
        // For each KV head, sequences have fewer ranges than there are sequences. A window that begins in a range cuts it once
        // more. A sequence may read a part alone before what it shares, and one sequence before each range.
        let members = self.members().saturating_mul(self.kv_heads);
        let ranges = members.saturating_mul(2);
        let parts = groups.saturating_add(members.saturating_mul(2)).saturating_add(ranges);
        let rereads = self.positions.div_ceil(BLOCK).div_ceil(REREAD_BLOCKS).saturating_mul(self.divided());
        let tasks =
            parts.saturating_add(self.threads.saturating_mul(TASKS_PER_THREAD)).saturating_add(rereads);
        let rows = MAX_ROWS * size_of::<QueryRow>();
        // A list that grows has at most twice the memory that it needs, or room for four.
        let (index, pair) = (size_of::<usize>(), size_of::<(usize, usize)>());
        let group = rows + 2 * size_of::<Group>() + 4 * pair;
        let part = rows + 2 * size_of::<Part>() + index + 2 * pair;
        let range = MAX_ROWS * (2 * index + 2 * pair);
        let lists = groups.saturating_mul(group).saturating_add(parts.saturating_mul(part));
        let lists = lists.saturating_add(ranges.saturating_mul(range));
        lists.saturating_add(tasks.saturating_mul(2 * size_of::<Task>()))
    }

    /// Returns a bound of the bytes of the lists of pages of a step's sequences.
    fn page_list_bytes(&self) -> usize {
        self.members().saturating_mul(self.positions.div_ceil(PAGE_TOKENS)).saturating_mul(size_of::<u32>())
    }

    fn queries_per_token(&self) -> usize {
        self.heads.div_ceil(self.kv_heads.max(1))
    }

    /// Returns a bound of the number of parts that are divided into tasks. Each has a larger share of the work than a task, so
    /// there are fewer of them than tasks.
    fn divided(&self) -> usize {
        match self.threads {
            0 | 1 => 0,
            threads => (threads.saturating_mul(TASKS_PER_THREAD) - 1).min(self.groups()),
        }
    }

    /// Returns the largest number of sequences that a step has.
    fn members(&self) -> usize {
        self.sequences.min(self.tokens)
    }

    /// Returns a bound of the number of groups of query rows.
    fn groups(&self) -> usize {
        let whole = self.tokens.saturating_mul(self.queries_per_token()) / MAX_ROWS;
        whole.saturating_add(self.members()).saturating_mul(self.kv_heads)
    }
}

/// Bytes of the buffers that a task has on the stack of its thread: a state, the queries and the scores of its rows,
/// and what attention with latents in 8 bits or in BF16 keeps there.
const THREAD_BYTES: usize =
    size_of::<f32>() * (State::MAX_LEN + MAX_ROWS * (MAX_HEAD + BLOCK)) + LATENT_BYTES;
const LATENT_BYTES: usize = match latent_bytes::STACK_BYTES > latent_bf16::STACK_BYTES {
    true => latent_bytes::STACK_BYTES,
    false => latent_bf16::STACK_BYTES,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plan::{Plan, PlanShape};
    use crate::attention::{AttentionBatch, AttentionSequence, Strides};
    use crate::random::Random;

    fn strides(limits: &AttentionLimits) -> Strides {
        let (heads, size) = (limits.heads, limits.value_size);
        Strides {
            heads,
            kv_heads: limits.kv_heads,
            query: [heads * size, size],
            output: [heads * size, size],
            value_stride: size.next_multiple_of(16),
            value_size: size,
        }
    }

    /// Returns sequences within the limits, some of which begin with the same pages.
    fn batch(limits: &AttentionLimits, random: &mut Random) -> AttentionBatch {
        let (mut row, mut left, mut sequences) = (0, limits.tokens, Vec::new());
        while left > 0 && sequences.len() < limits.sequences {
            let tokens = if random.below(3) == 0 { 1 + random.below(left.min(limits.positions)) } else { 1 };
            let start = if random.below(2) == 0 { 0 } else { random.below(limits.positions - tokens + 1) };
            let start = if random.below(3) == 0 { limits.positions - tokens } else { start };
            let first = random.below(3) as u32;
            let pages = (0..(start + tokens).div_ceil(PAGE_TOKENS) as u32).map(|page| first * 10_000 + page);
            sequences.push(AttentionSequence { row, tokens, start, pages: pages.collect() });
            (row, left) = (row + tokens, left - tokens);
        }
        AttentionBatch::new(sequences, limits.heads / limits.kv_heads)
    }

    #[test]
    fn no_call_within_the_limits_takes_more_than_the_bound() {
        let mut random = Random::fresh();
        let (mut kept, mut nearest) = (0, 0.0f64);
        for round in 0..600 {
            let kv_heads = [1, 1, 2, 3][random.below(4)];
            let limits = AttentionLimits {
                threads: 1 + random.below(5),
                heads: kv_heads * [1, 2, 5, 6, 7, 16][random.below(6)],
                kv_heads,
                value_size: [16, 24, 512][random.below(3)],
                tokens: [1, 3, 40, 300][random.below(4)],
                sequences: [1, 2, 9][random.below(3)],
                positions: [300, 1000, 5000][random.below(3)],
                plans: 1,
            };
            let batch = batch(&limits, &mut random);
            let window = (round % 2 == 0).then(|| 1 + random.below(limits.positions));
            let shape = PlanShape { threads: limits.threads, strides: strides(&limits), window };
            let plan = Plan::new(&shape, &batch);
            let (found, bound) = (plan.state_len, limits.state_len());
            assert!(found <= bound, "{found} values of states, but {bound} were planned: {limits:?}");
            let (bytes, planned) = (plan.list_bytes(), limits.list_bytes());
            assert!(bytes <= planned, "{bytes} bytes of lists, but {planned} were planned: {limits:?}");
            if found > 0 {
                (kept, nearest) = (kept + 1, nearest.max(found as f64 / bound as f64));
            }
        }
        assert!(kept > 50 && nearest > 0.3, "{kept} calls kept states, at most {nearest} of the bound");
    }

    #[test]
    fn one_thread_keeps_states_only_for_what_sequences_share() {
        let one = AttentionLimits {
            threads: 1,
            heads: 64,
            kv_heads: 1,
            value_size: 512,
            tokens: 512,
            sequences: 64,
            positions: 262_144,
            plans: 1,
        };
        assert_eq!(one.state_len(), 0, "a token of latent attention has too many queries to share a read");
        let few = AttentionLimits { heads: 6, ..one };
        assert_eq!(few.state_len(), MAX_STATES);
        let alone = AttentionLimits { sequences: 1, ..few };
        assert_eq!(alone.state_len(), 0);
        // Two threads have 12 tasks, so at most 11 parts are divided.
        let two = AttentionLimits { threads: 2, positions: 1280, ..alone };
        assert_eq!(two.state_len(), 11 * 10 * (32 + 12 * 512));
        assert!(two.workspace_bytes() > 4 * two.state_len());
        let absurd = AttentionLimits { tokens: usize::MAX, positions: usize::MAX, ..few };
        assert!(absurd.workspace_bytes() >= 4 * MAX_STATES);
    }

    #[test]
    fn lists_count_once_for_each_kind_of_layer() {
        let limits = AttentionLimits {
            threads: 2,
            heads: 8,
            kv_heads: 2,
            value_size: 64,
            tokens: 40,
            sequences: 9,
            positions: 5000,
            plans: 1,
        };
        let batch = batch(&limits, &mut Random::fresh());
        let pages = batch.sequences().iter().map(|sequence| sequence.pages.len() * size_of::<u32>());
        let pages: usize = pages.sum();
        let (mut found, mut planned) = (pages, Vec::new());
        for (count, window) in [None, Some(700)].into_iter().enumerate() {
            let plan = Plan::new(&PlanShape { threads: 2, strides: strides(&limits), window }, &batch);
            found += plan.list_bytes();
            let bytes = AttentionLimits { plans: count + 1, ..limits }.workspace_bytes();
            let lists =
                bytes - WorkerPool::scratch_bytes_of(limits.state_len()) - limits.threads * THREAD_BYTES;
            assert!(found <= lists, "{found} bytes of lists, but {lists} were planned for {window:?}");
            planned.push(lists);
        }
        assert_eq!(planned, [1, 2].map(|plans| plans * (limits.list_bytes() + limits.page_list_bytes())));
    }
}
