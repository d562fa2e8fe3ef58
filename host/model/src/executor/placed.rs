//! Creates executors where the options request them: on CUDA devices or on the CPU.

use std::num::NonZeroUsize;
use std::sync::Arc;

use skep_kernels::cuda::device::Device;
use skep_kernels::gpu;

use super::cuda::{CudaModel, Restarted, SharedWeights};
use super::{
    DeviceChoice, Executor, ExecutorOptions, LoadWatch, ModelWeights, Ordinals, Restart, WeightConversion,
    option, physical_cores, share_of,
};
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// An executor, and where it runs.
pub struct PlacedExecutor {
    pub executor: Box<dyn Executor>,
    /// The devices that the executor runs on; never `Auto`. They are those of all replicas.
    pub devices: DeviceChoice,
    /// Human-readable name of the device: `cpu`, or `cuda:0 (NVIDIA H200)`.
    pub device: String,
    /// Why the executor runs on the CPU although the machine may have a usable device.
    pub fallback: Option<String>,
}

impl PlacedExecutor {
    /// Loads a checkpoint once for several executors, which share its weights. `options` apply to each executor,
    /// except for the threads, which are divided: every replica gets at least one thread, and a separate KV pool and
    /// separate buffers.
    pub fn replicas(
        checkpoint: &Checkpoint,
        options: ExecutorOptions,
        replicas: NonZeroUsize,
    ) -> Result<Vec<Self>, ModelError> {
        Self::replicas_watched(checkpoint, options, replicas, &|_, _| ())
    }

    /// Loads a checkpoint like [`PlacedExecutor::replicas`]. `watch` is called while weights are packed for
    /// the CPU or copied to devices.
    pub fn replicas_watched(
        checkpoint: &Checkpoint,
        options: ExecutorOptions,
        replicas: NonZeroUsize,
        watch: LoadWatch<'_>,
    ) -> Result<Vec<Self>, ModelError> {
        match options.device {
            DeviceChoice::Cpu => on_processor(checkpoint, options, replicas, None, watch),
            DeviceChoice::Cuda(devices) => on_devices(checkpoint, options, replicas, devices, watch),
            DeviceChoice::Auto => {
                let placed = some_devices(&options, replicas)
                    .and_then(|devices| on_devices(checkpoint, options.clone(), replicas, devices, watch));
                placed.or_else(|error| {
                    on_processor(checkpoint, options, replicas, Some(error.to_string()), watch)
                })
            }
        }
    }

    /// Returns functions that start these executors, which are all replicas of a checkpoint with these options, again. Those on
    /// the CPU never have to be.
    pub fn restarts(
        placed: &[PlacedExecutor],
        checkpoint: &Arc<Checkpoint>,
        options: &ExecutorOptions,
    ) -> Vec<Option<Restart>> {
        let weights = SharedWeights::default();
        let ranks = options.tensor_parallel * options.pipeline_parallel;
        let restart = |(replica, placed): (usize, &PlacedExecutor)| {
            let DeviceChoice::Cuda(all) = placed.devices else { return None };
            let all: Vec<usize> = all.iter().collect();
            // Replicas are placed in the same way.
            let own = (0..ranks).map(|rank| all[(replica * ranks + rank) % all.len()]);
            let devices = Ordinals::of(own)?;
            let options = ExecutorOptions {
                device: DeviceChoice::Cuda(devices),
                kv_tokens: Some(placed.executor.limits().page_count * PAGE_TOKENS),
                reserved_bytes: 0,
                ..options.clone()
            };
            let restarted =
                Restarted { checkpoint: checkpoint.clone(), options, devices, weights: weights.clone() };
            let restart: Restart = Arc::new(move || {
                let compiler = restarted.options.kernels.compiler();
                let open = move |ordinal| Ok(Device::open(ordinal, &compiler)?);
                Ok(Box::new(restarted.executor(Box::new(open))?) as Box<dyn Executor>)
            });
            Some(restart)
        };
        placed.iter().enumerate().map(restart).collect()
    }
}

fn on_processor(
    checkpoint: &Checkpoint,
    options: ExecutorOptions,
    replicas: NonZeroUsize,
    fallback: Option<String>,
    watch: LoadWatch<'_>,
) -> Result<Vec<PlacedExecutor>, ModelError> {
    let weights = ModelWeights::load_watched(checkpoint, &options, watch)?;
    let threads = options.threads.unwrap_or_else(physical_cores);
    let mut affinity = options.affinity;
    (0..replicas.get())
        .map(|replica| {
            let threads = share_of(threads, replica, replicas.get());
            let options = ExecutorOptions { threads: Some(threads), affinity, ..options.clone() };
            affinity = affinity.after(threads);
            let executor = weights.executor(options)?;
            let (devices, device) = (DeviceChoice::Cpu, "cpu".to_owned());
            Ok(PlacedExecutor { executor, devices, device, fallback: fallback.clone() })
        })
        .collect()
}

fn on_devices(
    checkpoint: &Checkpoint,
    options: ExecutorOptions,
    replicas: NonZeroUsize,
    devices: Ordinals,
    watch: LoadWatch<'_>,
) -> Result<Vec<PlacedExecutor>, ModelError> {
    if options.weights != WeightConversion::Keep {
        let problem =
            format!("{} is only for the CPU; on CUDA devices, weights keep their formats", options.weights);
        return Err(option("weights", problem));
    }
    let compiler = options.kernels.compiler();
    let open = move |ordinal| Ok(Device::open(ordinal, &compiler)?);
    let model = CudaModel::new(checkpoint, options, devices, replicas.get(), Box::new(open))?;
    let mut model = model.watched_by(watch);
    (0..replicas.get())
        .map(|replica| {
            let executor = model.executor(replica)?;
            let device = executor.devices();
            let devices = DeviceChoice::Cuda(devices);
            Ok(PlacedExecutor { executor: Box::new(executor), devices, device, fallback: None })
        })
        .collect()
}

/// Returns as many of the machine's devices as the ranks of all replicas can use.
fn some_devices(options: &ExecutorOptions, replicas: NonZeroUsize) -> Result<Ordinals, ModelError> {
    let count = gpu::probe().map_err(|reason| option("device", reason))?.len();
    let ranks = options.tensor_parallel.saturating_mul(options.pipeline_parallel);
    let usable = usable_devices(count, ranks, replicas.get());
    Ordinals::first(usable).ok_or_else(|| option("device", "the driver lists no devices".to_owned()))
}

/// Returns the largest number of devices that hold equal numbers of ranks, either of whole replicas or of one
/// replica.
fn usable_devices(count: usize, ranks: usize, replicas: usize) -> usize {
    let most = count.min(ranks.saturating_mul(replicas));
    let even = |devices: &usize| devices.is_multiple_of(ranks.max(1)) || ranks.is_multiple_of(*devices);
    (1..=most).rev().find(even).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::KvDtype;
    use crate::executor::fixture::{folder, options};
    use skep_kernels::Isa;

    fn placed(device: &str, kv: KvDtype) -> Result<Vec<PlacedExecutor>, ModelError> {
        let checkpoint = Checkpoint::open(&folder("llama-gqa")).unwrap();
        let options = ExecutorOptions { device: device.parse().unwrap(), kv, ..options(Isa::detect()) };
        PlacedExecutor::replicas(&checkpoint, options, NonZeroUsize::MIN)
    }

    #[test]
    fn auto_falls_back_to_the_cpu_but_an_explicit_device_does_not() {
        // No machine has this many devices.
        let error = placed("cuda:63", KvDtype::F16).err().expect("the device must be rejected").to_string();
        assert!(error.contains("no CUDA device"), "{error}");
        // No device stores keys and values in 32 bits.
        let auto = placed("auto", KvDtype::F32).unwrap().remove(0);
        assert_eq!((auto.devices, auto.device.as_str()), (DeviceChoice::Cpu, "cpu"));
        assert!(auto.fallback.is_some_and(|reason| !reason.is_empty()));
        let placed = placed("cpu", KvDtype::F32).unwrap();
        assert!(placed[0].fallback.is_none());
        let checkpoint = Arc::new(Checkpoint::open(&folder("llama-gqa")).unwrap());
        let restarts = PlacedExecutor::restarts(&placed, &checkpoint, &ExecutorOptions::default());
        assert!(restarts.len() == 1 && restarts[0].is_none(), "the CPU is never lost");
    }

    #[test]
    fn devices_are_used_evenly() {
        for (count, ranks, replicas, expected) in
            [(8, 1, 1, 1), (8, 1, 3, 3), (8, 4, 1, 4), (3, 4, 1, 2), (3, 2, 2, 2), (8, 2, 3, 6), (1, 4, 2, 1)]
        {
            assert_eq!(usable_devices(count, ranks, replicas), expected, "{count} {ranks} {replicas}");
        }
        assert_eq!(usable_devices(0, 1, 1), 0);
    }
}
