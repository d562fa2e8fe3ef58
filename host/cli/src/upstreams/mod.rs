//! The models of other servers and the routes of a host, made from its settings.

mod route;
mod upstream;

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use futures::future::BoxFuture;
use skep_engine::{Model, ModelSet};
use skep_outbound::Url;
use skep_providers::{Key, KeySource, Prices, Route, Upstream};
use skep_runtime::{Price, PriceList, SecretReader, UsageDay};

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
        let priced =
            |model: &Model| (model.name().to_owned(), (model.clone(), price_of(prices, model.name())));
        let mut known: KnownModels = models.for_routes().iter().map(priced).collect();
        let mut names = BTreeSet::new();
        for upstream in &self.upstreams {
            if !names.insert(&upstream.name) {
                bail!("two [[upstream]] have the name {:?}\n  hint: rename one of them", upstream.name);
            }
            let secret = |name: &str| -> Arc<dyn KeySource> {
                // An address that is not valid is reported with the other options.
                let address = Url::parse(&upstream.url).unwrap_or_else(|_| nowhere());
                Arc::new(VaultKey { vault: vault.clone(), name: name.to_owned(), address })
            };
            let options = upstream.options(&secret)?;
            let opened = Upstream::new(options)
                .with_context(|| format!("[[upstream]] with the name {:?}", upstream.name))?;
            for remote in opened.models() {
                let model = Model::Remote(remote);
                known.extend([priced(&model)]);
                models = models.with(model);
            }
        }
        for route in &self.routes {
            let options = route.options(&known, None)?;
            let route =
                Route::new(options).with_context(|| format!("[[route]] with the name {:?}", route.name))?;
            let model = Model::Remote(Arc::new(route));
            // A route is not a member of another, so a request never goes in circles.
            models = models.with(model);
        }
        Ok(models)
    }
}

/// Returns the price of a model today, for the conditions of routes.
fn price_of(prices: &PriceList, model: &str) -> Option<Prices> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let today = UsageDay::of_ms(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
    let Price { input, cached_input, output, .. } = prices.price(model, today)?;
    let (input, cached_input, output) = (input.as_f64(), cached_input.as_f64(), output.as_f64());
    Some(Prices { input, cached_input, output })
}

fn nowhere() -> Url {
    Url::parse("http://localhost").expect("a constant address")
}
