//! Metrics of how evenly the experts and the ranks of the models work, read when `/metrics` is requested.
//!
//! Experts have no series of their own, because a model may have tens of thousands; `GET /v1/engine/load` has each of them.

use crate::metrics::{EXPERT_RATIO, EXPERT_SHARE, RANK_WAIT_SHARE};
use skep_engine::RankTime;
use skep_runtime::AgentHost;

pub(crate) fn record(host: &AgentHost) {
    for engine in host.models().engines() {
        let model = &engine.info().name;
        for layer in engine.expert_load() {
            let labels = [("model", model.clone()), ("layer", layer.layer.to_string())];
            if let (Some(share), Some(ratio)) = (layer.busiest_share(), layer.peak_ratio()) {
                metrics::gauge!(EXPERT_SHARE, &labels).set(share);
                metrics::gauge!(EXPERT_RATIO, &labels).set(ratio);
            }
        }
        for (replica, ranks) in engine.rank_times().iter().enumerate() {
            for (rank, time) in ranks.iter().enumerate() {
                let labels =
                    [("model", model.clone()), ("replica", replica.to_string()), ("rank", rank.to_string())];
                if let Some(share) = wait_share(time) {
                    metrics::gauge!(RANK_WAIT_SHARE, &labels).set(share);
                }
            }
        }
    }
}

/// Returns the share of its time in steps that a rank waited, or `None` before the first step.
fn wait_share(time: &RankTime) -> Option<f64> {
    let all = time.computing + time.waiting;
    (!all.is_zero()).then(|| time.waiting.as_secs_f64() / all.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_share_of_waits_is_of_the_time_in_steps() {
        let ms = Duration::from_millis;
        let time = RankTime { steps: 2, computing: ms(30), waiting: ms(10) };
        assert_eq!(wait_share(&time), Some(0.25));
        assert_eq!(wait_share(&RankTime::default()), None);
    }
}
