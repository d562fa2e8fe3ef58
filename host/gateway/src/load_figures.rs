//! Metrics of how evenly the experts and the ranks of the models work, read when `/metrics` is requested.
//!
//! Experts have no series of their own, because a model may have tens of thousands; `GET /v1/engine/load` has each of them.
//! The series of a model that is not loaded any longer are zero: a recorder forgets none.

use crate::metrics::{EXPERT_RATIO, EXPERT_SHARE, RANK_WAIT_SHARE};
use skep_engine::RankTime;
use skep_runtime::AgentHost;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

/// A gauge with its labels.
type Series = (&'static str, Vec<(&'static str, String)>);

/// The series that were written, so that those of models that are gone can be cleared.
#[derive(Default)]
pub(crate) struct LoadFigures(Mutex<BTreeSet<Series>>);

impl LoadFigures {
    /// Writes the figures of the models that are loaded now.
    pub(crate) fn record(&self, host: &AgentHost) {
        let mut now = BTreeMap::new();
        for engine in host.models().engines() {
            engine.set_gauges();
            let model = &engine.info().name;
            for layer in engine.expert_load() {
                let labels = vec![("model", model.clone()), ("layer", layer.layer.to_string())];
                if let (Some(share), Some(ratio)) = (layer.busiest_share(), layer.peak_ratio()) {
                    now.insert((EXPERT_SHARE, labels.clone()), share);
                    now.insert((EXPERT_RATIO, labels), ratio);
                }
            }
            for (replica, ranks) in engine.rank_times().iter().enumerate() {
                for (rank, time) in ranks.iter().enumerate() {
                    let numbers = [("replica", replica.to_string()), ("rank", rank.to_string())];
                    let labels = [("model", model.clone())].into_iter().chain(numbers).collect();
                    if let Some(share) = wait_share(time) {
                        now.insert((RANK_WAIT_SHARE, labels), share);
                    }
                }
            }
        }
        self.write(now);
    }

    fn write(&self, now: BTreeMap<Series, f64>) {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, labels) in written.iter().filter(|series| !now.contains_key(*series)) {
            metrics::gauge!(*name, labels).set(0.0);
        }
        for ((name, labels), value) in &now {
            metrics::gauge!(*name, labels).set(*value);
        }
        *written = now.into_keys().collect();
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
    use metrics_exporter_prometheus::PrometheusBuilder;
    use std::time::Duration;

    #[test]
    fn the_share_of_waits_is_of_the_time_in_steps() {
        let ms = Duration::from_millis;
        let time = RankTime { steps: 2, computing: ms(30), waiting: ms(10) };
        assert_eq!(wait_share(&time), Some(0.25));
        assert_eq!(wait_share(&RankTime::default()), None);
    }

    #[test]
    fn the_figures_of_a_model_that_is_gone_are_zero() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let series =
            |model: &str| (EXPERT_SHARE, vec![("model", model.to_owned()), ("layer", "0".to_owned())]);
        let line =
            |model: &str, value: &str| format!("{EXPERT_SHARE}{{model=\"{model}\",layer=\"0\"}} {value}\n");
        let figures = LoadFigures::default();
        metrics::with_local_recorder(&recorder, || {
            figures.write(BTreeMap::from([(series("stays"), 0.5), (series("goes"), 0.75)]));
            let text = recorder.handle().render();
            assert!(text.contains(&line("stays", "0.5")) && text.contains(&line("goes", "0.75")), "{text}");
            figures.write(BTreeMap::from([(series("stays"), 0.25)]));
            let text = recorder.handle().render();
            assert!(text.contains(&line("stays", "0.25")) && text.contains(&line("goes", "0")), "{text}");
            figures.write(BTreeMap::from([(series("goes"), 0.5)]));
            assert!(recorder.handle().render().contains(&line("goes", "0.5")), "it is loaded again");
        });
    }
}
