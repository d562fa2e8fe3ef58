//! Credentials for a registry: from the command line, from what `docker login` stored, or none.

use anyhow::{Result, bail};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

/// Environment variable with the password of `--username`; a flag would show it to everyone on the machine.
pub const PASSWORD_VARIABLE: &str = "SKEP_REGISTRY_PASSWORD";

/// The credentials that a user chose on the command line.
#[derive(Debug, Clone)]
pub enum Login {
    /// This user, with the password from the environment.
    As { username: String, password: String },
    /// The stored credentials, which other tools on this machine use as well.
    Stored,
}

impl Login {
    /// Returns the login for the user that was given, if any.
    pub fn new(username: Option<String>, password: Option<String>) -> Result<Self> {
        match (username, password) {
            (Some(username), Some(password)) => Ok(Login::As { username, password }),
            (Some(_), None) => {
                bail!("--username needs its password in the environment variable {PASSWORD_VARIABLE}")
            }
            (None, _) => Ok(Login::Stored),
        }
    }

    /// Returns the credentials for a registry.
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
                Err(error) => {
                    bail!("cannot read the credentials of {registry} that `docker login` stored: {error}")
                }
            },
        }
    }
}
