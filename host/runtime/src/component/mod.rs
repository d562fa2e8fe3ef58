//! Turns the bytes of a component into an agent that is ready to be called.
//!
//! Everything that can be checked before the first message is checked here: the component's imports and exports, its
//! description of itself, and that its schemas compile.

mod artifact;
mod compiler;
mod imports;
mod weight;

pub(crate) use compiler::Source;

use crate::{
    Clock, Limits, Manifest, RuntimeError, RuntimeOptions,
    agent::Agent,
    bindings::handler,
    capability::{self, ConversationSet, TurnContext, log::TurnLog, state::StateView},
    grant::ToolName,
    guest::{self, AgentPre, Code, WasmEngine},
    options::Rules,
    tool::Tools,
};
use compiler::{CompileError, Compiled, ComponentCompiler};
use skep_engine::{EngineError, LiveSetting, ModelSet};
use skep_store::{LogEntry, Store};
use std::{ops::Deref, sync::Arc};
use wasmtime::component::Linker;

const MAX_DESCRIPTION_BYTES: usize = 4 << 10;

/// An agent with its linked code. Those that do not run the code see only the [`Agent`].
pub(crate) struct Deployed {
    pub(crate) agent: Arc<Agent>,
    pub(crate) pre: AgentPre,
}

impl Deployed {
    /// Returns the same version with other limits.
    pub(crate) fn limited(&self, limits: Limits) -> Self {
        let agent = Agent { limits, ..self.agent.as_ref().clone() };
        Deployed { agent: Arc::new(agent), pre: self.pre.clone() }
    }

    pub(crate) fn code<'a>(&'a self, wasm: &'a WasmEngine) -> Code<'a> {
        Code { wasm, pre: &self.pre, limits: &self.agent.limits }
    }
}

impl Deref for Deployed {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.agent
    }
}

/// Compiles and checks components.
pub(crate) struct Compiler {
    wasm: WasmEngine,
    components: ComponentCompiler,
    linker: Linker<TurnContext>,
    models: ModelSet,
    clock: Clock,
    rules: LiveSetting<Rules>,
}

/// The linked code of a component that has not described itself yet.
pub(crate) struct Loaded {
    pre: AgentPre,
    digest: String,
    bytes: Option<Arc<Vec<u8>>>,
}

/// A fully checked agent that is not a version yet.
pub(crate) struct Prepared {
    pub(crate) manifest: Manifest,
    pub(crate) digest: String,
    /// The component, if it was sent.
    pub(crate) bytes: Option<Arc<Vec<u8>>>,
    /// Lines that it logged while it described itself.
    pub(crate) logs: Vec<LogEntry>,
    description: String,
    model: String,
    pub(crate) limits: Limits,
    tools: Tools,
    pre: AgentPre,
}

impl Compiler {
    pub(crate) async fn open(
        wasm: WasmEngine,
        models: ModelSet,
        store: Store,
        clock: Clock,
        options: &RuntimeOptions,
        rules: LiveSetting<Rules>,
    ) -> Result<Self, RuntimeError> {
        let mut linker = Linker::new(&wasm.engine);
        capability::add_to_linker(&mut linker).map_err(|error| RuntimeError::Internal {
            message: format!("the host's interfaces cannot be linked: {error:#}"),
        })?;
        let components = ComponentCompiler::open(wasm.clone(), store, clock.clone(), options).await;
        Ok(Compiler { wasm, components, linker, models, clock, rules })
    }

    /// Returns the limits of an agent within the operator's ceilings.
    pub(crate) fn limits_of(&self, manifest: &Manifest) -> Limits {
        manifest.limits.within(&self.rules.now().ceilings)
    }

    /// Loads or compiles the code of a component, links it, and checks its exports against the manifest.
    pub(crate) async fn compile(&self, manifest: &Manifest, source: Source) -> Result<Loaded, RuntimeError> {
        let broken = |message| RuntimeError::Component { agent: manifest.name.to_string(), message };
        let Compiled { component, digest, bytes } =
            self.components.compile(source, &manifest.grants).await.map_err(|error| match error {
                CompileError::Refused(message) => broken(message),
                CompileError::Host(error) => error,
            })?;
        let pre = self.linker.instantiate_pre(&component);
        let pre = pre.map_err(|error| broken(imports::unlinkable(&component, &self.wasm.engine, &error)))?;
        let pre = AgentPre::new(pre).map_err(broken)?;
        check_triggers(manifest, &pre).map_err(broken)?;
        Ok(Loaded { pre, digest, bytes })
    }

    /// Asks the component to describe itself. This runs the guest, so the caller must hold an instance slot.
    pub(crate) async fn describe(
        &self,
        manifest: Manifest,
        loaded: Loaded,
    ) -> Result<Prepared, RuntimeError> {
        let Loaded { pre, digest, bytes } = loaded;
        let name = manifest.name.clone();
        let broken = |message: String| RuntimeError::Component { agent: name.to_string(), message };
        let own = self.models.find(manifest.model.as_deref()).map_err(model_error)?;
        let limits = self.limits_of(&manifest);
        let context = TurnContext::new(
            None,
            StateView::new(Arc::default(), 0),
            ConversationSet::default(),
            TurnLog::new(&self.clock, manifest.name.as_str(), "", 0),
            &limits,
        );
        let (described, mut context) =
            guest::describe(Code { wasm: &self.wasm, pre: &pre, limits: &limits }, context).await;
        let handler::Description { description, mut tools } =
            described.map_err(|error| broken(format!("it cannot describe itself: {error}")))?;
        if description.len() > MAX_DESCRIPTION_BYTES {
            let size = description.len();
            return Err(broken(format!(
                "its description has {size} bytes; at most {MAX_DESCRIPTION_BYTES} are allowed"
            )));
        }
        // The manifest can require approval in addition to the component, and cannot waive it.
        for tool in &mut tools {
            tool.needs_approval |= manifest.asks_approval(&tool.name);
        }
        // Without its model, a deployment checks everything but that the model can be held to the schemas: a host would
        // otherwise load the models of all its agents when it starts. A schema that cannot be enforced is then refused when a
        // generation first offers it.
        if own.loaded().is_none() && !tools.is_empty() {
            tracing::warn!(
                agent = %name,
                model = own.name(),
                "the model is not loaded, so whether it can be constrained to the schemas of the agent's tools is checked when they are used"
            );
        }
        let tools = Tools::compile(tools, own.loaded().as_ref()).map_err(broken)?;
        let described = tools.iter().map(|tool| &tool.definition);
        let described: Vec<(&str, bool)> =
            described.map(|tool| (tool.name.as_str(), tool.hints.read_only)).collect();
        manifest.mcp.check_tools(&described, pre.handlers().tool_calls).map_err(broken)?;
        for name in manifest.tools.keys() {
            if tools.get(name).is_none() && name.parse::<ToolName>().is_err() {
                let own = match tools.names() {
                    names if names.is_empty() => "it has no tools of its own".to_owned(),
                    names => format!("it describes: {}", names.join(", ")),
                };
                return Err(broken(format!(
                    "[tools.{name}] in agent.toml does not name a tool; {own}; external tools have names such as \
                     \"agent:orders/find\""
                )));
            }
        }
        let model = manifest.model.clone().unwrap_or_else(|| own.name().to_owned());
        let logs = context.log.take();
        Ok(Prepared { manifest, digest, bytes, logs, description, model, limits, tools, pre })
    }
}

impl Prepared {
    /// Returns the agent as a new version, and the lines that it logged.
    pub(crate) fn into_version(self, version: u64, deployed_at_ms: u64) -> (Deployed, Vec<LogEntry>) {
        let Prepared { manifest, digest, bytes: _, logs, description, model, limits, tools, pre } = self;
        let handlers = pre.handlers();
        let agent =
            Agent { version, deployed_at_ms, manifest, description, digest, model, limits, tools, handlers };
        (Deployed { agent: Arc::new(agent), pre }, logs)
    }
}

/// Checks that the component exports a handler for every trigger in the manifest.
fn check_triggers(manifest: &Manifest, pre: &AgentPre) -> Result<(), String> {
    for (line, is_there, takes, export) in [
        ("[[schedule]]", !manifest.schedule.is_empty(), pre.handlers().alarms, "alarm-handler"),
        ("[[trigger.event]]", !manifest.trigger.event.is_empty(), pre.handlers().events, "event-handler"),
    ] {
        if is_there && !takes {
            return Err(format!(
                "agent.toml has {line}, but the component does not export skep:agent/{export}; export it, or remove those entries"
            ));
        }
    }
    Ok(())
}

fn model_error(error: EngineError) -> RuntimeError {
    match error {
        EngineError::ModelUnknown { name, known } => RuntimeError::ModelUnknown { name, known },
        other => RuntimeError::Engine(other),
    }
}
