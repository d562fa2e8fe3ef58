//! Measures the upper bounds of a device with which kernels are compared: how fast memory is copied, and how fast dense
//! matrices are multiplied.
//!
//! Invariant: timed work never finds its data in a cache from the previous repetition, just as in a step of a model.

use half::{bf16, f16};

use super::Activation;
use super::blas::Blas;
use super::device::{Device, DeviceBuffer};
use super::matmul::MatmulParams;
use super::operation::ACTIVATION_BYTES;
use super::timing::{Pace, median_ms};
use crate::KernelError;

/// Several times the size of any device's L2 cache.
pub(super) const FAR_BEYOND_L2_BYTES: usize = 512 << 20;
/// An alignment that suits every kernel.
pub(super) const ALIGNMENT_BYTES: usize = 256;
/// Length of the random pattern that fills buffers. With zeros, a device draws less power and is faster than with a model.
const PATTERN_VALUES: usize = 1 << 20;
/// The number of runs of a ceiling, and their length.
const PACE: Pace = Pace { runs: 9, run_ms: 5.0 };

/// The shape of a product `[rows, inputs] · [inputs, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    pub rows: u32,
    pub inputs: u32,
    pub outputs: u32,
    pub activation: Activation,
}

/// Measures how fast the driver copies memory on the device, in GB/s. Both the bytes read and the bytes written count.
pub fn copy_gb_per_s(device: &Device) -> Result<f64, KernelError> {
    copy_of(device, FAR_BEYOND_L2_BYTES)
}

/// Measures how fast cuBLASLt multiplies on the device, in TFLOP/s. A multiplication and an addition count as two
/// operations. Weights are read from memory each time.
pub fn gemm_tflops(device: &Device, blas: &Blas, gemm: Gemm) -> Result<f64, KernelError> {
    let Gemm { rows, inputs, outputs, activation } = gemm;
    let bytes_of = |rows: u32, columns: u32| {
        crate::error::product("gemm", "a matrix", &[rows as usize, columns as usize, ACTIVATION_BYTES])
    };
    let one = bytes_of(outputs, inputs)?.max(1).next_multiple_of(ALIGNMENT_BYTES);
    let copies = FAR_BEYOND_L2_BYTES.div_ceil(one);
    let whole = crate::error::product("gemm", "the weights", &[one, copies])?;
    let weights = filled(device, whole, activation)?;
    let x = filled(device, bytes_of(rows, inputs)?, activation)?;
    let y = device.zeroed(bytes_of(rows, outputs)?)?;
    let mut next = 0;
    let ms = median_ms(device, PACE, || {
        let at = weights.slice().part(next * one..(next + 1) * one)?;
        next = (next + 1) % copies;
        let params = MatmulParams::dense([x.address(), at.address(), y.address()], [rows, inputs, outputs]);
        // SAFETY: the buffers match the shapes and are kept until the queue has been waited for.
        unsafe { blas.matmul(&params, activation) }
    });
    // Work may still be in the queue if a run failed midway.
    device.synchronize()?;
    let operations = 2.0 * f64::from(rows) * f64::from(inputs) * f64::from(outputs);
    Ok(operations / ms? / 1e9)
}

fn copy_of(device: &Device, bytes: usize) -> Result<f64, KernelError> {
    let (from, to) = (device.zeroed(bytes)?, device.zeroed(bytes)?);
    let ms = median_ms(device, PACE, || device.copy(from.slice(), to.slice()))?;
    Ok(2.0 * bytes as f64 / ms / 1e6)
}

/// Returns a buffer of numbers between -1 and 1.
fn filled(device: &Device, bytes: usize, activation: Activation) -> Result<DeviceBuffer, KernelError> {
    filled_with(device, bytes, &device.copied(&pattern(activation))?)
}

/// Returns a buffer that repeats a pattern.
pub(super) fn filled_with(
    device: &Device,
    bytes: usize,
    pattern: &DeviceBuffer,
) -> Result<DeviceBuffer, KernelError> {
    let buffer = device.uninitialized(bytes)?;
    for start in (0..bytes).step_by(pattern.bytes()) {
        let length = pattern.bytes().min(bytes - start);
        device.copy(pattern.slice().part(0..length)?, buffer.slice().part(start..start + length)?)?;
    }
    // The pattern may be freed on return.
    device.synchronize()?;
    Ok(buffer)
}

/// Returns numbers between -1 and 1, which always are the same.
pub(super) fn pattern(activation: Activation) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        // The multiplier and the increment are Knuth's.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let value = |_| match activation {
        Activation::Bf16 => bf16::from_f32(next()).to_le_bytes(),
        Activation::F16 => f16::from_f32(next()).to_le_bytes(),
    };
    (0..PATTERN_VALUES).flat_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{device::Emulation, on_device};

    #[test]
    fn matrices_are_filled_with_numbers_of_both_signs() {
        let device = Device::emulated(Emulation::default());
        for activation in Activation::ALL {
            // A whole pattern and a part of one.
            let mut bytes = vec![0; 2 * PATTERN_VALUES + 6];
            filled(&device, bytes.len(), activation).unwrap().read(&mut bytes).unwrap();
            assert_eq!(bytes[2 * PATTERN_VALUES..], bytes[..6]);
            let bits = bytes.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            let values: Vec<f64> = bits.map(|bits| activation.decode(bits)).collect();
            assert!(values.iter().all(|value| value.abs() <= 1.0));
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            assert!(mean.abs() < 0.01, "{mean}");
        }
    }

    #[test]
    fn copies_have_a_rate() {
        let rate = copy_of(&Device::emulated(Emulation::default()), 1 << 20).unwrap();
        assert!(rate > 0.0 && rate.is_finite(), "{rate}");
        on_device::with(|device| {
            let rate = copy_gb_per_s(device).unwrap();
            // Plausible limits, between a slow bus and the fastest memory.
            assert!((10.0..100_000.0).contains(&rate), "{rate} GB/s");
            println!("copies: {rate:.0} GB/s");
        });
    }

    #[test]
    fn products_have_a_rate_if_the_library_is_installed() {
        on_device::with(|device| {
            let blas = match Blas::open(device) {
                Ok(blas) => blas,
                Err(error @ KernelError::NoCublas { .. }) => return eprintln!("skipped: {error}"),
                Err(error) => panic!("{error}"),
            };
            for rows in [16, 4096] {
                let gemm = Gemm { rows, inputs: 4096, outputs: 4096, activation: Activation::Bf16 };
                let rate = gemm_tflops(device, &blas, gemm).unwrap();
                assert!((0.1..100_000.0).contains(&rate), "{rate} TFLOP/s");
                println!("{rows} rows: {rate:.1} TFLOP/s");
            }
            let odd = Gemm { rows: 4, inputs: 4, outputs: 8, activation: Activation::Bf16 };
            assert!(gemm_tflops(device, &blas, odd).is_err());
        });
    }
}
