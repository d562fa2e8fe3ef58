//! The models of a host: their states, and changes of them.

use anyhow::Result;
use reqwest::Method;
use skep_api::{ChangeModel, Model, ModelList};

use super::Client;

impl Client {
    /// Returns the models of the host, without its agents.
    pub async fn models(&self) -> Result<Vec<Model>> {
        let list: ModelList = self.json(self.request(Method::GET, &["v1", "models"])?).await?;
        Ok(list.data.into_iter().filter(|model| model.skep.is_some()).collect())
    }

    /// Returns the state of one model.
    pub async fn model(&self, name: &str) -> Result<Model> {
        self.json(self.request(Method::GET, &["v1", "models", name])?).await
    }

    /// Loads or unloads a model, or points an alias at it.
    pub async fn change_model(&self, change: &ChangeModel) -> Result<Model> {
        self.json(self.request(Method::POST, &["v1", "models"])?.json(change)).await
    }
}
