//! Opens the devices of an executor, and copies the weights of all ranks to them at the same time; reports how far it is.
//!
//! Invariant: weights that do not fit into the model's part of a device's memory are refused before any is copied.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use skep_kernels::cuda::device::Device;

use super::CudaModel;
use super::estimate::layout_of_rank;
use super::layout::Layout;
use super::room::check_weights;
use super::start::RankPosition;
use super::weights::{Copying, DeviceWeights, STAGE_BYTES};
use crate::error::ModelError;
use crate::executor::{physical_cores, share_of};

/// Maximum number of threads that copy. More of them do not make the bus to the devices faster.
const MAX_THREADS: usize = 16;
/// Time between two calls of the watch.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two lines in the log.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// A rank whose weights have to be copied.
struct Missing<'a> {
    position: RankPosition,
    device: &'a Device,
    layout: Layout,
}

impl CudaModel<'_> {
    /// Opens the devices of a replica's ranks at the same time, because a driver takes long to create a context.
    pub(super) fn open_devices(&self, replica: usize) -> Result<Vec<(RankPosition, Device)>, ModelError> {
        let open = &self.open;
        let positions: Vec<RankPosition> = self.positions(replica).collect();
        let opened = std::thread::scope(|scope| {
            let open = |position: &RankPosition| {
                let ordinal = position.ordinal;
                scope.spawn(move || open(ordinal))
            };
            let running: Vec<_> = positions.iter().map(open).collect();
            running.into_iter().map(join).collect::<Vec<_>>()
        });
        positions.into_iter().zip(opened).map(|(position, device)| Ok((position, device?))).collect()
    }

    /// Copies the weights of these ranks that no replica before has on its device.
    pub(super) fn load_weights(&mut self, ranks: &[(RankPosition, Device)]) -> Result<(), ModelError> {
        let mut missing = Vec::new();
        for (position, device) in ranks.iter().filter(|(position, _)| !self.loaded.contains_key(position)) {
            let layout = layout_of_rank(self.checkpoint, &self.options, position.stage, position.rank)?;
            missing.push(Missing { position: *position, device, layout });
        }
        self.check_shares(&missing)?;
        let total = missing.iter().map(|rank| rank.layout.bytes as u64).sum();
        if total == 0 {
            return Ok(());
        }
        let threads = self.options.threads.unwrap_or_else(physical_cores).min(MAX_THREADS);
        let (checkpoint, count) = (self.checkpoint, missing.len());
        let done = AtomicU64::new(0);
        let mut report = Report { began: Instant::now(), last: Instant::now(), total };
        let loaded = std::thread::scope(|scope| {
            let (ended, ends) = channel();
            let mut running = Vec::new();
            for (index, Missing { position, device, layout }) in missing.into_iter().enumerate() {
                let (ended, done) = (ended.clone(), &done);
                // Kernels are loaded meanwhile. If that fails, whoever waits for them gets the error.
                scope.spawn(move || drop(device.ready()));
                // One thread fills a buffer while the device copies from that of another.
                let threads = share_of(threads, index, count).max(2);
                let copying = Copying { threads, stage_bytes: STAGE_BYTES, done };
                running.push(scope.spawn(move || {
                    let loaded = DeviceWeights::load(device, checkpoint, layout, copying);
                    // The receiver lives until all threads have ended.
                    let _ = ended.send(());
                    (position, loaded)
                }));
            }
            drop(ended);
            let mut left = running.len();
            while left > 0 {
                match ends.recv_timeout(WATCH_INTERVAL) {
                    Ok(()) => left -= 1,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                let done = done.load(Ordering::Relaxed);
                (self.watch)(done, total);
                report.tell(done);
            }
            running.into_iter().map(join).collect::<Vec<_>>()
        });
        for (position, weights) in loaded {
            self.loaded.insert(position, Arc::new(weights?));
        }
        (self.watch)(total, total);
        report.end();
        Ok(())
    }

    /// Checks the weights of each device against the part of its memory that the model may take.
    fn check_shares(&self, missing: &[Missing<'_>]) -> Result<(), ModelError> {
        let mut of_devices = BTreeMap::new();
        for Missing { position, device, layout } in missing {
            let before = || (*device, self.weights_on(position.ordinal));
            of_devices.entry(position.ordinal).or_insert_with(before).1 += layout.bytes as u64;
        }
        for (ordinal, (device, weights)) in of_devices {
            check_weights(self.options.gpu_memory, ordinal, device.memory()?.total, weights)?;
        }
        Ok(())
    }
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Logs how far a load is, and how fast.
struct Report {
    began: Instant,
    last: Instant,
    /// Number of bytes of all weights.
    total: u64,
}

impl Report {
    fn tell(&mut self, done: u64) {
        if self.last.elapsed() >= REPORT_INTERVAL {
            let (total, gb_per_s) = (self.total, self.gb_per_s(done));
            tracing::info!(done, total, gb_per_s, "loading weights");
            self.last = Instant::now();
        }
    }

    fn end(&self) {
        let (ms, gb_per_s) = (self.began.elapsed().as_millis(), self.gb_per_s(self.total));
        tracing::info!(bytes = self.total, ms, gb_per_s, "loaded weights");
    }

    /// Returns the mean rate in GB/s, rounded to hundredths.
    fn gb_per_s(&self, bytes: u64) -> f64 {
        let rate = bytes as f64 / self.began.elapsed().as_secs_f64().max(1e-6) / 1e9;
        (rate * 100.0).round() / 100.0
    }
}
