//! Deployment and rollback of agents.
//!
//! A version becomes active atomically, and only after it has been validated completely. Turns
//! finish on the version with which they started.

use super::AgentHost;
use crate::{
    AgentSummary, AgentVersion, Manifest, RuntimeError, Tenant, component::Source, schedule::manifest::rows,
    text::did_you_mean,
};
use skep_store::{AgentRow, VersionRow};

impl AgentHost {
    /// Deploys the next version of an agent. Its sessions use it from their next turn. Deploying
    /// the active version again keeps its number.
    pub async fn deploy(
        &self,
        manifest: Manifest,
        component: Vec<u8>,
        deployed_by: &str,
    ) -> Result<AgentSummary, RuntimeError> {
        let host = self.host();
        host.shutdown.admit()?;
        manifest.check()?;
        for warning in self.deployment_warnings(&manifest) {
            tracing::warn!(agent = manifest.name.as_str(), "{warning}");
        }
        let mut prepared = host.deployments.prepare(manifest, Source::Sent(component)).await?;
        let bytes = prepared.bytes.take().expect("the bytes were sent with the deployment");

        let _one = self.inner.deploying.lock().await;
        host.deployments.check_coexistence(&prepared.manifest, self.inner.max_agents)?;
        let row = AgentRow {
            name: prepared.manifest.name.to_string(),
            manifest: prepared.manifest.to_toml(),
            digest: prepared.digest.clone(),
            deployed_at_ms: host.clock.now_ms(),
            deployed_by: deployed_by.to_owned(),
        };
        // Sessions named by a manifest belong to the operator's tenant.
        let tenant = Tenant::local();
        let schedules = rows(&prepared.manifest.schedule, tenant.as_str(), host.clock.now_ms())?;
        let versions = host.store.versions(&row.name).await?;
        let active = versions.into_iter().find(|known| known.is_active);
        let same = active.filter(|VersionRow { agent, .. }| {
            (&agent.digest, &agent.manifest) == (&row.digest, &row.manifest)
        });
        let (version, deployed_at_ms) = match same {
            Some(VersionRow { version, agent, .. }) => {
                host.store.activate_version(&row.name, version, &schedules).await?;
                (version, agent.deployed_at_ms)
            }
            None => (host.store.put_agent(&row, &bytes, &schedules).await?, row.deployed_at_ms),
        };
        let summary = self.host().deployments.activate(prepared, version, deployed_at_ms).await;
        // Some turns may have waited for the agent to become callable.
        self.inner.dispatch.adopt_turns(Some(&row.name)).await?;
        Ok(summary)
    }

    /// Returns what is likely a mistake in a manifest, although an agent can be deployed with it.
    pub fn deployment_warnings(&self, manifest: &Manifest) -> Vec<String> {
        let models = &self.host().reach.models;
        let servers = self.tool_servers();
        let servers: Vec<&str> = servers.keys().map(String::as_str).collect();
        let absent = manifest.grants.tools.iter().filter_map(|grant| Some((grant, grant.server()?)));
        let absent = absent.filter(|(_, server)| !servers.contains(server)).map(|(grant, server)| {
            format!(
                "[grants] tools in agent.toml names {:?}, and skep.toml has no MCP server {server:?}{}",
                String::from(grant.clone()),
                did_you_mean(server, servers.iter().copied())
            )
        });
        let unserved = models.unserved(manifest).into_iter().map(|name| {
            let served: Vec<String> = models.set().served().iter().map(|model| model.name().to_owned()).collect();
            format!(
                "[grants] models in agent.toml names {name:?}, which this host does not serve, so calls of that model will fail; \
                 it serves: {}",
                served.join(", ")
            )
        });
        unserved.chain(absent).collect()
    }

    /// Reactivates a kept version. Without a number, this is the version before the active one.
    pub async fn rollback(&self, name: &str, to: Option<u64>) -> Result<AgentSummary, RuntimeError> {
        let host = self.host();
        host.shutdown.admit()?;
        host.deployments.known(name)?;
        let versions = host.store.versions(name).await?;
        let active = versions.iter().find(|row| row.is_active).map_or(0, |row| row.version);
        let known: Vec<u64> = versions.iter().map(|row| row.version).collect();
        let found = versions.into_iter().find(|row| match to {
            Some(wanted) => row.version == wanted,
            None => row.version < active,
        });
        let missing = RuntimeError::VersionNotFound { agent: name.to_owned(), wanted: to, active, known };
        let VersionRow { version, agent: row, .. } = found.ok_or(missing)?;
        let manifest = Manifest::from_toml(&row.manifest)?;
        let prepared = host.deployments.prepare(manifest, Source::Stored { digest: row.digest }).await?;

        let _one = self.inner.deploying.lock().await;
        host.deployments.check_coexistence(&prepared.manifest, self.inner.max_agents)?;
        // Sessions named by a manifest belong to the operator's tenant.
        let tenant = Tenant::local();
        let schedules = rows(&prepared.manifest.schedule, tenant.as_str(), host.clock.now_ms())?;
        if !host.store.activate_version(name, version, &schedules).await? {
            // The version was deleted or aged out meanwhile.
            return Err(host.deployments.not_found(name));
        }
        Ok(self.host().deployments.activate(prepared, version, row.deployed_at_ms).await)
    }

    /// Returns the kept versions of an agent, newest first.
    pub async fn versions(&self, name: &str) -> Result<Vec<AgentVersion>, RuntimeError> {
        self.host().deployments.known(name)?;
        let rows = self.host().store.versions(name).await?;
        Ok(rows.into_iter().map(agent_version).collect())
    }
}

fn agent_version(row: VersionRow) -> AgentVersion {
    let VersionRow { version, is_active, agent } = row;
    AgentVersion {
        version,
        is_active,
        digest: agent.digest,
        deployed_at_ms: agent.deployed_at_ms,
        deployed_by: agent.deployed_by,
        manifest_toml: agent.manifest,
    }
}
