//! The weights of a rank on its device, copied there by several threads through host buffers, while others ask the operating system
//! for what they will read next.
//!
//! Invariant: data on the device never changes after it is loaded. Only the pieces of the checkpoint that are being
//! copied are in memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use skep_kernels::cuda::Activation;
use skep_kernels::cuda::device::{Device, DeviceBuffer, Slice};
use skep_kernels::cuda::matmul::Weights;
use skep_kernels::cuda::operation::Matrix;

use super::layout::{Layout, MatrixOffsets};
use super::staging::{Piece, Staging, pieces};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::weights::{ReadAhead, Reads};

/// Size of the host buffers that copies are made from. It is large enough for the bus, and small enough for the caches of the
/// processor to help.
pub(super) const STAGE_BYTES: usize = 4 << 20;

pub(super) struct DeviceWeights {
    pub(super) layout: Layout,
    pub(super) buffer: Arc<DeviceBuffer>,
}

/// The way in which weights are copied.
#[derive(Clone, Copy)]
pub(super) struct Copying<'a> {
    /// Number of threads, each of which reads, converts and copies.
    pub(super) threads: usize,
    /// Size of a host buffer, and about that of a piece. A buffer holds at least one row.
    pub(super) stage_bytes: usize,
    /// Counts the bytes that were copied.
    pub(super) done: &'a AtomicU64,
}

/// The pieces that the threads of a load take one after the other.
struct Queue<'a> {
    device: &'a Device,
    checkpoint: &'a Checkpoint,
    layout: &'a Layout,
    buffer: &'a DeviceBuffer,
    stage_bytes: usize,
    pieces: Vec<Piece>,
    /// Index of the piece that is taken next.
    next: AtomicUsize,
    /// Number of pieces of each load that are not copied yet.
    left: Vec<AtomicUsize>,
    /// Is set once a thread has failed; the other threads then stop.
    has_failed: AtomicBool,
    done: &'a AtomicU64,
    ahead: &'a ReadAhead<'a>,
}

impl Queue<'_> {
    /// Copies pieces until none is left.
    fn work(&self) -> Result<(), ModelError> {
        let worked = self.try_work();
        if worked.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        worked
    }

    fn try_work(&self) -> Result<(), ModelError> {
        let mut staging = Staging::new(self.device, self.buffer, self.layout.activation, self.stage_bytes)?;
        while !self.has_failed.load(Ordering::Relaxed) {
            let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            self.ahead.begin();
            let load = &self.layout.loads[piece.load];
            let tensor = self.checkpoint.expect(&load.name, &load.shape)?;
            let copied = staging.copy(load, piece, &tensor)?;
            self.done.fetch_add(copied as u64, Ordering::Relaxed);
            // All bytes of the tensor are in host buffers by then.
            if self.left[piece.load].fetch_sub(1, Ordering::AcqRel) == 1 {
                self.checkpoint.release(&load.name);
            }
        }
        Ok(())
    }
}

impl DeviceWeights {
    /// Copies the weights of a layout to a device.
    pub(super) fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        layout: Layout,
        copying: Copying<'_>,
    ) -> Result<Self, ModelError> {
        // Most of it is overwritten; what separates and pads matrices stays zero.
        let buffer = device.zeroed(layout.bytes)?;
        let config = checkpoint.config();
        let frequencies = config.rope.inverse_frequencies(config.head_size);
        let bytes: Vec<u8> = frequencies.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut host = device.host_buffer(bytes.len())?;
        host.bytes_mut().copy_from_slice(&bytes);
        let start = layout.frequencies.start;
        device.upload(&host, 0, buffer.slice().part(start..start + bytes.len())?)?;
        let (pieces, widest) = pieces(checkpoint, &layout.loads, layout.activation, copying.stage_bytes)?;
        let mut left: Vec<AtomicUsize> = layout.loads.iter().map(|_| AtomicUsize::new(0)).collect();
        pieces.iter().for_each(|piece| *left[piece.load].get_mut() += 1);
        let threads = copying.threads.clamp(1, pieces.len().max(1));
        let mut reads = Reads::default();
        for piece in &pieces {
            let load = &layout.loads[piece.load];
            reads.add(checkpoint.file_parts(&load.name, &piece.reads(load)));
        }
        let ahead = ReadAhead::new(checkpoint, reads);
        let queue = Queue {
            device,
            checkpoint,
            layout: &layout,
            buffer: &buffer,
            stage_bytes: copying.stage_bytes.min(layout.bytes).max(widest),
            pieces,
            next: AtomicUsize::new(0),
            left,
            has_failed: AtomicBool::new(false),
            done: copying.done,
            ahead: &ahead,
        };
        let work = || {
            std::thread::scope(|scope| {
                let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| queue.work())).collect();
                let join = |thread: std::thread::ScopedJoinHandle<'_, Result<(), ModelError>>| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                };
                running.into_iter().map(join).collect::<Vec<_>>().into_iter().collect::<Result<(), _>>()
            })
        };
        ahead.beside(work)?;
        device.synchronize()?;
        Ok(DeviceWeights { layout, buffer: Arc::new(buffer) })
    }

    pub(super) fn slice(&self, offsets: &Range<usize>) -> Result<Slice<'_>, ModelError> {
        Ok(self.buffer.slice().part(offsets.clone())?)
    }

    pub(super) fn optional(&self, offsets: Option<&Range<usize>>) -> Result<Option<Slice<'_>>, ModelError> {
        offsets.map(|offsets| self.slice(offsets)).transpose()
    }

    pub(super) fn matrix(&self, offsets: &MatrixOffsets) -> Result<Matrix<'_>, ModelError> {
        Ok(Matrix {
            weights: offsets.weights,
            data: self.slice(&offsets.data)?,
            bias: self.optional(offsets.bias.as_ref())?,
            outputs: size(offsets.outputs)?,
            inputs: size(offsets.inputs)?,
        })
    }
}

/// Converts a size to the type that kernels take.
pub(super) fn size(value: usize) -> Result<u32, ModelError> {
    u32::try_from(value)
        .map_err(|_| ModelError::config("sizes", format!("{value} is too large for a device")))
}

/// Returns the format in which a table of vectors is read.
pub(super) fn table_format(weights: Weights, activation: Activation) -> skep_kernels::cuda::embedding::Table {
    use skep_kernels::cuda::embedding::Table;
    match weights {
        Weights::Tiles(dtype) => Table::Tiles(dtype, activation),
        Weights::Plain => Table::Plain,
    }
}
