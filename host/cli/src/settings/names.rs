//! Warnings about unknown names in the settings. They are not errors, because the names may be defined later.

use skep_engine::{ModelSet, ServedModel};
use skep_runtime::{AgentHost, ModelGrant, did_you_mean};

use crate::server_options::ServerOptions;

/// Returns warnings about likely mistakes in the settings of a host with these models.
pub fn warnings(options: &ServerOptions, models: &ModelSet) -> Vec<String> {
    let known = names(models);
    let mut warnings = Vec::new();
    let runtime = &options.runtime;
    let granted = runtime.granted_models.iter().map(|grants| ("[grants]".to_owned(), grants));
    let of_tenants =
        runtime.tenant_models.iter().map(|(tenant, grants)| (format!("[tenants.{tenant}]"), grants));
    // Another host of the cluster may have a model that this one lacks.
    let may_be_elsewhere = |name: &str| options.cluster.enabled && !name.contains(['/', '*']);
    for (section, grants) in granted.chain(of_tenants) {
        let here = grants.iter().filter(|grant| !may_be_elsewhere(&String::from((*grant).clone())));
        warnings.extend(here.filter_map(|grant| unknown_model(&section, grant, &known)));
    }
    let servers = || options.tool_servers.keys().map(String::as_str);
    for grant in &runtime.granted_tools {
        if let Some(server) = grant.server().filter(|server| !options.tool_servers.contains_key(*server)) {
            warnings.push(format!(
                "[grants] tools: {:?} grants tools of the MCP server {server:?}, and there is no [mcp.{server}]{}",
                String::from(grant.clone()),
                did_you_mean(server, servers())
            ));
        }
    }
    let priced = options.runtime.prices.models();
    let priced = priced.filter(|&model| !may_be_elsewhere(model) || models.find(Some(model)).is_ok());
    warnings.extend(priced.filter_map(|model| useless_price(model, models, &known)));
    warnings
}

/// Returns a warning about prices that no bill reads: a bill names models by their own names.
fn useless_price(name: &str, models: &ModelSet, known: &[String]) -> Option<String> {
    let Ok(model) = models.find(Some(name)) else {
        let meant = did_you_mean(name, known.iter().map(String::as_str));
        return Some(format!("[prices.{name:?}] is for a model that this host does not serve{meant}"));
    };
    let own = model.name();
    if own != name {
        return Some(format!(
            "[prices.{name:?}] is for an alias and is not used; set [prices.{own:?}] instead"
        ));
    }
    (model.names().len() > 1).then(|| {
        format!("[prices.{name:?}] is for a route and is not used; an answer costs what its model costs")
    })
}

/// Returns a warning for each agent whose own model the host does not serve.
pub fn agents_without_model(host: &AgentHost) -> Vec<String> {
    let models = host.models();
    let known = names(models);
    let agents = host.agents().into_iter().filter(|agent| models.find(Some(&agent.model)).is_err());
    agents
        .map(|agent| {
            let meant = did_you_mean(&agent.model, known.iter().map(String::as_str));
            format!(
                "agent {} generates with the model {:?}, which this host does not serve anymore{meant}",
                agent.name, agent.model
            )
        })
        .collect()
}

/// Returns warnings about agents and tenants in the settings that a running host does not have. Agents are deployed and tenants get
/// their keys at any time, so a tenant is only named if it looks like a misspelled one.
pub async fn unknown_to_host(options: &ServerOptions, host: &AgentHost) -> Vec<String> {
    let ready = host.agents().into_iter().map(|agent| agent.name);
    let agents: Vec<String> = ready.chain(host.failed_agents().into_iter().map(|agent| agent.name)).collect();
    let agents: Vec<&str> = agents.iter().map(String::as_str).collect();
    let mut warnings = Vec::new();
    for grant in &options.runtime.granted_tools {
        if let Some(agent) = grant.agent().filter(|agent| !agents.contains(agent)) {
            warnings.push(format!(
                "[grants] tools: {:?} grants tools of the agent {agent:?}, which is not deployed{}",
                String::from(grant.clone()),
                did_you_mean(agent, agents.iter().copied())
            ));
        }
    }
    for agent in options.weights.agents.keys().filter(|agent| !agents.contains(&agent.as_str())) {
        let meant = did_you_mean(agent, agents.iter().copied());
        warnings.push(format!("[agents.{agent}] is for an agent that is not deployed{meant}"));
    }
    warnings.extend(misspelled_tenants(options, host).await);
    warnings
}

async fn misspelled_tenants(options: &ServerOptions, host: &AgentHost) -> Vec<String> {
    let sections = options.rates.tenants.keys();
    let mut named: Vec<(String, &str)> = sections
        .map(|tenant| (format!("[tenants.{tenant}]: no tenant has this name"), tenant.as_str()))
        .collect();
    for route in &options.remote.routes {
        for tenant in route.models.iter().flat_map(|model| model.tenants.iter().flatten()) {
            let about = format!("[[route]] {}: no tenant has the name {tenant:?}", route.name);
            named.push((about, tenant));
        }
    }
    if named.is_empty() {
        return Vec::new();
    }
    let known = match host.tenants().await {
        Ok(tenants) => tenants,
        Err(error) => {
            return vec![format!("cannot compare the tenants in the file with those of the host: {error}")];
        }
    };
    let known: Vec<&str> = known.iter().map(|tenant| &*tenant.name).collect();
    let unknown = named.into_iter().filter(|(_, name)| !known.contains(name));
    unknown
        .filter_map(|(about, name)| {
            let meant = did_you_mean(name, known.iter().copied());
            (!meant.is_empty()).then(|| format!("{about}{meant}"))
        })
        .collect()
}

/// Returns the names of all models, and their aliases.
fn names(models: &ModelSet) -> Vec<String> {
    let served = models.served();
    let names = served
        .iter()
        .map(ServedModel::name)
        .flat_map(|name| std::iter::once(name.to_owned()).chain(models.aliases_of(name)));
    names.collect()
}

fn unknown_model(section: &str, grant: &ModelGrant, known: &[String]) -> Option<String> {
    let text = String::from(grant.clone());
    // A host without local models, or a tenant that may use all of them, is not a mistake.
    if text == "*" || known.iter().any(|name| grant.covers(name)) {
        return None;
    }
    Some(match text.strip_suffix("/*") {
        Some(upstream) => {
            let upstreams =
                known.iter().filter_map(|name| name.split_once('/')).map(|(upstream, _)| upstream);
            let meant = did_you_mean(upstream, upstreams);
            format!(
                "{section} models: {text:?} grants the models of the upstream {upstream:?}, which does not exist{meant}"
            )
        }
        None if text.ends_with('*') => format!(
            "{section} models: {text:?} grants nothing; \"*\" means all local models, and \"NAME/*\" those of \
             an upstream"
        ),
        None => {
            let meant = did_you_mean(&text, known.iter().map(String::as_str));
            format!("{section} models: {text:?} is neither a model nor an alias of this host{meant}")
        }
    })
}
