//! The figures of the last minutes, by model.

use std::collections::BTreeMap;

use skep_api::{EngineFigures, EngineSample, ModelFigures};

use super::view::SECONDS;

/// The figures of all models. Every column of a model has one value for each second.
pub(super) struct History {
    models: Vec<ModelFigures>,
    at_ms: u64,
}

impl History {
    /// Begins with the figures that the host has kept.
    pub(super) fn new(figures: EngineFigures) -> Self {
        History { models: figures.models, at_ms: figures.at_ms.last().copied().unwrap_or_default() }
    }

    /// Adds the figures of one second. A model that was not there before has no other facts than its name.
    pub(super) fn add(&mut self, sample: EngineSample) {
        self.at_ms = sample.at_ms;
        self.models.retain(|model| sample.models.iter().any(|known| known.name == model.name));
        for sampled in sample.models {
            let known = self.models.iter().position(|model| model.name == sampled.name);
            let at = known.unwrap_or_else(|| {
                self.models.push(blank(sampled.name));
                self.models.len() - 1
            });
            let columns = &mut self.models[at].columns;
            for (name, value) in sampled.values {
                let column = columns.entry(name).or_default();
                if column.len() >= SECONDS {
                    column.drain(..=column.len() - SECONDS);
                }
                column.push(value);
            }
        }
    }

    /// Returns the figures of each model.
    pub(super) fn models(&self) -> &[ModelFigures] {
        &self.models
    }

    /// Returns the time of the newest figures.
    pub(super) fn at_ms(&self) -> u64 {
        self.at_ms
    }
}

fn blank(name: String) -> ModelFigures {
    ModelFigures {
        name,
        device: String::new(),
        replicas: 1,
        context_length: 0,
        page_tokens: 0,
        memory: Vec::new(),
        replica_memory: Vec::new(),
        columns: BTreeMap::new(),
        each_replica: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_api::ModelSample;

    fn sample(name: &str, at_ms: u64, value: f64) -> EngineSample {
        let values = BTreeMap::from([("running".to_owned(), Some(value))]);
        EngineSample {
            at_ms,
            models: vec![ModelSample { name: name.to_owned(), values, each_replica: Vec::new() }],
        }
    }

    #[test]
    fn the_newest_values_are_kept_and_unloaded_models_go() {
        let mut history = History { models: Vec::new(), at_ms: 0 };
        for second in 0..SECONDS as u64 + 10 {
            history.add(sample("a", second, second as f64));
        }
        let running = &history.models()[0].columns["running"];
        assert_eq!((running.len(), running[0]), (SECONDS, Some(10.0)));
        history.add(sample("b", 999, 1.0));
        assert_eq!(history.models().len(), 1);
        assert_eq!((history.models()[0].name.as_str(), history.at_ms()), ("b", 999));
    }
}
