//! The declaration of a model that this process can compute.

use std::sync::Arc;
use std::time::Duration;

use skep_model::Sampling;

use crate::{Engine, LoadProgress};

/// Time that a request waits for its model's load by default.
pub const DEFAULT_LOAD_WAIT: Duration = Duration::from_secs(30);

/// Loads a model and starts its engine, on a thread that may block. The error is for people.
pub type Loader = Arc<dyn Fn(&LoadProgress) -> Result<Engine, String> + Send + Sync>;

/// A model that is declared by its name and loaded when it is needed.
#[derive(Clone)]
pub struct LocalModel {
    pub name: String,
    /// Names of the devices that it is loaded on. Loads that share a device follow one another.
    pub devices: Vec<String>,
    /// Maximum time that a request waits for the model to be loaded.
    pub load_wait: Duration,
    /// Time without requests after which the model is unloaded.
    pub idle_unload: Option<Duration>,
    /// Whether a request loads the model again after a person has unloaded it.
    pub on_demand: bool,
    /// Sampling parameters of a request that sets none, as far as they are known before the first load.
    pub sampling: Option<Sampling>,
    pub loader: Loader,
}

impl LocalModel {
    /// Returns the declaration of a model that is loaded on demand, with the default times.
    pub fn new(
        name: impl Into<String>,
        device: impl Into<String>,
        loader: impl Fn(&LoadProgress) -> Result<Engine, String> + Send + Sync + 'static,
    ) -> Self {
        LocalModel {
            name: name.into(),
            devices: vec![device.into()],
            load_wait: DEFAULT_LOAD_WAIT,
            idle_unload: None,
            on_demand: true,
            sampling: None,
            loader: Arc::new(loader),
        }
    }
}
