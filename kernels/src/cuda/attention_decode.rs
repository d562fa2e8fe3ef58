//! Attention of one query row per sequence over its paged keys and values, split along the context.

use std::ops::Range;

use super::{Activation, Address, Launch, WARP, WIDE_HEAD};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of warps per block.
const WARPS: u32 = device_constant!("attention_decode.cu", "DECODE_WARPS");
/// Number of query heads per block; half as many if they are wide.
const MAX_GROUP_HEADS: u32 = device_constant!("attention_decode.cu", "MAX_GROUP_HEADS");
const HEAD_SIZES: [u32; 6] = [16, 32, 64, 96, 128, 256];
/// Minimum length of a split. Shorter splits cost more to join than they save.
const MIN_SPLIT: u32 = 128;

/// The parameters of the kernel that attends within splits and writes the state of each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecodeParams {
    /// `[rows, q_stride]`. Each row starts with the queries.
    pub q: Address,
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub keys: Address,
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub values: Address,
    /// u32 `[rows, table_stride]`.
    pub page_tables: Address,
    /// An array of [`Split`].
    pub splits: Address,
    /// f32 `[states, heads, head_size + 2]`.
    pub states: Address,
    pub q_stride: u32,
    pub table_stride: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub scale: f32,
}

/// The parameters of the kernel that merges the splits of each row.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionMergeParams {
    /// f32 `[states, heads, head_size + 2]`, as attention wrote them.
    pub states: Address,
    /// u32 `[rows + 1]`: see [`Plan::first_state`].
    pub first_state: Address,
    /// `[rows, heads, head_size]`.
    pub out: Address,
    pub heads: u32,
    pub head_size: u32,
}

/// A split of one row's context.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    pub row: u32,
    pub first: u32,
    /// Exclusive.
    pub last: u32,
    /// Index of its state.
    pub state: u32,
}

impl Split {
    /// A split that computes nothing. Recorded launches have as many splits as any step of their shape needs.
    pub const SPARE: Split =
        Split { row: 0, first: 0, last: 0, state: device_constant!("attention_decode.cu", "NO_STATE") };
}

/// The division of a step's contexts into splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub splits: Vec<Split>,
    /// The index of each row's first state, followed by the total number of states.
    pub first_state: Vec<u32>,
}

impl Plan {
    /// Divides the ranges of the contexts that rows see into splits. The longest split is as short as possible while all
    /// splits together take no more than `blocks` blocks, where each split takes `blocks_per_split` (see
    /// [`blocks_per_split()`]). The device then runs all of them at once, and none waits long for another. Every row has at
    /// least one split.
    pub fn new(seen: &[Range<u32>], blocks_per_split: u32, blocks: u32) -> Self {
        let wanted = u64::from(blocks / blocks_per_split.max(1)).max(seen.len() as u64);
        let splits = |length: u32| seen.iter().map(|seen| u64::from(splits_of(seen, length))).sum::<u64>();
        let longest = seen.iter().map(|seen| seen.end - seen.start).max().unwrap_or(0);
        // Binary search for the shortest length that gives no more splits than wanted. A greater length never gives more
        // splits.
        let (mut low, mut high) = (MIN_SPLIT, longest.max(MIN_SPLIT));
        while low < high {
            let middle = low + (high - low) / 2;
            if splits(middle) <= wanted { high = middle } else { low = middle + 1 }
        }
        let mut plan = Plan { splits: Vec::new(), first_state: vec![0] };
        for (row, seen) in seen.iter().enumerate() {
            let count = splits_of(seen, low);
            // The splits of a row have equal lengths.
            let even = (seen.end - seen.start).div_ceil(count);
            for index in 0..count {
                let first = (seen.start + index * even).min(seen.end);
                let last = (first + even).min(seen.end);
                let state = plan.splits.len() as u32;
                plan.splits.push(Split { row: row as u32, first, last, state });
            }
            plan.first_state.push(plan.splits.len() as u32);
        }
        plan
    }
}

/// Returns how many splits of at most this length cover the range.
fn splits_of(seen: &Range<u32>, length: u32) -> u32 {
    (seen.end - seen.start).div_ceil(length).max(1)
}

/// Returns the number of blocks per split, as in the kernel: for each key-value head, one block for as many of its query
/// heads as registers hold.
pub fn blocks_per_split(heads: u32, kv_heads: u32, head_size: u32) -> u32 {
    let group = if head_size > WIDE_HEAD { MAX_GROUP_HEADS / 2 } else { MAX_GROUP_HEADS };
    kv_heads * (heads / kv_heads.max(1)).div_ceil(group)
}

/// Returns the launch for this number of splits. Fails for head sizes and ratios of heads that no kernel supports.
pub fn launch(
    params: &AttentionDecodeParams,
    splits: u32,
    head_size: u32,
    activation: Activation,
) -> Result<Launch, KernelError> {
    const OP: &str = "attention_decode";
    let sizes = || HEAD_SIZES.map(|size| size.to_string()).join(", ");
    super::require(HEAD_SIZES.contains(&head_size), OP, "head_size", head_size, sizes)?;
    let (heads, kv_heads) = (params.heads, params.kv_heads);
    super::require(kv_heads > 0 && heads % kv_heads.max(1) == 0, OP, "heads", heads, || {
        format!("a multiple of the {kv_heads} key-value heads")
    })?;
    let columns = blocks_per_split(heads, kv_heads, head_size);
    let name = format!("attention_decode_{head_size}_{}", activation.suffix());
    let shared_bytes = WARPS * (head_size + 2) * 4;
    Ok(Launch { shared_bytes, ..Launch::new(name, [splits, columns, 1], WARPS * WARP) })
}

/// Returns the launch that merges the splits of `rows` rows.
pub fn merge(params: &AttentionMergeParams, rows: u32, activation: Activation) -> Launch {
    let name = format!("attention_merge_{}", activation.suffix());
    Launch::new(name, [rows, params.heads, 1], params.head_size.next_multiple_of(WARP).min(256))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Context},
        random::Random,
    };

    fn check(activation: Activation, heads: usize, kv_heads: usize, head_size: usize, blocks: u32) {
        let mut random = Random::fresh();
        let contexts = [1, 300, 37, 128, 257];
        let rows = contexts.len();
        let paged = Context::random(activation, &mut random, &contexts, kv_heads, head_size);
        let q_stride = (heads + 2 * kv_heads) * head_size;
        let q = activation.random(&mut random, rows * q_stride);
        let mut out = activation.zeros(rows * heads * head_size);
        // One row sees only a window.
        let mut seen: Vec<_> = contexts.iter().map(|context| 0..*context).collect();
        seen[1].start = 200;
        let columns = blocks_per_split(heads as u32, kv_heads as u32, head_size as u32);
        let mut plan = Plan::new(&seen, columns, blocks);
        let states = vec![f32::NAN; plan.splits.len() * heads * (head_size + 2)];
        plan.splits.extend([Split::SPARE; 2]);
        let scale = 1.0 / (head_size as f32).sqrt();
        let params = AttentionDecodeParams {
            q: q.address(),
            keys: paged.keys.address(),
            values: paged.values.address(),
            page_tables: host::address(&paged.page_tables),
            splits: host::address(&plan.splits),
            states: host::address(&states),
            q_stride: q_stride as u32,
            table_stride: paged.table_stride as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            scale,
        };
        let decode = launch(&params, plan.splits.len() as u32, head_size as u32, activation);
        host::run(&decode.expect("good shapes"), &params, &mut []);
        let params = AttentionMergeParams {
            states: host::address(&states),
            first_state: host::address(&plan.first_state),
            out: out.address(),
            heads: heads as u32,
            head_size: head_size as u32,
        };
        host::run(&merge(&params, rows as u32, activation), &params, &mut [out.values_mut()]);
        let mut expected = Vec::new();
        for (row, seen) in seen.iter().enumerate() {
            for head in 0..heads {
                let query = &q.values()[row * q_stride + head * head_size..][..head_size];
                let seen = seen.start as usize..seen.end as usize;
                expected.extend(paged.attend(query, row, head / (heads / kv_heads), seen, scale.into()));
            }
        }
        activation.assert_close(out.values(), &expected, 1e-4);
    }

    #[test]
    fn divided_contexts_match_the_reference() {
        for activation in Activation::ALL {
            for (heads, kv_heads, head_size) in
                [(9, 3, 64), (8, 1, 128), (2, 2, 16), (4, 2, 96), (9, 1, 32), (38, 2, 16), (5, 1, 256)]
            {
                check(activation, heads, kv_heads, head_size, 16);
            }
        }
    }

    #[test]
    fn undivided_contexts_match_the_reference() {
        for activation in Activation::ALL {
            check(activation, 9, 3, 64, 1);
        }
    }

    #[test]
    fn a_plan_covers_each_context_once_in_even_splits() {
        let seen = [0..1, 100..100, 0..4096, 50..700];
        let plan = Plan::new(&seen, 2, 64);
        assert_eq!(plan.first_state.len(), seen.len() + 1);
        for (row, seen) in seen.iter().enumerate() {
            let states = plan.first_state[row] as usize..plan.first_state[row + 1] as usize;
            let splits = &plan.splits[states.clone()];
            assert_eq!((splits[0].first, splits[splits.len() - 1].last), (seen.start, seen.end));
            assert!(splits.windows(2).all(|pair| pair[0].last == pair[1].first));
            assert!(splits.iter().zip(states).all(|(split, state)| split.state as usize == state));
        }
        assert_eq!(plan.splits.len(), 32, "64 blocks at 2 blocks per split");
        assert_eq!(longest(&plan), 163, "4096 in 26 splits and 650 in 4");
    }

    #[test]
    fn a_plan_minimizes_its_longest_split() {
        let mut random = Random::fresh();
        for _ in 0..200 {
            let rows = 1 + random.next_u64() % 20;
            let seen: Vec<Range<u32>> = (0..rows).map(|_| 0..(random.next_u64() % 5000) as u32).collect();
            let blocks = (random.next_u64() % 200) as u32;
            let plan = Plan::new(&seen, 1, blocks);
            let most = u64::from(blocks).max(rows);
            assert!(plan.splits.len() as u64 <= most, "{seen:?} in {blocks}");
            let longest = longest(&plan);
            let shorter: u64 = seen.iter().map(|seen| u64::from(seen.end.div_ceil(longest - 1).max(1))).sum();
            assert!(longest <= MIN_SPLIT || shorter > most, "{longest} of {seen:?} in {blocks}");
        }
        assert_eq!(Plan::new(&[], 8, 132), Plan { splits: vec![], first_state: vec![0] });
    }

    fn longest(plan: &Plan) -> u32 {
        plan.splits.iter().map(|split| split.last - split.first).max().unwrap_or(0)
    }

    #[test]
    fn unsupported_heads_are_rejected() {
        let none = Address::NONE;
        let params = AttentionDecodeParams {
            q: none,
            keys: none,
            values: none,
            page_tables: none,
            splits: none,
            states: none,
            q_stride: 0,
            table_stride: 0,
            heads: 9,
            kv_heads: 2,
            scale: 1.0,
        };
        let refused = |head_size| {
            launch(&params, 1, head_size, Activation::F16).expect_err("9 is not a multiple of 2").to_string()
        };
        assert!(refused(64).contains("multiple of the 2"), "{}", refused(64));
        assert!(refused(72).contains("16, 32, 64"), "{}", refused(72));
    }
}
