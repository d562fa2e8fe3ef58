//! The state that the callers of the cluster cache and its threads share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use skep_cache::{DiskTier, FetchEnding, SealingSecret, TransferRate, TransitSeal, metric};

use crate::arena::Lane;
use crate::connection::{Connect, Connection};
use crate::figures::Figures;
use crate::objects::{Failure, ObjectNames};
use crate::work::Work;

/// Number of names in a question to the master.
pub(crate) const NAMES_AT_ONCE: usize = 256;
/// Maximum number of pages of one batch. Hundreds of small ones at a time exceed what the library queues for a host.
const PAGES_AT_ONCE: usize = 32;
/// A call that takes longer counts as a failure: the next requests would wait as long.
const SLOW_CALL: Duration = Duration::from_secs(2);
/// Assumed time until the first page is here.
const LATENCY_S: f64 = 0.002;
/// Assumed rate, until it has been measured: that of a network with a gigabit per second.
const BYTES_PER_S: f64 = 100e6;

/// The state that callers and threads share.
pub(crate) struct Shared {
    pub tier: Arc<DiskTier>,
    pub seal: TransitSeal,
    pub names: ObjectNames,
    pub connection: Connection,
    pub calls: Calls,
    pub rate: TransferRate,
    pub figures: Figures,
    pub work: Work,
    pub is_closing: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("names", &self.names).finish_non_exhaustive()
    }
}

/// The calls that are under way, with the times at which they began.
#[derive(Default)]
pub(crate) struct Calls(Mutex<Vec<Instant>>);

impl Calls {
    fn begin(&self) -> Instant {
        let began = Instant::now();
        self.lock().push(began);
        began
    }

    fn end(&self, began: Instant) {
        let mut calls = self.lock();
        if let Some(at) = calls.iter().position(|call| *call == began) {
            calls.swap_remove(at);
        }
    }

    /// Returns whether a call has been under way for so long that its thread may be stuck.
    fn has_slow_one(&self) -> bool {
        self.lock().iter().any(|began| began.elapsed() > SLOW_CALL)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Creates the state of a cache that is not connected yet.
    pub fn new(connect: Connect, (secret, namespace): (&SealingSecret, u64), tier: Arc<DiskTier>) -> Shared {
        Shared {
            tier,
            seal: TransitSeal::new(secret),
            names: ObjectNames::new(namespace),
            connection: Connection::new(connect),
            calls: Calls::default(),
            rate: TransferRate::assumed(LATENCY_S, BYTES_PER_S),
            figures: Figures::default(),
            work: Work::default(),
            is_closing: AtomicBool::new(false),
        }
    }

    /// Shows in the metrics whether the cache can be used now.
    pub fn show(&self) {
        metrics::gauge!(metric::CLUSTER_UP).set(f64::from(u8::from(self.is_up())));
    }

    /// Returns whether the cache can be used now. A host that has stopped holds up a call for a minute, and the cache is not
    /// used meanwhile.
    pub fn is_up(&self) -> bool {
        self.connection.is_usable() && !self.calls.has_slow_one()
    }

    /// Makes a call, and pauses the cache if it fails or takes too long.
    pub fn timed<T>(&self, call: impl FnOnce() -> Result<T, Failure>) -> Result<T, FetchEnding> {
        let began = self.calls.begin();
        let answer = call();
        self.calls.end(began);
        match answer {
            Ok(_) if began.elapsed() > SLOW_CALL => {
                self.connection.failed(&Failure::Slow { seconds: began.elapsed().as_secs() });
                Err(FetchEnding::Late)
            }
            Ok(answer) => {
                self.connection.succeeded();
                Ok(answer)
            }
            Err(failure) => {
                self.connection.failed(&failure);
                Err(FetchEnding::Broken)
            }
        }
    }
}

/// Returns how many images of this size are put or got in one call; 0 if the lane is too small for one.
pub(crate) fn batch_len(lane: &Lane, image_bytes: usize) -> usize {
    lane.room(image_bytes).min(PAGES_AT_ONCE)
}
