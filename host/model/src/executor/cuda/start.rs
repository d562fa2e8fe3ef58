//! Creates an executor on devices from a checkpoint: decides which rank holds what, and how much memory that takes.
//!
//! Invariant: what a device cannot run or hold is rejected here, before the first step. The largest shapes are
//! planned, and a step of each kind is tried; then steps of all sizes are prepared.

use std::cell::{Cell, OnceCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use skep_kernels::cuda::attention_decode::max_blocks_per_multiprocessor;
use skep_kernels::cuda::blas::Blas;
use skep_kernels::cuda::device::{Device, Loaded};
use skep_kernels::{Isa, KernelError};

use super::draw::DrawBuffers;
use super::estimate::{
    STEP_TOKENS, attention, cuts, device_options, logits_bytes, page_format, spare, workspace_bytes,
    workspace_of_rank,
};
use super::layout::Layout;
use super::page_copies::PageCopies;
use super::rank::Rank;
use super::room::{Room, Share};
use super::shape::Shape;
use super::weights::{DeviceWeights, size};
use super::workspace::{Sizes, WorkspaceOffsets};
use super::{CudaExecutor, Recordings, StepInputs, warm_up};
use crate::batch::{Batch, PAGE_TOKENS};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::limits::limits;
use crate::executor::{ExecutorOptions, LoadWatch, Ordinals, option};
use crate::memory_plan::{MemoryPlan, RankMemory};
use crate::shard;

/// Maximum number of queues that a device processes at the same time.
const MAX_RANKS_PER_DEVICE: usize = 8;
/// Maximum memory that a driver takes for the launches of a step with a few dozen layers.
const RECORDING_BYTES: u64 = 2 << 20;
const MOST_RECORDINGS: u64 = 128;

/// A function that opens a device by its ordinal. Devices are opened at the same time.
pub(crate) type Open<'a> = Box<dyn Fn(usize) -> Result<Device, ModelError> + Sync + 'a>;

/// A checkpoint that is loaded for replicas, which share its weights where they share a device.
pub(crate) struct CudaModel<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) options: ExecutorOptions,
    replicas: usize,
    ordinals: Vec<usize>,
    pub(super) open: Open<'a>,
    pub(super) loaded: HashMap<RankPosition, Arc<DeviceWeights>>,
    /// The planned memory of the replicas that were started, without their weights, by the number of the device.
    taken: HashMap<usize, u64>,
    pub(super) watch: LoadWatch<'a>,
    /// Whether executors prepare steps of all sizes before they are returned.
    warms_up: bool,
    /// Says whether these executors replace others, whose number of pages they must have.
    is_again: bool,
}

/// The part of a model that a rank holds, and its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RankPosition {
    pub(super) ordinal: usize,
    pub(super) stage: usize,
    pub(super) rank: usize,
}

/// A rank before its number of pages is known.
struct PreparedRank {
    position: RankPosition,
    device: Device,
    blas: Option<Blas>,
    weights: Arc<DeviceWeights>,
    sizes: Sizes,
    offsets: WorkspaceOffsets,
}

impl<'a> CudaModel<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        options: ExecutorOptions,
        devices: Ordinals,
        replicas: usize,
        open: Open<'a>,
    ) -> Result<Self, ModelError> {
        let options = device_options(options);
        limits(checkpoint.config(), &options)?;
        page_format(options.kv)?;
        let config = checkpoint.config();
        let stages = options.pipeline_parallel;
        if stages == 0 || stages > config.layer_count {
            let layers = config.layer_count;
            return Err(option(
                "pipeline_parallel",
                format!("{stages} is not between 1 and {layers}; the model has {layers} layers"),
            ));
        }
        shard::check(checkpoint, options.tensor_parallel)?;
        let (tensor, count) = (options.tensor_parallel, devices.count());
        let ranks = tensor * stages;
        let needed = ranks * replicas;
        if count > needed || !(count.is_multiple_of(ranks) || ranks.is_multiple_of(count)) {
            let problem = format!(
                "{count} devices cannot be shared evenly by {replicas} replicas of {ranks} ranks; choose at most {needed} devices, \
                 a multiple or a divisor of {ranks}, or raise replicas, tensor_parallel or pipeline_parallel"
            );
            return Err(option("device", problem));
        }
        let ordinals = devices.iter().collect();
        let (loaded, taken) = (HashMap::new(), HashMap::new());
        let watch: LoadWatch<'a> = &|_, _| ();
        let model = CudaModel {
            checkpoint,
            options,
            replicas,
            ordinals,
            open,
            loaded,
            taken,
            watch,
            warms_up: true,
            is_again: false,
        };
        let positions = model.max_ranks_per_device();
        if tensor > 1 && positions > MAX_RANKS_PER_DEVICE {
            let problem = format!(
                "{positions} ranks on one device would wait for each other; a device runs {MAX_RANKS_PER_DEVICE} at once"
            );
            return Err(option("device", problem));
        }
        Ok(model)
    }

    /// Leaves out the preparation of steps, which takes an emulated device seconds.
    #[cfg(any(test, feature = "emulated"))]
    pub(super) fn without_warm_up(self) -> Self {
        CudaModel { warms_up: false, ..self }
    }

    /// Starts executors that were there before. Half of the reserve is for what has changed on the devices meanwhile.
    pub(super) fn again(self) -> Self {
        CudaModel { is_again: true, ..self }
    }

    /// Calls `watch` while weights are copied, with the number of bytes that are there and with the number of all.
    pub(crate) fn watched_by(self, watch: LoadWatch<'a>) -> Self {
        CudaModel { watch, ..self }
    }

    /// Creates the executor of a replica. Executors must be created in the order of the replicas.
    pub(crate) fn executor(&mut self, replica: usize) -> Result<CudaExecutor, ModelError> {
        let opened = self.open_devices(replica)?;
        self.load_weights(&opened)?;
        let mut stages: Vec<Vec<PreparedRank>> = Vec::new();
        for (position, device) in opened {
            stages.resize_with(position.stage + 1, Vec::new);
            stages[position.stage].push(self.begin(position, device)?);
        }
        // Ranks of a stage add up in each other's memory.
        for ranks in &stages {
            for (prepared, other) in
                ranks.iter().flat_map(|prepared| ranks.iter().map(move |other| (prepared, other)))
            {
                prepared.device.enable_peer_access(&other.device)?;
            }
        }
        // Ranks of a stage copy from those of the stage before.
        for (ranks, before) in stages.iter().skip(1).zip(&stages) {
            for (prepared, from) in ranks.iter().zip(before) {
                match prepared.device.enable_peer_access(&from.device) {
                    Err(KernelError::NoPeer { device, peer }) => {
                        tracing::info!(device, peer, "the driver copies between stages through the host");
                    }
                    enabled => enabled?,
                }
            }
        }
        for prepared in stages.iter().flatten() {
            // Kernels take memory too, so they are loaded before the pages are counted.
            let Loaded { shipped, cached, compiled, rejected } = prepared.device.ready()?;
            let device = prepared.device.name();
            tracing::debug!(device, shipped, cached, compiled, "loaded kernels");
            if rejected > 0 {
                tracing::warn!(
                    device,
                    rejected,
                    "the driver rejects compiled kernels that were found; they were compiled here"
                );
            }
        }
        let pages = self.page_count(replica, &stages)?;
        let options = ExecutorOptions { kv_tokens: Some(pages * PAGE_TOKENS), ..self.options.clone() };
        let mut limits = limits(self.checkpoint.config(), &options)?;
        limits.step_tokens = STEP_TOKENS;
        let mut memory = Vec::new();
        let last = stages.len() - 1;
        let multiprocessors =
            stages.iter().flatten().map(|prepared| prepared.device.multiprocessors()).min().unwrap_or(1);
        let leader = &stages[last][0];
        let attention = attention(&self.options, self.checkpoint.config());
        let blocks = attention_blocks(stages.iter().flatten())?;
        let layouts: Vec<&Layout> =
            stages.iter().flatten().map(|prepared| &prepared.weights.layout).collect();
        let cuts = cuts(blocks, &leader.sizes, &layouts, pages as u32, attention);
        let meeting_blocks = self.meeting_blocks(multiprocessors);
        let mut finished = Vec::new();
        for (stage, prepared) in stages.into_iter().enumerate() {
            let ranks = prepared.into_iter().enumerate().map(|(rank, prepared)| {
                self.finish(prepared, pages, stage == last && rank == 0, meeting_blocks, &mut memory)
            });
            finished.push(ranks.collect::<Result<Vec<_>, _>>()?);
        }
        let plan = memory.iter().fold(MemoryPlan::default(), |sum, rank| sum.plus(&rank.memory));
        let ranks = finished.iter().flatten().count();
        let max_shapes =
            (plan.graph_bytes / ranks as u64 / 2 / RECORDING_BYTES).clamp(8, MOST_RECORDINGS) as usize;
        let leader = &finished[last][0];
        let most_inputs = leader.offsets.inputs.len();
        let buffers = [leader.device.host_buffer(most_inputs)?, leader.device.host_buffer(most_inputs)?];
        let draw = leader.offsets.draw.as_ref();
        let draws = DrawBuffers::new(&leader.device, draw, leader.sizes.logit_rows, limits.vocabulary_size)?;
        let copies = PageCopies::new(self.checkpoint.config(), &self.options, &finished)?;
        let mut executor = CudaExecutor {
            recordings: Recordings { made: HashMap::new(), launched: HashSet::new(), max_shapes },
            launchers: None,
            stages: Arc::new(finished),
            stalled: Cell::new(None),
            cuts,
            inputs: StepInputs { buffers, next: 0, packed: Vec::new() },
            draws,
            logit_rows: 0,
            step: Batch::default(),
            ahead: None,
            logits: OnceCell::new(),
            isa: self.options.isa.unwrap_or_else(Isa::detect),
            limits,
            plan,
            memory,
            copies,
        };
        let prepare = |executor: &mut CudaExecutor| {
            let free = executor.free_bytes()?;
            executor.set_measures(self.warms_up);
            let prepared = executor.try_steps().and_then(|()| match self.warms_up {
                true => executor.warm_up(&free, &warm_up::report()),
                false => Ok(()),
            });
            executor.set_measures(false);
            prepared
        };
        if let Err(error) = prepare(&mut executor) {
            let ModelError::Kernel(KernelError::Cublas { .. }) = &error else { return Err(error) };
            tracing::warn!(%error, "falling back to Skep's kernels for dense weights");
            executor.recordings.made.clear();
            executor.recordings.launched.clear();
            executor.ranks_mut().for_each(|rank| rank.blas = None);
            prepare(&mut executor)?;
        }
        Ok(executor)
    }

    /// Assigns devices in order, rank by rank and replica by replica, starting over after the last device.
    fn position(&self, replica: usize, stage: usize, rank: usize) -> RankPosition {
        let ranks = self.options.tensor_parallel * self.options.pipeline_parallel;
        let number = replica * ranks + stage * self.options.tensor_parallel + rank;
        RankPosition { ordinal: self.ordinals[number % self.ordinals.len()], stage, rank }
    }

    fn begin(&self, position: RankPosition, device: Device) -> Result<PreparedRank, ModelError> {
        let RankPosition { stage, rank, .. } = position;
        let weights = self.loaded[&position].clone();
        let draws = stage + 1 == self.options.pipeline_parallel && rank == 0;
        let multiprocessors = device.multiprocessors();
        let (sizes, offsets) =
            workspace_of_rank(self.checkpoint, &self.options, &weights.layout, draws, multiprocessors)?;
        let blas = blas(&device, &weights.layout, self.options.deterministic);
        Ok(PreparedRank { position, device, blas, weights, sizes, offsets })
    }

    /// Returns the number of pages that every rank can hold: the requested number, or what fits into the memory that
    /// the devices have left after everything else that all replicas need.
    fn page_count(&self, replica: usize, stages: &[Vec<PreparedRank>]) -> Result<usize, ModelError> {
        let rooms = stages.iter().flatten().map(|prepared| self.room(replica, prepared));
        let rooms = rooms.collect::<Result<Vec<(usize, Room)>, ModelError>>()?;
        let (pages, room) =
            rooms.into_iter().min_by_key(|(pages, _)| *pages).expect("a model has at least one rank");
        // One page is for padding rows, which are never read.
        let most = pages.saturating_sub(1);
        let tokens = most.saturating_mul(PAGE_TOKENS);
        match self.options.kv_tokens {
            Some(asked) if asked > tokens => {
                let problem = format!(
                    "{asked} tokens do not fit; beside the weights there is room for {tokens}: {room}"
                );
                Err(option("kv_tokens", problem))
            }
            Some(asked) => Ok(asked.div_ceil(PAGE_TOKENS)),
            None if most == 0 => Err(option(
                "device",
                format!("its memory has no space left for keys and values after the weights: {room}"),
            )),
            // Page ids have 32 bits.
            None => Ok(most.min(u32::MAX as usize / PAGE_TOKENS)),
        }
    }

    /// Returns the number of pages of a rank, and the room on its device, which is divided among the ranks that still need
    /// pages there.
    fn room(&self, replica: usize, prepared: &PreparedRank) -> Result<(usize, Room), ModelError> {
        let memory = prepared.device.memory()?;
        let ordinal = prepared.position.ordinal;
        let here = |replicas: Range<usize>| {
            let positions = replicas.flat_map(|replica| self.positions(replica));
            positions.filter(|position| position.ordinal == ordinal).count() as u64
        };
        let users = here(replica..self.replicas);
        let workspace = workspace_bytes(&prepared.sizes, &prepared.offsets, self.checkpoint.config()) as u64;
        let workspaces = workspace.saturating_mul(users);
        let spare = spare(memory.total) / if self.is_again { 2 } else { 1 };
        let share = self.options.gpu_memory.map(|fraction| Share {
            fraction,
            taken: self
                .weights_on(ordinal)
                .saturating_add(self.taken.get(&ordinal).copied().unwrap_or_default()),
            steps: spare.saturating_mul(users).saturating_add(workspaces),
        });
        // No rank uses the reserve, so the reserve of replicas that already run is still free.
        let reserve = spare.saturating_mul(here(0..self.replicas));
        let room = Room {
            ordinal,
            total: memory.total,
            used: memory.total.saturating_sub(memory.free),
            steps: reserve.saturating_add(workspaces),
            reserved: self.options.reserved_bytes,
            share,
        };
        let pages = room.left() / users.max(1) / prepared.sizes.page_bytes().max(1) as u64;
        Ok((usize::try_from(pages).unwrap_or(usize::MAX), room))
    }

    /// Returns the bytes of the model's weights that are on a device.
    pub(super) fn weights_on(&self, ordinal: usize) -> u64 {
        let here = self.loaded.iter().filter(|(position, _)| position.ordinal == ordinal);
        here.map(|(_, weights)| weights.layout.bytes as u64).sum()
    }

    /// Returns the number of blocks in which a rank may wait. Half of a device is left for what ranks still compute
    /// while others wait for them.
    fn meeting_blocks(&self, multiprocessors: u32) -> u32 {
        (multiprocessors / 2 / self.max_ranks_per_device() as u32).max(1)
    }

    /// Returns the number of ranks, over all replicas, on the device that has the most of them.
    fn max_ranks_per_device(&self) -> usize {
        let positions = || (0..self.replicas).flat_map(|replica| self.positions(replica));
        let on = |ordinal: usize| positions().filter(|position| position.ordinal == ordinal).count();
        self.ordinals.iter().map(|ordinal| on(*ordinal)).max().unwrap_or(1)
    }

    pub(super) fn positions(&self, replica: usize) -> impl Iterator<Item = RankPosition> {
        (0..self.options.pipeline_parallel).flat_map(move |stage| {
            (0..self.options.tensor_parallel).map(move |rank| self.position(replica, stage, rank))
        })
    }

    /// Allocates the memory of a rank, and adds it to `memory`.
    fn finish(
        &mut self,
        prepared: PreparedRank,
        pages: usize,
        draws: bool,
        meeting_blocks: u32,
        memory: &mut Vec<RankMemory>,
    ) -> Result<Rank, ModelError> {
        let workspace_bytes = workspace_bytes(&prepared.sizes, &prepared.offsets, self.checkpoint.config());
        let PreparedRank { position, device, blas, weights, mut sizes, offsets } = prepared;
        sizes.page_count = pages + 1;
        // Signals, the failure word and the counts of arrivals must start as zeros. Everything else is written before
        // it is read.
        let workspace = Arc::new(device.zeroed(offsets.bytes)?);
        let kv_bytes = sizes.page_bytes().saturating_mul(sizes.page_count);
        let kv = Arc::new(device.zeroed(kv_bytes)?);
        let config = self.checkpoint.config();
        let logits = match draws {
            true => Some(Arc::new(device.uninitialized(logits_bytes(&sizes, config.vocabulary_size))?)),
            false => None,
        };
        let plan = MemoryPlan {
            weight_bytes: weights.layout.bytes as u64,
            activation_bytes: workspace_bytes as u64,
            graph_bytes: spare(device.memory()?.total),
            kv_bytes: kv_bytes as u64,
        };
        *self.taken.entry(position.ordinal).or_default() += plan.total_bytes() - plan.weight_bytes;
        let (stage, shard) = (position.stage, position.rank);
        memory.push(RankMemory { stage, shard, device: device.name(), memory: plan });
        // Other ranks write into this rank's buffers as soon as they run.
        device.synchronize()?;
        let rank_deadline_us = u64::try_from(self.options.rank_deadline.as_micros()).unwrap_or(u64::MAX);
        Ok(Rank {
            shape: Shape::new(
                config,
                weights.layout.activation,
                rank_deadline_us,
                meeting_blocks,
                self.options.deterministic,
            ),
            report: device.host_buffer(4)?,
            done: device.event()?,
            drawn: device.event()?,
            known: device.event()?,
            handed_on: device.event()?,
            copied: [device.event()?, device.event()?],
            device,
            blas,
            weights,
            sizes,
            offsets,
            workspace,
            pages: kv,
            logits,
        })
    }
}

impl CudaExecutor {
    /// Returns the names of the devices, each name once.
    pub(crate) fn devices(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for rank in self.stages.iter().flatten() {
            let name = rank.device.name();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(", ")
    }
}

/// Returns the number of blocks of attention that every device runs at once. Ranks have room for as many splits as the
/// largest devices run, and no more are planned.
fn attention_blocks<'a>(ranks: impl Iterator<Item = &'a PreparedRank>) -> Result<u32, ModelError> {
    let mut least = u32::MAX;
    for PreparedRank { device, weights, sizes, .. } in ranks {
        let (head_size, activation) = (size(sizes.head_size)?, weights.layout.activation);
        let most = device.multiprocessors() * max_blocks_per_multiprocessor(head_size, sizes.format);
        let blocks = device.attention_blocks(head_size, activation, sizes.format)?;
        least = least.min(blocks.clamp(1, most.max(1)));
    }
    Ok(least)
}

/// Returns whether products may use the library for dense weights, which adds up in a different order for every
/// number of rows. Many rows are multiplied with dense weights whatever the format of the weights is.
pub(super) fn opens_blas(layout: &Layout, deterministic: bool) -> bool {
    !deterministic && !layout.layers.is_empty()
}

/// Returns the library for dense weights, if it may be used and is available.
fn blas(device: &Device, layout: &Layout, deterministic: bool) -> Option<Blas> {
    device.stream()?;
    if !opens_blas(layout, deterministic) {
        return None;
    }
    match Blas::open(device) {
        Ok(blas) => Some(blas),
        Err(error) => {
            tracing::info!(%error, "falling back to Skep's kernels for dense weights");
            None
        }
    }
}
