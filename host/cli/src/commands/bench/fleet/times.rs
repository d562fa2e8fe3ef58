//! A distribution of times in bounded memory.

/// Buckets for each power of two, so that a bucket is at most 3 % wide.
const STEPS: u64 = 32;
const STEP_BITS: u32 = STEPS.trailing_zeros();

/// Counts of times in microseconds.
#[derive(Debug)]
pub(super) struct Times {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Times {
    fn default() -> Self {
        Times { counts: vec![0; ((64 - STEP_BITS as usize) + 1) * STEPS as usize], total: 0 }
    }
}

impl Times {
    pub(super) fn add(&mut self, us: u64) {
        self.counts[bucket(us)] += 1;
        self.total += 1;
    }

    /// Returns the time in milliseconds below which `share` of the times lie (nearest rank), to 3 %.
    pub(super) fn percentile_ms(&self, share: f64) -> f64 {
        let rank = ((share * self.total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return lower_bound(bucket) as f64 / 1_000.0;
            }
        }
        0.0
    }
}

fn bucket(us: u64) -> usize {
    let shift = (64 - us.leading_zeros()).saturating_sub(STEP_BITS + 1);
    (u64::from(shift) * STEPS + (us >> shift)) as usize
}

/// Returns the shortest time of a bucket.
fn lower_bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    (bucket - shift * STEPS) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_narrow_and_buckets_are_in_order() {
        let mut last = 0;
        let buckets = Times::default().counts.len();
        for us in (0..100_000).chain([u64::MAX / 2, u64::MAX - 1, u64::MAX]) {
            let found = bucket(us);
            assert!(found >= last && found < buckets, "{us}");
            let low = lower_bound(found);
            assert!(low <= us && (us - low) as f64 <= us as f64 / 31.0, "{us} is in the bucket of {low}");
            last = found;
        }
    }

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let mut times = Times::default();
        assert!(times.percentile_ms(0.5).abs() < f64::EPSILON);
        for ms in 1..=100 {
            times.add(ms * 1_000);
        }
        for (share, expected) in [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0)] {
            let found = times.percentile_ms(share);
            assert!((found - expected).abs() <= expected / 31.0, "{found}");
        }
    }
}
