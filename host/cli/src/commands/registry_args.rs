//! The flags of every command that talks to a registry.

use anyhow::Result;

use crate::registry::Login;

/// The flags for the credentials of a registry and its transport.
#[derive(Debug, clap::Args)]
pub struct RegistryArgs {
    /// Log in to the registry as this user, with the password in SKEP_REGISTRY_PASSWORD
    ///
    /// Without it, the credentials that `docker login` stored are used.
    #[arg(long, value_name = "NAME")]
    username: Option<String>,
    /// Talk to the registry without TLS; this is always so for a registry on this machine
    #[arg(long)]
    pub plain_http: bool,
}

impl RegistryArgs {
    /// Returns the credentials that the flags and the environment choose.
    pub fn login(&self) -> Result<Login> {
        Login::new(self.username.clone(), std::env::var("SKEP_REGISTRY_PASSWORD").ok())
    }
}
