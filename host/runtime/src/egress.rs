//! Outbound requests of agents: the HTTP client, the allowed hosts, and the secrets. Denials name the setting
//! that would allow the request.

use crate::{
    Clock, Manifest, RuntimeError, RuntimeOptions, SecretGrant,
    tenancy::{Tenancy, TenantPermit, TenantPermits},
    vault::{OpenSecret, Vault},
};
use skep_outbound::{Bounds, Client, Origins, OutboundError, Policy, Request, Response, Secret, Secrets};
use skep_store::Store;
use std::sync::Arc;

const DEVELOPER: &str = "hosts under [grants] in agent.toml";
const OPERATOR: &str = "hosts under [grants] in skep.toml";

/// The outbound state that all agents of a host share.
pub(crate) struct Egress {
    pub(crate) client: Client,
    /// Slots for requests of turns. The client has a few more for webhooks.
    request_permits: TenantPermits,
    /// Slots for calls to tool servers. They are separate, so that slow servers do not block requests.
    tool_call_permits: TenantPermits,
    pub(crate) vault: Arc<Vault>,
    store: Store,
}

impl Egress {
    pub(crate) fn new(store: Store, clock: Clock, options: &RuntimeOptions, tenancy: Tenancy) -> Self {
        let client = Client::new(options.outbound.clone());
        let request_permits = TenantPermits::new(options.outbound.max_running, tenancy.clone());
        let tool_call_permits = TenantPermits::new(options.outbound.max_running, tenancy);
        Egress {
            client,
            request_permits,
            tool_call_permits,
            vault: Arc::new(Vault::new(store.clone(), clock, options.sealing_key.clone())),
            store,
        }
    }

    /// Waits for a request slot.
    pub(crate) async fn request_permit(&self, tenant: &str) -> TenantPermit {
        self.request_permits.take(tenant).await
    }

    /// Returns how many requests of turns are under way, and how many may be.
    pub(crate) fn running_requests(&self) -> (usize, usize) {
        self.request_permits.taken()
    }

    /// Waits for a slot for a call to a tool server.
    pub(crate) async fn tool_call_permit(&self, tenant: &str) -> TenantPermit {
        self.tool_call_permits.take(tenant).await
    }

    /// Returns whether the turns of this host may reach sessions of other hosts.
    pub(crate) fn is_clustered(&self) -> bool {
        self.store.is_clustered()
    }

    /// Waits until no other host of the cluster can have taken this turn over, which is so at once unless this host hung or was cut
    /// off from its database. It is the last thing before an effect outside.
    pub(crate) async fn until_certain(&self) {
        if self.store.is_clustered() {
            self.store.until_certain().await;
        }
    }

    /// Sends a request of a tenant's turn, once it has a request slot.
    pub(crate) async fn send(
        &self,
        tenant: &str,
        request: Request,
        policy: &Policy,
        bounds: &Bounds,
    ) -> Result<Response, OutboundError> {
        let permit = async {
            let permit = self.request_permit(tenant).await;
            self.until_certain().await;
            permit
        };
        let permit = tokio::time::timeout_at(bounds.deadline.into(), permit).await;
        let _permit = permit.map_err(|_elapsed| OutboundError::DeadlineExceeded)?;
        self.client.send(request, policy, bounds).await
    }

    /// Returns the hosts to which an agent may send requests: those that its developer asks for and the operator allows, which
    /// are `granted`. `placeholder` returns the text that stands for a secret in requests.
    pub(crate) async fn policy(
        &self,
        manifest: &Manifest,
        granted: Arc<Origins>,
        placeholder: impl Fn(&str) -> String,
    ) -> Result<Policy, RuntimeError> {
        let grants = &manifest.grants;
        let policy = Policy::default().and(grants.hosts.clone(), DEVELOPER).and(granted, OPERATOR);
        if grants.secrets.is_empty() {
            return Ok(policy);
        }
        let is_granted = |name: &str| grants.secrets.iter().any(|grant| grant.name.as_str() == name);
        let mut opened = self.vault.open(manifest.name.as_str(), is_granted).await?;
        let secrets = grants.secrets.iter().map(|grant| {
            let found = opened.iter().position(|open| open.name == grant.name.as_str());
            secret(grant, found.map(|at| opened.swap_remove(at)), placeholder(grant.name.as_str()))
        });
        let secrets = secrets.collect();
        Ok(policy.with_secrets(Secrets::new(secrets)))
    }
}

fn secret(grant: &SecretGrant, opened: Option<OpenSecret>, placeholder: String) -> Secret {
    let name = grant.name.to_string();
    let line = format!("the hosts of {name} in secrets under [grants] in agent.toml");
    let allowed = Policy::default().and(grant.hosts.clone(), line);
    match opened {
        Some(OpenSecret { value, hosts, .. }) => {
            let line = format!("its hosts with `skep secret set {name} --to ORIGIN`");
            Secret { allowed: allowed.and(hosts, line), name, placeholder, value: Some(value) }
        }
        None => Secret { allowed, name, placeholder, value: None },
    }
}
