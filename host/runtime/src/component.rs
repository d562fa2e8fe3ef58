//! From the bytes of a component to an agent that is ready to be called.
//!
//! Everything that can be known before the first message is checked here: what the component imports and exports,
//! what it says of itself, and that its schemas compile.

mod imports;

use crate::{
    Limits, Manifest, RuntimeError,
    bindings::{AgentPre, handler},
    capability::{self, ConversationSet, TurnContext, log::TurnLog, state::StateView},
    engine::WasmEngine,
    instance::{self, MemoryLimiter},
    summary::{AgentDetail, AgentSummary},
    tools::Tools,
};
use sha2::{Digest, Sha256};
use skep_engine::{EngineError, ModelSet};
use skep_store::LogEntry;
use std::{fmt::Write, sync::Arc};
use wasmtime::component::{Component, Linker};

const HANDLER: &str = "skep:agent/handler@0.1.0";
const HANDLER_FUNCTIONS: [&str; 2] = ["describe", "on-message"];
const MAX_DESCRIPTION_BYTES: usize = 4 << 10;

/// A deployed version of an agent. A turn keeps the version with which it began.
pub(crate) struct Deployed {
    pub(crate) manifest: Manifest,
    pub(crate) description: String,
    pub(crate) digest: String,
    pub(crate) model: String,
    pub(crate) deployed_at_ms: u64,
    pub(crate) limits: Limits,
    pub(crate) tools: Tools,
    pub(crate) pre: AgentPre<TurnContext>,
}

/// Turns components into agents.
#[derive(Clone)]
pub(crate) struct Compiler {
    wasm: WasmEngine,
    linker: Arc<Linker<TurnContext>>,
    models: ModelSet,
    ceilings: Limits,
    max_bytes: usize,
}

impl Compiler {
    pub(crate) fn new(
        wasm: WasmEngine,
        models: ModelSet,
        ceilings: Limits,
        max_bytes: usize,
    ) -> Result<Self, RuntimeError> {
        let mut linker = Linker::new(&wasm.engine);
        capability::add_to_linker(&mut linker).map_err(|error| RuntimeError::Internal {
            message: format!("the host's interfaces cannot be linked: {error:#}"),
        })?;
        Ok(Compiler { wasm, linker: Arc::new(linker), models, ceilings, max_bytes })
    }

    /// Compiles on a blocking thread, then asks the component what it is. Also gives what it logged meanwhile.
    pub(crate) async fn compile(
        &self,
        manifest: Manifest,
        bytes: Arc<Vec<u8>>,
        deployed_at_ms: u64,
    ) -> Result<(Deployed, Vec<LogEntry>), RuntimeError> {
        let name = manifest.name.clone();
        let broken = |message: String| RuntimeError::Component { agent: name.to_string(), message };
        if bytes.len() > self.max_bytes {
            let size = bytes.len();
            return Err(broken(format!("it has {size} bytes; at most {} are allowed", self.max_bytes)));
        }
        let engine = self.models.get(manifest.model.as_deref()).map_err(model_error)?;
        let compiler = self.clone();
        let grants = manifest.grants;
        let compiled = tokio::task::spawn_blocking(move || {
            let digest = hex(&Sha256::digest(bytes.as_slice()));
            compiler.prepare(&bytes, grants).map(|pre| (pre, digest))
        });
        let (pre, digest) = compiled
            .await
            .map_err(|error| RuntimeError::Internal { message: format!("the compiler stopped: {error}") })?
            .map_err(broken)?;

        let limits = manifest.limits.within(&self.ceilings);
        let context = TurnContext::new(
            None,
            StateView::new(Arc::default(), 0),
            ConversationSet::new(Arc::default()),
            TurnLog::new(manifest.name.as_str(), "", 0),
            MemoryLimiter::new(limits.memory_mb),
        );
        let (described, mut context) = instance::describe(&self.wasm, &pre, &limits, context).await;
        let handler::Description { description, tools } =
            described.map_err(|error| broken(format!("it cannot describe itself: {error}")))?;
        if description.len() > MAX_DESCRIPTION_BYTES {
            let size = description.len();
            return Err(broken(format!(
                "its description has {size} bytes; {MAX_DESCRIPTION_BYTES} are allowed"
            )));
        }
        let tools = Tools::compile(tools, &engine).map_err(broken)?;
        let model = engine.info().name.clone();
        let logs = context.log.take();
        Ok((Deployed { manifest, description, digest, model, deployed_at_ms, limits, tools, pre }, logs))
    }

    fn prepare(&self, bytes: &[u8], grants: crate::Grants) -> Result<AgentPre<TurnContext>, String> {
        if bytes.starts_with(b"\0asm\x01\0\0\0") {
            return Err(
                "it is a core WebAssembly module, not a component; `skep build` makes a component of it"
                    .into(),
            );
        }
        let engine = &self.wasm.engine;
        let component = Component::from_binary(engine, bytes).map_err(|error| format!("{error:#}"))?;
        imports::check(&component, engine, grants)?;
        check_exports(&component)?;
        let pre = self.linker.instantiate_pre(&component).map_err(|error| format!("{error:#}"))?;
        AgentPre::new(pre).map_err(|error| format!("it does not export {HANDLER} as it is: {error:#}"))
    }
}

impl Deployed {
    pub(crate) fn summary(&self) -> AgentSummary {
        let routes = self.manifest.trigger.http.iter();
        AgentSummary {
            name: self.manifest.name.to_string(),
            description: self.description.clone(),
            digest: self.digest.clone(),
            model: self.model.clone(),
            deployed_at_ms: self.deployed_at_ms,
            tools: self.tools.names(),
            routes: routes.map(|trigger| format!("{} {}", trigger.method, trigger.route)).collect(),
        }
    }

    pub(crate) fn detail(&self) -> AgentDetail {
        AgentDetail {
            summary: self.summary(),
            manifest_toml: self.manifest.to_toml(),
            tools: self.tools.definitions(),
            limits: self.limits,
        }
    }
}

fn check_exports(component: &Component) -> Result<(), String> {
    let Some(handler) = component.get_export_index(None, HANDLER) else {
        return Err(format!(
            "it does not export {HANDLER}; build it with skep-sdk, or for the WIT world skep:agent/agent"
        ));
    };
    for function in HANDLER_FUNCTIONS {
        if component.get_export_index(Some(&handler), function).is_none() {
            return Err(format!("its export {HANDLER} lacks the function {function}"));
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

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
