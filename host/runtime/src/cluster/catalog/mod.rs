//! The models of all hosts of a cluster as one catalog: each host reports those that it computes, and uses those of the
//! others as models of its own set, which it asks through the connections between hosts.
//!
//! A host answers another one only with a model that it computes itself. So a generation is passed on once, and never in circles.

mod choice;
mod model;

use super::{Members, Peers, members::KnownHost};
use model::ClusterModel;
use serde::{Deserialize, Serialize};
use skep_engine::{ModelDigest, ModelSet, OtherModels, ServedModel};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// The name of the choice of a default, which all hosts without one of their own have.
pub(super) const DEFAULT_MODEL: &str = "default_model";
/// Maximum number of models that a host reports, and maximum size of what it reports about them. The database keeps it, and every
/// host reads it twice a second.
const MAX_MODELS: usize = 64;
const MAX_BYTES: usize = 16 << 10;
/// Number of models whose digest is remembered, beyond which those are forgotten that no host reports.
const MAX_DIGESTS: usize = 1024;

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
pub(super) struct Catalog {
    /// The model of requests without one, once it is known: the one that the settings name, or the one that the cluster has
    /// chosen.
    default: OnceLock<String>,
    known: Mutex<Known>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Known {
    models: Vec<ModelFacts>,
    /// It stays while no host has it: agents and grants without a name mean this model.
    default: Option<String>,
    /// The last digest of each model. A host that has just started has not loaded its models yet, and reports none.
    digests: BTreeMap<String, ModelDigest>,
    /// Models that a host has under the name of another model, with the number of this host.
    differing: BTreeSet<(String, i64)>,
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

    /// Returns whether a host that reports this computes the model of a digest. It does as far as is known if either is not known.
    fn is_of(&self, digest: Option<&ModelDigest>) -> bool {
        self.digest.as_ref().is_none_or(|own| digest.is_none_or(|digest| own == digest))
    }

    /// Adds what another host reports about the same model. Whichever host answers, the prompt must fit.
    fn add(&mut self, other: &ModelFacts) {
        let missing: Vec<String> =
            other.aliases.iter().filter(|alias| !self.aliases.contains(alias)).cloned().collect();
        self.aliases.extend(missing);
        self.digest = self.digest.take().or_else(|| other.digest.clone());
        self.context_length = match (self.context_length, other.context_length) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        self.reasoning = self.reasoning.or(other.reasoning);
    }
}

impl Catalog {
    /// Returns the catalog of a host that knows no others yet. `default` names the model that requests without one get; without
    /// it, it is the one that the cluster chooses.
    pub(super) fn new(default: Option<String>) -> Self {
        let default: OnceLock<String> = default.map(OnceLock::from).unwrap_or_default();
        Catalog { default, known: Mutex::default() }
    }

    /// Returns whether the default is not known yet.
    pub(super) fn lacks_default(&self) -> bool {
        self.default.get().is_none()
    }

    /// Sets the default that the cluster has chosen, unless there is one.
    pub(super) fn set_default(&self, chosen: String) {
        // All hosts get the same choice, so it does not matter which call sets it.
        let _ = self.default.set(chosen);
    }

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
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let default = self.default.get().map(String::as_str);
        let found = Known::of(&members.hosts(), own, &own_names, &known, default);
        if *known == found {
            return None;
        }
        for (model, host) in found.differing.difference(&known.differing) {
            tracing::warn!(
                host,
                model,
                "this host has another model under the name of one of the cluster, and is not asked for it; give the two models \
                 different names"
            );
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
    /// Merges what the other hosts report, which are in the order of their numbers. Of different models with one name, that of the
    /// host with the lowest number is meant.
    fn of(
        hosts: &[KnownHost],
        own: i64,
        own_names: &BTreeSet<&str>,
        before: &Known,
        default: Option<&str>,
    ) -> Self {
        let mut models: Vec<ModelFacts> = Vec::new();
        let mut differing = BTreeSet::new();
        let others = hosts.iter().filter(|host| host.row.number != own);
        let reported =
            others.flat_map(|host| host.catalog().iter().map(move |facts| (host.row.number, facts)));
        for (host, facts) in reported.filter(|(_, facts)| !own_names.contains(facts.name.as_str())) {
            match models.iter_mut().find(|known| known.name == facts.name) {
                Some(known) if !facts.is_of(known.digest.as_ref()) => {
                    differing.insert((facts.name.clone(), host));
                }
                Some(known) => known.add(facts),
                None => models.push(facts.clone()),
            }
        }
        let mut digests = before.digests.clone();
        for model in &mut models {
            match &model.digest {
                Some(digest) => drop(digests.insert(model.name.clone(), digest.clone())),
                None => model.digest = digests.get(&model.name).cloned(),
            }
        }
        if digests.len() > MAX_DIGESTS {
            digests.retain(|name, _| models.iter().any(|model| model.name == *name));
        }
        Known { models, default: default.map(str::to_owned), digests, differing }
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

/// Returns the model that the cluster chooses as the default if it has not chosen one yet: the default of the host with the lowest
/// number that computes any.
pub(super) fn first_model(hosts: &[KnownHost]) -> Option<&str> {
    hosts.iter().find_map(|host| host.catalog().first()).map(|model| model.name.as_str())
}

impl KnownHost {
    /// Returns what the host reports about the models that it computes.
    fn catalog(&self) -> &[ModelFacts] {
        self.facts.as_ref().map(|facts| facts.catalog.as_slice()).unwrap_or_default()
    }

    /// Returns whether the host computes the model of this name and digest.
    fn computes(&self, model: &str, digest: Option<&ModelDigest>) -> bool {
        self.catalog().iter().any(|known| known.name == model && known.is_of(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    pub(super) use crate::cluster::members::tests::row;
    use crate::{cluster::Facts, tests::fixture::tiny_engine};
    use skep_store::{HostRow, HostState};

    /// Returns the facts of a host with these models.
    pub(super) fn facts(models: &[&str]) -> String {
        let catalog = models.iter().map(|name| model(name)).collect();
        Facts { catalog, ..Facts::default() }.encode()
    }

    pub(super) fn model(name: &str) -> ModelFacts {
        ModelFacts {
            name: name.to_owned(),
            aliases: Vec::new(),
            digest: None,
            context_length: None,
            reasoning: None,
            created_unix_s: 0,
        }
    }

    fn with(number: i64, models: Vec<ModelFacts>) -> HostRow {
        let facts = Facts { catalog: models, ..Facts::default() };
        row(number, HostState::Serving, &facts.encode())
    }

    fn known(rows: &[HostRow], own_names: &[&str], before: &Known) -> Known {
        let hosts: Vec<KnownHost> = rows.iter().cloned().map(KnownHost::of).collect();
        Known::of(&hosts, 1, &own_names.iter().copied().collect(), before, None)
    }

    fn first(rows: &[HostRow]) -> Option<String> {
        let hosts: Vec<KnownHost> = rows.iter().cloned().map(KnownHost::of).collect();
        first_model(&hosts).map(str::to_owned)
    }

    fn digest(name: &str) -> ModelDigest {
        ModelDigest::remote("test", name)
    }

    #[test]
    fn hosts_with_different_models_have_one_catalog() {
        let digest = digest("big");
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
        let found = known(&rows, &["mine"], &Known::default());
        let names: Vec<&str> = found.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["big", "small"]);
        let big = &found.models[0];
        assert_eq!((big.context_length, big.reasoning, &big.digest), (Some(2048), Some(true), &Some(digest)));
        let others =
            found.others(|facts| ServedModel::Remote(Arc::new(ClusterModel::of_nobody(&facts.name))));
        let aliases: Vec<(&str, &str)> =
            others.aliases.iter().map(|(alias, model)| (alias.as_str(), model.as_str())).collect();
        assert_eq!(aliases, [("fast", "big"), ("quick", "big")], "a name is not an alias");
    }

    #[test]
    fn a_model_of_this_host_is_not_one_of_others() {
        let rows = [with(2, vec![model("a"), model("b")]), with(3, vec![model("b")])];
        assert_eq!(known(&rows, &["a"], &Known::default()).models, [model("b")]);
        assert_eq!(known(&rows, &[], &Known::default()).models, [model("a"), model("b")]);
    }

    #[test]
    fn the_default_is_that_of_the_first_host_with_models_and_stays() {
        let gateway = row(1, HostState::Serving, &Facts::default().encode());
        let rows = [gateway, with(2, vec![model("b"), model("a")]), with(3, vec![model("a")])];
        assert_eq!((first(&rows).as_deref(), first(&rows[..1])), (Some("b"), None));

        let catalog = Catalog::new(None);
        assert!(catalog.lacks_default());
        for chosen in ["b", "a"] {
            catalog.set_default(chosen.to_owned());
            assert_eq!(catalog.default.get().map(String::as_str), Some("b"), "a choice stays");
        }
        let set = Catalog::new(Some("a".to_owned()));
        assert!(!set.lacks_default(), "the settings have chosen");
        let gone = Known::of(&[], 1, &BTreeSet::new(), &Known::default(), Some("b"));
        let others = gone.others(|facts| ServedModel::Remote(Arc::new(ClusterModel::of_nobody(&facts.name))));
        assert_eq!(others.default.as_deref(), Some("b"), "errors name it while no host has it");
        assert_eq!(known(&[], &[], &Known::default()).default, None);
    }

    #[test]
    fn a_digest_is_remembered_while_no_host_has_loaded_the_model() {
        let loaded = |name| ModelFacts { digest: Some(digest(name)), ..model("big") };
        let first = known(&[with(2, vec![loaded("one")])], &[], &Known::default());
        let gone = known(&[], &[], &first);
        let restarted = known(&[with(3, vec![model("big")])], &[], &gone);
        assert_eq!(restarted.models, first.models);
        let replaced = known(&[with(4, vec![loaded("two")])], &[], &restarted);
        assert_eq!(replaced.models[0].digest, Some(digest("two")), "another model has the name now");
    }

    #[test]
    fn a_different_model_of_the_same_name_is_left_out() {
        let of = |name, context_length| {
            let context_length = Some(context_length);
            ModelFacts { digest: Some(digest(name)), context_length, ..model("big") }
        };
        let unloaded = ModelFacts { aliases: vec!["fast".into()], ..model("big") };
        let rows = [with(2, vec![unloaded]), with(3, vec![of("one", 4096)]), with(4, vec![of("two", 64)])];
        let found = known(&rows, &[], &Known::default());
        let expected = ModelFacts { aliases: vec!["fast".into()], ..of("one", 4096) };
        assert_eq!(
            (found.models, found.differing),
            (vec![expected], BTreeSet::from([("big".to_owned(), 4)]))
        );
        let hosts: Vec<KnownHost> = rows.into_iter().map(KnownHost::of).collect();
        let asked = |digest: Option<&ModelDigest>| -> Vec<i64> {
            hosts.iter().filter(|host| host.computes("big", digest)).map(|host| host.row.number).collect()
        };
        assert_eq!(asked(Some(&digest("one"))), [2, 3], "one that has not loaded it may be asked");
        assert_eq!(asked(None), [2, 3, 4]);
    }

    #[test]
    fn facts_of_an_earlier_version_have_no_catalog() {
        let early = row(2, HostState::Serving, r#"{"models": ["a"], "running_turns": 1}"#);
        assert!(Facts::of(&early).is_some(), "it serves");
        let found = known(&[early], &[], &Known::default());
        assert!(found.models.is_empty(), "it answers nobody's generations");
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
