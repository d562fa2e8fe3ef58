//! A stream in a device's primary context, and the errors of the driver's calls in it.
//!
//! Invariant: an error that spoils the context is recorded for all of its users.

use cudarc::driver::{result, sys};
use result::DriverError;

use super::contexts::CONTEXTS;
use crate::{Fault, KernelError};

/// A retained primary context with a stream.
pub(super) struct Queue {
    pub(super) ordinal: usize,
    pub(super) device: sys::CUdevice,
    pub(super) context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
}

impl Queue {
    pub(super) fn new(ordinal: usize) -> Result<Self, KernelError> {
        let number = i32::try_from(ordinal).expect("the driver lists fewer devices than i32::MAX");
        let device = result::device::get(number).map_err(|error| failed("cuDeviceGet", error))?;
        // SAFETY: the driver returned the device above.
        let retain = || unsafe { result::primary_ctx::retain(device) };
        let context = CONTEXTS
            .retain(ordinal, || retain().map_err(|error| failed("cuDevicePrimaryCtxRetain", error)))?;
        // From here on, dropping the queue releases the context, and the stream if there is one.
        let mut made = Queue { ordinal, device, context, stream: std::ptr::null_mut() };
        made.bind()?;
        made.stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| made.failed("cuStreamCreate", error))?;
        Ok(made)
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), KernelError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| self.failed("cuCtxSetCurrent", error))
    }

    /// Returns the error of a call in this context, and records whether it spoils the context.
    pub(super) fn failed(&self, call: &'static str, error: DriverError) -> KernelError {
        let error = failed(call, error);
        CONTEXTS.record(self.ordinal, &error);
        error
    }

    /// Returns the fault that spoiled the context. Work that has failed without being waited for counts as well.
    pub(super) fn fault(&self) -> Option<KernelError> {
        if self.bind().is_ok() {
            // SAFETY: the stream is alive.
            let queried = unsafe { sys::cuStreamQuery(self.stream) }.result();
            // A queue with work in it reports an error that means nothing here.
            let _ = queried.map_err(|error| self.failed("cuStreamQuery", error));
        }
        CONTEXTS.fault(self.ordinal)
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<u32, KernelError> {
        // SAFETY: the driver returned the device.
        let found = unsafe { result::device::get_attribute(self.device, attribute) }
            .map_err(|error| self.failed("cuDeviceGetAttribute", error))?;
        Ok(u32::try_from(found).unwrap_or(0))
    }

    pub(super) fn synchronize(&self) -> Result<(), KernelError> {
        self.bind()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| self.failed("cuStreamSynchronize", error))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.stream.is_null() {
            // SAFETY: the stream was created once. Nothing can be done about a failure, here and below.
            let _ = self.bind().map(|()| unsafe { result::stream::destroy(self.stream) });
        }
        // SAFETY: the context was retained once for this queue.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Returns the error of a call, which has the name and the text of the driver's error.
fn failed(call: &'static str, error: DriverError) -> KernelError {
    let text =
        error.error_string().map_or_else(|_| String::new(), |text| format!(", {}", text.to_string_lossy()));
    let reason = format!("{:?}{text}", error.0);
    match Fault::of_code(error.0 as u32) {
        None => KernelError::Driver { call, reason },
        Some(fault) => KernelError::DeviceFault { fault, call, reason },
    }
}
