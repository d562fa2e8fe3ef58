//! The ways to divide a model among devices, and the memory that each of them takes.
//!
//! Invariant: for a model that the executors can run, the memory is what they plan themselves. `expert_parallel` ranks
//! of a tensor-parallel group hold whole experts each; the ranks between them divide each expert.

use serde::Serialize;

use super::description::{AttentionShape, Description, LayerShape, ModelPart, Split, Weight};
use super::devices::{DeviceKind, Devices};
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::cuda::estimate::{device_options, page_format, rank_plan, spare, workspace_of_widths};
use crate::executor::cuda::workspace::Widths;
use crate::executor::estimate::{cpu_buffers_of_widths, cpu_plan, step_limits};
use crate::executor::{ExecutorLimits, ExecutorOptions, KvDtype, physical_cores, share_of};
use crate::memory_plan::{MemoryPlan, RankPlan};
use crate::shard::{self, Shard};

/// Memory of a CUDA device that its context, the loaded kernels and NVIDIA's libraries take before anything else.
pub const DRIVER_BYTES: u64 = 1 << 30;
/// The share of a machine's memory that stays free for the system and for the rest of the host: one part in this many.
pub const CPU_RESERVE_PARTS: u64 = 8;

/// The devices and the work that a plan is made for.
#[derive(Clone, Debug)]
pub struct Request {
    pub devices: Devices,
    /// Number of tokens of each sequence.
    pub context: usize,
    /// Number of sequences of `context` tokens that must fit.
    pub sequences: usize,
    pub kv: KvDtype,
}

/// The memory of a model on some devices, for each way to divide it.
#[derive(Debug, Serialize)]
pub struct Plan {
    pub layouts: Vec<LayoutPlan>,
    /// The ways to divide the model that are not possible, with the reason.
    pub excluded: Vec<String>,
    /// Whether the executors can run the model, so that the plan is what they allocate.
    pub is_exact: bool,
}

/// One way to divide a model. Bytes are those of the device that has the least room.
#[derive(Clone, Debug, Serialize)]
pub struct LayoutPlan {
    pub tensor_parallel: usize,
    pub pipeline_parallel: usize,
    pub expert_parallel: usize,
    /// Memory of one device. On the CPU, it is that of all ranks, which share the machine's memory.
    pub device: MemoryPlan,
    /// Memory of all devices that is left for keys and values.
    pub kv_bytes_in_all: u64,
    /// Number of tokens that fit.
    pub kv_tokens: u64,
    /// Number of sequences of the asked context that fit.
    pub sequences: u64,
    /// Memory that each device lacks for the asked sequences; 0 if they fit.
    pub missing_bytes: u64,
}

/// The numbers of ranks that divide a model.
#[derive(Clone, Copy, Debug)]
struct Ranks {
    tensor: usize,
    pipeline: usize,
    expert: usize,
}

impl Description {
    /// Plans every way to divide the model among all the devices.
    pub fn plan(&self, request: &Request) -> Result<Plan, ModelError> {
        check(self, request)?;
        let count = request.devices.count;
        let kind = request.devices.device.kind;
        let is_exact = self.runnable_on(kind).is_some();
        let mut plan = Plan { layouts: Vec::new(), excluded: Vec::new(), is_exact };
        for tensor in divisors(count).rev() {
            // The executors divide each expert among the ranks.
            let experts = if self.experts > 0 && !is_exact { tensor } else { 1 };
            for expert in divisors(experts) {
                let ranks = Ranks { tensor, pipeline: count / tensor, expert };
                match self.obstacle_to(ranks, kind)? {
                    Some(reason) => plan.excluded.push(reason),
                    None => plan.layouts.push(self.layout(request, ranks)?),
                }
            }
        }
        plan.excluded.dedup();
        Ok(plan)
    }

    /// Returns whether the model fits into the memory of a machine for one sequence of `context` tokens on the CPU.
    pub fn fits_into(&self, memory_bytes: u64, context: usize, kv: KvDtype) -> Result<bool, ModelError> {
        let request = Request { devices: Devices::cpu(memory_bytes), context, sequences: 1, kv };
        check(self, &request)?;
        let layout = self.layout(&request, Ranks { tensor: 1, pipeline: 1, expert: 1 })?;
        Ok(layout.missing_bytes == 0)
    }

    /// Returns why the model cannot be divided this way.
    fn obstacle_to(&self, ranks: Ranks, kind: DeviceKind) -> Result<Option<String>, ModelError> {
        let Ranks { tensor, pipeline, expert } = ranks;
        if pipeline > self.layers.len() {
            return Ok(Some(format!("PP {pipeline}: the model has {} layers", self.layers.len())));
        }
        if !self.head_count.is_multiple_of(tensor) {
            return Ok(Some(format!("TP {tensor}: it does not divide the {} heads", self.head_count)));
        }
        if let Some(checkpoint) = self.runnable_on(kind) {
            return Ok(shard::check(checkpoint, tensor).err().map(|error| error.to_string()));
        }
        if self.experts > 0 && !self.experts.is_multiple_of(expert) {
            let experts = self.experts;
            return Ok(Some(format!("EP {expert}: it does not divide the {experts} experts")));
        }
        let within = tensor / expert;
        let too_few = self.weights.iter().any(|weight| match weight.split {
            Split::Parts(parts) => parts < tensor as u64,
            Split::Experts { parts } => weight.columns > 1 && parts < within as u64,
            Split::Replicated | Split::KvHeads => false,
        });
        let reason =
            || format!("TP {tensor}, EP {expert}: a weight has fewer whole groups than ranks divide it");
        Ok(too_few.then(reason))
    }

    fn layout(&self, request: &Request, ranks: Ranks) -> Result<LayoutPlan, ModelError> {
        let device = &request.devices.device;
        let most = ExecutorOptions::default();
        let options = ExecutorOptions {
            kv: request.kv,
            max_sequences: most.max_sequences.max(request.sequences),
            max_logit_rows: most.max_logit_rows.max(request.sequences),
            tensor_parallel: ranks.tensor,
            pipeline_parallel: ranks.pipeline,
            ..most
        };
        let (stages, available) = match device.kind {
            DeviceKind::Cpu => {
                let plan = match self.runnable_on(device.kind) {
                    Some(checkpoint) => cpu_plan(checkpoint, &options)?,
                    None => self.estimate_on_cpu(&options, ranks)?,
                };
                (vec![plan], device.memory_bytes - device.memory_bytes / CPU_RESERVE_PARTS)
            }
            DeviceKind::Cuda { multiprocessors } => {
                let options = device_options(options);
                let stage = |stage| match self.runnable_on(device.kind) {
                    Some(checkpoint) => {
                        largest_rank(checkpoint, &options, stage, device.memory_bytes, multiprocessors)
                    }
                    None => self.estimate_stage(&options, ranks, stage, device.memory_bytes, multiprocessors),
                };
                let stages = (0..ranks.pipeline).map(stage).collect::<Result<Vec<_>, _>>()?;
                (stages, device.memory_bytes.saturating_sub(DRIVER_BYTES))
            }
        };
        Ok(fill(&stages, available, request, ranks))
    }

    /// Returns the shapes that executors on devices of this kind plan with, if they can run the model.
    fn runnable_on(&self, kind: DeviceKind) -> Option<&Checkpoint> {
        let checkpoint = self.runnable.as_ref().ok()?;
        let runs = match kind {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda { .. } => checkpoint.config().style.lack_on_cuda().is_none(),
        };
        runs.then_some(checkpoint)
    }

    /// Estimates the largest rank of a stage on a CUDA device.
    fn estimate_stage(
        &self,
        options: &ExecutorOptions,
        ranks: Ranks,
        stage: usize,
        memory_bytes: u64,
        multiprocessors: u32,
    ) -> Result<RankPlan, ModelError> {
        let limits = step_limits(self.context_length, self.vocabulary_size, options)?;
        let draws = stage + 1 == ranks.pipeline;
        let windows = self.layers.iter().map(|layer| layer.window).collect();
        let widths = self.widths(ranks);
        let format = page_format(options.kv)?;
        let activation_bytes =
            workspace_of_widths(&widths, &limits, windows, ranks.tensor, draws, format, multiprocessors);
        let memory = MemoryPlan {
            weight_bytes: self.weight_bytes_of_rank(ranks, stage),
            activation_bytes,
            graph_bytes: spare(memory_bytes),
            kv_bytes: 0,
        };
        let page_bytes = self.page_bytes_of_rank(ranks, stage, options.kv);
        Ok(RankPlan { memory, page_bytes, windowed: None, spare_pages: 1 })
    }

    /// Estimates all ranks together on the CPU.
    fn estimate_on_cpu(&self, options: &ExecutorOptions, ranks: Ranks) -> Result<RankPlan, ModelError> {
        let limits: ExecutorLimits = step_limits(self.context_length, self.vocabulary_size, options)?;
        let (kv_heads, _) = self.kv_heads(ranks);
        let plans = 1 + usize::from(self.windowed_layers().is_some());
        let threads = share_of(physical_cores(), 0, ranks.tensor * ranks.pipeline);
        let mut all = RankPlan::default();
        for stage in 0..ranks.pipeline {
            let each = ranks.tensor as u64;
            let weights = self.weight_bytes_of_rank(ranks, stage).saturating_mul(each);
            let buffers = cpu_buffers_of_widths(&self.widths(ranks), kv_heads, plans, threads, &limits)
                .saturating_mul(each);
            let pages = self.page_bytes_of_rank(ranks, stage, options.kv).saturating_mul(each);
            all.memory.weight_bytes = all.memory.weight_bytes.saturating_add(weights);
            all.memory.activation_bytes = all.memory.activation_bytes.saturating_add(buffers);
            all.page_bytes = all.page_bytes.saturating_add(pages);
        }
        Ok(all)
    }

    fn stage_layers(&self, ranks: Ranks, stage: usize) -> std::ops::Range<usize> {
        shard::stage_layers(self.layers.len(), ranks.pipeline, stage)
    }

    fn weight_bytes_of_rank(&self, ranks: Ranks, stage: usize) -> u64 {
        let layers = self.stage_layers(ranks, stage);
        let is_last = stage + 1 == ranks.pipeline;
        let held = self.weights.iter().filter(|weight| match weight.model_part {
            // The last stage has a copy of a tied table.
            ModelPart::Table { is_tied } => stage == 0 || is_tied && is_last,
            ModelPart::Layer(layer) => layers.contains(&layer),
            ModelPart::Exit => is_last,
            ModelPart::Vision => stage == 0,
            ModelPart::Draft => false,
        });
        held.fold(0u64, |sum, weight| sum.saturating_add(self.part_of_rank(weight, ranks)))
    }

    /// Returns the bytes of a weight that the rank with the largest part holds.
    fn part_of_rank(&self, weight: &Weight, ranks: Ranks) -> u64 {
        let share = |bytes: u64, held: u64, of: u64| {
            (u128::from(bytes) * u128::from(held)).div_ceil(u128::from(of.max(1))).min(u128::from(u64::MAX))
                as u64
        };
        let tensor = ranks.tensor as u64;
        match weight.split {
            Split::Replicated => weight.bytes,
            Split::Parts(parts) => share(weight.bytes, parts.div_ceil(tensor), parts),
            Split::KvHeads => {
                let (held, of) = self.kv_heads(ranks);
                share(weight.bytes, held as u64, of as u64)
            }
            Split::Experts { parts } => {
                let copies = weight.copies.div_ceil(ranks.expert as u64);
                let bytes = share(weight.bytes, copies, weight.copies);
                share(bytes, parts.div_ceil(tensor / ranks.expert as u64), parts)
            }
        }
    }

    /// Returns the number of KV heads of a rank, and of the model.
    fn kv_heads(&self, ranks: Ranks) -> (usize, usize) {
        match self.layers.first().map(|layer| layer.attention) {
            Some(AttentionShape::Grouped { kv_heads, .. }) => {
                let own = Shard { rank: 0, ranks: ranks.tensor }.heads_of(self.head_count, kv_heads);
                (own.kv.len(), kv_heads)
            }
            // A latent belongs to all heads, so every rank keeps it whole.
            Some(AttentionShape::Latent { .. }) | None => (1, 1),
        }
    }

    fn page_bytes_of_rank(&self, ranks: Ranks, stage: usize, kv: KvDtype) -> u64 {
        let (held, _) = self.kv_heads(ranks);
        let layers = &self.layers[self.stage_layers(ranks, stage)];
        let token = |layer: &LayerShape| layer.attention.kv_bytes(held, kv);
        let tokens = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(token(layer)));
        tokens.saturating_mul(PAGE_TOKENS as u64)
    }

    /// Returns the widths of a rank's widest rows.
    fn widths(&self, ranks: Ranks) -> Widths {
        let own = self.head_count / ranks.tensor;
        let (kv_heads, _) = self.kv_heads(ranks);
        let (mut qkv, mut attended, mut gated, mut size) = (0, 0, 0, 0);
        for layer in &self.layers {
            let (rows, out, head) = match layer.attention {
                AttentionShape::Grouped { head_size, .. } => {
                    ((own + 2 * kv_heads) * head_size, own * head_size, head_size)
                }
                // Queries and the expanded keys and values of the same rows, with the two narrow rows before them.
                AttentionShape::Latent { query_rank, latent, rotated, unrotated, value } => {
                    let narrow = query_rank + latent + rotated;
                    (narrow + own * (2 * unrotated + rotated + value), own * value, latent)
                }
            };
            (qkv, attended, size) = (qkv.max(rows), attended.max(out), size.max(head));
            // A token may have all its experts on one rank.
            let experts = self.experts_per_token.min(self.experts.div_ceil(ranks.expert));
            let expert_width = layer.expert_width.div_ceil(ranks.tensor / ranks.expert);
            gated = gated.max(layer.dense_width.div_ceil(ranks.tensor) + experts * expert_width);
        }
        Widths {
            hidden: self.hidden_size,
            qkv,
            attended,
            gated,
            heads: own,
            head_size: size,
            vocabulary: self.vocabulary_size,
            expanded_bytes: 0,
        }
    }
}

/// Fills what is left on the devices with pages.
fn fill(stages: &[RankPlan], available: u64, request: &Request, ranks: Ranks) -> LayoutPlan {
    let pages_of_sequence = request.context.div_ceil(PAGE_TOKENS) as u64;
    let needed = pages_of_sequence.saturating_mul(request.sequences as u64);
    let left = |plan: &RankPlan| available.saturating_sub(plan.memory.total_bytes());
    let pages = stages.iter().map(|plan| plan.pages(left(plan))).min().unwrap_or(0);
    let missing = |plan: &RankPlan| {
        let kv = needed.saturating_add(plan.spare_pages).saturating_mul(plan.page_bytes);
        plan.memory.total_bytes().saturating_add(kv).saturating_sub(available)
    };
    // The stage that has the least room decides.
    let tightest =
        stages.iter().max_by_key(|plan| (missing(plan), std::cmp::Reverse(plan.pages(left(plan)))));
    let tightest = tightest.copied().unwrap_or_default();
    // The machine's memory is shared by all ranks on the CPU.
    let ranks_of_stage = match request.devices.device.kind {
        DeviceKind::Cpu => 1,
        DeviceKind::Cuda { .. } => ranks.tensor as u64,
    };
    let kv_bytes_in_all =
        stages.iter().fold(0u64, |sum, plan| sum.saturating_add(left(plan).saturating_mul(ranks_of_stage)));
    LayoutPlan {
        tensor_parallel: ranks.tensor,
        pipeline_parallel: ranks.pipeline,
        expert_parallel: ranks.expert,
        device: MemoryPlan { kv_bytes: left(&tightest), ..tightest.memory },
        kv_bytes_in_all,
        kv_tokens: pages.saturating_mul(PAGE_TOKENS as u64),
        sequences: pages / pages_of_sequence.max(1),
        missing_bytes: stages.iter().map(missing).max().unwrap_or(0),
    }
}

/// Returns the plan of the rank of a stage that takes the most memory, use by use.
pub(super) fn largest_rank(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    stage: usize,
    memory_bytes: u64,
    multiprocessors: u32,
) -> Result<RankPlan, ModelError> {
    let mut largest = RankPlan::default();
    for rank in 0..options.tensor_parallel {
        let plan = rank_plan(checkpoint, options, [stage, rank], memory_bytes, multiprocessors)?;
        let (memory, own) = (&mut largest.memory, &plan.memory);
        memory.weight_bytes = memory.weight_bytes.max(own.weight_bytes);
        memory.activation_bytes = memory.activation_bytes.max(own.activation_bytes);
        memory.graph_bytes = memory.graph_bytes.max(own.graph_bytes);
        largest.page_bytes = largest.page_bytes.max(plan.page_bytes);
        largest.spare_pages = largest.spare_pages.max(plan.spare_pages);
    }
    Ok(largest)
}

fn check(description: &Description, request: &Request) -> Result<(), ModelError> {
    const MAX_SEQUENCES: usize = 1 << 16;
    let wrong =
        |option: &str, problem: String| Err(ModelError::Option { option: option.to_owned(), problem });
    let longest = description.context_length;
    if request.context == 0 || request.context > longest {
        return wrong(
            "context",
            format!("{} is not between 1 and the model's {longest} tokens", request.context),
        );
    }
    if request.sequences == 0 || request.sequences > MAX_SEQUENCES {
        return wrong("sequences", format!("{} is not between 1 and {MAX_SEQUENCES}", request.sequences));
    }
    let has_latents =
        description.layers.iter().any(|layer| matches!(layer.attention, AttentionShape::Latent { .. }));
    if request.kv == KvDtype::Fp8 && has_latents {
        return wrong("kv", "the latents of this model are not stored in fp8; use f16".to_owned());
    }
    match request.devices.device.kind {
        DeviceKind::Cpu => request.kv.format().map(drop),
        DeviceKind::Cuda { .. } => page_format(request.kv).map(drop),
    }
}

fn divisors(number: usize) -> impl DoubleEndedIterator<Item = usize> {
    (1..=number).filter(move |divisor| number.is_multiple_of(*divisor))
}
