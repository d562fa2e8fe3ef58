//! `[[route]]` in `skep.toml`: a name for several models, of which the first one that can answer does.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_engine::Model;
use skep_providers::{Choice, Conditions, Member, Prices, RouteOptions};
use skep_runtime::did_you_mean;

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
    /// The highest price of a request, in the currency of the prices.
    pub max_price: Option<f64>,
}

/// The models that a route may name, with their prices.
pub type KnownModels = BTreeMap<String, (Model, Option<Prices>)>;

impl RouteConfig {
    /// Returns the options of the route.
    pub fn options(&self, known: &KnownModels) -> Result<RouteOptions> {
        self.read(known).with_context(|| format!("[[route]] with the name {:?}", self.name))
    }

    fn read(&self, known: &KnownModels) -> Result<RouteOptions> {
        if self.models.is_empty() {
            bail!("it has no models\n  hint: add [[route.models]] with model = \"…\" below it");
        }
        if known.contains_key(&self.name) {
            bail!("a model already has this name\n  hint: choose another name for the route");
        }
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
        let Some((model, prices)) = known.get(name) else {
            let names = known.keys().cloned().collect::<Vec<_>>().join(", ");
            let meant = did_you_mean(name, known.keys().map(String::as_str));
            bail!("no model is called {name:?}{meant}\n  hint: the models are: {names}");
        };
        if self.max_price.is_some_and(|price| !price.is_finite() || price < 0.0) {
            bail!("max_price of {name:?} must not be negative");
        }
        if let (Some(least), Some(most)) = (self.min_prompt_tokens, self.max_prompt_tokens)
            && least > most
        {
            bail!("{name:?} gets no request: min_prompt_tokens is more than max_prompt_tokens");
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
                max_price: self.max_price,
            },
            prices: *prices,
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
        let model = |model| (Model::Remote(model), Some(Prices { input: 1.0, ..Prices::default() }));
        models.into_iter().map(|remote| ("a/m".to_owned(), model(remote))).collect()
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
        assert_eq!(second.prices.map(|prices| prices.input), Some(1.0));
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
