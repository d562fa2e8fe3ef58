//! Who we are to a registry: what was said on the command line, or what `docker login` keeps, or nobody.

use anyhow::{Result, bail};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

/// The variable that holds the password of `--username`; a flag would show it to everyone on the machine.
pub const PASSWORD_VARIABLE: &str = "SKEP_REGISTRY_PASSWORD";

#[derive(Debug, Clone)]
pub enum Login {
    /// With the password from the environment.
    As { username: String, password: String },
    /// As other tools on this machine do.
    Stored,
}

impl Login {
    /// `username` as it was given, if it was.
    pub fn new(username: Option<String>, password: Option<String>) -> Result<Self> {
        match (username, password) {
            (Some(username), Some(password)) => Ok(Login::As { username, password }),
            (Some(_), None) => bail!("--username needs its password in the variable {PASSWORD_VARIABLE}"),
            (None, _) => Ok(Login::Stored),
        }
    }

    pub(super) fn resolve(&self, registry: &str) -> Result<RegistryAuth> {
        match self {
            Login::As { username, password } => Ok(RegistryAuth::Basic(username.clone(), password.clone())),
            Login::Stored => match docker_credential::get_credential(registry) {
                Ok(DockerCredential::UsernamePassword(username, password)) => {
                    Ok(RegistryAuth::Basic(username, password))
                }
                Ok(DockerCredential::IdentityToken(token)) => Ok(RegistryAuth::Bearer(token)),
                Err(
                    CredentialRetrievalError::ConfigNotFound
                    | CredentialRetrievalError::ConfigReadError
                    | CredentialRetrievalError::NoCredentialConfigured,
                ) => Ok(RegistryAuth::Anonymous),
                Err(error) => bail!("the credentials of {registry} that `docker login` keeps: {error}"),
            },
        }
    }
}
