//! Plans the memory of a model on devices, from its configuration alone: no weights are read.
//!
//! Invariant: for a model that the executors can run, the plan is what they allocate, because they and the planner call
//! the same functions; for other models it is an estimate by the same rules. Sizes saturate instead of overflowing.

mod configuration;
mod description;
mod devices;
mod experts;
mod family;
mod layouts;
mod quantization;
mod replicas;
mod storage;
#[cfg(test)]
mod tests;
mod vision;
mod weights_of_checkpoint;

pub use configuration::MAX_CONFIG_BYTES;
pub use description::{Description, Totals};
pub use devices::{DeviceKind, Devices, PlannedDevice};
pub use layouts::{CPU_RESERVE_PARTS, DRIVER_BYTES, LayoutPlan, Plan, Request};
pub use replicas::{LEAST_CPU_KV_TOKENS, default_tokens_on_cpu, memory_on_cpu, memory_on_device};
