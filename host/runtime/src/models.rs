//! The models that an agent may generate with: those that its developer asked for and that the operator allows.
//!
//! An agent's own model, which is `model` in `agent.toml` or the host's default, counts as asked for. An operator who
//! configures nothing allows only the host's default model. A route counts as all the models that it may choose, and an
//! alias as the model that it means, so a request never leaves the host without a grant that names the upstream.

use crate::{Manifest, ModelGrant, agent::Agent, bindings::types::Error, name::setting_of, options::Rules};
use skep_engine::{LiveSetting, Model, ModelSet, PublicPart, ServedModel};
use std::sync::Arc;

/// The host's models, and the operator's ceilings on which of them agents and tenants may use.
#[derive(Clone)]
pub(crate) struct GrantedModels {
    set: ModelSet,
    rules: LiveSetting<Rules>,
}

impl GrantedModels {
    pub(crate) fn new(set: ModelSet, rules: LiveSetting<Rules>) -> Self {
        GrantedModels { set, rules }
    }

    /// Returns the models as they are now, with these rules. Later changes do not reach them.
    pub(crate) fn pinned(&self, rules: Arc<Rules>) -> Self {
        GrantedModels { set: self.set.pinned(), rules: rules.into() }
    }

    /// Returns the part of an agent's prompts that tenants may share.
    pub(crate) fn public_part(&self, agent: &str) -> PublicPart {
        self.rules.now().public_part(agent)
    }

    pub(crate) fn set(&self) -> &ModelSet {
        &self.set
    }

    /// Returns the models that a manifest asks for and this host does not serve.
    pub(crate) fn unserved<'a>(&self, manifest: &'a Manifest) -> Vec<&'a str> {
        let names = manifest.grants.models.iter().filter_map(ModelGrant::name);
        names.filter(|name| self.set.find(Some(name)).is_err()).collect()
    }

    /// Returns a model that the agent may use for the tenant; without a name, the agent's own model. One that is not loaded
    /// is loaded first.
    pub(crate) async fn ready(
        &self,
        agent: &Agent,
        tenant: &str,
        name: Option<&str>,
    ) -> Result<Model, Error> {
        let asked = name.unwrap_or(&agent.model);
        let model = self.set.find(Some(asked))?;
        self.check(agent, tenant, asked, &model).map_err(Error::Denied)?;
        Ok(self.set.ready(Some(asked)).await?)
    }

    /// Returns all models that the agent may use for the tenant, loaded or not.
    pub(crate) fn of<'a>(
        &'a self,
        agent: &'a Agent,
        tenant: &'a str,
    ) -> impl Iterator<Item = ServedModel> + 'a {
        let models = self.set.served().into_iter();
        models.filter(move |model| self.check(agent, tenant, model.name(), model).is_ok())
    }

    /// Returns the name of the agent's own model.
    pub(crate) fn own_name(&self, agent: &Agent) -> Option<String> {
        self.set.find(Some(&agent.model)).ok().map(|model| model.name().to_owned())
    }

    /// Checks that a tenant may use a model without an agent. Operators may use all models.
    pub(crate) fn check_direct(
        &self,
        tenant: &str,
        is_operator: bool,
        model: &ServedModel,
    ) -> Result<(), String> {
        match setting_of(&self.rules.now().tenant_models, tenant) {
            None if is_operator => Ok(()),
            None => check_tenant(tenant, &[ModelGrant::all_local()], model),
            Some(granted) => check_tenant(tenant, granted, model),
        }
    }

    fn check(&self, agent: &Agent, tenant: &str, asked: &str, model: &ServedModel) -> Result<(), String> {
        // Under its own name, the model that an agent's alias means is the agent's own model, too.
        let own = self.own_name(agent).filter(|own| own == asked).unwrap_or_else(|| agent.model.clone());
        let rules = self.rules.now();
        match &rules.granted_models {
            Some(ceiling) => check(&agent.manifest, &own, ceiling, asked, model)?,
            None => {
                check(&agent.manifest, &own, &[ModelGrant::of(self.set.default_name())], asked, model)?;
            }
        }
        let of_tenant = setting_of(&rules.tenant_models, tenant);
        of_tenant.map_or(Ok(()), |granted| check_tenant(tenant, granted, model))
    }
}

/// Checks that an agent may use a model that it asks for by this name. The error names the setting that would allow
/// it.
fn check(
    manifest: &Manifest,
    own: &str,
    ceiling: &[ModelGrant],
    asked: &str,
    model: &ServedModel,
) -> Result<(), String> {
    let missing = |grants: &[ModelGrant]| missing(grants, asked, model);
    let lacks = |name: String, file| {
        format!(
            "agent {} may not use the model {name}; add \"{name}\" to `models` under [grants] in {file}",
            manifest.name
        )
    };
    if asked != own
        && let Some(name) = missing(&manifest.grants.models)
    {
        return Err(lacks(name, "agent.toml"));
    }
    missing(ceiling).map_or(Ok(()), |name| Err(lacks(name, "skep.toml, which is the operator's")))
}

fn check_tenant(tenant: &str, granted: &[ModelGrant], model: &ServedModel) -> Result<(), String> {
    missing(granted, model.name(), model).map_or(Ok(()), |name| {
        Err(format!(
            "tenant {tenant} may not use the model {name}; the operator can add \"{name}\" to `models` under \
             [tenants.{tenant}] in skep.toml"
        ))
    })
}

/// Returns the first of the model's names that no grant covers. A model of this host may be granted by the name by which
/// it is asked for. One of an upstream needs a grant of its own name, because an alias can be pointed elsewhere at any
/// time, and a route also needs the grants of all the models that it may choose.
fn missing(grants: &[ModelGrant], asked: &str, model: &ServedModel) -> Option<String> {
    let covers = |name: &str| grants.iter().any(|grant| grant.covers(name));
    let mut names = model.names().into_iter();
    let is_upstream = |name: &str| name.contains('/');
    let own = names.next().filter(|own| !covers(own) && (is_upstream(own) || !covers(asked)));
    own.or_else(|| names.find(|name| !covers(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::{
        ModelDigest, RemoteInfo, RemoteModel,
        chat::{ChatOptions, Input, RemoteStream},
    };

    /// A model that is only looked at.
    struct Named {
        info: RemoteInfo,
        members: Vec<String>,
    }

    impl RemoteModel for Named {
        fn info(&self) -> &RemoteInfo {
            &self.info
        }

        fn members(&self) -> Vec<String> {
            self.members.clone()
        }

        fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
            Box::pin(futures::stream::empty())
        }

        fn free_slots(&self) -> usize {
            0
        }

        fn problem(&self) -> Option<String> {
            None
        }
    }

    fn route(name: &str, members: &[&str]) -> ServedModel {
        let digest = ModelDigest::default();
        let info = RemoteInfo { name: name.to_owned(), digest, context_length: None, created_unix_s: 0 };
        ServedModel::Remote(Arc::new(Named {
            info,
            members: members.iter().map(ToString::to_string).collect(),
        }))
    }

    fn model(name: &str) -> ServedModel {
        route(name, &[])
    }

    fn manifest(models: &str) -> Manifest {
        Manifest::from_toml(&format!("name = \"a\"\n[grants]\nmodels = [{models}]")).expect("valid")
    }

    fn grants(texts: &[&str]) -> Vec<ModelGrant> {
        texts.iter().map(|text| ModelGrant::try_from((*text).to_owned()).expect("a grant")).collect()
    }

    #[test]
    fn developer_and_operator_must_allow_a_model_and_a_denial_names_the_setting() {
        let checked = |asked: &str, ceiling: &[&str], name: &str| {
            check(&manifest(asked), "own", &grants(ceiling), name, &model(name))
        };
        let denied = checked("", &["*"], "big").expect_err("the developer did not ask for it");
        assert!(denied.contains("add \"big\" to `models` under [grants] in agent.toml"), "{denied}");
        checked("", &["*"], "own").expect("an agent's own model counts as asked for");
        for asked in ["\"big\"", "\"*\""] {
            checked(asked, &["big"], "big").expect("both allow it");
        }
        let denied = checked("\"*\"", &["own"], "big").expect_err("the operator does not allow it");
        assert!(denied.contains("under [grants] in skep.toml"), "{denied}");
        checked("\"*\"", &[], "own").expect_err("an empty list allows no model");
    }

    #[test]
    fn a_route_needs_the_grants_of_all_models_that_it_may_choose() {
        let smart = route("smart", &["small", "openai/gpt"]);
        let checked =
            |asked: &str, ceiling: &[&str]| check(&manifest(asked), "own", &grants(ceiling), "smart", &smart);
        let denied = checked("\"*\"", &["*", "openai/*"]).expect_err("`*` is for this host only");
        assert!(denied.contains("add \"openai/gpt\" to `models` under [grants] in agent.toml"), "{denied}");
        let denied = checked("\"*\", \"openai/*\"", &["smart", "small"]).expect_err("the operator");
        assert!(denied.contains("\"openai/gpt\"") && denied.contains("skep.toml"), "{denied}");
        checked("\"*\", \"openai/*\"", &["*", "openai/gpt"]).expect("all are granted");
        check_tenant("acme", &grants(&["*"]), &smart).expect_err("the tenant stays on this host");
        check_tenant("acme", &grants(&["*", "openai/*"]), &smart).expect("the tenant may leave it");
    }

    #[test]
    fn a_model_may_be_granted_by_the_alias_by_which_it_is_asked_for() {
        let checked =
            |asked: &str| check(&manifest("\"fast\""), "own", &grants(&["fast"]), asked, &model("small"));
        checked("fast").expect("the alias is granted");
        checked("small").expect_err("the model itself is not");
    }

    #[test]
    fn an_alias_of_an_upstream_model_needs_the_grant_of_that_model() {
        let checked = |asked: &str, ceiling: &[&str], own: &str| {
            check(&manifest(asked), own, &grants(ceiling), "fast", &model("far/model"))
        };
        for alias in ["*", "fast"] {
            let denied =
                checked("\"far/*\"", &[alias], "main").expect_err("the operator granted no upstream");
            assert!(
                denied.contains("add \"far/model\" to `models` under [grants] in skep.toml"),
                "{alias}: {denied}"
            );
            let asked = format!("\"{alias}\"");
            let denied =
                checked(&asked, &["far/*"], "main").expect_err("the developer asked for no upstream");
            assert!(denied.contains("\"far/model\"") && denied.contains("agent.toml"), "{alias}: {denied}");
            checked("", &[alias], "fast").expect_err("the alias is the agent's own model");
        }
        checked("\"far/*\"", &["far/model"], "main").expect("both granted it");
        checked("", &["far/*"], "fast").expect("the agent's own model needs only the operator's grant");
    }
}
