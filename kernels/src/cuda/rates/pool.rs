//! Buffers that operations share one after the other, and that grow to the largest.

use crate::KernelError;
use crate::cuda::ceilings::{ALIGNMENT_BYTES, filled_with};
use crate::cuda::device::{Device, DeviceBuffer, Slice};

/// A buffer that repeats a pattern until an operation writes to it.
pub(super) struct Pool {
    pattern: DeviceBuffer,
    buffer: DeviceBuffer,
}

impl Pool {
    pub(super) fn new(device: &Device, pattern: &[u8]) -> Result<Self, KernelError> {
        Ok(Pool { pattern: device.copied(pattern)?, buffer: device.uninitialized(0)? })
    }

    /// Returns slices of these sizes in bytes, which do not overlap.
    pub(super) fn slices<const N: usize>(
        &mut self,
        device: &Device,
        sizes: [usize; N],
    ) -> Result<[Slice<'_>; N], KernelError> {
        let aligned = sizes.map(aligned);
        let whole = aligned.iter().sum();
        if self.buffer.bytes() < whole {
            // The old buffer is freed first, because both may not fit.
            self.buffer = device.uninitialized(0)?;
            self.buffer = filled_with(device, whole, &self.pattern)?;
        }
        let mut slices = [self.buffer.slice(); N];
        let mut start = 0;
        for ((slice, bytes), aligned) in slices.iter_mut().zip(sizes).zip(aligned) {
            *slice = self.buffer.slice().part(start..start + bytes)?;
            start += aligned;
        }
        Ok(slices)
    }
}

/// Returns the size of a part after which another part is aligned.
pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::Emulation;

    #[test]
    fn slices_do_not_overlap_and_hold_the_pattern() {
        let device = Device::emulated(Emulation::default());
        let mut pool = Pool::new(&device, &[1, 2, 3]).unwrap();
        for sizes in [[4, 300], [1000, 5]] {
            let [first, second] = pool.slices(&device, sizes).unwrap();
            assert_eq!([first, second].map(Slice::bytes), sizes);
            let distance = (second.address().0 - first.address().0) as usize;
            assert_eq!(distance, sizes[0].next_multiple_of(256));
            let mut bytes = vec![0; sizes[1]];
            device.read(second, &mut bytes).unwrap();
            assert!(bytes.iter().enumerate().all(|(at, byte)| usize::from(*byte) == (distance + at) % 3 + 1));
        }
    }
}
