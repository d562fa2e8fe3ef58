//! The flags of every command that speaks to a registry.

use anyhow::Result;

use crate::registry::Login;

#[derive(Debug, clap::Args)]
pub struct RegistryArgs {
    /// Log in to the registry as this user, with the password in SKEP_REGISTRY_PASSWORD
    ///
    /// Without it, what `docker login` keeps is used.
    #[arg(long, value_name = "NAME")]
    username: Option<String>,
    /// Speak to the registry without TLS; one on this machine always is
    #[arg(long)]
    pub plain_http: bool,
}

impl RegistryArgs {
    pub fn login(&self) -> Result<Login> {
        Login::new(self.username.clone(), std::env::var("SKEP_REGISTRY_PASSWORD").ok())
    }
}
