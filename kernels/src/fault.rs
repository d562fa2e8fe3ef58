//! Classifies the errors of NVIDIA's driver by what they leave behind.
//!
//! Invariant: this is the only place that knows the driver's error codes. An error without a [`Fault`] is transient: it fails
//! the call that reports it, and the next call may succeed.

use std::fmt;

/// The part that has to be replaced before a device computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The device's memory is taken by others. What is started again can plan with the memory that is left.
    Memory,
    /// The context is spoiled: each call returns this error until the process ends.
    Context,
    /// The device is lost or not usable. Another process can use it only once the device works again.
    Device,
}

impl Fault {
    /// Returns what the driver's error with this code leaves behind, or `None` if the error is transient.
    pub(crate) fn of_code(code: u32) -> Option<Self> {
        match code {
            // OUT_OF_MEMORY
            2 => Some(Fault::Memory),
            // INVALID_CONTEXT, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
            // CONTEXT_IS_DESTROYED, ASSERT
            201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 => Some(Fault::Context),
            // HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC,
            // LAUNCH_FAILED, TENSOR_MEMORY_LEAK, EXTERNAL_DEVICE
            714..=719 | 721 | 911 => Some(Fault::Context),
            // NOT_INITIALIZED, DEINITIALIZED, DEVICE_UNAVAILABLE, NO_DEVICE, INVALID_DEVICE, DEVICE_NOT_LICENSED
            3 | 4 | 46 | 100..=102 => Some(Fault::Device),
            // OPERATING_SYSTEM, SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH, the errors of MPS, UNKNOWN
            304 | 802 | 803 | 805..=810 | 999 => Some(Fault::Device),
            _ => None,
        }
    }

    /// Returns whether a context in which this happened cannot be used anymore.
    pub fn spoils_context(self) -> bool {
        match self {
            Fault::Memory => false,
            Fault::Context | Fault::Device => true,
        }
    }
}

/// Says what follows from the fault.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::Memory => {
                "the device's memory is taken; lower gpu_memory or kv_tokens, or end other programs on the device"
            }
            Fault::Context => "this process has to be restarted before it can use the device again",
            Fault::Device => {
                "the device is lost or cannot be used; `nvidia-smi` shows its state, and a process that found it lost may have \
                 to be restarted"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn codes_are_classified_by_what_they_leave_behind() {
        for (code, expected) in [
            (CUresult::CUDA_ERROR_INVALID_VALUE, None),
            (CUresult::CUDA_ERROR_NOT_READY, None),
            (CUresult::CUDA_ERROR_INVALID_IMAGE, None),
            (CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, None),
            (CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, None),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None),
            (CUresult::CUDA_ERROR_NOT_SUPPORTED, None),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, Some(Fault::Memory)),
            (CUresult::CUDA_ERROR_INVALID_CONTEXT, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_CONTAINED, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_ASSERT, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_MISALIGNED_ADDRESS, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_EXTERNAL_DEVICE, Some(Fault::Context)),
            (CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE, Some(Fault::Device)),
            (CUresult::CUDA_ERROR_NO_DEVICE, Some(Fault::Device)),
            (CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED, Some(Fault::Device)),
            (CUresult::CUDA_ERROR_UNKNOWN, Some(Fault::Device)),
        ] {
            assert_eq!(Fault::of_code(code as u32), expected, "{code:?}");
        }
    }
}
