//! A host without HTTP, on which agents are measured directly.

use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Result;
use skep_engine::{ModelSet, Priority};
use skep_runtime::{AgentHost, HostParts, Invocation, Manifest, Origin, RuntimeError, RuntimeOptions};
use skep_store::{Durability, Store};

use crate::engines;
use crate::progress::Terminal;

/// Opens the model that the host has to have, although no turn uses it.
pub fn models(name: &str) -> Result<ModelSet> {
    let engine = tokio::task::block_in_place(|| {
        engines::open_engine(name, NonZeroUsize::MIN, Default::default(), Default::default(), &Terminal)
    })?;
    Ok(ModelSet::new(engine))
}

/// Starts a host whose data is in `dir`.
pub async fn start(dir: &Path, models: ModelSet, options: RuntimeOptions) -> Result<AgentHost> {
    std::fs::create_dir_all(dir)?;
    let store = Store::open(&dir.join("skep.db"), Durability::Process).await?;
    let options = RuntimeOptions { artifact_dir: Some(dir.join("artifacts")), ..options };
    Ok(AgentHost::start(HostParts::new(store, models), options).await?)
}

/// Deploys a component to the host.
pub async fn deploy(host: &AgentHost, manifest: &str, component: &[u8]) -> Result<()> {
    host.deploy(Manifest::from_toml(manifest)?, component.to_vec(), "bench").await?;
    Ok(())
}

/// Runs one turn and returns its reply.
pub async fn turn(host: &AgentHost, agent: &str, session: &str, text: &str) -> Result<String, RuntimeError> {
    let invocation = Invocation {
        principal: "local".to_owned(),
        key: None,
        agent: agent.to_owned(),
        session: session.to_owned(),
        text: text.to_owned(),
        data: None,
        origin: Origin::Direct,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: None,
        detached: false,
    };
    Ok(host.invoke(invocation).await?.outcome().await?.text)
}
