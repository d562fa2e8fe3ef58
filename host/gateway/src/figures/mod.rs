//! The figures of the engines over the last hour, sampled each second and kept in memory.

mod sample;

use crate::Gateway;
use sample::{COLUMNS, ModelTotals, ModelValues, Values};
use skep_api::{
    EngineFigures, EngineSample, MemoryUse, ModelFigures, ModelSample, RankMemory, ReplicaMemory, marker,
};
use skep_engine::{Engine, MemoryPlan};
use skep_runtime::AgentHost;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::broadcast,
    time::{Instant, MissedTickBehavior},
};

const INTERVAL: Duration = Duration::from_secs(1);
/// Number of samples that are kept: one hour.
pub(crate) const KEPT: usize = 3600;
/// Number of samples that a follower may lag behind before it misses some.
const FOLLOWED: usize = 64;

/// The figures of one interval, by model.
pub(crate) struct Sample {
    at_ms: u64,
    models: Vec<(Arc<str>, ModelValues)>,
}

/// The samples of the last hour, and those to come.
pub(crate) struct Figures {
    kept: Mutex<VecDeque<Arc<Sample>>>,
    followers: broadcast::Sender<Arc<Sample>>,
}

impl Default for Figures {
    fn default() -> Self {
        Figures { kept: Mutex::default(), followers: broadcast::Sender::new(FOLLOWED) }
    }
}

impl Figures {
    /// Takes samples until it is dropped.
    pub(crate) async fn run(self: Arc<Self>, host: AgentHost) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: BTreeMap<Arc<str>, ModelTotals> = BTreeMap::new();
        let mut since = Instant::now();
        loop {
            ticks.tick().await;
            let took = since.elapsed();
            since = Instant::now();
            let engines: Vec<Engine> = host.models().engines().collect();
            let mut now = BTreeMap::new();
            let mut models = Vec::with_capacity(engines.len());
            for engine in &engines {
                let name: Arc<str> = engine.info().name.as_str().into();
                let state = ModelTotals::of(engine);
                // The first sample of a model has nothing to be compared with.
                if let Some(before) = before.get(&name) {
                    models.push((name.clone(), state.since(before, took)));
                }
                now.insert(name, state);
            }
            before = now;
            self.add(Sample { at_ms: host.now_ms(), models });
        }
    }

    fn add(&self, sample: Sample) {
        let sample = Arc::new(sample);
        let mut kept = self.kept();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(sample.clone());
        drop(kept);
        // Without followers there is nobody to notify.
        let _ = self.followers.send(sample);
    }

    /// Follows the samples to come.
    pub(crate) fn follow(&self) -> broadcast::Receiver<Arc<Sample>> {
        self.followers.subscribe()
    }

    /// Returns the last samples in columns, at most `most` of them.
    pub(crate) fn columns(&self, gateway: &Gateway, most: usize) -> EngineFigures {
        let kept: Vec<Arc<Sample>> = {
            let kept = self.kept();
            kept.iter().skip(kept.len().saturating_sub(most)).cloned().collect()
        };
        let models = gateway.host.models().engines().map(|engine| model(&engine, &kept));
        EngineFigures {
            object: marker::Engine,
            interval_ms: INTERVAL.as_millis() as u64,
            at_ms: kept.iter().map(|sample| sample.at_ms).collect(),
            models: models.collect(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Arc<Sample>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sample {
    pub(crate) fn described(&self) -> EngineSample {
        let named = |values: &Values| {
            let values = COLUMNS.iter().zip(values);
            values.map(|(name, value)| ((*name).to_owned(), written(*value))).collect()
        };
        let models = self.models.iter().map(|(name, values)| ModelSample {
            name: name.to_string(),
            values: named(&values.whole),
            each_replica: values.replicas.iter().map(named).collect(),
        });
        EngineSample { at_ms: self.at_ms, models: models.collect() }
    }
}

fn model(engine: &Engine, kept: &[Arc<Sample>]) -> ModelFigures {
    let info = engine.info();
    let values: Vec<Option<&ModelValues>> = kept
        .iter()
        .map(|sample| sample.models.iter().find(|(name, _)| **name == *info.name).map(|(_, values)| values))
        .collect();
    // A model that was loaded again may have had another number of replicas.
    let replicas = if info.replicas > 1 { info.replicas } else { 0 };
    let each_replica = (0..replicas).map(|replica| {
        let of_replica = values.iter().map(|values| values.and_then(|values| values.replicas.get(replica)));
        columns(&of_replica.collect::<Vec<_>>())
    });
    let whole: Vec<Option<&Values>> =
        values.iter().map(|values| values.map(|values| &values.whole)).collect();
    ModelFigures {
        name: info.name.clone(),
        device: info.device.to_string(),
        replicas: info.replicas as u64,
        context_length: info.context_length as u64,
        page_tokens: engine.page_tokens() as u64,
        memory: memory(&info.memory),
        replica_memory: info.replica_memory.iter().map(replica_memory).collect(),
        columns: columns(&whole),
        each_replica: each_replica.collect(),
    }
}

fn replica_memory(replica: &skep_engine::ReplicaMemory) -> ReplicaMemory {
    let rank = |rank: &skep_engine::RankMemory| RankMemory {
        stage: rank.stage as u64,
        shard: rank.shard as u64,
        device: rank.device.clone(),
        memory: memory(&rank.memory),
    };
    ReplicaMemory {
        device: replica.device.clone(),
        memory: memory(&replica.memory),
        ranks: replica.ranks.iter().map(rank).collect(),
    }
}

/// Returns memory by kind.
fn memory(plan: &MemoryPlan) -> Vec<MemoryUse> {
    let kinds = [
        ("weights", plan.weight_bytes),
        ("activations", plan.activation_bytes),
        ("graphs", plan.graph_bytes),
        ("kv", plan.kv_bytes),
    ];
    let taken = kinds.into_iter().filter(|(_, bytes)| *bytes > 0);
    taken.map(|(kind, bytes)| MemoryUse { kind: kind.to_owned(), bytes }).collect()
}

/// Returns the values of each interval in columns.
fn columns(values: &[Option<&Values>]) -> BTreeMap<String, Vec<Option<f64>>> {
    let columns = COLUMNS.iter().enumerate().map(|(index, name)| {
        let column = values.iter().map(|values| values.and_then(|values| written(values[index])));
        ((*name).to_owned(), column.collect())
    });
    columns.collect()
}

/// Returns a value with four significant digits, or `None` for one that is not a number.
fn written(value: f32) -> Option<f64> {
    if !value.is_finite() {
        return None;
    }
    let value = f64::from(value);
    let digits = 3 - value.abs().max(1e-3).log10().floor() as i32;
    let scale = 10f64.powi(digits);
    Some((value * scale).round() / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_hour_is_kept() {
        let figures = Figures::default();
        for at_ms in 0..KEPT as u64 + 5 {
            figures.add(Sample { at_ms, models: Vec::new() });
        }
        let kept = figures.kept();
        assert_eq!((kept.len(), kept[0].at_ms, kept[KEPT - 1].at_ms), (KEPT, 5, KEPT as u64 + 4));
    }

    #[tokio::test]
    async fn each_of_several_replicas_has_figures_of_its_own() {
        let engine = crate::tests::fixture::tiny_replicas(2);
        let before = ModelTotals::of(&engine);
        let mut request = skep_engine::GenerateRequest::new(vec![5; 40]);
        request.max_tokens = Some(9);
        request.ignore_eos = true;
        let mut tokens = engine.generate(request).unwrap();
        while futures::StreamExt::next(&mut tokens).await.is_some() {}
        let values = ModelTotals::of(&engine).since(&before, INTERVAL);
        let figures = Figures::default();
        figures.add(Sample { at_ms: 1, models: vec![(engine.info().name.as_str().into(), values)] });
        let kept: Vec<_> = figures.kept().iter().cloned().collect();
        let model = model(&engine, &kept);
        let generated =
            |columns: &BTreeMap<String, Vec<Option<f64>>>| columns["generated_tokens_s"][0].unwrap();
        let each: Vec<f64> = model.each_replica.iter().map(generated).collect();
        assert_eq!((each.iter().sum::<f64>(), generated(&model.columns)), (9.0, 9.0));
        assert!(each.contains(&0.0), "one replica did all the work: {each:?}");
        assert_eq!(kept[0].described().models[0].each_replica.len(), 2);
        let alone = crate::tests::fixture::tiny_engine("alone");
        assert!(ModelTotals::of(&alone).since(&ModelTotals::of(&alone), INTERVAL).replicas.is_empty());
    }

    #[tokio::test]
    async fn the_memory_of_each_replica_and_rank_is_shown() {
        let bytes = |memory: &[MemoryUse], kind: &str| {
            memory.iter().find(|used| used.kind == kind).map_or(0, |used| used.bytes)
        };
        let replicas = model(&crate::tests::fixture::tiny_replicas(2), &[]);
        let [one, other] = &replicas.replica_memory[..] else { panic!("there are two replicas") };
        assert_eq!((one.device.as_str(), one.ranks.len()), ("cpu", 0));
        let kv = bytes(&one.memory, "kv") + bytes(&other.memory, "kv");
        assert_eq!(kv, bytes(&replicas.memory, "kv"));
        assert_eq!(bytes(&one.memory, "weights"), bytes(&replicas.memory, "weights"), "they share them");

        let divided = model(&crate::tests::fixture::tiny_ranks(2, 2), &[]);
        let [replica] = &divided.replica_memory[..] else { panic!("there is one replica") };
        let places: Vec<_> = replica.ranks.iter().map(|rank| (rank.stage, rank.shard)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        for kind in ["weights", "kv"] {
            let of_ranks: u64 = replica.ranks.iter().map(|rank| bytes(&rank.memory, kind)).sum();
            assert_eq!(of_ranks, bytes(&divided.memory, kind), "{kind}");
        }
    }

    #[test]
    fn values_have_four_digits() {
        for (value, expected) in
            [(0.0, 0.0), (1234.56, 1235.0), (0.123_456, 0.1235), (31.4159, 31.42), (98_765.4, 98_770.0)]
        {
            assert_eq!(written(value), Some(expected));
        }
        assert_eq!(written(f32::NAN), None);
    }
}
