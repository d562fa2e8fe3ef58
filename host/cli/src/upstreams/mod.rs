//! The models of other servers and the routes of a host, made from its settings.

mod max_price;
mod route;
mod upstream;

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, Result, bail};
use futures::future::BoxFuture;
use skep_engine::{Model, ModelSet};
use skep_outbound::Url;
use skep_providers::{Key, KeySource, Route, Upstream};
use skep_runtime::{PriceList, SecretReader};

pub use self::route::{KnownModels, RouteConfig};
pub use self::upstream::UpstreamConfig;

/// The settings of `[[upstream]]` and `[[route]]`.
#[derive(Debug, Clone, Default)]
pub struct RemoteOptions {
    pub upstreams: Vec<UpstreamConfig>,
    pub routes: Vec<RouteConfig>,
}

/// The host's vault, from which the keys of upstreams are read once the host has started. Clones share it.
#[derive(Clone, Default)]
pub struct VaultKeys(Arc<OnceLock<SecretReader>>);

/// A key in the host's vault.
struct VaultKey {
    vault: VaultKeys,
    name: String,
    /// The address that the key is sent to.
    address: Url,
}

impl VaultKeys {
    /// Gives the keys the vault to read from.
    pub fn open(&self, vault: SecretReader) {
        // A host starts once, so the vault is never replaced.
        let _ = self.0.set(vault);
    }
}

impl KeySource for VaultKey {
    fn key(&self) -> BoxFuture<'_, Result<Key, String>> {
        Box::pin(async move {
            let vault = self.vault.0.get().ok_or_else(|| "the host is still starting".to_owned())?;
            let key = vault.read(&self.name, &self.address).await.map_err(|error| error.to_string())?;
            Key::new(&key)
        })
    }
}

impl RemoteOptions {
    /// Adds the models of all upstreams, and the routes over them and the models of the set.
    pub fn add_to(&self, mut models: ModelSet, prices: &PriceList, vault: &VaultKeys) -> Result<ModelSet> {
        self.check_names()?;
        for upstream in &self.upstreams {
            for model in upstream.open(vault)? {
                models = models.with(model);
            }
        }
        let known = KnownModels::new(&models.for_routes(), prices);
        // A route is not a member of another, so a request never goes in circles.
        for route in self.open_routes(&known)? {
            models = models.with(route);
        }
        Ok(models)
    }

    /// Checks that no two upstreams have the same name.
    pub fn check_names(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        match self.upstreams.iter().find(|upstream| !names.insert(&upstream.name)) {
            Some(upstream) => {
                bail!("two [[upstream]] have the name {:?}\n  hint: rename one of them", upstream.name)
            }
            None => Ok(()),
        }
    }

    /// Returns the routes over these models.
    pub fn open_routes(&self, known: &KnownModels) -> Result<Vec<Model>> {
        let open = |route: &RouteConfig| {
            let options = route.options(known)?;
            let opened =
                Route::new(options).with_context(|| format!("[[route]] with the name {:?}", route.name))?;
            Ok(Model::Remote(Arc::new(opened)))
        };
        self.routes.iter().map(open).collect()
    }
}

impl UpstreamConfig {
    /// Returns the models of the upstream. Nothing is sent before the first request.
    pub fn open(&self, vault: &VaultKeys) -> Result<Vec<Model>> {
        let secret = |name: &str| -> Arc<dyn KeySource> {
            // An address that is not valid is reported with the other options.
            let address = Url::parse(&self.url).unwrap_or_else(|_| nowhere());
            Arc::new(VaultKey { vault: vault.clone(), name: name.to_owned(), address })
        };
        let options = self.options(&secret)?;
        let opened =
            Upstream::new(options).with_context(|| format!("[[upstream]] with the name {:?}", self.name))?;
        Ok(opened.models().into_iter().map(|model| Model::Remote(model)).collect())
    }

    /// Returns the names by which callers use the models.
    pub fn model_names(&self) -> impl Iterator<Item = String> + '_ {
        self.models.iter().map(|model| format!("{}/{}", self.name, model.name))
    }
}

fn nowhere() -> Url {
    Url::parse("http://localhost").expect("a constant address")
}
