//! The engines of one process, by the name of their model. A set is built once and then only read; cloning it
//! is cheap.

use std::sync::Arc;

use crate::{Engine, EngineError};

/// Named engines; the first is the default.
#[derive(Clone)]
pub struct ModelSet {
    engines: Arc<Vec<Engine>>,
}

impl ModelSet {
    pub fn new(default: Engine) -> Self {
        ModelSet { engines: Arc::new(vec![default]) }
    }

    /// Returns the set with one more engine, which replaces an engine of the same name.
    pub fn with(self, engine: Engine) -> Self {
        let mut engines = self.engines.as_ref().clone();
        match engines.iter_mut().find(|known| known.info().name == engine.info().name) {
            Some(known) => *known = engine,
            None => engines.push(engine),
        }
        ModelSet { engines: Arc::new(engines) }
    }

    /// Returns the engine of this name, or the default engine if no name is given.
    pub fn get(&self, name: Option<&str>) -> Result<Engine, EngineError> {
        let Some(name) = name else { return Ok(self.default_engine().clone()) };
        self.iter().find(|engine| engine.info().name == name).cloned().ok_or_else(|| {
            EngineError::ModelUnknown {
                name: name.to_string(),
                known: self.iter().map(|engine| engine.info().name.clone()).collect(),
            }
        })
    }

    pub fn default_engine(&self) -> &Engine {
        &self.engines[0]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Engine> {
        self.engines.iter()
    }
}
