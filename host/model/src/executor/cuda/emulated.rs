//! An executor on emulated devices, for tests of code that drives executors.

use skep_kernels::cuda::device::{Device, Emulation};

use super::start::CudaModel;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::{Executor, ExecutorOptions, Ordinals};

/// Memory of an emulated device.
const MEMORY_BYTES: u64 = 64 << 20;

/// Starts an executor whose ranks have an emulated device each, with the code that drives real devices. It does not prepare
/// steps, which takes seconds.
pub fn emulated_executor(
    checkpoint: &Checkpoint,
    options: ExecutorOptions,
) -> Result<Box<dyn Executor>, ModelError> {
    let emulation = Emulation { memory_bytes: MEMORY_BYTES, multiprocessors: 3, ..Emulation::default() };
    let open = move |_| Ok(Device::emulated(emulation));
    let model = CudaModel::new(checkpoint, options, Ordinals::FIRST, 1, Box::new(open))?;
    Ok(Box::new(model.without_warm_up().executor(0)?))
}
