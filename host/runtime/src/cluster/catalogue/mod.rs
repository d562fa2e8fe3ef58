//! The models of all hosts of a cluster as one catalogue: each host reports those that it computes, and uses those of the others
//! as models of its own set, which it asks over the way to the other hosts.
//!
//! A host answers another one only with a model that it computes itself. So a generation is passed on once, and never in circles.

mod choice;
mod model;

use super::{Facts, Members, Peers};
use model::ClusterModel;
use serde::{Deserialize, Serialize};
use skep_engine::{ModelDigest, ModelSet, OtherModels, ServedModel};
use skep_store::HostRow;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

/// Maximum number of models that a host reports, and maximum size of what it reports about them. The database keeps it, and every
/// host reads it twice a second.
const MAX_MODELS: usize = 64;
const MAX_BYTES: usize = 16 << 10;

/// A model that a host computes, as it reports it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelFacts {
    name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    /// The digest and all other properties are known once the model has been loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<ModelDigest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    context_length: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<bool>,
    #[serde(default)]
    created_unix_s: u64,
}

/// The models of the other hosts as of the last look.
#[derive(Default)]
pub(super) struct Catalogue(Mutex<Known>);

#[derive(Clone, Default, PartialEq)]
struct Known {
    models: Vec<ModelFacts>,
    default: Option<String>,
}

impl ModelFacts {
    /// Returns what this host reports about the models that it computes, its default first. Models beyond the limits are not
    /// reported, and only this host uses them.
    pub(crate) fn of_own(models: &ModelSet) -> Vec<ModelFacts> {
        let default = models.default_name();
        let mut own: Vec<ServedModel> =
            models.own().into_iter().filter(|model| matches!(model, ServedModel::Local(_))).collect();
        own.sort_by_key(|model| model.name() != default);
        let mut bytes = 0;
        let facts = own.iter().map(|model| ModelFacts::of(models, model));
        let fits = |facts: &ModelFacts| {
            bytes += facts.bytes();
            bytes <= MAX_BYTES
        };
        facts.take(MAX_MODELS).take_while(fits).collect()
    }

    fn of(models: &ModelSet, model: &ServedModel) -> Self {
        ModelFacts {
            name: model.name().to_owned(),
            aliases: models.aliases_of(model.name()),
            digest: model.digest().cloned(),
            context_length: model.context_length(),
            reasoning: model.abilities().reasoning,
            created_unix_s: model.created_unix_s(),
        }
    }

    /// Returns the approximate size of the facts as JSON.
    fn bytes(&self) -> usize {
        const OTHER_FIELDS: usize = 300;
        OTHER_FIELDS + self.name.len() + self.aliases.iter().map(|alias| alias.len() + 3).sum::<usize>()
    }

    /// Adds what another host reports about a model of the same name. Whichever host answers, the prompt must fit.
    fn add(&mut self, other: ModelFacts) {
        let missing =
            other.aliases.into_iter().filter(|alias| !self.aliases.contains(alias)).collect::<Vec<_>>();
        self.aliases.extend(missing);
        self.digest = self.digest.take().or(other.digest);
        self.context_length = match (self.context_length, other.context_length) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        self.reasoning = self.reasoning.or(other.reasoning);
    }
}

impl Catalogue {
    /// Returns the models of the other hosts that this one lacks, unless they are the same as at the last call.
    pub(super) fn look(
        &self,
        own: i64,
        models: &ModelSet,
        members: &Arc<Members>,
        peers: &Arc<dyn Peers>,
    ) -> Option<OtherModels> {
        let own_models = models.own();
        let own_names: BTreeSet<&str> = own_models.iter().map(ServedModel::name).collect();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Known::of(&members.rows(), own, &own_names, known.default.as_deref());
        if *known == found {
            return None;
        }
        let names: Vec<&str> = found.models.iter().map(|model| model.name.as_str()).collect();
        tracing::info!(models = names.join(", "), "the models of the other hosts have changed");
        let others = found.others(|facts| {
            ServedModel::Remote(Arc::new(ClusterModel::new(facts, own, members.clone(), peers.clone())))
        });
        *known = found;
        Some(others)
    }
}

impl Known {
    /// Merges what the other hosts report. The default stays while a host has it.
    fn of(rows: &[HostRow], own: i64, own_names: &BTreeSet<&str>, default: Option<&str>) -> Self {
        let mut models: Vec<ModelFacts> = Vec::new();
        let others = rows.iter().filter(|row| row.number != own);
        for facts in others.filter_map(|row| Some(Facts::of(row)?.catalogue)).flatten() {
            if own_names.contains(facts.name.as_str()) {
                continue;
            }
            match models.iter_mut().find(|known| known.name == facts.name) {
                Some(known) => known.add(facts),
                None => models.push(facts),
            }
        }
        let stays = models.iter().find(|model| Some(model.name.as_str()) == default);
        let default = stays.or(models.first()).map(|model| model.name.clone());
        Known { models, default }
    }

    /// Returns the models for this host's set. An alias that two hosts use differently means the model of the host with the lower
    /// number, and a model's own name is never an alias.
    fn others(&self, served: impl Fn(&ModelFacts) -> ServedModel) -> OtherModels {
        let mut aliases = BTreeMap::new();
        for model in &self.models {
            for alias in &model.aliases {
                aliases.entry(alias.clone()).or_insert_with(|| model.name.clone());
            }
        }
        aliases.retain(|alias, _| !self.models.iter().any(|model| model.name == *alias));
        OtherModels {
            models: self.models.iter().map(served).collect(),
            aliases,
            default: self.default.clone(),
        }
    }
}

/// Returns the numbers of the other hosts that compute a model.
fn hosts_of(members: &Members, own: i64, model: &str) -> Vec<i64> {
    let rows = members.rows();
    let has = |row: &&HostRow| {
        row.number != own
            && Facts::of(row).is_some_and(|facts| facts.catalogue.iter().any(|known| known.name == model))
    };
    rows.iter().filter(has).map(|row| row.number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::tiny_engine;
    use skep_store::HostState;

    /// Returns the facts of a host with these models.
    pub(super) fn facts(models: &[&str]) -> String {
        let catalogue = models.iter().map(|name| model(name)).collect();
        Facts { catalogue, ..Facts::default() }.encode()
    }

    fn model(name: &str) -> ModelFacts {
        ModelFacts {
            name: name.to_owned(),
            aliases: Vec::new(),
            digest: None,
            context_length: None,
            reasoning: None,
            created_unix_s: 0,
        }
    }

    pub(super) fn row(number: i64, state: HostState, facts: &str) -> HostRow {
        HostRow {
            number,
            url: format!("http://10.0.0.{number}:8080"),
            version: "1.0.0".into(),
            state,
            facts: facts.into(),
            started_at_ms: 1,
            seen_ms_ago: 1,
            sessions: 0,
        }
    }

    fn with(number: i64, models: Vec<ModelFacts>) -> HostRow {
        let facts = Facts { catalogue: models, ..Facts::default() };
        row(number, HostState::Serving, &facts.encode())
    }

    fn known(rows: &[HostRow], own_names: &[&str], default: Option<&str>) -> Known {
        Known::of(rows, 1, &own_names.iter().copied().collect(), default)
    }

    #[test]
    fn hosts_with_different_models_have_one_catalogue() {
        let digest = ModelDigest::remote("a", "b");
        let long = ModelFacts { context_length: Some(4096), aliases: vec!["fast".into()], ..model("big") };
        let short = ModelFacts {
            context_length: Some(2048),
            aliases: vec!["quick".into(), "fast".into()],
            digest: Some(digest.clone()),
            reasoning: Some(true),
            ..model("big")
        };
        let other = ModelFacts { aliases: vec!["fast".into(), "big".into()], ..model("small") };
        let rows = [with(1, vec![model("mine")]), with(2, vec![long]), with(3, vec![other, short])];
        let found = known(&rows, &["mine"], None);
        let names: Vec<&str> = found.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!((&names[..], found.default.as_deref()), (&["big", "small"][..], Some("big")));
        let big = &found.models[0];
        assert_eq!((big.context_length, big.reasoning, &big.digest), (Some(2048), Some(true), &Some(digest)));
        let others =
            found.others(|facts| ServedModel::Remote(Arc::new(ClusterModel::of_nobody(&facts.name))));
        let aliases: Vec<(&str, &str)> =
            others.aliases.iter().map(|(alias, model)| (alias.as_str(), model.as_str())).collect();
        assert_eq!(aliases, [("fast", "big"), ("quick", "big")], "a name is not an alias");
    }

    #[test]
    fn a_model_of_this_host_is_not_one_of_others_and_a_default_stays() {
        let rows = [with(2, vec![model("a"), model("b")]), with(3, vec![model("b")])];
        assert_eq!(known(&rows, &["a"], None).models, [model("b")]);
        assert_eq!(known(&rows, &[], Some("b")).default.as_deref(), Some("b"));
        assert_eq!(known(&rows[1..], &[], Some("a")).default.as_deref(), Some("b"), "its host has left");
        assert_eq!(known(&[], &[], Some("a")).default, None);
    }

    #[test]
    fn facts_of_an_earlier_version_have_no_catalogue() {
        let early = row(2, HostState::Serving, r#"{"models": ["a"], "running_turns": 1}"#);
        assert!(Facts::of(&early).is_some(), "it serves");
        assert!(known(&[early], &[], None).models.is_empty(), "it answers nobody's generations");
    }

    #[tokio::test]
    async fn a_host_reports_the_models_that_it_computes_and_no_others() {
        let models = ModelSet::new(tiny_engine("second")).with(tiny_engine("first"));
        models.set_default("first").expect("served");
        models.set_alias("fast", "second").expect("served");
        let elsewhere = ClusterModel::of_nobody("elsewhere");
        let others =
            OtherModels { models: vec![ServedModel::Remote(Arc::new(elsewhere))], ..OtherModels::default() };
        models.set_others(others);
        let reported = ModelFacts::of_own(&models);
        let names: Vec<&str> = reported.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["first", "second"]);
        assert_eq!(reported[1].aliases, ["fast"]);
        let first = models.find(Some("first")).expect("served");
        assert_eq!(reported[0].digest.as_ref(), first.digest());
        assert!(reported[0].context_length.is_some() && reported[0].reasoning.is_some());
    }
}
