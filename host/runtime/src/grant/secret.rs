//! Secrets in an agent's manifest, and the hosts to which they may be sent.

use crate::SecretName;
use serde::{Deserialize, Serialize};
use skep_outbound::Origins;

/// A secret under `[grants]`. It is sent only to hosts that this list, the operator's list for the secret, and both
/// `hosts` lists allow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretGrant {
    pub name: SecretName,
    pub hosts: Origins,
}
