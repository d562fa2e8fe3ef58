//! Turns the bytes of a component into code: loaded from the cache, or weighed, validated and compiled.
//!
//! The compiler cannot be interrupted. A component is therefore weighed first, compilations run on separate threads, a few
//! at a time, and callers wait with a timeout. A compilation that timed out keeps its slot until it finishes.

use super::{artifact::ArtifactCache, imports, weight};
use crate::{Clock, Grants, RuntimeError, RuntimeOptions, guest::WasmEngine, text::hex};
use sha2::{Digest, Sha256};
use skep_store::Store;
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Component;

/// The bytes of a component: sent by the caller, or in the store.
pub(crate) enum Source {
    Sent(Vec<u8>),
    Stored { digest: String },
}

/// A compiled component.
pub(crate) struct Compiled {
    pub(crate) component: Component,
    pub(crate) digest: String,
    /// The component's bytes, unless they were not needed.
    pub(crate) bytes: Option<Arc<Vec<u8>>>,
}

/// Compiles components. Only a few compile at once, so that a burst of deployments leaves CPU time for turns.
#[derive(Clone)]
pub(crate) struct ComponentCompiler {
    wasm: WasmEngine,
    store: Store,
    cache: Option<ArtifactCache>,
    permits: Arc<Semaphore>,
    max_bytes: usize,
    timeout: Duration,
}

/// The error of a compilation: the component was refused, or the host failed.
pub(crate) enum CompileError {
    Refused(String),
    Host(RuntimeError),
}

impl ComponentCompiler {
    pub(crate) async fn open(wasm: WasmEngine, store: Store, clock: Clock, options: &RuntimeOptions) -> Self {
        let mut cache = None;
        if let Some(dir) = &options.artifact_dir {
            let engine = wasm.engine.clone();
            let max_bytes = options.max_artifact_bytes;
            match ArtifactCache::open(store.clone(), clock, engine, dir.clone(), max_bytes).await {
                Ok(opened) => cache = Some(opened),
                Err(error) => tracing::warn!("compiled code is not cached, so every start compiles: {error}"),
            }
        }
        let permits = Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));
        let (max_bytes, timeout) = (options.max_component_bytes, options.compile_timeout);
        ComponentCompiler { wasm, store, cache, permits, max_bytes, timeout }
    }

    /// Loads or compiles a component. Fails if it imports anything beyond `grants`.
    pub(crate) async fn compile(&self, source: Source, grants: &Grants) -> Result<Compiled, CompileError> {
        let (digest, mut bytes) = match source {
            Source::Stored { digest } => (digest, None),
            Source::Sent(bytes) => {
                self.check_size(&bytes)?;
                let bytes = Arc::new(bytes);
                let hashed = bytes.clone();
                let digest = off_thread(move || Ok(hex(&Sha256::digest(hashed.as_slice())))).await?;
                (digest, Some(bytes))
            }
        };
        if let Some(cache) = &self.cache
            && let Some(component) = cache.load(&digest).await
        {
            imports::check(&component, &self.wasm.engine, grants).map_err(CompileError::Refused)?;
            return Ok(Compiled { component, digest, bytes });
        }
        let (code, permit) = match &bytes {
            Some(bytes) => (bytes.clone(), self.permit_before_timeout().await?),
            // At the start of the host all agents are loaded at once, so each waits without a timeout.
            None => {
                let permit = self.permit().await;
                let stored = self.store.component(&digest).await;
                let stored = stored.map_err(|error| CompileError::Host(error.into()))?;
                (bytes.insert(Arc::new(stored)).clone(), permit)
            }
        };
        let component = self.compile_bytes(code, permit).await?;
        imports::check(&component, &self.wasm.engine, grants).map_err(CompileError::Refused)?;
        if let Some(cache) = &self.cache {
            cache.keep(&digest, &component).await;
        }
        Ok(Compiled { component, digest, bytes })
    }

    async fn compile_bytes(
        &self,
        bytes: Arc<Vec<u8>>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Component, CompileError> {
        let (engine, max_bytes) = (self.wasm.engine.clone(), self.max_bytes as u64);
        let compiling = off_thread(move || {
            let _permit = permit;
            refuse_no_component(&bytes)?;
            weight::check(&bytes, max_bytes)?;
            Component::from_binary(&engine, &bytes).map_err(|error| refusal(&error))
        });
        match tokio::time::timeout(self.timeout, compiling).await {
            Ok(compiled) => compiled,
            Err(_elapsed) => Err(CompileError::Refused(format!(
                "its compilation did not finish within {} s; `compile_s` under [runtime] in skep.toml sets the timeout",
                self.timeout.as_secs_f32()
            ))),
        }
    }

    async fn permit(&self) -> OwnedSemaphorePermit {
        self.permits.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    async fn permit_before_timeout(&self) -> Result<OwnedSemaphorePermit, CompileError> {
        tokio::time::timeout(self.timeout, self.permit()).await.map_err(|_elapsed| {
            CompileError::Refused(format!(
                "other components are still being compiled after {} s; deploy it again later",
                self.timeout.as_secs_f32()
            ))
        })
    }

    fn check_size(&self, bytes: &[u8]) -> Result<(), CompileError> {
        if bytes.len() <= self.max_bytes {
            return Ok(());
        }
        Err(CompileError::Refused(format!(
            "it has {} bytes; `max_component_bytes` under [runtime] in skep.toml allows {}",
            bytes.len(),
            self.max_bytes
        )))
    }
}

/// Formats a compiler error. The compiler itself refuses components that exceed the ceilings of every agent, before any
/// instance exists.
fn refusal(error: &wasmtime::Error) -> String {
    let reason = format!("{error:#}");
    if ["pooling allocator", "exceeds the limit of"].iter().any(|words| reason.contains(words)) {
        return format!(
            "{reason}; memory_mb, tables, table_elements and instances under [limits] in skep.toml are the operator's ceilings"
        );
    }
    reason
}

/// Refuses anything but a component, judging by the first eight bytes: the magic number, the version, and whether it is a
/// module or a component.
fn refuse_no_component(bytes: &[u8]) -> Result<(), String> {
    match bytes.get(..8) {
        Some([0, b'a', b's', b'm', _, _, 1, 0]) => Ok(()),
        Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => Err(
            "it is a core WebAssembly module, not a component; build a component from it with `skep build`"
                .into(),
        ),
        _ => Err(
            "it is not WebAssembly, which starts with the bytes \"\\0asm\"; send a component, as built by \
                  `skep build`"
                .into(),
        ),
    }
}

async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, CompileError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        CompileError::Host(RuntimeError::Internal { message: format!("the compiler stopped: {error}") })
    })?
    .map_err(CompileError::Refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_input_that_is_not_a_component_in_one_line() {
        refuse_no_component(b"\0asm\x0d\0\x01\0...").expect("a component, judging by its first eight bytes");
        for (bytes, expected) in [
            (&b"junk instead of a component"[..], "it is not WebAssembly"),
            (b"", "it is not WebAssembly"),
            (b"\0asm\x01\0\0\0", "it is a core WebAssembly module"),
        ] {
            let error = refuse_no_component(bytes).expect_err(expected);
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
    }
}
