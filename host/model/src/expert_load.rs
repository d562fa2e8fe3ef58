//! The number of tokens that each expert of a model computed.
//!
//! Invariant: counts only grow, and a step never waits for a reader. The ranks of a stage route alike, so one of them counts: the
//! counts of a layer add up to the tokens times the experts that each token passes through. There is one counter for each expert of each
//! layer, and a step adds to those of the experts that it used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The tokens of the experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLoad {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Number of tokens that each expert computed, in the order of the experts.
    pub tokens: Vec<u64>,
}

impl LayerLoad {
    /// Returns the share of the busiest expert, or `None` before the first token.
    pub fn busiest_share(&self) -> Option<f64> {
        let all: u64 = self.tokens.iter().sum();
        let most = self.tokens.iter().copied().max().unwrap_or(0);
        (all > 0).then(|| most as f64 / all as f64)
    }

    /// Returns how many times the mean of all experts the busiest one computed, or `None` before the first token.
    pub fn peak_ratio(&self) -> Option<f64> {
        Some(self.busiest_share()? * self.tokens.len() as f64)
    }
}

/// The counters of an executor.
#[derive(Debug)]
pub struct ExpertLoad {
    /// One counter for each expert of each layer; a layer without experts has none.
    layers: Vec<Box<[AtomicU64]>>,
}

impl ExpertLoad {
    /// Returns counters for layers with these numbers of experts, or `None` if there are no experts.
    pub(crate) fn new(experts: impl Iterator<Item = usize>) -> Option<Arc<Self>> {
        let counters = |count: usize| -> Box<[AtomicU64]> { (0..count).map(|_| AtomicU64::new(0)).collect() };
        let layers: Vec<Box<[AtomicU64]>> = experts.map(counters).collect();
        layers.iter().any(|layer| !layer.is_empty()).then(|| Arc::new(ExpertLoad { layers }))
    }

    /// Returns the counts of the layers that have experts.
    pub fn layers(&self) -> Vec<LayerLoad> {
        let counted = self.layers.iter().enumerate().filter(|(_, counters)| !counters.is_empty());
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        counted
            .map(|(layer, counters)| LayerLoad { layer, tokens: counters.iter().map(read).collect() })
            .collect()
    }

    /// Returns the counters of the stage that begins with this layer.
    pub(crate) fn of_stage(self: &Arc<Self>, first_layer: usize) -> StageLoad {
        StageLoad { load: self.clone(), first_layer }
    }
}

/// The counters of a pipeline stage.
#[derive(Debug)]
pub(crate) struct StageLoad {
    load: Arc<ExpertLoad>,
    first_layer: usize,
}

impl StageLoad {
    /// Adds the tokens that experts, given by their numbers, computed in a layer of the stage.
    pub(crate) fn count(&self, layer: usize, experts: impl Iterator<Item = (usize, usize)>) {
        let counters = &self.load.layers[self.first_layer + layer];
        for (expert, tokens) in experts {
            counters[expert].fetch_add(tokens as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_layers_that_have_experts() {
        let load = ExpertLoad::new([0, 3, 3].into_iter()).unwrap();
        load.of_stage(0).count(1, [(0, 2), (2, 1)].into_iter());
        load.of_stage(2).count(0, [(2, 4)].into_iter());
        load.of_stage(0).count(1, [(0, 3)].into_iter());
        let layers = load.layers();
        assert_eq!(layers[0], LayerLoad { layer: 1, tokens: vec![5, 0, 1] });
        assert_eq!(layers[1], LayerLoad { layer: 2, tokens: vec![0, 0, 4] });
        assert_eq!(layers.len(), 2);
        assert_eq!((layers[1].busiest_share(), layers[1].peak_ratio()), (Some(1.0), Some(3.0)));
        let unused = LayerLoad { layer: 0, tokens: vec![0, 0] };
        assert_eq!((unused.busiest_share(), unused.peak_ratio()), (None, None));
        assert!(ExpertLoad::new([0, 0].into_iter()).is_none(), "a dense model has no counters");
    }
}
