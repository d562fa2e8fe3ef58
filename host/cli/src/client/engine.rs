//! The figures of a host's engines.

use anyhow::Result;
use reqwest::Method;
use skep_api::{EngineFigures, EngineSample};

use super::{Client, Follower};

impl Client {
    /// Returns the figures of the last seconds.
    pub async fn engine_figures(&self, seconds: usize) -> Result<EngineFigures> {
        let request = self.request(Method::GET, &["v1", "engine"])?;
        self.json(request.query(&[("seconds", seconds)])).await
    }

    /// Follows the figures of each further second.
    pub async fn follow_engine(&self) -> Result<Follower<EngineSample>> {
        let request = self.request(Method::GET, &["v1", "engine"])?;
        self.follow_events(request.query(&[("stream", true)]), "sample", None).await
    }
}
