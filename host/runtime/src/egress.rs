//! What the host lets agents reach: the connections, the operator's list, and where both lists are written.

use crate::{Grants, RuntimeOptions};
use skep_outbound::{Client, Origins, Policy};
use std::sync::Arc;

const DEVELOPER: &str = "hosts under [grants] in agent.toml";
const OPERATOR: &str = "hosts under [grants] in skep.toml";

/// What all agents of a host share to make requests.
pub(crate) struct Egress {
    pub(crate) client: Client,
    granted: Arc<Origins>,
}

impl Egress {
    pub(crate) fn new(options: &RuntimeOptions) -> Self {
        let (client, granted) = (Client::new(options.outbound.clone()), options.granted_hosts.clone());
        Egress { client, granted: Arc::new(granted) }
    }

    /// Where an agent with these grants may send requests: where its developer asks for it and the operator agrees.
    pub(crate) fn policy(&self, grants: &Grants) -> Policy {
        Policy::default().and(grants.hosts.clone(), DEVELOPER).and(self.granted.clone(), OPERATOR)
    }
}
