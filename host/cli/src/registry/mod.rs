//! Agents in an OCI registry: one artifact is the component and its `agent.toml`.
//!
//! The component is stored as other WebAssembly tools store theirs (`application/wasm` under a `wasm`
//! configuration), so that they can pull it; the manifest is a second layer that only skep reads. Whatever is
//! pulled is bounded before it is read, and checked against the digests of the registry's manifest.

mod credentials;

pub use credentials::Login;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use futures::StreamExt as _;
use oci_client::client::{ClientConfig, ClientProtocol, Config, ImageLayer};
use oci_client::errors::OciDistributionError;
use oci_client::manifest::{OciDescriptor, OciImageManifest};
use oci_client::{Client, Reference};
use serde_json::json;

use crate::agent_source::AgentSource;
use crate::authorities;
use crate::progress::Progress;

const ARTIFACT_TYPE: &str = "application/vnd.skep.agent.v1";
const CONFIG_TYPE: &str = "application/vnd.wasm.config.v0+json";
const COMPONENT_TYPE: &str = "application/wasm";
const MANIFEST_TYPE: &str = "application/vnd.skep.agent.manifest.v1+toml";

const MAX_COMPONENT_BYTES: u64 = 1 << 30;
const MAX_MANIFEST_BYTES: u64 = 256 << 10;
const MAX_LAYERS: usize = 16;
/// Maximum time that a registry may be silent.
const SILENCE: Duration = Duration::from_secs(60);

/// Name of an artifact: `[oci://]REGISTRY/REPOSITORY[:TAG][@DIGEST]`.
#[derive(Debug, Clone)]
pub struct ArtifactName(Reference);

/// The registry of one artifact.
pub struct Registry {
    client: Client,
    name: ArtifactName,
    login: Login,
}

/// An artifact that was pulled from a registry.
pub struct Pulled {
    /// Digest of the registry's manifest.
    pub digest: String,
    pub manifest_toml: String,
    pub component: Vec<u8>,
}

impl ArtifactName {
    /// The beginning of an agent's name in a registry.
    pub const SCHEME: &str = "oci://";
}

impl std::str::FromStr for ArtifactName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.strip_prefix(Self::SCHEME).unwrap_or(text);
        // Without a registry, the name would mean a default registry that nobody chose.
        let has_registry =
            name.split_once('/').is_some_and(|(host, _)| host.contains(['.', ':']) || host == "localhost");
        if !has_registry {
            return Err(format!("{text:?} does not name a registry; write oci://REGISTRY/REPOSITORY:TAG"));
        }
        let reference = name.parse::<Reference>();
        reference.map(ArtifactName).map_err(|error| {
            format!("{text:?} is not a valid artifact name ({error}); write oci://REGISTRY/REPOSITORY:TAG")
        })
    }
}

impl std::fmt::Display for ArtifactName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", Self::SCHEME, self.0.whole())
    }
}

impl Registry {
    /// Creates a client; nothing is sent yet. Registries on this machine are accessed without TLS, others
    /// only if `plain_http` is set.
    pub fn new(name: ArtifactName, login: Login, plain_http: bool) -> Result<Self> {
        skep_outbound::tls::install_provider();
        // The library also sets up a client with default settings, which loads them and is never used.
        authorities::require_any("the client of registries")?;
        let registry = name.0.resolve_registry();
        let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
        let is_local = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let config = ClientConfig {
            protocol: if plain_http || is_local { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(Duration::from_secs(10)),
            read_timeout: Some(SILENCE),
            user_agent: concat!("skep/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).context("cannot set up the registry's client")?;
        Ok(Registry { client, name, login })
    }

    /// Stores an agent, and returns the digest of what was stored.
    pub async fn push(&self, source: &AgentSource, progress: &dyn Progress) -> Result<String> {
        let auth = self.login.resolve(self.name.0.resolve_registry())?;
        let component = ImageLayer::new(source.component.clone(), COMPONENT_TYPE.to_owned(), None);
        let manifest = ImageLayer::new(source.manifest_toml.clone(), MANIFEST_TYPE.to_owned(), None);
        let layers = [component, manifest];
        let digests: Vec<String> = layers.iter().map(ImageLayer::sha256_digest).collect();
        let config = json!({"architecture": "wasm", "os": "wasip2", "layerDigests": digests});
        let config = Config::new(config.to_string(), CONFIG_TYPE.to_owned(), None);
        let title = ("org.opencontainers.image.title".to_owned(), source.manifest.name.to_string());
        let mut described = OciImageManifest::build(&layers, &config, Some(BTreeMap::from([title])));
        described.artifact_type = Some(ARTIFACT_TYPE.to_owned());

        let step = progress.begin(&format!("pushing {}", self.name), None);
        let pushed = self.client.push(&self.name.0, &layers, config, &auth, Some(described)).await;
        pushed.map_err(|error| self.explain("push to", error))?;
        let digest = self.client.fetch_manifest_digest(&self.name.0, &auth).await;
        let digest = digest.map_err(|error| self.explain("read back", error))?;
        step.finish("");
        Ok(digest)
    }

    /// Fetches an agent.
    pub async fn pull(&self, progress: &dyn Progress) -> Result<Pulled> {
        let auth = self.login.resolve(self.name.0.resolve_registry())?;
        let pulled = self.client.pull_image_manifest(&self.name.0, &auth).await;
        let (manifest, digest) = pulled.map_err(|error| self.explain("pull", error))?;
        if manifest.layers.len() > MAX_LAYERS {
            bail!("{} has {} layers; an agent has two", self.name, manifest.layers.len());
        }
        let component = self.layer(&manifest, COMPONENT_TYPE, MAX_COMPONENT_BYTES)?;
        let manifest_toml = self.layer(&manifest, MANIFEST_TYPE, MAX_MANIFEST_BYTES)?;

        let total = u64::try_from(component.size).ok();
        let step = progress.begin(&format!("pulling {}", self.name), total);
        let manifest_toml = self.blob(manifest_toml, MAX_MANIFEST_BYTES, |_| ()).await?;
        let component = self.blob(component, MAX_COMPONENT_BYTES, |bytes| step.advance_to(bytes)).await?;
        step.finish("");
        let manifest_toml = String::from_utf8(manifest_toml)
            .map_err(|_| anyhow!("the agent.toml in {} is not UTF-8", self.name))?;
        Ok(Pulled { digest, manifest_toml, component })
    }

    fn layer<'a>(
        &self,
        manifest: &'a OciImageManifest,
        media_type: &str,
        max_bytes: u64,
    ) -> Result<&'a OciDescriptor> {
        let layer = manifest.layers.iter().find(|layer| layer.media_type == media_type);
        let layer = layer.with_context(|| {
            format!(
                "{} is not an agent: it has no layer of the type {media_type}\n  hint: store agents with `skep push`",
                self.name
            )
        })?;
        if !u64::try_from(layer.size).is_ok_and(|size| size <= max_bytes) {
            bail!(
                "the layer {media_type} of {} claims to have {} bytes; at most {max_bytes} are allowed",
                self.name,
                layer.size
            );
        }
        Ok(layer)
    }

    /// Returns the bytes of a layer. A registry that sends other bytes than it described, or more, causes an
    /// error.
    async fn blob(
        &self,
        layer: &OciDescriptor,
        max_bytes: u64,
        mut received: impl FnMut(u64),
    ) -> Result<Vec<u8>> {
        let stream = self.client.pull_blob_stream(&self.name.0, layer).await;
        let mut stream = stream.map_err(|error| self.explain("pull", error))?;
        let mut bytes = Vec::new();
        while let Some(piece) = stream.next().await {
            let piece = piece.with_context(|| format!("reading {} failed", self.name))?;
            if bytes.len() as u64 + piece.len() as u64 > max_bytes {
                bail!("a layer of {} has more than the {max_bytes} bytes that are allowed", self.name);
            }
            bytes.extend_from_slice(&piece);
            received(bytes.len() as u64);
        }
        Ok(bytes)
    }

    fn explain(&self, what: &str, error: OciDistributionError) -> anyhow::Error {
        let hint = match &error {
            OciDistributionError::AuthenticationFailure(_)
            | OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::ServerError { code: 401 | 403, .. } => {
                "\n  hint: log in with `docker login`, or pass --username and set SKEP_REGISTRY_PASSWORD"
            }
            OciDistributionError::RequestError(error) if error.is_connect() => {
                "\n  hint: is the registry running? A registry without TLS needs --plain-http"
            }
            _ => "",
        };
        anyhow::Error::new(error).context(format!("cannot {what} {}{hint}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_needs_its_registry() {
        for (text, whole) in [
            ("oci://ghcr.io/acme/agent:1", "oci://ghcr.io/acme/agent:1"),
            ("localhost:5000/agent", "oci://localhost:5000/agent:latest"),
        ] {
            assert_eq!(text.parse::<ArtifactName>().expect(text).to_string(), whole);
        }
        for text in ["agent", "acme/agent:1", "oci://", "oci://ghcr.io/UPPER"] {
            let error = text.parse::<ArtifactName>().expect_err(text);
            assert!(error.contains("oci://REGISTRY/REPOSITORY:TAG"), "{error}");
        }
    }
}
