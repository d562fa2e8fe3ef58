//! The weights of a rank on its device, copied there through host buffers.
//!
//! Invariant: data on the device never changes after it is loaded. Only the chunk of the checkpoint that is being
//! copied is in memory.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::device::{Device, DeviceBuffer, Event, HostBuffer, Slice};
use skep_kernels::cuda::matmul::Weights;
use skep_kernels::cuda::operation::{ACTIVATION_BYTES, Matrix};
use skep_kernels::{DType, dequantize};

use super::layout::{Form, Layout, Load, MatrixOffsets};
use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::ModelError;
use crate::shard::ShardPlan;
use crate::weights::part;

/// Size of each of the two host buffers that copies are made from in turn.
const STAGE_BYTES: usize = 16 << 20;

pub(super) struct DeviceWeights {
    pub(super) layout: Layout,
    pub(super) buffer: Arc<DeviceBuffer>,
}

impl DeviceWeights {
    pub(super) fn load(device: &Device, checkpoint: &Checkpoint, layout: Layout) -> Result<Self, ModelError> {
        // Most of it is overwritten; what separates and pads matrices stays zero.
        let buffer = device.zeroed(layout.bytes)?;
        let mut stages = Stages::new(device)?;
        let config = checkpoint.config();
        let frequencies = config.rope.inverse_frequencies(config.head_size);
        let bytes: Vec<u8> = frequencies.iter().flat_map(|value| value.to_le_bytes()).collect();
        stages.copy(&buffer, layout.frequencies.start, &bytes)?;
        for load in &layout.loads {
            let tensor = checkpoint.expect(&load.name, &load.shape)?;
            stages.load(&buffer, layout.activation, load, &tensor)?;
            checkpoint.release(&load.name);
        }
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
            scales: None,
            bias: self.optional(offsets.bias.as_ref())?,
            outputs: size(offsets.outputs)?,
            inputs: size(offsets.inputs)?,
            scale_rows: 0,
            scale_columns: 0,
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
        Weights::Blocks(dtype) => Table::Blocks(dtype, activation),
        Weights::Plain | Weights::Int4 | Weights::Fp8 => Table::Plain,
    }
}

/// Two host buffers. One is filled while the device copies from the other.
struct Stages<'a> {
    device: &'a Device,
    stages: [(HostBuffer, Event); 2],
    next: usize,
}

impl<'a> Stages<'a> {
    fn new(device: &'a Device) -> Result<Self, ModelError> {
        let stage = || {
            let event = device.event()?;
            event.record()?;
            Ok::<_, ModelError>((device.host_buffer(STAGE_BYTES)?, event))
        };
        Ok(Stages { device, stages: [stage()?, stage()?], next: 0 })
    }

    fn load(
        &mut self,
        buffer: &DeviceBuffer,
        activation: Activation,
        load: &Load,
        tensor: &Tensor<'_>,
    ) -> Result<(), ModelError> {
        let (dtype, content) = tensor.content()?;
        let tensor = &tensor.with_content(dtype, &content);
        if let [rows] = load.shape[..] {
            let mut values = vec![0.0; rows];
            dequantize(tensor.dtype, tensor.data, &mut values)
                .map_err(|error| ModelError::tensor(tensor.name, error.to_string()))?;
            if let ShardPlan::Rows(ranges) = &load.plan {
                values = ranges.iter().flat_map(|range| &values[range.clone()]).copied().collect();
            }
            let bytes = encoded(activation, &values);
            return self.copy(buffer, load.offsets.start, &bytes);
        }
        let columns = load.shape[1];
        let (data, columns) = part(tensor, columns, &load.plan)?;
        if load.form == Form::Blocks(tensor.dtype) || is_activation(tensor.dtype, activation) {
            return self.copy(buffer, load.offsets.start, &data);
        }
        // Converts some rows at a time, so that only these rows are in memory as floats.
        let row_bytes = tensor.dtype.row_bytes(columns).unwrap_or(data.len()).max(1);
        let rows = (STAGE_BYTES / (columns * ACTIVATION_BYTES)).max(1);
        let mut values = Vec::new();
        let mut at = load.offsets.start;
        for chunk in data.chunks(rows * row_bytes) {
            values.resize(chunk.len() / row_bytes * columns, 0.0);
            dequantize(tensor.dtype, chunk, &mut values)
                .map_err(|error| ModelError::tensor(tensor.name, error.to_string()))?;
            let bytes = encoded(activation, &values);
            self.copy(buffer, at, &bytes)?;
            at += bytes.len();
        }
        Ok(())
    }

    fn copy(&mut self, buffer: &DeviceBuffer, at: usize, bytes: &[u8]) -> Result<(), ModelError> {
        let mut at = at;
        for part in bytes.chunks(STAGE_BYTES) {
            let (stage, free) = &mut self.stages[self.next];
            free.synchronize()?;
            stage.bytes_mut()[..part.len()].copy_from_slice(part);
            let to = buffer.slice().part(at..at + part.len())?;
            self.device.upload(stage, 0, to)?;
            free.record()?;
            at += part.len();
            self.next ^= 1;
        }
        Ok(())
    }
}

fn is_activation(dtype: DType, activation: Activation) -> bool {
    matches!((dtype, activation), (DType::BF16, Activation::Bf16) | (DType::F16, Activation::F16))
}

fn encoded(activation: Activation, values: &[f32]) -> Vec<u8> {
    let encode = |value: &f32| match activation {
        Activation::Bf16 => bf16::from_f32(*value).to_bits().to_le_bytes(),
        Activation::F16 => f16::from_f32(*value).to_bits().to_le_bytes(),
    };
    values.iter().flat_map(encode).collect()
}
