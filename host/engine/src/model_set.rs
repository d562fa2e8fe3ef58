//! The models of one process, by name. A set is built once and then only read; cloning it is cheap.

use std::sync::Arc;

use crate::{Engine, EngineError, Model};

/// Named models; the first is the default.
#[derive(Clone)]
pub struct ModelSet {
    models: Arc<Vec<Model>>,
}

impl ModelSet {
    pub fn new(default: impl Into<Model>) -> Self {
        ModelSet { models: Arc::new(vec![default.into()]) }
    }

    /// Returns the set with one more model, which replaces a model of the same name.
    pub fn with(self, model: impl Into<Model>) -> Self {
        let model = model.into();
        let mut models = self.models.as_ref().clone();
        match models.iter_mut().find(|known| known.name() == model.name()) {
            Some(known) => *known = model,
            None => models.push(model),
        }
        ModelSet { models: Arc::new(models) }
    }

    /// Returns the model of this name, or the default model if no name is given.
    pub fn get(&self, name: Option<&str>) -> Result<Model, EngineError> {
        let Some(name) = name else { return Ok(self.default_model().clone()) };
        self.iter().find(|model| model.name() == name).cloned().ok_or_else(|| EngineError::ModelUnknown {
            name: name.to_string(),
            known: self.iter().map(|model| model.name().to_owned()).collect(),
        })
    }

    pub fn default_model(&self) -> &Model {
        &self.models[0]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Model> {
        self.models.iter()
    }

    /// Returns the engines of the models that this process computes.
    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.models.iter().filter_map(Model::engine)
    }
}
