//! `[[route]]` in `skep.toml`: a name for several models, of which the first one that can answer does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_engine::Model;
use skep_providers::{Choice, Conditions, CostEstimate, Member, RouteOptions};
use skep_runtime::{PriceList, Tenant, UsageCounts, UsageDay, did_you_mean};

use super::max_price::{self, MaxPriceConfig};
use crate::number::number;

const LONGEST_MS: u64 = 3_600_000;
const LONGEST_PROMPT: u64 = 1 << 30;

/// One route.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    pub name: String,
    #[serde(default)]
    pub choice: ChoiceConfig,
    /// Time in which a model of this host has to begin its answer, once it is loaded.
    #[serde(default, deserialize_with = "number::<1, LONGEST_MS, _, _>")]
    pub first_token_ms: Option<u64>,
    #[serde(default)]
    pub models: Vec<RouteModelConfig>,
}

/// How a route chooses among its models.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChoiceConfig {
    /// The models are tried in the order of the file.
    #[default]
    Ordered,
    /// Each model gets its share of the sessions.
    Weighted,
}

/// One model of a route, and the conditions under which it gets a request.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteModelConfig {
    /// A model of this host, or `UPSTREAM/MODEL`.
    pub model: String,
    #[serde(default, deserialize_with = "number::<0, 1_000_000, _, _>")]
    pub weight: Option<u32>,
    #[serde(default, deserialize_with = "number::<0, LONGEST_PROMPT, _, _>")]
    pub min_prompt_tokens: Option<usize>,
    #[serde(default, deserialize_with = "number::<0, LONGEST_PROMPT, _, _>")]
    pub max_prompt_tokens: Option<usize>,
    /// Whether the request has tools.
    pub tools: Option<bool>,
    /// Whether the request has images.
    pub images: Option<bool>,
    pub tenants: Option<Vec<String>>,
    /// The highest price of a request.
    pub max_price: Option<MaxPriceConfig>,
}

/// The models that a route may name, and the prices of the host.
pub struct KnownModels {
    models: BTreeMap<String, Model>,
    prices: Arc<PriceList>,
}

impl KnownModels {
    /// Indexes the models by their names.
    pub fn new(models: &[Model], prices: &PriceList) -> Self {
        let named = models.iter().map(|model| (model.name().to_owned(), model.clone()));
        KnownModels { models: named.collect(), prices: Arc::new(prices.clone()) }
    }

    /// Returns the estimate of what a request to a model costs, at the price of the day of the request. A server that has a
    /// price for what it writes to its cache may write the whole prompt.
    fn cost_of(&self, model: &str) -> CostEstimate {
        let (prices, model) = (self.prices.clone(), model.to_owned());
        CostEstimate::new(move |prompt_tokens, output_tokens| {
            let (input_tokens, output_tokens) = (prompt_tokens as u64, output_tokens as u64);
            let price = prices.price(&model, today())?;
            let is_dearer_to_write = price.cache_write.is_some_and(|rate| rate > price.input);
            let cache_write_tokens = if is_dearer_to_write { input_tokens } else { 0 };
            let counts =
                UsageCounts { input_tokens, cache_write_tokens, output_tokens, ..UsageCounts::default() };
            Some(price.cost(&counts).as_f64())
        })
    }
}

fn today() -> UsageDay {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UsageDay::of_ms(u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

impl RouteConfig {
    /// Returns the options of the route.
    pub fn options(&self, known: &KnownModels) -> Result<RouteOptions> {
        self.read(known).with_context(|| format!("[[route]] with the name {:?}", self.name))
    }

    fn read(&self, known: &KnownModels) -> Result<RouteOptions> {
        if self.models.is_empty() {
            bail!("it has no models\n  hint: add [[route.models]] with model = \"…\" below it");
        }
        if known.models.contains_key(&self.name) {
            bail!("a model already has this name\n  hint: choose another name for the route");
        }
        max_price::check(&self.models, &known.prices)?;
        let members: Result<Vec<_>> = self.models.iter().map(|model| model.member(known)).collect();
        Ok(RouteOptions {
            name: self.name.clone(),
            choice: match self.choice {
                ChoiceConfig::Ordered => Choice::Ordered,
                ChoiceConfig::Weighted => Choice::Weighted,
            },
            members: members?,
            first_token: self.first_token_ms.map(Duration::from_millis),
            created_unix_s: 0,
        })
    }
}

impl RouteModelConfig {
    fn member(&self, known: &KnownModels) -> Result<Member> {
        let name = &self.model;
        let Some(model) = known.models.get(name) else {
            let names = known.models.keys().cloned().collect::<Vec<_>>().join(", ");
            let meant = did_you_mean(name, known.models.keys().map(String::as_str));
            bail!("no model is called {name:?}{meant}\n  hint: the models are: {names}");
        };
        if let (Some(least), Some(most)) = (self.min_prompt_tokens, self.max_prompt_tokens)
            && least > most
        {
            bail!("{name:?} gets no request: min_prompt_tokens is more than max_prompt_tokens");
        }
        for tenant in self.tenants.iter().flatten() {
            Tenant::new(tenant).with_context(|| format!("tenants of {name:?}"))?;
        }
        Ok(Member {
            model: model.clone(),
            weight: self.weight.unwrap_or(1),
            conditions: Conditions {
                min_prompt_tokens: self.min_prompt_tokens,
                max_prompt_tokens: self.max_prompt_tokens,
                tools: self.tools,
                images: self.images,
                tenants: self.tenants.clone(),
                max_price: self.max_price.map(MaxPriceConfig::amount),
            },
            cost: known.cost_of(name),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_providers::{Upstream, UpstreamKind, UpstreamModelOptions, UpstreamOptions};

    fn known() -> KnownModels {
        let mut options = UpstreamOptions::new("a", UpstreamKind::OpenAi, "http://127.0.0.1:9/v1");
        options.models = vec![UpstreamModelOptions::new("m")];
        let models = Upstream::new(options).expect("valid").models();
        let price = "input = 1\ncached_input = 0\noutput = 3\ncurrency = \"USD\"\nfrom = \"2026-01-01\"";
        let mut prices = PriceList::default();
        prices.add("a/m", vec![skep_runtime::parse_toml(price).expect("a price")]).expect("prices");
        let models: Vec<Model> = models.into_iter().map(|model| Model::Remote(model)).collect();
        KnownModels::new(&models, &prices)
    }

    fn options(text: &str) -> Result<RouteOptions> {
        let config: RouteConfig = toml::from_str(text)?;
        config.options(&known())
    }

    #[test]
    fn a_route_is_read_with_its_conditions() {
        let text = "name = \"smart\"\nchoice = \"weighted\"\nfirst_token_ms = 100\n[[models]]\nmodel = \"a/m\"\n\
            weight = 3\nmax_prompt_tokens = 1000\ntools = false\nimages = true\ntenants = [\"acme\"]\nmax_price = 0.5\n\
            [[models]]\nmodel = \"a/m\"\n";
        let route = options(text).expect("valid");
        assert_eq!((route.choice, route.first_token), (Choice::Weighted, Some(Duration::from_millis(100))));
        let [first, second] = &route.members[..] else { panic!("{:?}", route.members) };
        assert_eq!((first.weight, second.weight), (3, 1));
        assert_eq!(first.conditions.tenants.as_deref(), Some(&["acme".to_owned()][..]));
        let Conditions { tools, images, max_price, .. } = first.conditions;
        assert_eq!((max_price, tools, images), (Some(0.5), Some(false), Some(true)));
        assert_eq!(second.conditions, Conditions::default());
        assert_eq!(second.cost.of(1_000_000, 1_000_000), Some(4.0));
        assert_eq!(known().cost_of("other").of(1, 1), None);
    }

    #[test]
    fn a_prompt_is_estimated_at_the_dearer_of_input_and_cache_write() {
        for (cache_write, expected) in
            [("", 4.0), ("cache_write = 1.25\n", 4.25), ("cache_write = 0.5\n", 4.0)]
        {
            let price = format!(
                "input = 1\n{cache_write}cached_input = 0\noutput = 3\ncurrency = \"USD\"\nfrom = \"2026-01-01\""
            );
            let mut prices = PriceList::default();
            prices.add("a/m", vec![skep_runtime::parse_toml(&price).expect("a price")]).expect("prices");
            let cost = KnownModels::new(&[], &prices).cost_of("a/m");
            assert_eq!(cost.of(1_000_000, 1_000_000), Some(expected), "{cache_write}");
        }
    }

    #[test]
    fn mistakes_are_reported_with_their_reason() {
        let model = "[[models]]\nmodel = \"a/m\"\n";
        for (text, why) in [
            ("name = \"r\"".to_owned(), "hint: add [[route.models]]"),
            ("name = \"r\"\n[[models]]\nmodel = \"b\"".to_owned(), "hint: the models are: a/m"),
            (format!("name = \"a/m\"\n{model}"), "hint: choose another name for the route"),
            (format!("name = \"r\"\nchoice = \"random\"\n{model}"), "unknown variant `random`"),
            (format!("name = \"r\"\n{model}price = 1"), "unknown field `price`"),
            (format!("name = \"r\"\n{model}max_price = -1.0"), "must not be negative"),
            (format!("name = \"r\"\n{model}tenants = [\"Acme\"]"), "tenants of \"a/m\": "),
            (
                format!("name = \"r\"\n{model}min_prompt_tokens = 2\nmax_prompt_tokens = 1"),
                "\"a/m\" gets no request",
            ),
        ] {
            let error = format!("{:#}", options(&text).expect_err(why));
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
