//! `skep up --watch`: rebuilds and redeploys agents whose files change.
//!
//! A build that fails is reported, and the active version stays. Running turns finish on the version with
//! which they started.

use std::convert::Infallible;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use skep_runtime::{AgentHost, AgentSummary};

use crate::agent_source::AgentSource;
use crate::progress::Terminal;
use crate::server::DEPLOYER;
use crate::source_watch::{Change, SourceWatch};
use crate::style;

/// The version that was built after a change, and is now active.
struct Redeployed {
    agent: AgentSummary,
    /// Whether it differs from the version that was active before.
    is_new: bool,
    build_s: f64,
}

/// Redeploys agents as they change, until their sources can no longer be read.
pub(super) async fn watch(mut sources: SourceWatch, host: AgentHost) -> Result<Infallible> {
    loop {
        for Change { path, since } in sources.changes().await? {
            let paint = style::stderr();
            match redeploy(&path, &host).await {
                Ok(Redeployed { agent, is_new: true, build_s }) => eprintln!(
                    "  {} {} version {} active, {:.1} s after the change (build {build_s:.1} s)",
                    paint.green("updated"),
                    agent.name,
                    agent.version,
                    since.elapsed().as_secs_f64(),
                ),
                Ok(Redeployed { agent, is_new: false, .. }) => eprintln!(
                    "  {} {}: the build is version {}, which is already active",
                    paint.green("unchanged"),
                    agent.name,
                    agent.version
                ),
                Err(error) => eprintln!(
                    "  {} {}; the active version stays: {error:#}",
                    paint.red("not updated"),
                    path.display()
                ),
            }
        }
    }
}

async fn redeploy(path: &Path, host: &AgentHost) -> Result<Redeployed> {
    let started = Instant::now();
    let source = path.to_path_buf();
    let built = tokio::task::spawn_blocking(move || AgentSource::load(&source, None, &Terminal));
    let AgentSource { manifest, component, .. } = built.await.context("the build stopped unexpectedly")??;
    let build_s = started.elapsed().as_secs_f64();
    let before = host.agent(manifest.name.as_str()).map(|agent| agent.summary.version).ok();
    let agent = host.deploy(manifest, component, DEPLOYER).await?;
    Ok(Redeployed { is_new: before != Some(agent.version), agent, build_s })
}
